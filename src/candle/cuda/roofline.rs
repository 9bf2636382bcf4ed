//! What a pass has to cost at least, measured on the GPU at hand.

use super::CudaTarget;
use super::stack::padded;
use crate::candle::{Error, Result};

/// Bytes that one measured copy moves.
const COPY: usize = 2 << 30;

/// The floor under a pass: what it has to read, how fast this GPU moves bytes, and what its matrix products alone
/// take.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Roofline {
    /// Bytes of weights that a pass reads, embedding aside.
    pub weight_bytes: usize,
    /// Bytes of keys and values that it reads for every committed row.
    pub cache_row_bytes: usize,
    /// Bytes per second of a copy within the GPU, read and written bytes both counted.
    pub copy_rate: f64,
}

impl Roofline {
    /// Measures the copy rate (2 GiB are allocated for it and freed), and counts the rest.
    ///
    /// # Errors
    /// Too little memory, or an error from CUDA.
    pub fn measure(target: &CudaTarget) -> Result<Self> {
        let (gpu, weight_bytes, cache_row_bytes) = target.roofline_parts();
        let (from, to) = (gpu.allocate(COPY / 2)?, gpu.allocate(COPY / 2)?);
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            best = best.min(gpu.time(|| gpu.copy(from.pointer(), &to, 0, COPY / 2))?);
        }
        let copy_rate = COPY as f64 / (best / 1e3);
        Ok(Self { weight_bytes, cache_row_bytes, copy_rate })
    }

    /// Milliseconds below which no pass over `committed` rows can come.
    pub fn floor_ms(&self, committed: usize) -> f64 {
        1e3 * (self.weight_bytes + committed * self.cache_row_bytes) as f64 / self.copy_rate
    }
}

impl CudaTarget {
    /// Milliseconds that the matrix products of a pass of `slots` rows, filled up as passes are, take, replayed as one graph
    /// without anything between them; the median of `repeats`. They are done as in passes of that width, if there have
    /// been any.
    ///
    /// # Errors
    /// More slots than a pass can have, or an error from CUDA.
    pub fn time_products(&self, slots: usize, repeats: usize) -> Result<f64> {
        let limit = self.max_width();
        if slots == 0 || slots > limit || repeats == 0 {
            let found = format!("{slots} slots, {repeats} repeats");
            let accepted = format!("1 to {limit} slots, at least one repeat");
            return Err(Error::argument("slots", found, accepted));
        }
        let width = padded(slots);
        let gpu = self.roofline_parts().0;
        self.plan_products(width)?;
        let graph = gpu.capture(|| self.products(width))?;
        graph.launch()?;
        let mut times =
            (0..repeats).map(|_| gpu.time(|| graph.launch())).collect::<Result<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[repeats / 2])
    }
}
