//! The DFlash drafter on a GPU.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::device::{Buffer, Graph};
use super::draw::Couple;
use super::kernels::{Kernels, TopK};
use super::products::{Product, Sums};
use super::stack::{KeyValues, PassInput, Stack, padded, padded_to_few};
use super::target::Shared;
use super::weights::{Loader, Source, check};
use super::{CudaTaps, CudaTarget};
use crate::candle::dflash::DFlashConfig;
use crate::candle::{Error, Result, Weights};
use crate::{Committed, Drafter, Proposal, ProposalRequest};

/// A DFlash v1 drafter on the GPU of its target, with the context of one sequence.
///
/// The block's pass, the projection of its rows to logits and the selection of the best entries of each depth are one
/// graph; a proposal comes back as a few kilobytes. Observing projects the taps of committed rows to keys and values
/// of every layer, and the host does not wait for it.
///
/// Drafts for a request with a temperature are coupled to its noise on the GPU: noise is added to the logits of all
/// tokens before the best are selected.
#[derive(Debug)]
pub struct CudaDFlash {
    stack: Stack,
    shared: Rc<Shared>,
    config: DFlashConfig,
    fc: Buffer,
    hidden_norm: Buffer,
    context: Context,
    couple: Couple,
    top_k: TopK,
    logits: Buffer,
    block: PassInput,
    /// By whether drafts are coupled, and how many entries a depth has.
    drafts: BTreeMap<(bool, usize), Graph>,
    observe: BTreeMap<usize, Graph>,
    start: usize,
    len: usize,
    may_skip: bool,
}

/// Memory of an observation.
#[derive(Debug)]
struct Context {
    input: PassInput,
    taps: Buffer,
    projected: Buffer,
    normed: Buffer,
    key_values: KeyValues,
    kv: Buffer,
}

impl CudaDFlash {
    /// Puts a drafter beside its target. Proposals have at most `top_k` entries a depth (64 at most).
    ///
    /// # Errors
    /// Taps other than the target's; `weights` not opened for the CPU in the target's type; causal or windowed
    /// layers; `top_k` out of range; tensors that are missing, misshapen or unknown; an error from CUDA.
    pub fn new(
        target: &CudaTarget,
        config: DFlashConfig,
        weights: Weights,
        top_k: usize,
    ) -> Result<Self> {
        check(&weights, target.stack.dtype())?;
        Self::load(target, config, Source::Checkpoint(weights.into()), top_k)
    }

    /// A drafter of random weights, for measurements at a shape whose checkpoint is not at hand.
    ///
    /// # Errors
    /// As [`new`](Self::new), as far as it is about sizes.
    pub fn random(target: &CudaTarget, config: DFlashConfig, top_k: usize) -> Result<Self> {
        Self::load(target, config, Source::Random { seed: 2 }, top_k)
    }

    fn load(
        target: &CudaTarget,
        config: DFlashConfig,
        source: Source,
        top_k: usize,
    ) -> Result<Self> {
        let shared = target.shared.clone();
        check_pair(&config, target, &shared)?;
        let (gpu, dtype) = (&target.stack.gpu, target.stack.dtype());
        let decoder = &config.decoder;
        let hidden = decoder.hidden_size;
        let kernels = Kernels::new(gpu, dtype, decoder.head_dim)?;
        let loader_kernels = kernels.clone();
        let nested = matches!(&source, Source::Checkpoint(w) if w.contains("model.fc.weight"));
        let prefix = if nested { "model." } else { "" };
        let mut loader = Loader { gpu, kernels: &loader_kernels, source, prefix };
        let fc = loader.matrix(&[("fc", hidden)], config.feature_size())?;
        let hidden_norm = loader.norm("hidden_norm", hidden)?;
        let width = padded(config.block_size());
        let chunk = shared.max_width();
        // The last block may reach past the last position that the target can hold.
        let rows = shared.max_len + width.max(chunk);
        let stack = Stack::load(&mut loader, decoder, kernels, rows, width, rows)?;
        loader.finish()?;
        let key_values = stack.key_values()?;
        let element = dtype.size_in_bytes();
        let k = top_k.min(shared.vocab_size);
        Ok(Self {
            context: Context {
                input: PassInput::new(gpu, chunk)?,
                taps: gpu.allocate(element * chunk * config.feature_size())?,
                projected: gpu.allocate(4 * chunk * hidden)?,
                normed: gpu.allocate(element * chunk * hidden)?,
                kv: gpu.allocate(element * chunk * key_values.width)?,
                key_values,
            },
            couple: Couple::new(gpu, shared.vocab_size)?,
            top_k: TopK::new(gpu, width, shared.vocab_size, k)?,
            logits: gpu.allocate(4 * width * shared.vocab_size)?,
            block: PassInput::new(gpu, width)?,
            drafts: BTreeMap::new(),
            observe: BTreeMap::new(),
            stack,
            shared,
            config,
            fc,
            hidden_norm,
            start: 0,
            len: 0,
            may_skip: true,
        })
    }

    /// The configuration that the drafter was built from.
    pub fn config(&self) -> &DFlashConfig {
        &self.config
    }

    /// Asks for everything that a proposal does on the GPU.
    fn draft_pass(&self, width: usize, coupled: bool, k: usize) -> Result<()> {
        let (gpu, vocab_size) = (&self.stack.gpu, self.shared.vocab_size);
        self.block.send(gpu, width)?;
        let inputs = self.block.inputs(width);
        self.stack.forward(&inputs, &self.shared.embed_tokens, None)?;
        self.shared.head(&self.stack, width, self.sums(coupled))?;
        // Slot 0 holds the root; what it would predict is known.
        let depths = 1..self.config.block_size();
        if coupled {
            let logits = self.logits.at(4 * vocab_size);
            self.couple.run(gpu, inputs.positions, logits, depths.len())?;
            self.top_k.summarize(gpu, self.logits.pointer(), depths.clone())?;
        }
        self.top_k.select(gpu, self.logits.pointer(), depths, k)
    }

    /// What is wanted of a block's logits.
    fn sums(&self, coupled: bool) -> Sums<'_> {
        let (logits, top_k) = (&self.logits, &self.top_k);
        // What noise is added to has other summaries.
        if coupled { Sums::Floats(logits) } else { Sums::Summarized { logits, top_k } }
    }

    /// Asks for everything that an observation of `width` rows does on the GPU, once their taps are there.
    fn observe_pass(&self, width: usize) -> Result<()> {
        let (gpu, context) = (&self.stack.gpu, &self.context);
        context.input.send(gpu, width)?;
        let inputs = context.input.inputs(width);
        let (sums, shape) = self.projection(width);
        gpu.product(context.taps.pointer(), &self.fc, sums, shape)?;
        self.context_norm(width)?;
        let normed = context.normed.pointer();
        self.stack.write_context(&context.key_values, &inputs, normed, &context.kv)
    }

    /// The product that makes rows of the hidden size of taps.
    fn projection(&self, rows: usize) -> (Sums<'_>, Product) {
        let sums = Sums::Floats(&self.context.projected);
        let (inputs, outputs) = (self.config.feature_size(), self.shared.hidden);
        let (dtype, output) = (self.stack.dtype(), sums.output());
        (sums, Product { rows, inputs, outputs, dtype, output, weights: 1 })
    }

    fn context_norm(&self, rows: usize) -> Result<()> {
        let Context { projected, normed, .. } = &self.context;
        let norm = (&self.hidden_norm, self.stack.eps);
        let (gpu, hidden) = (&self.stack.gpu, self.shared.hidden);
        self.stack.kernels.norm(gpu, rows, projected, norm, normed, None, hidden)
    }

    /// Finds out how the products of an observation are best done, whose rows are in `self.context`.
    fn plan_observation(&self, width: usize) -> Result<()> {
        let (gpu, context) = (&self.stack.gpu, &self.context);
        let before = || self.context_norm(width);
        let (sums, projection) = self.projection(width);
        gpu.plan_product(context.taps.pointer(), &[&self.fc], sums, projection, &before)?;
        let KeyValues { weight, .. } = &context.key_values;
        let (sums, key_values) =
            self.stack.context_product(&context.key_values, width, &context.kv);
        gpu.plan_product(context.normed.pointer(), &[weight], sums, key_values, &before)?;
        gpu.settle(&[projection, key_values], &|| self.observe_pass(width))
    }

    fn check_position(&self, name: &'static str, position: usize) -> Result<()> {
        let next = self.start + self.len;
        if self.len > 0 && next != position {
            let accepted = format!("{next}, where the observed context ends");
            return Err(Error::argument(name, position, accepted));
        }
        Ok(())
    }
}

impl Drafter<CudaTaps> for CudaDFlash {
    type Error = Error;

    fn horizon(&self) -> usize {
        self.config.block_size() - 1
    }

    fn reset(&mut self, keep: usize) -> Result<()> {
        self.len = keep.clamp(self.start, self.start + self.len) - self.start;
        self.may_skip = true;
        Ok(())
    }

    fn observe(&mut self, committed: &Committed<'_>, features: &CudaTaps) -> Result<()> {
        let tokens = committed.tokens().len();
        if tokens == 0 {
            return Err(Error::argument("tokens", 0, "at least one to observe"));
        }
        if !Rc::ptr_eq(&features.of, &self.shared) {
            let accepted = "those of the target that the drafter was made for";
            return Err(Error::argument("features", "taps of another target", accepted));
        }
        if features.rows() != tokens || features.width != self.config.feature_size() {
            let found = format!("[{}, {}]", features.rows(), features.width);
            let accepted = format!("[{tokens}, {}]", self.config.feature_size());
            return Err(Error::argument("features", found, accepted));
        }
        // What lies between the rows kept at a reset and the first token after it has no taps: begin anew, as a
        // context with a hole would be read as one without.
        let anew = self.may_skip && committed.start() > self.start + self.len;
        if !anew {
            self.check_position("start", committed.start())?;
        }
        let end = committed.start() + tokens;
        if end > self.shared.max_len {
            let accepted = format!("at most {}", self.shared.max_len);
            return Err(Error::argument("start", end, accepted));
        }
        if anew {
            self.len = 0;
        }
        if self.len == 0 {
            self.start = committed.start();
        }
        let gpu = self.stack.gpu.clone();
        let row_bytes = self.config.feature_size() * self.stack.dtype().size_in_bytes();
        let mut row = self.len;
        for block in &features.blocks {
            let width = padded_to_few(block.rows, self.shared.max_width());
            let positions = (self.start + row..self.start + row + block.rows).map(|p| p as u32);
            let rows = positions.map(|position| (0, position));
            self.context.input.write(&gpu, width, row, rows, |_, _| {})?;
            gpu.copy(block.buffer().pointer(), &self.context.taps, 0, block.rows * row_bytes)?;
            if !self.observe.contains_key(&width) {
                self.plan_observation(width)?;
                let graph = gpu.capture(|| self.observe_pass(width))?;
                self.observe.insert(width, graph);
            }
            self.observe[&width].launch()?;
            row += block.rows;
        }
        self.len = row;
        self.may_skip = false;
        Ok(())
    }

    fn propose(&mut self, request: &ProposalRequest, proposal: &mut Proposal) -> Result<()> {
        let (root, horizon) = (request.root(), request.horizon());
        let block_size = self.config.block_size();
        if root as usize >= self.shared.vocab_size {
            let accepted = format!("ids below the vocabulary size {}", self.shared.vocab_size);
            return Err(Error::argument("root", root, accepted));
        }
        if horizon == 0 || horizon >= block_size {
            return Err(Error::argument("horizon", horizon, format!("1 to {}", block_size - 1)));
        }
        let position = request.position();
        self.check_position("position", position)?;
        if position >= self.shared.max_len {
            let accepted = format!("below {}", self.shared.max_len);
            return Err(Error::argument("position", position, accepted));
        }
        let gpu = self.stack.gpu.clone();
        let (width, mask_token) = (padded(block_size), self.config.mask_token_id());
        let rows = (0..block_size).map(|slot| {
            let token = if slot == 0 { root } else { mask_token };
            (token, (position + slot) as u32)
        });
        // The whole block sees the whole block.
        self.block.write(&gpu, width, self.len, rows, |_, words| {
            (0..block_size).for_each(|slot| words[slot / 64] |= 1 << (slot % 64));
        })?;
        let coupled = request.noise().is_some();
        if let Some(key) = request.noise() {
            self.couple.set(&key);
        }
        let k = request.top_k().clamp(1, self.top_k.max_k());
        let key = (coupled, k);
        if !self.drafts.contains_key(&key) {
            let pass = || self.draft_pass(width, coupled, k);
            self.shared.plan(&self.stack, width, self.sums(coupled), &pass)?;
            let graph = gpu.capture(pass)?;
            self.drafts.insert(key, graph);
        }
        self.top_k.clear();
        self.drafts[&key].launch()?;
        self.top_k.wait(&gpu, block_size - 1)?;
        self.block.landed();
        self.context.input.landed();
        let wanted = request.top_k().min(k);
        for depth in 0..horizon {
            let (ids, log_probs) = self.top_k.row(depth, k);
            proposal.push(&ids[..wanted], &log_probs[..wanted])?;
        }
        proposal.set_coupled(coupled);
        Ok(())
    }
}

/// Whether the drafter reads this target's taps and shares its embedding, and is of the kind that the kernels run.
fn check_pair(config: &DFlashConfig, target: &CudaTarget, shared: &Shared) -> Result<()> {
    let hidden = shared.hidden;
    if config.decoder.hidden_size != hidden || config.target_hidden_size != hidden {
        let accepted = format!("{hidden}, the target's");
        return Err(Error::config("hidden_size", config.decoder.hidden_size, accepted));
    }
    if config.mask_token_id() as usize >= shared.vocab_size {
        let accepted = format!("a row of the target's embedding, below {}", shared.vocab_size);
        return Err(Error::config("dflash_config.mask_token_id", config.mask_token_id(), accepted));
    }
    config.decoder.rope.check_reach(shared.max_len)?;
    if let Some(found) = config.num_target_layers
        && found != shared.num_layers
    {
        let accepted = format!("{}, the target's", shared.num_layers);
        return Err(Error::config("num_target_layers", found, accepted));
    }
    if target.taps() != config.target_layer_ids() {
        let accepted = format!("{:?}, what the target captures", target.taps());
        let found = format!("{:?}", config.target_layer_ids());
        return Err(Error::config("dflash_config.target_layer_ids", found, accepted));
    }
    if config.attention().iter().any(|layer| layer.causal || layer.window.is_some()) {
        let found = "causal or sliding layers";
        return Err(Error::config("layer_types", found, "full bidirectional attention on a GPU"));
    }
    if config.block_size() > shared.max_slots {
        let accepted = format!("at most the target's max_slots, {}", shared.max_slots);
        return Err(Error::config("block_size", config.block_size(), accepted));
    }
    Ok(())
}
