//! Noise on the GPU: sampled picks, and drafts that use their noise.

use cudarc::driver::{CudaFunction, sys::CUdeviceptr};

use super::device::{Buffer, Gpu, Pinned};
use super::kernels::{Inputs, parameters};
use crate::candle::Result;
use crate::{NoiseKey, sample};

/// Tokens that share a draw of noise.
const CHUNK: usize = 256;

/// Tokens of one block of the kernels that draw.
const PART: usize = 32 * CHUNK;

/// Scale and seed of the noise, which a captured pass reads anew each time.
#[derive(Debug)]
struct Settings {
    host: Pinned<u32>,
    device: Buffer,
}

impl Settings {
    fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self { host: gpu.pinned(4)?, device: gpu.allocate(16)? })
    }

    /// The pass that read them last has been waited for.
    fn set(&mut self, scale: f32, seed: u64) {
        let words = [scale.to_bits(), 0, seed as u32, (seed >> 32) as u32];
        self.host.as_mut_slice().copy_from_slice(&words);
    }

    /// Asks for the copy to the GPU, and says where it will be.
    fn send(&self, gpu: &Gpu) -> Result<CUdeviceptr> {
        gpu.copy_in(&self.host, &self.device, 16)?;
        Ok(self.device.pointer())
    }
}

/// Picks tokens with the noise of a request: those that the host would pick from the same logits.
#[derive(Debug)]
pub(super) struct Draw {
    bound: CudaFunction,
    draw: CudaFunction,
    settings: Settings,
    bounds: Buffer,
    known: Buffer,
    maxima: Buffer,
    bests: Buffer,
    counters: Buffer,
    size: usize,
}

impl Draw {
    /// For `max_rows` rows of `size` f32 logits.
    pub(super) fn new(gpu: &Gpu, max_rows: usize, size: usize) -> Result<Self> {
        Ok(Self {
            bound: gpu.modules().draw.load_function("bound_draws")?,
            draw: gpu.modules().draw.load_function("draw")?,
            settings: Settings::new(gpu)?,
            bounds: gpu.allocate(8 * max_rows * size.div_ceil(CHUNK))?,
            known: gpu.allocate(8 * max_rows)?,
            maxima: gpu.allocate(4 * max_rows)?,
            bests: gpu.allocate(16 * max_rows * size.div_ceil(PART))?,
            counters: gpu.allocate(4 * max_rows)?,
            size,
        })
    }

    /// Sets what the next pass draws with. The last one has been waited for.
    pub(super) fn set(&mut self, key: &NoiseKey) {
        self.settings.set(key.temperature, key.seed);
    }

    /// Asks for picks of the rows of `inputs` from `logits`, packed as those of
    /// [`Argmax`](super::kernels::Argmax).
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        inputs: &Inputs,
        logits: &Buffer,
        picks: &Pinned<u64>,
    ) -> Result<()> {
        assert!(inputs.rows * 4 <= self.counters.bytes(), "made for fewer rows");
        assert!(inputs.rows <= picks.len(), "picks have a place");
        let draws = self.settings.send(gpu)?;
        let (logits, positions) = (logits.pointer(), inputs.positions);
        let (bounds, known) = (self.bounds.pointer(), self.known.pointer());
        let (maxima, bests) = (self.maxima.pointer(), self.bests.pointer());
        let (counters, picks, size) = (self.counters.pointer(), picks.device(), self.size as i32);
        let grid = (self.size.div_ceil(PART) as u32, inputs.rows as u32, 1);
        // SAFETY: the types are the kernel's; the caller's logits and picks have the rows of `inputs`.
        unsafe {
            gpu.launch(
                &self.bound,
                grid,
                (256, 1),
                parameters!(logits, positions, draws, bounds, known, maxima, size),
            )?;
            gpu.launch(
                &self.draw,
                grid,
                (256, 1),
                parameters!(
                    logits, positions, draws, bounds, known, maxima, bests, counters, picks, size
                ),
            )
        }
    }
}

/// Adds the noise that the target will draw with to a draft's logits.
#[derive(Debug)]
pub(super) struct Couple {
    function: CudaFunction,
    settings: Settings,
    size: usize,
}

impl Couple {
    /// For rows of `size` f32 logits.
    pub(super) fn new(gpu: &Gpu, size: usize) -> Result<Self> {
        let function = gpu.modules().couple.load_function("couple")?;
        Ok(Self { function, settings: Settings::new(gpu)?, size })
    }

    /// Sets what the next pass drafts with. The last one has been waited for.
    pub(super) fn set(&mut self, key: &NoiseKey) {
        self.settings.set(sample::coupled_scale(key.temperature) as f32, key.seed);
    }

    /// Asks for the noise of `depths` rows at `logits`, the first of which is about the position after that at `root`.
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        root: CUdeviceptr,
        logits: CUdeviceptr,
        depths: usize,
    ) -> Result<()> {
        let draws = self.settings.send(gpu)?;
        let size = self.size as i32;
        let grid = (self.size.div_ceil(CHUNK) as u32, depths as u32, 1);
        // SAFETY: the types are the kernel's; the caller's logits are `depths` rows of the size this was made for.
        unsafe {
            gpu.launch(
                &self.function,
                grid,
                (CHUNK as u32 / 2, 1),
                parameters!(logits, root, draws, size),
            )
        }
    }
}
