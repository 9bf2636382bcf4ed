//! A target and its drafter on a GPU.

use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device};
use ddtree::candle::{
    self, DecoderConfig, Gguf, Rounding, Weights,
    cuda::{CudaDFlash, CudaOptions, CudaTarget, Gpu},
    dflash::DFlashConfig,
};

use crate::common::models::Checkpoints;

/// Entries per depth that the drafter selects on the GPU.
pub const TOP_K: usize = 64;

/// Models on a GPU.
#[derive(Debug)]
pub struct GpuModels {
    pub target: CudaTarget,
    /// `None` if none was asked for.
    pub drafter: Option<CudaDFlash>,
    /// Tokens after which a text ends.
    pub stop_tokens: Vec<u32>,
}

impl GpuModels {
    /// Loads checkpoints for sequences of `rows` tokens and trees of `budget` nodes.
    pub fn load(
        checkpoints: &Checkpoints,
        gpu: &Gpu,
        dtype: DType,
        rows: usize,
        budget: usize,
    ) -> Result<Self> {
        let reads = checkpoints.load_drafter(|folder| DFlashConfig::load(folder))?;
        let (taps, block_size) = match &reads {
            Some(config) => (config.target_layer_ids(), config.block_size()),
            None => (&[][..], 1),
        };
        let mut options = CudaOptions::default();
        options.max_slots = options.max_slots.max(budget + 1).max(block_size);
        let (target, stop_tokens) = checkpoints.load(|path| {
            let (config, weights) = open(path, dtype)?;
            // Room for the last tree, so that the cache cuts none.
            let rows = rows + options.max_slots;
            let options = options.max_len(rows.min(config.max_positions));
            let target = CudaTarget::new(gpu, &config, weights, taps, options)?;
            Ok((target, config.eos_token_ids))
        })?;
        let drafter = checkpoints.load_drafter(|folder| {
            let weights = Weights::open(folder, dtype, &Device::Cpu)?;
            CudaDFlash::new(&target, DFlashConfig::load(folder)?, weights, TOP_K)
        })?;
        Ok(Self { target, drafter, stop_tokens })
    }
}

fn open(path: &Path, dtype: DType) -> candle::Result<(DecoderConfig, Weights)> {
    if path.extension().is_some_and(|extension| extension == "gguf") {
        let mut gguf = Gguf::open(path)?;
        let config = gguf.config()?;
        return Ok((config, gguf.into_weights(dtype, &Device::Cpu, Rounding::Bf16)?));
    }
    Ok((DecoderConfig::load(path)?, Weights::open(path, dtype, &Device::Cpu)?))
}
