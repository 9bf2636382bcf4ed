//! Tree attention: a kernel for exact comparison, one for tensor cores that warps use, and one for tensor cores that
//! warpgroups use. What they compute is said in `kernels/attention.cu`.

mod warpgroups;
mod warps;

use candle_core::DType;
use cudarc::driver::CudaFunction;
use cudarc::driver::sys::CUdeviceptr;

use super::device::{Buffer, Gpu};
use super::kernels::{Heads, Inputs, parameters};
use crate::candle::Result;
use warpgroups::Warpgroups;
use warps::Warps;

/// Attention of layers whose heads have the same sizes.
#[derive(Debug)]
pub(super) struct Attention {
    heads: Heads,
    by: By,
}

#[derive(Debug)]
enum By {
    /// f32, a block for each row and head.
    Rows(CudaFunction),
    Warps(Warps),
    Warpgroups(Warpgroups),
}

/// Keys and values of a layer, at addresses that stay: planes of so many rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    pub(super) keys: CUdeviceptr,
    pub(super) values: CUdeviceptr,
    pub(super) rows: usize,
}

/// What all kernels take, as they take it.
#[derive(Clone, Copy, Debug)]
struct Call {
    q: CUdeviceptr,
    q_stride: i32,
    out: CUdeviceptr,
    prefix: CUdeviceptr,
    mask: CUdeviceptr,
    mask_words: i32,
    width: i32,
    /// Query heads of a KV head.
    group: i32,
    scale: f32,
}

impl Attention {
    /// For passes of up to `max_rows` rows. The type and the size of the heads are those of a [`Kernels`](super::kernels::Kernels).
    pub(super) fn new(gpu: &Gpu, dtype: DType, heads: Heads, max_rows: usize) -> Result<Self> {
        let load = |name| {
            let name = format!("{name}_{}_{}", heads.size, dtype.as_str());
            gpu.modules().attention.load_function(&name)
        };
        let by = if dtype == DType::F32 {
            By::Rows(load("attend")?)
        } else if let Some(warpgroups) = Warpgroups::new(gpu, dtype, heads)? {
            By::Warpgroups(warpgroups)
        } else {
            By::Warps(Warps::new(gpu, load("attend")?, load("merge")?, heads, max_rows)?)
        };
        Ok(Self { heads, by })
    }

    /// `qkv` holds rows of queries, keys and values; only the queries are read.
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        inputs: &Inputs,
        qkv: &Buffer,
        cached: Cached,
        out: &Buffer,
    ) -> Result<()> {
        let heads = self.heads;
        let call = Call {
            q: qkv.pointer(),
            q_stride: (heads.q_size() + 2 * heads.kv_size()) as i32,
            out: out.pointer(),
            prefix: inputs.prefix,
            mask: inputs.mask,
            mask_words: inputs.mask_words as i32,
            width: inputs.rows as i32,
            group: (heads.query / heads.kv) as i32,
            scale: (heads.size as f32).powf(-0.5),
        };
        match &self.by {
            By::Warpgroups(warpgroups) => warpgroups.run(gpu, call, cached),
            By::Warps(warps) => warps.run(gpu, call, cached),
            By::Rows(attend) => {
                let Call { q, q_stride, out, prefix, mask, mask_words, group, scale, .. } = call;
                let Cached { keys, values, .. } = cached;
                // SAFETY: the types are the kernel's; the caller sized the buffers for the pass.
                unsafe {
                    gpu.launch_early(
                        attend,
                        (inputs.rows as u32, heads.query as u32, 1),
                        (128, 1),
                        parameters!(
                            q, q_stride, keys, values, out, prefix, mask, mask_words, group, scale
                        ),
                    )
                }
            }
        }
    }
}
