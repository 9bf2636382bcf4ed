//! Targets and drafters on NVIDIA GPUs.
//!
//! The arithmetic of [`DecoderModel`](super::DecoderModel) and of its drafter, arranged so that a round of a tree costs
//! little more than a round of a chain: each model's pass is one captured graph of matrix products (by cuBLAS or kernels
//! of this crate, whichever is faster) and other kernels over memory that is allocated once, and the host waits once per
//! pass, for picks or for a proposal. Logits stay on the GPU, but for rows that the host has to pick from.
//!
//! Weights come through [`Weights`](super::Weights), opened for the CPU; nothing of candle runs on the GPU.

mod attention;
mod device;
mod drafter;
mod draw;
mod kernels;
mod products;
mod roofline;
mod stack;
mod target;
#[cfg(test)]
mod tests;
mod tiles;
mod weights;

pub use device::Gpu;
pub use drafter::CudaDFlash;
pub use roofline::Roofline;
pub use target::{CudaOptions, CudaTaps, CudaTarget};
