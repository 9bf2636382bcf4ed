//! Sampled picks on the GPU.

use cudarc::driver::CudaFunction;

use super::device::{Buffer, Gpu, Pinned};
use super::kernels::{Inputs, parameters};
use crate::NoiseKey;
use crate::candle::Result;

/// Tokens of one block of the kernel, and of one entry of `bounds`.
const PART: usize = 64 * CHUNK;
const CHUNK: usize = 256;

/// Picks tokens with the noise of a request: those that the host would pick from the same logits.
#[derive(Debug)]
pub(super) struct Draw {
    function: CudaFunction,
    /// Temperature and seed, which a captured pass reads anew each time.
    host: Pinned<u32>,
    device: Buffer,
    bounds: Buffer,
    known: Buffer,
    maxima: Buffer,
    counters: Buffer,
    size: usize,
}

impl Draw {
    /// For `max_rows` rows of `size` f32 logits.
    pub(super) fn new(gpu: &Gpu, max_rows: usize, size: usize) -> Result<Self> {
        Ok(Self {
            function: gpu.modules().draw.load_function("draw")?,
            host: gpu.pinned(4)?,
            device: gpu.allocate(16)?,
            bounds: gpu.allocate(8 * max_rows * size.div_ceil(CHUNK))?,
            known: gpu.allocate(8 * max_rows)?,
            maxima: gpu.allocate(4 * max_rows)?,
            counters: gpu.allocate(4 * max_rows)?,
            size,
        })
    }

    /// Sets what the next pass draws with. The last one has been waited for.
    pub(super) fn set(&mut self, key: &NoiseKey) {
        let host = self.host.as_mut_slice();
        host[0] = key.temperature.to_bits();
        host[2] = key.seed as u32;
        host[3] = (key.seed >> 32) as u32;
    }

    /// Asks for picks of the rows of `inputs` from `logits`, packed as those of
    /// [`Argmax`](super::kernels::Argmax).
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        inputs: &Inputs,
        logits: &Buffer,
        picks: &Buffer,
    ) -> Result<()> {
        assert!(inputs.rows * 4 <= self.counters.bytes(), "made for fewer rows");
        gpu.copy_in(&self.host, &self.device, 16)?;
        let (logits, positions, draws) =
            (logits.pointer(), inputs.positions, self.device.pointer());
        let (bounds, known) = (self.bounds.pointer(), self.known.pointer());
        let (maxima, counters) = (self.maxima.pointer(), self.counters.pointer());
        let (picks, size) = (picks.pointer(), self.size as i32);
        let grid = (self.size.div_ceil(PART) as u32, inputs.rows as u32, 1);
        // SAFETY: the types are the kernel's; the caller's logits and picks have the rows of `inputs`.
        unsafe {
            gpu.launch(
                &self.function,
                grid,
                (256, 1),
                parameters!(logits, positions, draws, bounds, known, maxima, counters, picks, size),
            )
        }
    }
}
