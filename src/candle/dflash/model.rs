//! The drafter's forward pass: observing context, drafting a block.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, RmsNorm};

use super::{BlockAttention, DFlashConfig};
use crate::TopK;
use crate::candle::{
    DecoderModel, Embedding, Error, KvCache, LmHead, Result, Weights,
    attention::{LayerMask, Segment},
    layers::{self, Mlp},
    rope::{Rope, Rotation},
    self_attention::{AttentionParts, Heads, SelfAttention},
};

/// What every position is below, as passes take them as 32-bit numbers.
const MAX_POSITIONS: usize = u32::MAX as usize;

/// What a drafter takes from its target: it has no embedding and no output projection of its own.
#[derive(Clone, Debug)]
pub struct SharedWeights {
    embed_tokens: Embedding,
    lm_head: LmHead,
    num_layers: usize,
    max_positions: usize,
    /// Width of what layers give, where the target is known.
    tap_width: Option<usize>,
}

impl SharedWeights {
    /// Of a target with `num_layers` layers whose sequences have at most `max_positions` tokens, of
    /// which there are at most 4,294,967,295.
    ///
    /// `embed_tokens` and `lm_head` are `[vocab_size, hidden_size]`; two handles to one tensor
    /// where they are tied.
    ///
    /// # Errors
    /// Shapes that are no matrices or differ; more positions than a 32-bit number counts.
    pub fn new(
        embed_tokens: Tensor,
        lm_head: Tensor,
        num_layers: usize,
        max_positions: usize,
    ) -> Result<Self> {
        if embed_tokens.dims2().is_err() || lm_head.dims() != embed_tokens.dims() {
            let accepted = format!(
                "[vocab_size, hidden_size], as embed_tokens has: {:?}",
                embed_tokens.dims()
            );
            return Err(Error::argument("lm_head", format!("{:?}", lm_head.dims()), accepted));
        }
        if max_positions > MAX_POSITIONS {
            let accepted = format!("at most {MAX_POSITIONS}");
            return Err(Error::argument("max_positions", max_positions, accepted));
        }
        let (embed_tokens, lm_head) = (Embedding::new(embed_tokens), LmHead::new(lm_head));
        Ok(Self { embed_tokens, lm_head, num_layers, max_positions, tap_width: None })
    }
}

impl From<&DecoderModel> for SharedWeights {
    fn from(target: &DecoderModel) -> Self {
        Self {
            embed_tokens: target.embed_tokens().clone(),
            lm_head: target.lm_head().clone(),
            num_layers: target.config().num_layers(),
            max_positions: target.config().max_positions,
            tap_width: Some(target.config().hidden_size),
        }
    }
}

/// A DFlash v1 drafter with the context of one sequence.
///
/// One forward pass over a block `[root, MASK, MASK, ...]` predicts all positions after the root at
/// once: slot `k` predicts the token at the root's position plus `k`. The block attends to the
/// accepted tokens through keys and values that were projected from the target's hidden states
/// ("taps") once per token, when they were [observed](Self::observe). Nothing of a block is kept,
/// so a rejected branch leaves nothing to undo.
///
/// The root has not been forwarded by the target, so it has no taps: it is in the block, not in the
/// context.
#[derive(Debug)]
pub struct DFlash {
    config: DFlashConfig,
    shared: SharedWeights,
    /// `[hidden_size, taps * target_hidden_size]`.
    fc: Linear,
    hidden_norm: RmsNorm,
    layers: Vec<Layer>,
    norm: RmsNorm,
    rope: Rope,
    dtype: DType,
    /// Row `i` holds the token at position `start + i`. Rows behind the committed ones hold the
    /// block while a layer attends to it.
    context: KvCache,
    start: usize,
    /// Whether the next tokens may begin after the end of the context, which then is forgotten.
    pub(super) may_skip: bool,
    pub(super) top_k: TopK,
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_norm: RmsNorm,
    mlp: Mlp,
}

impl DFlash {
    /// Loads the drafter in `folder` (`config.json` and safetensors) for the target that `shared`
    /// comes from.
    ///
    /// It runs on the device and in the type of the shared weights.
    ///
    /// # Errors
    /// As [`DFlashConfig::load`], [`Weights::open`] and [`new`](Self::new).
    pub fn load(folder: impl AsRef<Path>, shared: impl Into<SharedWeights>) -> Result<Self> {
        let (folder, shared) = (folder.as_ref(), shared.into());
        let config = DFlashConfig::load(folder)?;
        let table = shared.embed_tokens.table();
        let weights = Weights::open(folder, table.dtype(), table.device())?;
        Self::new(config, weights, shared)
    }

    /// Builds the drafter of an opened checkpoint. Tensor names may all start with `model.`.
    ///
    /// # Errors
    /// A drafter that does not fit the target; `weights` opened for another type than the target's;
    /// tensors that are missing, misshapen, ill-typed or unknown; an error from candle.
    pub fn new(
        config: DFlashConfig,
        mut weights: Weights,
        shared: impl Into<SharedWeights>,
    ) -> Result<Self> {
        let shared = shared.into();
        check_pair(&config, &weights, &shared)?;
        let (dtype, device) = (weights.dtype(), weights.device().clone());
        let residual = layers::residual_dtype(dtype);
        let decoder = &config.decoder;
        let (hidden, eps) = (decoder.hidden_size, decoder.rms_norm_eps);
        let (heads, parts) = (Heads::of(decoder), AttentionParts::of(decoder));

        let prefix = if weights.contains("model.fc.weight") { "model." } else { "" };
        let norm = |weights: &mut Weights, name: &str| {
            layers::rms_norm(weights, &format!("{prefix}{name}"), hidden, eps, residual)
        };
        let sizes = (config.feature_size(), hidden);
        let fc = layers::linear(&mut weights, &format!("{prefix}fc"), sizes, false)?;
        let hidden_norm = norm(&mut weights, "hidden_norm")?;
        let mut stack = Vec::with_capacity(decoder.num_layers());
        for index in 0..decoder.num_layers() {
            let layer = format!("layers.{index}");
            stack.push(Layer {
                input_norm: norm(&mut weights, &format!("{layer}.input_layernorm"))?,
                attention: SelfAttention::load(
                    &mut weights,
                    &format!("{prefix}{layer}.self_attn"),
                    heads,
                    parts,
                )?,
                post_norm: norm(&mut weights, &format!("{layer}.post_attention_layernorm"))?,
                mlp: Mlp::load(
                    &mut weights,
                    &format!("{prefix}{layer}.mlp"),
                    hidden,
                    decoder.intermediate_size,
                    decoder.mlp_bias,
                )?,
            });
        }
        let norm = norm(&mut weights, "norm")?;
        weights.finish()?;

        // The last block may reach past the last position that the target can hold.
        let positions = shared.max_positions.saturating_add(config.block_size).min(MAX_POSITIONS);
        let rope = Rope::new(&decoder.rope, positions, dtype, &device)?;
        let context = KvCache::new(
            stack.len(),
            heads.num_kv_heads,
            heads.head_dim,
            positions,
            dtype,
            &device,
        )?;
        Ok(Self {
            config,
            shared,
            fc,
            hidden_norm,
            layers: stack,
            norm,
            rope,
            dtype,
            context,
            start: 0,
            may_skip: false,
            top_k: TopK::new(),
        })
    }

    /// The configuration that the drafter was built from.
    pub fn config(&self) -> &DFlashConfig {
        &self.config
    }

    /// The position of the first token of the context; meaningless while that is empty.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// How many tokens are in the context.
    pub fn context_len(&self) -> usize {
        self.context.len()
    }

    /// The position after the last observed token, where the root has to be. Nothing while the
    /// context is empty: it may then begin anywhere.
    pub fn next_position(&self) -> Option<usize> {
        (!self.context.is_empty()).then(|| self.start + self.context.len())
    }

    /// Bytes held by the context and by scratch buffers. The drafter's weights are as large as its
    /// checkpoint.
    pub fn memory_usage(&self) -> usize {
        self.context.memory_usage() + self.top_k.memory_usage()
    }

    /// Forgets the tokens at `position` and after it; the buffers stay.
    ///
    /// # Errors
    /// `position` lies before the context or after its end.
    pub fn truncate(&mut self, position: usize) -> Result<()> {
        let end = self.start + self.context.len();
        if position < self.start || position > end {
            let accepted = format!("a position in {}..={end}", self.start);
            return Err(Error::argument("position", position, accepted));
        }
        self.context.truncate(position - self.start)
    }

    /// Adds accepted tokens, the first of which is at position `start`, to the context.
    ///
    /// `taps` is `[tokens, taps * target_hidden_size]`: for each token the outputs of the target's
    /// layers [`target_layer_ids`](DFlashConfig::target_layer_ids), side by side in that order. An
    /// empty context may begin at any position, as when the target resumes from cached rows whose
    /// taps are gone. After that there is no hole: a drafter that misses tokens drafts badly
    /// without an error.
    ///
    /// # Errors
    /// Another shape; a `start` that does not continue the context or is beyond the target's
    /// positions; an error from candle. The context is as before then.
    pub fn observe(&mut self, start: usize, taps: &Tensor) -> Result<()> {
        self.observe_from(start, taps, false)
    }

    /// As [`observe`](Self::observe); `anew` with an empty context, which stays if this is refused.
    pub(super) fn observe_from(&mut self, start: usize, taps: &Tensor, anew: bool) -> Result<()> {
        let width = self.config.feature_size();
        let rows = match *taps.dims() {
            [rows, found] if rows > 0 && found == width => rows,
            _ => {
                let accepted = format!("[at least one token, {width}]");
                return Err(Error::argument("taps", format!("{:?}", taps.dims()), accepted));
            }
        };
        if !anew {
            self.check_position("start", start)?;
        }
        let rotation = self.rotation("start", start, rows)?;
        if anew {
            self.truncate(self.start)?;
        }
        let len = self.context.len();
        self.context.reserve(len + rows)?;

        let x = layers::project_residual(&self.fc, taps)?;
        let x = self.hidden_norm.forward(&x)?.to_dtype(self.dtype)?;
        for (index, layer) in self.layers.iter().enumerate() {
            layer.attention.write_context(&x, &rotation, &self.context, index, len)?;
        }
        self.context.set_written(len + rows);
        self.context.extend(rows)?;
        if len == 0 {
            self.start = start;
        }
        Ok(())
    }

    /// f32 logits of the `horizon` tokens after `root`, which is at `position`: `[horizon,
    /// vocab_size]`.
    ///
    /// Row `k` belongs to position `position + 1 + k`. The block runs whole whatever the horizon,
    /// as its slots see each other. The context does not change; `&mut` is for its buffers.
    ///
    /// # Errors
    /// A `root` outside the vocabulary; a `position` that does not continue the context or is
    /// beyond the target's; a `horizon` outside `1..block_size`; an error from candle.
    pub fn logits(&mut self, root: u32, position: usize, horizon: usize) -> Result<Tensor> {
        let block_size = self.config.block_size;
        if horizon == 0 || horizon >= block_size {
            let accepted = format!("1 to {}", block_size - 1);
            return Err(Error::argument("horizon", horizon, accepted));
        }
        // Slot 0 holds the root; what it would predict is known.
        let x = self.block(root, position, block_size)?.narrow(0, 1, horizon)?.contiguous()?;
        self.shared.lm_head.forward(&self.norm.forward(&x)?)
    }

    /// f32 logits of every slot of a block of `slots` slots, the root's included: `[slots,
    /// vocab_size]`. As [`logits`](Self::logits), but for a block that is cut short: a drafter was
    /// trained on whole blocks and drafts worse in others, which is why drafting never cuts them.
    /// This is here to compare with implementations that do.
    ///
    /// # Errors
    /// As [`logits`](Self::logits); `slots` outside `1..=block_size`.
    pub fn slot_logits(&mut self, root: u32, position: usize, slots: usize) -> Result<Tensor> {
        let block_size = self.config.block_size;
        if slots == 0 || slots > block_size {
            return Err(Error::argument("slots", slots, format!("1 to {block_size}")));
        }
        let x = self.block(root, position, slots)?;
        self.shared.lm_head.forward(&self.norm.forward(&x)?)
    }

    /// Runs a block; the residual stream after the last layer, `[block_size, hidden_size]`.
    fn block(&mut self, root: u32, position: usize, block_size: usize) -> Result<Tensor> {
        self.check_position("position", position)?;
        let rotation = self.rotation("position", position, block_size)?;
        let len = self.context.len();
        self.context.reserve(len + block_size)?;

        let mut block = vec![self.config.mask_token_id; block_size];
        block[0] = root;
        let mut x = self.shared.embed_tokens.forward(&block)?;
        x = x.to_dtype(layers::residual_dtype(self.dtype))?;
        let mut masks: Vec<(BlockAttention, LayerMask)> = Vec::new();
        for (index, (layer, &attention)) in
            self.layers.iter().zip(&self.config.attention).enumerate()
        {
            let known = masks.iter().position(|(known, _)| *known == attention);
            let known = match known {
                Some(known) => known,
                None => {
                    masks.push((attention, block_mask(attention, len, block_size, x.device())?));
                    masks.len() - 1
                }
            };
            let normed = layer.input_norm.forward(&x)?.to_dtype(self.dtype)?;
            let mask = &masks[known].1;
            let block = Segment { rows: normed.dim(0)?, mask, cache: &self.context, start: len };
            x = (x + layer.attention.forward(&normed, &rotation, &[block], index)?)?;
            let normed = layer.post_norm.forward(&x)?.to_dtype(self.dtype)?;
            x = (&x + layer.mlp.forward(&normed)?)?;
        }
        Ok(x)
    }

    fn check_position(&self, name: &'static str, position: usize) -> Result<()> {
        match self.next_position() {
            Some(next) if next != position => {
                let accepted = format!("{next}, where the observed context ends");
                Err(Error::argument(name, position, accepted))
            }
            _ => Ok(()),
        }
    }

    fn rotation(&self, name: &'static str, position: usize, rows: usize) -> Result<Rotation> {
        let limit = self.rope.positions();
        if rows > limit || position > limit - rows {
            let accepted = format!("{rows} rows that end below position {limit}");
            return Err(Error::argument(name, position, accepted));
        }
        let positions: Vec<u32> = (position..position + rows).map(|p| p as u32).collect();
        self.rope.at(&positions)
    }
}

/// What a block after `len` context rows sees in a layer.
fn block_mask(
    attention: BlockAttention,
    len: usize,
    block_size: usize,
    device: &Device,
) -> Result<LayerMask> {
    // The root sees furthest back, `window - 1` positions. Rows are consecutive positions.
    let first = attention.window.map_or(0, |window| (len + 1).saturating_sub(window));
    let end = len + block_size;
    // What a slot sees is an interval: all of it if both ends are.
    let all = (len..end).all(|slot| attention.sees(slot, first) && attention.sees(slot, end - 1));
    if all {
        return Ok(LayerMask { first, bias: None });
    }
    let bias: Vec<f32> = (len..end)
        .flat_map(|slot| (first..end).map(move |row| (slot, row)))
        .map(|(slot, row)| if attention.sees(slot, row) { 0.0 } else { f32::NEG_INFINITY })
        .collect();
    let bias = Tensor::from_vec(bias, (block_size, end - first), device)?;
    Ok(LayerMask { first, bias: Some(bias) })
}

/// Whether the drafter can read this target's taps and use its embedding and output projection.
fn check_pair(config: &DFlashConfig, weights: &Weights, shared: &SharedWeights) -> Result<()> {
    let (vocab_size, width) = shared.embed_tokens.table().dims2()?;
    let dtype = shared.embed_tokens.table().dtype();
    if weights.dtype() != dtype {
        let accepted = format!("{dtype:?}, the type of the target");
        return Err(Error::argument("weights", format!("{:?}", weights.dtype()), accepted));
    }
    if config.decoder.hidden_size != width {
        let accepted = format!("{width}, the target's");
        return Err(Error::config("hidden_size", config.decoder.hidden_size, accepted));
    }
    if let Some(width) = shared.tap_width
        && config.target_hidden_size != width
    {
        let accepted = format!("{width}, the target's hidden_size");
        return Err(Error::config(
            "dflash_config.target_hidden_size",
            config.target_hidden_size,
            accepted,
        ));
    }
    if config.mask_token_id as usize >= vocab_size {
        let accepted = format!("a row of the target's embedding, below {vocab_size}");
        return Err(Error::config("dflash_config.mask_token_id", config.mask_token_id, accepted));
    }
    config.decoder.rope.check_reach(shared.max_positions)?;
    if let Some(found) = config.num_target_layers
        && found != shared.num_layers
    {
        let accepted = format!("{}, the target's", shared.num_layers);
        return Err(Error::config("num_target_layers", found, accepted));
    }
    if let Some(id) = config.target_layer_ids.iter().find(|&&id| id >= shared.num_layers) {
        let accepted = format!("layers of the target, below {}", shared.num_layers);
        return Err(Error::config("dflash_config.target_layer_ids", id, accepted));
    }
    Ok(())
}
