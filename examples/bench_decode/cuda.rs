//! A pair on a GPU.

use anyhow::{Context, Result};
use ddtree::{
    Config, NoDrafter, Picks, Prefill, Request, Verifier,
    candle::cuda::{CudaDFlash, CudaTarget},
};

use crate::{
    gpu::GpuModels,
    measure::{Pair, Sample, time},
};

pub struct CudaPair {
    target: CudaTarget,
    drafter: CudaDFlash,
}

impl CudaPair {
    pub fn new(models: GpuModels) -> Result<Self> {
        let GpuModels { target, drafter, .. } = models;
        Ok(Self { target, drafter: drafter.context("no drafter")? })
    }
}

impl Pair for CudaPair {
    fn run(&mut self, config: &Config, request: &Request, drafting: bool) -> Result<Sample> {
        if drafting {
            time((&mut self.target, &mut self.drafter), config, request)
        } else {
            time((&mut self.target, NoDrafter), config, request)
        }
    }

    fn gap(&mut self, tokens: &[u32]) -> Result<f32> {
        self.target.reset(0)?;
        let mut ids = Vec::new();
        self.target.prefill(&Prefill::new(0, tokens), &mut Picks::new(&mut ids))?;
        let last = (tokens.len() - 1) % self.target.capabilities().max_slots;
        let [best, second] = self.target.top_two(last)?;
        Ok(best.1 - second.1)
    }
}
