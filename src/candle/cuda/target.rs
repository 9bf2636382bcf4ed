//! The target on a GPU.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use candle_core::DType;

use super::device::{Buffer, Gpu, Graph, Pinned};
use super::draw::Draw;
use super::kernels::{Argmax, Kernels, MAX_SLOTS, Path, TopK};
use super::products::{Product, Sums};
use super::stack::{PassInput, Stack, TapInto, padded, padded_to_few};
use super::weights::{Loader, Source, check};
use crate::candle::target::pick_row;
use crate::candle::{DecoderConfig, Error, Result, Weights};
use crate::{Capabilities, CommitPlan, PickRule, Picks, Prefill, Round, Verifier};

/// Sizes of a [`CudaTarget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Rows of the cache: prompt and text of one sequence. 4,096 unless set.
    pub max_len: usize,
    /// Slots of a round at most, the root included; also the rows of one prefill pass. 129 unless set: trees of 128
    /// nodes. At most 252.
    pub max_slots: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { max_len: 4096, max_slots: 129 }
    }
}

impl CudaOptions {
    /// Sets [`max_len`](Self::max_len).
    #[must_use]
    pub fn max_len(mut self, rows: usize) -> Self {
        self.max_len = rows;
        self
    }

    /// Sets [`max_slots`](Self::max_slots).
    #[must_use]
    pub fn max_slots(mut self, slots: usize) -> Self {
        self.max_slots = slots;
        self
    }
}

/// A decoder on a GPU with the cache of one sequence, as the target of a speculative round.
///
/// A pass is one launch: a graph, captured when a width comes up first, that brings the inputs over, runs the layers,
/// picks, and brings the picks back. Widths are filled up to multiples of 8, so that few graphs serve all trees.
/// Nothing is allocated per round; a commit moves rows within the cache.
///
/// Greedy picks are made on the GPU: the greatest f32 logit, of equal ones the lowest id. So are those of requests with
/// a temperature and nothing else, from the same noise and by the same arithmetic as on the host. Requests that need
/// more get the logits of the slots on the path, one copy to the host each. Attention is restricted by ancestor bits,
/// in every layer, over a prefix of any length.
#[derive(Debug)]
pub struct CudaTarget {
    pub(super) stack: Stack,
    pub(super) shared: Rc<Shared>,
    taps: Vec<usize>,
    tap_rows: Buffer,
    pool: Rc<RefCell<Vec<Buffer>>>,
    logits: Buffer,
    argmax: Argmax,
    draw: Draw,
    top_two: TopK,
    input: PassInput,
    packed: Pinned<u64>,
    /// Logits of a row, for picks on the host.
    row: Pinned<f32>,
    /// By width, and by how picks are made.
    graphs: BTreeMap<(usize, Picking), Graph>,
    /// The width of the last pass, and whether its logits are there.
    last: Cell<(usize, bool)>,
    committed: usize,
    verified: Option<usize>,
}

/// How the picks of a pass are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Picking {
    Greedy,
    Drawn,
    /// On the host, from logits.
    Host,
}

/// What a drafter uses of its target.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) embed_tokens: Rc<Buffer>,
    pub(super) lm_head: Rc<Buffer>,
    pub(super) vocab_size: usize,
    pub(super) hidden: usize,
    pub(super) num_layers: usize,
    pub(super) max_len: usize,
    pub(super) max_slots: usize,
}

impl Shared {
    /// Rows of the target's widest pass.
    pub(super) fn max_width(&self) -> usize {
        padded(self.max_slots)
    }

    /// Asks for what is wanted of the logits of the rows that a pass of `stack` ends with.
    pub(super) fn head(&self, stack: &Stack, rows: usize, logits: Sums<'_>) -> Result<()> {
        let shape = self.head_shape(rows, stack.dtype(), logits);
        stack.gpu.product(stack.output(), &self.lm_head, logits, shape)
    }

    /// Finds out how the products of a pass of `stack` and of its logits are best done, `pass` being one.
    pub(super) fn plan(
        &self,
        stack: &Stack,
        rows: usize,
        logits: Sums<'_>,
        pass: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let mut shapes = stack.plan(rows)?;
        let shape = self.head_shape(rows, stack.dtype(), logits);
        let before = || stack.last_norm(rows);
        stack.gpu.plan_product(stack.output(), &[&self.lm_head], logits, shape, &before)?;
        shapes.push(shape);
        stack.gpu.settle(&shapes, pass)
    }

    fn head_shape(&self, rows: usize, dtype: DType, logits: Sums<'_>) -> Product {
        let (inputs, outputs, output) = (self.hidden, self.vocab_size, logits.output());
        Product { rows, inputs, outputs, dtype, output, weights: 1 }
    }
}

/// Hidden states of committed rows on the GPU, for a drafter there. Their memory goes back to the target when they
/// are dropped.
#[derive(Debug)]
pub struct CudaTaps {
    pub(super) blocks: Vec<TapBlock>,
    /// Elements of a row.
    pub(super) width: usize,
    /// Of which target.
    pub(super) of: Rc<Shared>,
}

#[derive(Debug)]
pub(super) struct TapBlock {
    pub(super) rows: usize,
    buffer: Option<Buffer>,
    pool: Rc<RefCell<Vec<Buffer>>>,
}

impl TapBlock {
    pub(super) fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("it is taken when the block is dropped")
    }
}

impl Drop for TapBlock {
    fn drop(&mut self) {
        self.pool.borrow_mut().extend(self.buffer.take());
    }
}

impl CudaTaps {
    /// How many rows there are; 0 if no layer is tapped.
    pub fn rows(&self) -> usize {
        self.blocks.iter().map(|block| block.rows).sum()
    }
}

impl CudaTarget {
    /// Puts a checkpoint on `gpu`. It computes in the type that `weights` was opened for (on the CPU), with f32 sums,
    /// norms and residual stream, and captures the outputs of the layers `taps` (0-based, in this order) for its
    /// drafter.
    ///
    /// # Errors
    /// Sizes out of range; taps that name no layer or one twice; tensors that are missing, misshapen or unknown;
    /// sliding windows, partial rotation, biases outside of qkv, heads of other sizes than 64, 128 and 256; an error
    /// from CUDA.
    pub fn new(
        gpu: &Gpu,
        config: &DecoderConfig,
        weights: Weights,
        taps: &[usize],
        options: CudaOptions,
    ) -> Result<Self> {
        let dtype = weights.dtype();
        check(&weights, dtype)?;
        Self::load(gpu, config, Source::Checkpoint(weights.into()), dtype, taps, options)
    }

    /// A target of random weights, for measurements at a shape whose checkpoint is not at hand.
    ///
    /// # Errors
    /// As [`new`](Self::new), as far as it is about sizes.
    pub fn random(
        gpu: &Gpu,
        config: &DecoderConfig,
        dtype: DType,
        taps: &[usize],
        options: CudaOptions,
    ) -> Result<Self> {
        Self::load(gpu, config, Source::Random { seed: 1 }, dtype, taps, options)
    }

    fn load(
        gpu: &Gpu,
        config: &DecoderConfig,
        source: Source,
        dtype: DType,
        taps: &[usize],
        options: CudaOptions,
    ) -> Result<Self> {
        let CudaOptions { max_len, max_slots } = options;
        if max_len == 0 || max_len > config.max_positions {
            let accepted = format!("1 to {}", config.max_positions);
            return Err(Error::argument("max_len", max_len, accepted));
        }
        if max_slots == 0 || max_slots > MAX_SLOTS {
            return Err(Error::argument("max_slots", max_slots, format!("1 to {MAX_SLOTS}")));
        }
        let layers = config.num_layers();
        if let Some((_, tap)) =
            taps.iter().enumerate().find(|&(at, tap)| *tap >= layers || taps[..at].contains(tap))
        {
            let accepted = format!("different layers below {layers}");
            return Err(Error::argument("taps", tap, accepted));
        }

        let (hidden, vocab_size) = (config.hidden_size, config.vocab_size);
        let kernels = Kernels::new(gpu, dtype, config.head_dim)?;
        let loader_kernels = kernels.clone();
        let mut loader = Loader { gpu, kernels: &loader_kernels, source, prefix: "model." };
        let embed_tokens = Rc::new(loader.matrix(&[("embed_tokens", vocab_size)], hidden)?);
        let lm_head = if config.tie_word_embeddings {
            loader.skip_tied("lm_head.weight", &[vocab_size, hidden])?;
            embed_tokens.clone()
        } else {
            Rc::new(loader.outer_matrix("lm_head", vocab_size, hidden)?)
        };
        let width = padded(max_slots);
        let stack =
            Stack::load(&mut loader, config, kernels, max_len + width, width, max_len + width)?;
        loader.finish()?;
        let element = dtype.size_in_bytes();
        let shared = Shared {
            embed_tokens,
            lm_head,
            vocab_size,
            hidden,
            num_layers: layers,
            max_len,
            max_slots,
        };
        Ok(Self {
            stack,
            shared: Rc::new(shared),
            taps: taps.to_vec(),
            tap_rows: gpu.allocate(element * width * taps.len() * hidden)?,
            pool: Rc::default(),
            logits: gpu.allocate(4 * width * vocab_size)?,
            argmax: Argmax::new(gpu, width, vocab_size)?,
            draw: Draw::new(gpu, width, vocab_size)?,
            top_two: TopK::new(gpu, 1, vocab_size, 2.min(vocab_size))?,
            input: PassInput::new(gpu, width)?,
            packed: gpu.pinned(width)?,
            row: gpu.pinned(vocab_size)?,
            graphs: BTreeMap::new(),
            last: Cell::new((0, true)),
            committed: 0,
            verified: None,
        })
    }

    /// The layers whose outputs are captured.
    pub fn taps(&self) -> &[usize] {
        &self.taps
    }

    /// The two greatest logits of a row of the last pass and their log-probabilities, greatest first: how near a pick
    /// was to another.
    ///
    /// # Errors
    /// A slot beyond the width of a pass, or an error from CUDA.
    pub fn top_two(&self, slot: usize) -> Result<[(u32, f32); 2]> {
        let (gpu, width) = (&self.stack.gpu, self.max_width());
        if slot >= width {
            return Err(Error::argument("slot", slot, format!("below {width}")));
        }
        self.find_logits()?;
        let k = self.top_two.max_k();
        let row = self.logits.at(4 * slot * self.shared.vocab_size);
        self.top_two.summarize(gpu, row, 0..1)?;
        self.top_two.select(gpu, row, 0..1, k)?;
        gpu.synchronize()?;
        let (ids, log_probs) = self.top_two.row(0, k);
        let mut found = [(0, f32::NEG_INFINITY); 2];
        for (found, (&id, &log_prob)) in found.iter_mut().zip(ids.iter().zip(log_probs)) {
            *found = (id, log_prob);
        }
        Ok(found)
    }

    /// The logits of a row of the last pass.
    ///
    /// # Errors
    /// A slot beyond the width of a pass, or an error from CUDA.
    pub fn logits(&self, slot: usize) -> Result<Vec<f32>> {
        let (vocab_size, width) = (self.shared.vocab_size, self.max_width());
        if slot >= width {
            return Err(Error::argument("slot", slot, format!("below {width}")));
        }
        self.find_logits()?;
        let mut row = vec![0.0; vocab_size];
        self.stack.gpu.download(&self.logits, 4 * slot * vocab_size, &mut row)?;
        Ok(row)
    }

    /// Asks for the logits of the last pass, if it left none.
    fn find_logits(&self) -> Result<()> {
        let (width, there) = self.last.get();
        if !there {
            self.shared.head(&self.stack, width, Sums::Floats(&self.logits))?;
            self.last.set((width, true));
        }
        Ok(())
    }

    /// Asks for everything that a pass of `width` rows does.
    fn pass(&self, width: usize, picking: Picking) -> Result<()> {
        let gpu = &self.stack.gpu;
        self.input.send(gpu, width)?;
        let taps = Some(TapInto { layers: &self.taps, rows: &self.tap_rows });
        let inputs = self.input.inputs(width);
        self.stack.forward(&inputs, &self.shared.embed_tokens, taps)?;
        self.shared.head(&self.stack, width, self.sums(picking))?;
        if picking == Picking::Drawn {
            self.draw.run(gpu, &inputs, &self.logits, &self.packed)?;
        }
        Ok(())
    }

    /// What is wanted of a pass's logits.
    fn sums(&self, picking: Picking) -> Sums<'_> {
        let (logits, argmax, picks) = (&self.logits, &self.argmax, &self.packed);
        match picking {
            Picking::Greedy => Sums::Greatest { picks, argmax, logits },
            Picking::Drawn | Picking::Host => Sums::Floats(logits),
        }
    }

    /// Finds out how the products of a pass are best done, `pass` being one.
    fn plan(&self, width: usize, picking: Picking, pass: &dyn Fn() -> Result<()>) -> Result<()> {
        self.shared.plan(&self.stack, width, self.sums(picking), pass)
    }

    /// Runs what `self.input` holds and waits for it.
    fn run(&mut self, width: usize, picks: &Picks<'_>) -> Result<()> {
        let gpu = &self.stack.gpu;
        let picking = match picks.noise() {
            _ if picks.rule() > DEVICE_PICKS => Picking::Host,
            None => Picking::Greedy,
            Some(key) => {
                self.draw.set(&key);
                Picking::Drawn
            }
        };
        let key = (width, picking);
        if !self.graphs.contains_key(&key) {
            self.plan(width, picking, &|| self.pass(width, picking))?;
            let graph = gpu.capture(|| self.pass(width, picking))?;
            self.graphs.insert(key, graph);
        }
        self.last.set((width, picking != Picking::Greedy));
        self.packed.as_mut_slice()[..width].fill(0);
        self.graphs[&key].launch()?;
        match picking {
            Picking::Greedy | Picking::Drawn => gpu.wait_for(&self.packed, width)?,
            Picking::Host => gpu.synchronize()?,
        }
        self.input.landed();
        Ok(())
    }

    /// Adds the picks of rows of the last pass: tokens where they are what is asked for, else the logits of the rows
    /// that matter.
    fn hand_over(&mut self, rows: Range<usize>, picks: &mut Picks<'_>) -> Result<()> {
        let device = picks.rule() <= DEVICE_PICKS;
        for row in rows {
            if device {
                match Argmax::token(self.packed.as_slice()[row]) {
                    Some(token) => picks.push(token),
                    None if picks.wanted() => return Err(Error::NonFiniteLogits { row }),
                    // As on the host: a draft that nobody takes does no harm.
                    None => picks.skip(),
                }
            } else if picks.wanted() {
                let (gpu, skipped) = (&self.stack.gpu, 4 * row * self.shared.vocab_size);
                gpu.download(&self.logits, skipped, self.row.as_mut_slice())?;
                pick_row(self.row.as_slice(), picks)?;
            } else {
                picks.skip();
            }
        }
        Ok(())
    }

    /// Copies taps of the last pass to memory of their own.
    fn take_taps(&self, slots: &[u32]) -> Result<CudaTaps> {
        let mut taps = self.no_taps();
        if self.taps.is_empty() || slots.is_empty() {
            return Ok(taps);
        }
        let width = taps.width;
        let (gpu, row_bytes) = (&self.stack.gpu, width * self.stack.dtype().size_in_bytes());
        // The smallest that does: many may be held at the same time, of a row each.
        let bytes = padded(slots.len()) * row_bytes;
        let pooled = {
            let mut pool = self.pool.borrow_mut();
            let suffices = (0..pool.len()).filter(|&at| pool[at].bytes() >= bytes);
            suffices.min_by_key(|&at| pool[at].bytes()).map(|at| pool.swap_remove(at))
        };
        let buffer = match pooled {
            Some(buffer) => buffer,
            None => gpu.allocate(bytes)?,
        };
        self.stack.kernels.gather(gpu, &self.tap_rows, &buffer, row_bytes, &Path::new(slots))?;
        let (rows, pool) = (slots.len(), self.pool.clone());
        taps.blocks.push(TapBlock { rows, buffer: Some(buffer), pool });
        Ok(taps)
    }

    fn no_taps(&self) -> CudaTaps {
        let (width, of) = (self.taps.len() * self.shared.hidden, self.shared.clone());
        CudaTaps { blocks: Vec::new(), width, of }
    }

    fn check_start(&self, start: usize, rows: usize) -> Result<()> {
        if start != self.committed {
            let accepted = format!("the committed length {}", self.committed);
            return Err(Error::argument("start", start, accepted));
        }
        if start + rows > self.shared.max_len {
            let accepted = format!("at most {} rows", self.shared.max_len);
            return Err(Error::argument("max_len", start + rows, accepted));
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.shared.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(token) => {
                let accepted = format!("ids below the vocabulary size {vocab_size}");
                Err(Error::argument("tokens", token, accepted))
            }
        }
    }

    /// Rows of the widest pass.
    pub(super) fn max_width(&self) -> usize {
        self.shared.max_width()
    }

    /// What a pass has to do at least; see [`Roofline`](super::Roofline).
    pub(super) fn roofline_parts(&self) -> (&Gpu, usize, usize) {
        let head = self.shared.lm_head.bytes();
        (&self.stack.gpu, self.stack.weight_bytes() + head, self.stack.cache_row_bytes())
    }

    /// Asks for the products of a greedy pass and nothing else.
    pub(super) fn products(&self, width: usize) -> Result<()> {
        self.stack.products(width)?;
        self.shared.head(&self.stack, width, self.sums(Picking::Greedy))
    }

    /// Plans them.
    pub(super) fn plan_products(&self, width: usize) -> Result<()> {
        self.plan(width, Picking::Greedy, &|| self.products(width))
    }
}

impl Verifier for CudaTarget {
    type Features = CudaTaps;
    type Error = Error;

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(self.shared.vocab_size, self.shared.max_len);
        capabilities.max_slots = self.shared.max_slots;
        capabilities.device_picks = DEVICE_PICKS;
        capabilities
    }

    fn reset(&mut self, keep: usize) -> Result<()> {
        if keep > self.committed {
            let accepted = format!("at most the committed length {}", self.committed);
            return Err(Error::argument("keep", keep, accepted));
        }
        self.committed = keep;
        self.verified = None;
        Ok(())
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<CudaTaps> {
        self.verified = None;
        let (start, tokens) = (prefill.start(), prefill.tokens());
        self.check_start(start, tokens.len())?;
        self.check_tokens(tokens)?;
        let mut taps = self.no_taps();
        let mut last = None;
        let mut at = start;
        for chunk in tokens.chunks(self.shared.max_slots) {
            let width = padded_to_few(chunk.len(), self.max_width());
            let rows = chunk.iter().enumerate().map(|(row, &token)| (token, (at + row) as u32));
            self.input.write(&self.stack.gpu, width, at, rows, causal)?;
            self.run(width, picks)?;
            let slots: Vec<u32> = (0..chunk.len() as u32).collect();
            taps.blocks.extend(self.take_taps(&slots)?.blocks);
            last = Some(chunk.len() - 1);
            at += chunk.len();
        }
        let last =
            last.ok_or_else(|| Error::argument("tokens", "none", "at least one to prefill"))?;
        self.hand_over(last..last + 1, picks)?;
        self.committed = at;
        Ok(taps)
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<()> {
        self.verified = None;
        let tree = round.tree();
        self.check_start(round.start(), tree.len())?;
        self.check_tokens(tree.tokens())?;
        if tree.len() > self.shared.max_slots {
            let accepted = format!("at most {}", self.shared.max_slots);
            return Err(Error::argument("slots", tree.len(), accepted));
        }
        if let Some(mask) = round.mask().filter(|mask| mask.slots() != tree.len()) {
            let found = format!("{} slots", mask.slots());
            return Err(Error::argument("mask", found, format!("{}, the tree's", tree.len())));
        }
        let width = padded(tree.len());
        let rows = tree.tokens().iter().zip(round.positions());
        let rows = rows.map(|(&token, position)| (token, position as u32));
        let (gpu, start) = (&self.stack.gpu, round.start());
        match round.mask() {
            Some(mask) => self.input.write(gpu, width, start, rows, |row, words| {
                let bits = mask.row(row);
                words[..bits.len()].copy_from_slice(bits);
            })?,
            None => self.input.write(gpu, width, start, rows, causal)?,
        }
        self.run(width, picks)?;
        self.hand_over(0..tree.len(), picks)?;
        self.verified = Some(tree.len());
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<CudaTaps> {
        self.check_start(plan.start(), plan.path().len())?;
        // Taken out: if rows have begun to move, the round has to be verified again.
        let slots = self
            .verified
            .take()
            .ok_or_else(|| Error::argument("plan", "no verification", "a commit after verify"))?;
        if let Some(slot) = plan.path().iter().find(|&&slot| slot as usize >= slots) {
            return Err(Error::argument("plan", slot, format!("slots below {slots}")));
        }
        if !plan.is_prefix() {
            self.stack.compact(plan.start(), &Path::new(plan.path()))?;
        }
        let taps = self.take_taps(plan.path())?;
        self.committed = plan.new_len();
        Ok(taps)
    }
}

/// The most that picks on the GPU honour.
const DEVICE_PICKS: PickRule = PickRule::Noise;

/// The mask of a path: every row sees itself and all before it.
fn causal(row: usize, words: &mut [u64]) {
    for (index, word) in words.iter_mut().enumerate() {
        *word = match row.checked_sub(64 * index) {
            None => 0,
            Some(bit) if bit < 63 => (1 << (bit + 1)) - 1,
            Some(_) => u64::MAX,
        };
    }
}
