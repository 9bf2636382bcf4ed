//! The kernels of one element type and head size, and their launches. What each computes is said where it is written,
//! in `kernels/`.

use std::ops::Range;

use candle_core::DType;
use cudarc::driver::CudaFunction;
use cudarc::driver::sys::CUdeviceptr;

use super::device::{Buffer, EARLY_BLOCKS, Gpu, Pinned};
use crate::candle::{Error, Result};

/// Entries of a row that `top_k` can select at most.
pub(super) const MAX_TOP_K: usize = 64;

/// Slots of a pass at most: an accepted path names them in bytes.
pub(super) const MAX_SLOTS: usize = 252;

/// Blocks of the kernel for SiLU at most: each then has several runs of its loop.
const SILU_BLOCKS: usize = 528;

/// Entries of a chunk, of which a summary is left; `top_k` selects from fewer than 2^16 of them.
const CHUNK: usize = 64;

macro_rules! parameters {
    ($($value:expr),* $(,)?) => {
        &mut [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(super) use parameters;

#[derive(Clone, Debug)]
pub(super) struct Kernels {
    pub(super) dtype: DType,
    embed_norm: CudaFunction,
    norm: CudaFunction,
    silu_mul: CudaFunction,
    rope_store: CudaFunction,
    fill_random: CudaFunction,
    compact: CudaFunction,
    gather: CudaFunction,
}

/// Accepted slots as the kernels take them.
#[repr(C)]
pub(super) struct Path {
    len: u32,
    slots: [u8; MAX_SLOTS],
}

impl Path {
    /// `slots` are below [`MAX_SLOTS`], and there are at most that many.
    pub(super) fn new(slots: &[u32]) -> Self {
        let mut path = Self { len: slots.len() as u32, slots: [0; MAX_SLOTS] };
        for (to, &slot) in path.slots.iter_mut().zip(slots) {
            *to = slot as u8;
        }
        path
    }
}

/// Sizes of the heads of an attention layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) query: usize,
    pub(super) kv: usize,
    pub(super) size: usize,
}

impl Heads {
    /// Elements of a row of queries.
    pub(super) fn q_size(&self) -> usize {
        self.query * self.size
    }

    /// Elements of a row of keys.
    pub(super) fn kv_size(&self) -> usize {
        self.kv * self.size
    }
}

/// What a pass reads: on the GPU, at addresses that stay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs {
    pub(super) prefix: CUdeviceptr,
    pub(super) tokens: CUdeviceptr,
    pub(super) positions: CUdeviceptr,
    pub(super) mask: CUdeviceptr,
    pub(super) mask_words: usize,
    pub(super) rows: usize,
}

/// Norms, bias and rotation of queries and keys, and where keys and values go.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeStore<'a> {
    pub(super) bias: Option<CUdeviceptr>,
    pub(super) norms: Option<(CUdeviceptr, CUdeviceptr)>,
    pub(super) eps: f32,
    pub(super) rope: &'a Buffer,
    pub(super) keys: CUdeviceptr,
    pub(super) values: CUdeviceptr,
    /// Layers that are treated at once, and how many elements on in the cache the next one is.
    pub(super) layers: usize,
    pub(super) layer_stride: usize,
}

impl Kernels {
    pub(super) fn new(gpu: &Gpu, dtype: DType, head_dim: usize) -> Result<Self> {
        let suffix = match dtype {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            found => return Err(Error::UnsupportedDtype { found }),
        };
        if !matches!(head_dim, 64 | 128 | 256) {
            return Err(Error::config("head_dim", head_dim, "64, 128 or 256 on a GPU"));
        }
        gpu.bind()?;
        let modules = gpu.modules();
        Ok(Self {
            dtype,
            embed_norm: modules.norm.load_function(&format!("embed_norm_{suffix}"))?,
            norm: modules.norm.load_function(&format!("norm_{suffix}"))?,
            silu_mul: modules.norm.load_function(&format!("silu_mul_{suffix}"))?,
            rope_store: modules.rope.load_function(&format!("rope_store_{head_dim}_{suffix}"))?,
            fill_random: modules.random.load_function(&format!("fill_random_{suffix}"))?,
            compact: modules.commit.load_function("compact")?,
            gather: modules.commit.load_function("gather")?,
        })
    }

    /// Whether rows of `size` elements suit the norm kernels.
    pub(super) fn check_row(field: &str, size: usize) -> Result<()> {
        if size.is_multiple_of(8) && size <= 16 * 1024 {
            return Ok(());
        }
        Err(Error::config(field, size, "a multiple of 8 up to 16384 on a GPU"))
    }

    #[expect(clippy::too_many_arguments, reason = "they are the kernel's")]
    pub(super) fn embed_norm(
        &self,
        gpu: &Gpu,
        inputs: &Inputs,
        table: &Buffer,
        residual: &Buffer,
        (weight, eps): (&Buffer, f32),
        out: &Buffer,
        size: usize,
    ) -> Result<()> {
        let (tokens, table, residual) = (inputs.tokens, table.pointer(), residual.pointer());
        let (weight, out, count) = (weight.pointer(), out.pointer(), size as i32);
        // SAFETY: the types are the kernel's; the caller sized the buffers for the pass.
        unsafe {
            gpu.launch(
                &self.embed_norm,
                (inputs.rows as u32, 1, 1),
                (row_threads(size), 1),
                parameters!(tokens, table, residual, weight, eps, out, count),
            )
        }
    }

    /// `tap` is the address of the first row's tap and the elements from row to row.
    #[expect(clippy::too_many_arguments, reason = "they are the kernel's")]
    pub(super) fn norm(
        &self,
        gpu: &Gpu,
        rows: usize,
        x: &Buffer,
        (weight, eps): (&Buffer, f32),
        out: &Buffer,
        tap: Option<(CUdeviceptr, usize)>,
        size: usize,
    ) -> Result<()> {
        let (tap, tap_stride) = tap.unwrap_or((0, 0));
        let (x, weight, out) = (x.pointer(), weight.pointer(), out.pointer());
        let (tap_stride, count) = (tap_stride as i32, size as i32);
        // SAFETY: as above.
        unsafe {
            gpu.launch_early(
                &self.norm,
                (rows as u32, 1, 1),
                (row_threads(size), 1),
                parameters!(x, weight, eps, out, tap, tap_stride, count),
            )
        }
    }

    /// `gate_up` has eight gates, the eight ups of the same elements, and so on; `out` gets `len` elements.
    pub(super) fn silu_mul(
        &self,
        gpu: &Gpu,
        gate_up: &Buffer,
        out: &Buffer,
        len: usize,
    ) -> Result<()> {
        let units = len / 8;
        let blocks = units.div_ceil(256).min(SILU_BLOCKS) as u32;
        let (gate_up, out, units) = (gate_up.pointer(), out.pointer(), units as i32);
        // SAFETY: as above.
        unsafe {
            gpu.launch_early(
                &self.silu_mul,
                (blocks, 1, 1),
                (256, 1),
                parameters!(gate_up, out, units),
            )
        }
    }

    /// `qkv` has the heads of `heads` of all layers; with `heads.query` 0, keys and values only.
    pub(super) fn rope_store(
        &self,
        gpu: &Gpu,
        inputs: &Inputs,
        qkv: CUdeviceptr,
        heads: Heads,
        how: &RopeStore<'_>,
    ) -> Result<()> {
        let bias = how.bias.unwrap_or(0);
        let (q_norm, k_norm) = how.norms.unwrap_or((0, 0));
        let (eps, rope, keys, values) = (how.eps, how.rope.pointer(), how.keys, how.values);
        let (positions, prefix) = (inputs.positions, inputs.prefix);
        let (query, kv) = (heads.query as i32, heads.kv as i32);
        let (rows, layers, layer_stride) =
            (inputs.rows as i32, how.layers as i32, how.layer_stride);
        // Half a warp for each head; blocks so large that the kernel is started early, if that can be.
        let units = inputs.rows * how.layers * (heads.query + 2 * heads.kv);
        let blocks = |threads: u32| (16 * units).div_ceil(threads as usize) as u32;
        let threads = [256, 512, 1024].into_iter().find(|&threads| blocks(threads) <= EARLY_BLOCKS);
        let threads = threads.unwrap_or(256);
        // SAFETY: as above.
        unsafe {
            gpu.launch_early(
                &self.rope_store,
                (blocks(threads), 1, 1),
                (threads, 1),
                parameters!(
                    qkv,
                    bias,
                    q_norm,
                    k_norm,
                    eps,
                    rope,
                    positions,
                    prefix,
                    keys,
                    values,
                    rows,
                    layers,
                    query,
                    kv,
                    layer_stride
                ),
            )
        }
    }

    pub(super) fn fill_random(
        &self,
        gpu: &Gpu,
        out: &Buffer,
        len: usize,
        seed: u64,
        bound: f32,
    ) -> Result<()> {
        assert!(len * self.dtype.size_in_bytes() <= out.bytes(), "the buffer has {len} elements");
        let out = out.pointer();
        // SAFETY: checked above.
        unsafe {
            gpu.launch(
                &self.fill_random,
                (1024, 1, 1),
                (256, 1),
                parameters!(out, len, seed, bound),
            )
        }
    }

    /// Moves the accepted rows of `planes` planes of `rows_per_plane` rows to the rows from `start` on.
    pub(super) fn compact(
        &self,
        gpu: &Gpu,
        cache: &Buffer,
        (planes, rows_per_plane, row_bytes): (usize, usize, usize),
        start: usize,
        path: &Path,
    ) -> Result<()> {
        let units = row_bytes / 16;
        let (cache, plane) = (cache.pointer(), rows_per_plane * units);
        let (row_units, start) = (units as i32, start as u32);
        // SAFETY: the caller names the shape that the cache was made with.
        unsafe {
            gpu.launch(
                &self.compact,
                (units.div_ceil(128) as u32, planes as u32, 1),
                (128, 1),
                parameters!(cache, plane, row_units, start, *path),
            )
        }
    }

    /// Copies the rows of `path` one after the other to `out`.
    pub(super) fn gather(
        &self,
        gpu: &Gpu,
        rows: &Buffer,
        out: &Buffer,
        row_bytes: usize,
        path: &Path,
    ) -> Result<()> {
        assert!(path.len as usize * row_bytes <= out.bytes(), "the rows fit");
        let units = row_bytes / 8;
        let (rows, out, row_units) = (rows.pointer(), out.pointer(), units as i32);
        // SAFETY: checked above for `out`; the caller's slots are rows of `rows`.
        unsafe {
            gpu.launch(
                &self.gather,
                (units.div_ceil(256) as u32, path.len, 1),
                (256, 1),
                parameters!(rows, out, row_units, *path),
            )
        }
    }
}

/// Two or more loads a thread, so that blocks of all rows of a pass can run at once.
fn row_threads(size: usize) -> u32 {
    (size.div_ceil(8).next_multiple_of(32)).min(1024) as u32
}

/// The greatest entry of each row of f32 logits: packed by the GPU, a token id on the host.
#[derive(Debug)]
pub(super) struct Argmax {
    function: CudaFunction,
    greatest: CudaFunction,
    bests: Buffer,
    counters: Buffer,
    size: usize,
}

impl Argmax {
    /// For `max_rows` rows of `size` entries.
    pub(super) fn new(gpu: &Gpu, max_rows: usize, size: usize) -> Result<Self> {
        let load = |name| gpu.modules().select.load_function(name);
        Ok(Self {
            function: load("argmax")?,
            greatest: load("greatest")?,
            bests: gpu.allocate(Self::bytes(max_rows, size))?,
            counters: gpu.allocate(4 * max_rows)?,
            size,
        })
    }

    /// Bytes of the greatest entries of the parts of rows, of which each has 64 entries or more.
    pub(super) fn bytes(rows: usize, size: usize) -> usize {
        8 * rows * size.div_ceil(64)
    }

    /// Where a product leaves the greatest packed entries of parts of rows.
    pub(super) fn bests(&self) -> &Buffer {
        &self.bests
    }

    /// Blocks that share a row: two to eight loads a thread.
    fn parts(rows: usize, size: usize) -> usize {
        size.div_ceil(4 * 256 * rows.clamp(2, 8))
    }

    /// Asks for the packed picks of the first `rows` rows.
    pub(super) fn run(
        &self,
        gpu: &Gpu,
        logits: &Buffer,
        rows: usize,
        picks: &Pinned<u64>,
    ) -> Result<()> {
        assert!(4 * rows <= self.counters.bytes(), "made for fewer rows");
        assert!(rows <= picks.len(), "picks have a place");
        let (bests, counters) = (self.bests.pointer(), self.counters.pointer());
        let (logits, picks) = (logits.pointer(), picks.device());
        let (parts, size) = (Self::parts(rows, self.size) as u32, self.size as i32);
        // SAFETY: the caller's logits are `rows` rows of the size that this was made for.
        unsafe {
            gpu.launch_early(
                &self.function,
                (parts, rows as u32, 1),
                (256, 1),
                parameters!(logits, bests, counters, picks, size),
            )
        }
    }

    /// Asks for the packed picks of `rows` rows, of whose `parts` parts the greatest entries are in [`bests`](Self::bests).
    pub(super) fn run_on_parts(
        &self,
        gpu: &Gpu,
        rows: usize,
        parts: usize,
        picks: &Pinned<u64>,
    ) -> Result<()> {
        assert!(8 * rows * parts <= self.bests.bytes(), "made for fewer rows");
        assert!(rows <= picks.len(), "picks have a place");
        let (bests, picks, parts) = (self.bests.pointer(), picks.device(), parts as i32);
        // SAFETY: checked above.
        unsafe {
            gpu.launch_early(
                &self.greatest,
                (rows as u32, 1, 1),
                (256, 1),
                parameters!(bests, picks, parts),
            )
        }
    }

    /// The token of a packed entry; `None` for NaN, +inf and a row of -inf.
    pub(super) fn token(packed: u64) -> Option<u32> {
        const POSITIVE_INFINITY: u32 = 0xff80_0000;
        const NEGATIVE_INFINITY: u32 = 0x007f_ffff;
        let key = (packed >> 32) as u32;
        (key > NEGATIVE_INFINITY && key < POSITIVE_INFINITY).then_some(!(packed as u32))
    }
}

/// The best entries of each row of f32 logits and their log-probabilities, in memory of the host.
#[derive(Debug)]
pub(super) struct TopK {
    summarize: CudaFunction,
    function: CudaFunction,
    summaries: Buffer,
    ids: Pinned<u32>,
    log_probs: Pinned<f32>,
    /// A one for every row that is there.
    done: Pinned<u64>,
    size: usize,
    max_k: usize,
}

impl TopK {
    /// For rows of `size` entries of which up to `max_k` are wanted.
    pub(super) fn new(gpu: &Gpu, max_rows: usize, size: usize, max_k: usize) -> Result<Self> {
        let (limit, chunks) = (MAX_TOP_K.min(size), size.div_ceil(CHUNK));
        if max_k == 0 || max_k > limit {
            return Err(Error::argument("top_k", max_k, format!("1 to {limit} on a GPU")));
        }
        if chunks >= 1 << 16 {
            let accepted = format!("fewer than {} on a GPU", CHUNK << 16);
            return Err(Error::config("vocab_size", size, accepted));
        }
        let load = |name| gpu.modules().select.load_function(name);
        Ok(Self {
            summarize: load("summarize")?,
            function: load("top_k")?,
            summaries: gpu.allocate(8 * max_rows * chunks)?,
            ids: gpu.pinned(max_rows * max_k)?,
            log_probs: gpu.pinned(max_rows * max_k)?,
            done: gpu.pinned(max_rows)?,
            size,
            max_k,
        })
    }

    pub(super) fn max_k(&self) -> usize {
        self.max_k
    }

    /// Summaries of a row, 8 bytes each.
    fn chunks(&self) -> usize {
        self.size.div_ceil(CHUNK)
    }

    /// Where a product leaves the summaries of rows of the logits that it leaves, too, of which there are so many.
    pub(super) fn summaries(&self, rows: usize) -> CUdeviceptr {
        assert!(8 * rows * self.chunks() <= self.summaries.bytes(), "made for fewer rows");
        self.summaries.pointer()
    }

    /// The first of `rows` of the rows at `logits`, and its summaries.
    fn first(&self, logits: CUdeviceptr, rows: &Range<usize>) -> (CUdeviceptr, CUdeviceptr) {
        let summaries = self.summaries(rows.end) + (8 * rows.start * self.chunks()) as u64;
        (logits + (4 * rows.start * self.size) as u64, summaries)
    }

    /// Asks for the summaries of some of the rows at `logits`.
    pub(super) fn summarize(
        &self,
        gpu: &Gpu,
        logits: CUdeviceptr,
        rows: Range<usize>,
    ) -> Result<()> {
        let (logits, summaries) = self.first(logits, &rows);
        let chunks = self.chunks();
        // A block has sixteen chunks at once, and up to four times.
        let parts = chunks.div_ceil(4 * 16) as u32;
        let (size, chunks) = (self.size as i32, chunks as i32);
        // SAFETY: the caller's logits are rows of the size that the rest was made for.
        unsafe {
            gpu.launch_early(
                &self.summarize,
                (parts, rows.len() as u32, 1),
                (256, 1),
                parameters!(logits, summaries, size, chunks),
            )
        }
    }

    /// Asks for the `k` best entries of some of the rows at `logits`, whose summaries are there by then.
    pub(super) fn select(
        &self,
        gpu: &Gpu,
        logits: CUdeviceptr,
        rows: Range<usize>,
        k: usize,
    ) -> Result<()> {
        assert!((1..=self.max_k).contains(&k), "made for up to {}", self.max_k);
        let (logits, summaries) = self.first(logits, &rows);
        let (ids, log_probs, done) =
            (self.ids.device(), self.log_probs.device(), self.done.device());
        let (size, chunks, k) = (self.size as i32, self.chunks() as i32, k as i32);
        // SAFETY: as above.
        unsafe {
            gpu.launch_early(
                &self.function,
                (rows.len() as u32, 1, 1),
                (512, 1),
                parameters!(logits, summaries, ids, log_probs, done, size, chunks, k),
            )
        }
    }

    /// Forgets what was found before, so that [`wait`](Self::wait) waits for what is asked for next. Nothing that was
    /// asked for may be on its way.
    pub(super) fn clear(&mut self) {
        self.done.as_mut_slice().fill(0);
    }

    /// Waits until the best entries of so many rows are there.
    pub(super) fn wait(&self, gpu: &Gpu, rows: usize) -> Result<()> {
        gpu.wait_for(&self.done, rows)
    }

    /// The `k` best entries of the row that was asked for at this place, best first, once it has been waited for.
    pub(super) fn row(&self, row: usize, k: usize) -> (&[u32], &[f32]) {
        let entries = row * k..(row + 1) * k;
        (&self.ids.as_slice()[entries.clone()], &self.log_probs.as_slice()[entries])
    }
}
