//! Attention whose warps use tensor cores each for itself: `kernels/attention.cu`.

use cudarc::driver::CudaFunction;

use super::{Cached, Call};
use crate::candle::Result;
use crate::candle::cuda::device::{Buffer, Clusters, Gpu, allow_shared_memory};
use crate::candle::cuda::kernels::{Heads, parameters};

/// Keys that a warp takes at a time, and steps of that in shared memory.
const UNIT: usize = 32;
const MIN_STAGES: usize = 2;
const MAX_STAGES: usize = 4;

/// Splits of the keys at most: the blocks that a cluster can have on every GPU that has clusters.
const MAX_SPLITS: usize = 8;

#[derive(Debug)]
pub(super) struct Warps {
    attend: CudaFunction,
    merge: CudaFunction,
    heads: Heads,
    /// Warps of a block.
    warps: usize,
    /// Bytes of shared memory that a block may have.
    shared: usize,
    multiprocessors: usize,
    /// How many tiles can be worked on at once with 1, 2, ... splits each.
    at_once: Vec<usize>,
    /// Where splits cannot read each other's sums and norms, what they leave of them.
    left: Option<(Buffer, Buffer)>,
}

/// How a pass is split.
#[derive(Clone, Copy, Debug)]
struct Split {
    /// Warps of a block over different rows, and over different keys.
    row_warps: usize,
    key_warps: usize,
    tiles: usize,
    splits: usize,
    stages: usize,
}

impl Warps {
    pub(super) fn new(
        gpu: &Gpu,
        attend: CudaFunction,
        merge: CudaFunction,
        heads: Heads,
        max_rows: usize,
    ) -> Result<Self> {
        let warps = if heads.size <= 128 { 6 } else { 4 };
        // Two blocks share a multiprocessor, unless it has too little memory.
        let (block, half) = gpu.shared_memory()?;
        let least = shared_bytes(heads.size, warps, 1, MIN_STAGES);
        let (shared, blocks) = if half >= least { (half, 2) } else { (block, 1) };
        allow_shared_memory(&attend, shared)?;
        let multiprocessors = gpu.multiprocessors()?;
        let at_once = |splits| {
            if !gpu.has_clusters() {
                return Ok(blocks * multiprocessors / splits);
            }
            let clusters = Clusters { blocks: (splits as u32, 1), shared_bytes: shared };
            gpu.clusters_at_once(&attend, 32 * warps as u32, clusters)
        };
        let at_once = (1..=MAX_SPLITS).map(at_once).collect::<Result<_>>()?;
        let mut this =
            Self { attend, merge, heads, warps, shared, multiprocessors, at_once, left: None };
        if !gpu.has_clusters() {
            let needed = |width| {
                let split = this.split(width);
                heads.kv * split.splits * split.tiles * split.row_warps * 16
            };
            let rows = (1..=max_rows).map(needed).max().unwrap_or(0);
            this.left = Some((gpu.allocate(2 * rows * heads.size)?, gpu.allocate(8 * rows)?));
        }
        Ok(this)
    }

    /// The least time, by rough measure, for a prefix of about a thousand keys: as many splits as run at once, units
    /// that a warp multiplies, units that a multiprocessor copies, and parts to merge.
    fn split(&self, width: usize) -> Split {
        let heads = self.heads;
        let row_groups = (width * heads.query / heads.kv).div_ceil(16);
        let units = (1024 + width).div_ceil(UNIT);
        let candidates = (1..=self.warps).filter(|row_warps| self.warps.is_multiple_of(*row_warps));
        let splits = candidates.filter_map(|row_warps| {
            let (tiles, key_warps) = (row_groups.div_ceil(row_warps), self.warps / row_warps);
            let groups = tiles * heads.kv;
            let splits = self.at_once.iter().rposition(|&at_once| at_once >= groups);
            let splits = splits.map_or(1, |at| at + 1);
            let fits = |stages: &usize| {
                shared_bytes(heads.size, row_warps, key_warps, *stages) <= self.shared
            };
            let stages = (MIN_STAGES..=MAX_STAGES).rev().find(fits)?;
            let waves = groups.div_ceil(self.at_once[splits - 1].max(1));
            let blocks = (groups * splits).div_ceil(self.multiprocessors);
            let products = waves * units.div_ceil(splits * key_warps);
            let copies = blocks * units.div_ceil(splits);
            let split = Split { row_warps, key_warps, tiles, splits, stages };
            Some((3 * products + copies + 2 * splits, split))
        });
        let best = splits.min_by_key(|(work, split)| (*work, std::cmp::Reverse(split.row_warps)));
        best.expect("there is memory for all warps over rows").1
    }

    pub(super) fn run(&self, gpu: &Gpu, call: Call, cached: Cached) -> Result<()> {
        let Call { q, q_stride, out, prefix, mask, mask_words, width, group, scale } = call;
        let (heads, Cached { keys, values, .. }) = (self.heads, cached);
        let split = self.split(width as usize);
        let clusters = Clusters {
            blocks: (split.splits as u32, 1),
            shared_bytes: shared_bytes(heads.size, split.row_warps, split.key_warps, split.stages),
        };
        let (partial, norms) = match &self.left {
            Some((partial, norms)) => (partial.pointer(), norms.pointer()),
            None => (0, 0),
        };
        let (row_warps, key_warps, stages) =
            (split.row_warps as i32, split.key_warps as i32, split.stages as i32);
        // SAFETY: the types are the kernel's; the caller sized the buffers for the pass, and what splits leave was sized
        // for every width.
        unsafe {
            gpu.launch_clusters(
                &self.attend,
                (split.splits as u32, split.tiles as u32, heads.kv as u32),
                (32 * self.warps as u32, 1),
                clusters,
                parameters!(
                    q, q_stride, keys, values, out, partial, norms, prefix, mask, mask_words,
                    width, group, scale, row_warps, key_warps, stages
                ),
            )?;
        }
        if self.left.is_none() {
            return Ok(());
        }
        let splits = split.splits as i32;
        // SAFETY: as above.
        unsafe {
            gpu.launch(
                &self.merge,
                ((split.tiles * split.row_warps) as u32, heads.kv as u32, 1),
                (128, 1),
                parameters!(partial, norms, out, prefix, width, group, splits),
            )
        }
    }
}

/// Bytes of shared memory: for the steps in flight and the queries; when they are done, for what the warps leave.
fn shared_bytes(head_dim: usize, row_warps: usize, key_warps: usize, stages: usize) -> usize {
    let rows = stages * key_warps * 2 * UNIT + 16 * row_warps;
    (rows * 2 * (head_dim + 8)).max(16 * row_warps * key_warps * (4 * head_dim + 8))
}
