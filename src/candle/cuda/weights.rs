//! Weights on their way to the GPU.

use candle_core::{DType, Device, Tensor};

use super::device::{Buffer, Gpu};
use super::kernels::Kernels;
use crate::candle::{Error, Result, Weights};

/// Where weights come from.
pub(super) enum Source {
    /// A checkpoint, opened for the CPU.
    Checkpoint(Box<Weights>),
    /// Nowhere: random matrices, norms of one.
    Random { seed: u64 },
}

/// Takes weights by name and puts them on the GPU.
pub(super) struct Loader<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) kernels: &'a Kernels,
    pub(super) source: Source,
    pub(super) prefix: &'static str,
}

impl Loader<'_> {
    /// Several matrices `[rows, inputs]` of the model's type, one below the other.
    pub(super) fn matrix(&mut self, parts: &[(&str, usize)], inputs: usize) -> Result<Buffer> {
        let dtype = self.kernels.dtype;
        match &mut self.source {
            Source::Random { seed } => {
                let rows: usize = parts.iter().map(|&(_, rows)| rows).sum();
                let buffer = self.gpu.allocate(rows * inputs * dtype.size_in_bytes())?;
                *seed = seed.wrapping_add(1 << 40);
                // Keeps the size of activations from layer to layer.
                let bound = (3.0 / inputs as f32).sqrt();
                self.kernels.fill_random(self.gpu, &buffer, rows * inputs, *seed, bound)?;
                Ok(buffer)
            }
            Source::Checkpoint(weights) => {
                let prefix = self.prefix;
                let take = |&(name, rows): &(&str, usize)| {
                    weights.take_as(&format!("{prefix}{name}.weight"), &[rows, inputs], dtype)
                };
                let parts = parts.iter().map(take).collect::<Result<Vec<_>>>()?;
                upload(self.gpu, &Tensor::cat(&parts, 0)?)
            }
        }
    }

    /// Two matrices `[rows, inputs]` of the model's type: eight rows of the first, eight of the second, and so on.
    pub(super) fn interleaved(
        &mut self,
        names: [&str; 2],
        rows: usize,
        inputs: usize,
    ) -> Result<Buffer> {
        let dtype = self.kernels.dtype;
        let prefix = self.prefix;
        let Source::Checkpoint(weights) = &mut self.source else {
            return self.matrix(&names.map(|name| (name, rows)), inputs);
        };
        let mut parts = Vec::with_capacity(2);
        for name in names {
            let name = format!("{prefix}{name}.weight");
            let matrix = weights.take_as(&name, &[rows, inputs], dtype)?;
            parts.push(matrix.reshape((rows / 8, 8 * inputs))?);
        }
        upload(self.gpu, &Tensor::cat(&parts, 1)?)
    }

    /// A matrix whose name has no prefix.
    pub(super) fn outer_matrix(
        &mut self,
        name: &str,
        rows: usize,
        inputs: usize,
    ) -> Result<Buffer> {
        let prefix = std::mem::take(&mut self.prefix);
        let matrix = self.matrix(&[(name, rows)], inputs);
        self.prefix = prefix;
        matrix
    }

    /// Leaves out a copy of a tied matrix, if there is one.
    pub(super) fn skip_tied(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        match &mut self.source {
            Source::Checkpoint(weights) if weights.contains(name) => weights.skip(name, shape),
            _ => Ok(()),
        }
    }

    /// Several vectors of the model's type, one after the other.
    pub(super) fn bias(&mut self, parts: &[(&str, usize)]) -> Result<Buffer> {
        let dtype = self.kernels.dtype;
        match &mut self.source {
            Source::Random { .. } => {
                let len: usize = parts.iter().map(|&(_, len)| len).sum();
                self.gpu.allocate(len * dtype.size_in_bytes())
            }
            Source::Checkpoint(weights) => {
                let prefix = self.prefix;
                let take = |&(name, len): &(&str, usize)| {
                    weights.take_as(&format!("{prefix}{name}.bias"), &[len], dtype)
                };
                let parts = parts.iter().map(take).collect::<Result<Vec<_>>>()?;
                upload(self.gpu, &Tensor::cat(&parts, 0)?)
            }
        }
    }

    /// The f32 weight of a norm.
    pub(super) fn norm(&mut self, name: &str, len: usize) -> Result<Buffer> {
        match &mut self.source {
            Source::Random { .. } => self.gpu.upload(&vec![1.0f32; len]),
            Source::Checkpoint(weights) => {
                let name = format!("{}{name}.weight", self.prefix);
                upload(self.gpu, &weights.take_as(&name, &[len], DType::F32)?)
            }
        }
    }

    /// Ends loading; tensors that are left over are an error.
    pub(super) fn finish(self) -> Result<()> {
        match self.source {
            Source::Checkpoint(weights) => weights.finish(),
            Source::Random { .. } => Ok(()),
        }
    }
}

/// Refuses weights that were opened for another device or type than they are used in.
pub(super) fn check(weights: &Weights, dtype: DType) -> Result<()> {
    if !matches!(weights.device(), Device::Cpu) {
        let found = format!("weights on {:?}", weights.device().location());
        return Err(Error::argument("weights", found, "weights opened for the CPU"));
    }
    if weights.dtype() != dtype {
        let accepted = format!("{dtype:?}, the type of the target");
        return Err(Error::argument("weights", format!("{:?}", weights.dtype()), accepted));
    }
    Ok(())
}

fn upload(gpu: &Gpu, tensor: &Tensor) -> Result<Buffer> {
    let tensor = tensor.flatten_all()?;
    match tensor.dtype() {
        DType::F32 => gpu.upload(&tensor.to_vec1::<f32>()?),
        DType::BF16 => gpu.upload(&tensor.to_vec1::<half::bf16>()?),
        DType::F16 => gpu.upload(&tensor.to_vec1::<half::f16>()?),
        found => Err(Error::UnsupportedDtype { found }),
    }
}
