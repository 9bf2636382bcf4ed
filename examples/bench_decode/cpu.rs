//! A pair on the CPU.

use anyhow::{Context, Result};
use ddtree::{
    Config, NoDrafter, Request,
    candle::{CandleTarget, DecoderModel, Forward, Want, dflash::DFlash},
    top_k::TopK,
};

use crate::{
    common::models::Models,
    measure::{Pair, Sample, time},
};

pub struct CpuPair {
    model: DecoderModel,
    drafter: DFlash,
    /// Without taps, which cost a little: plain decoding has no use for them.
    plain: CandleTarget,
    tapped: CandleTarget,
}

impl CpuPair {
    pub fn new(models: Models) -> Result<Self> {
        let (plain, tapped) = (models.target(false)?, models.target(true)?);
        let Models { model, drafter } = models;
        Ok(Self { model, drafter: drafter.context("no drafter")?, plain, tapped })
    }
}

impl Pair for CpuPair {
    fn run(&mut self, config: &Config, request: &Request, drafting: bool) -> Result<Sample> {
        if drafting {
            time((&mut self.tapped, &mut self.drafter), config, request)
        } else {
            time((&mut self.plain, NoDrafter), config, request)
        }
    }

    fn gap(&mut self, tokens: &[u32]) -> Result<f32> {
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut cache = self.model.new_cache(tokens.len())?;
        let pass = Forward {
            tokens,
            positions: &positions,
            start: 0,
            mask: None,
            tree: None,
            want: Want::Last,
            taps: &[],
        };
        let logits = self.model.forward(&mut cache, &pass)?.logits.context("no logits")?;
        let row: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let mut best = Vec::new();
        TopK::new().top_k_log_probs(&row, 2, &mut Vec::new(), &mut best)?;
        Ok(best.first().zip(best.get(1)).map_or(0.0, |(first, second)| first - second))
    }
}
