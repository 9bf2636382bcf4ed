//! Attention by warpgroups, for GPUs of compute capability 9.0 (`kernels/hopper/attention.cu`).

use candle_core::DType;
use cudarc::driver::CudaFunction;

use super::{Cached, Call};
use crate::candle::Result;
use crate::candle::cuda::device::{Clusters, Gpu, allow_shared_memory};
use crate::candle::cuda::kernels::{Heads, MAX_SLOTS, parameters};
use crate::candle::cuda::tiles::{COLUMNS, map};

/// Query rows of a warpgroup.
const ROWS: usize = 64;

/// Keys, and values, of a tile.
const KEYS: usize = 64;

const MAX_WARPGROUPS: usize = 2;
const MAX_SPLITS: usize = 8;

/// Tiles of keys and of values in shared memory.
const MIN_STAGES: usize = 2;
const MAX_STAGES: usize = 5;

#[derive(Debug)]
pub(super) struct Warpgroups {
    function: CudaFunction,
    dtype: DType,
    heads: Heads,
    shapes: Vec<Shape>,
}

/// A cluster that there is room for.
#[derive(Debug)]
struct Shape {
    warpgroups: usize,
    splits: usize,
    stages: usize,
    /// Blocks that share a multiprocessor.
    sharing: usize,
    /// How many can run at once.
    at_once: usize,
}

impl Warpgroups {
    /// `None` where the GPU, the type or the size of heads is not the kernel's.
    pub(super) fn new(gpu: &Gpu, dtype: DType, heads: Heads) -> Result<Option<Self>> {
        let head_dim = heads.size;
        let Some(modules) = &gpu.modules().hopper else { return Ok(None) };
        if !matches!(dtype, DType::BF16 | DType::F16) || !matches!(head_dim, 64 | 128) {
            return Ok(None);
        }
        let name = format!("attend_{head_dim}_{}", dtype.as_str());
        let function = modules.attention.load_function(&name)?;
        let (whole, half) = gpu.shared_memory()?;
        allow_shared_memory(&function, whole)?;
        let mut shapes = Vec::new();
        for (sharing, memory) in [(1, whole), (2, half)] {
            for warpgroups in 1..=MAX_WARPGROUPS {
                for splits in 1..=MAX_SPLITS {
                    let bytes = |stages| {
                        shared_bytes(head_dim, warpgroups, stages, splits, MAX_SLOTS.div_ceil(64))
                    };
                    let fits = |stages: &usize| bytes(*stages) <= memory;
                    let Some(stages) = (MIN_STAGES..=MAX_STAGES).rev().find(fits) else { continue };
                    let (blocks, shared_bytes) = ((splits as u32, 1), bytes(stages));
                    let clusters = Clusters { blocks, shared_bytes };
                    let at_once = gpu.clusters_at_once(&function, threads(warpgroups), clusters)?;
                    if at_once > 0 {
                        shapes.push(Shape { warpgroups, splits, stages, sharing, at_once });
                    }
                }
            }
        }
        Ok(Some(Self { function, dtype, heads, shapes }))
    }

    /// How a pass is split, and its tiles of rows: the least time, by rough measure, for a prefix of about a thousand
    /// keys. A tile of keys takes longer the more warpgroups of a multiprocessor work on theirs, and so does what comes
    /// before and after.
    fn split(&self, width: usize) -> (&Shape, usize) {
        let heads = self.heads;
        let key_tiles = (1024 + width).div_ceil(KEYS);
        let tiles =
            |shape: &Shape| (width * heads.query / heads.kv).div_ceil(ROWS * shape.warpgroups);
        let work = |shape: &&Shape| {
            let waves = (tiles(shape) * heads.kv).div_ceil(shape.at_once);
            let at_work = shape.warpgroups * shape.sharing;
            let work = key_tiles.div_ceil(shape.splits) * (3 + at_work) + 3 * at_work;
            (waves * work, shape.warpgroups, shape.splits)
        };
        let best = self.shapes.iter().min_by_key(work).expect("there is memory for a warpgroup");
        (best, tiles(best))
    }

    pub(super) fn run(&self, gpu: &Gpu, call: Call, cached: Cached) -> Result<()> {
        let Call { q, q_stride, out, prefix, mask, mask_words, width, group, scale } = call;
        let heads = self.heads;
        let (&Shape { warpgroups, splits, stages, .. }, tiles) = self.split(width as usize);
        let row = heads.kv_size();
        // A tile has all planes of 64 columns that a head has.
        let planes = |address| {
            let sizes = [COLUMNS, cached.rows, row / COLUMNS];
            let tile = [COLUMNS, KEYS, heads.size / COLUMNS];
            map(address, self.dtype, sizes, &[row, COLUMNS], tile)
        };
        let (keys, values) = (planes(cached.keys)?, planes(cached.values)?);
        let clusters = Clusters {
            blocks: (splits as u32, 1),
            shared_bytes: shared_bytes(heads.size, warpgroups, stages, splits, mask_words as usize),
        };
        let stages = stages as i32;
        // SAFETY: the types are the kernel's; the caller sized the buffers for the pass.
        unsafe {
            gpu.launch_clusters(
                &self.function,
                (splits as u32, tiles as u32, heads.kv as u32),
                (threads(warpgroups), 1),
                clusters,
                parameters!(
                    keys, values, q, q_stride, out, prefix, mask, mask_words, width, group, scale,
                    stages
                ),
            )
        }
    }
}

/// One more warp asks for tiles.
fn threads(warpgroups: usize) -> u32 {
    128 * warpgroups as u32 + 32
}

/// Bytes of shared memory: tiles; queries; what splits send, and how it is weighted; masks; barriers.
fn shared_bytes(
    head_dim: usize,
    warpgroups: usize,
    stages: usize,
    splits: usize,
    mask_words: usize,
) -> usize {
    let rows = warpgroups * ROWS;
    let sent = (rows / 16).div_ceil(splits) * splits * 16;
    2 * head_dim * (2 * stages * KEYS + rows + sent)
        + 8 * (sent + (rows + 1) * (mask_words + 1) + 3 * stages + 1)
}
