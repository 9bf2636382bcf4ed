//! The config-driven decoder: one implementation for every supported family.

use std::ops::Range;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor, utils};
use candle_nn::{Module, RmsNorm};

use super::attention::{LayerMask, Segment};
use super::delta_net::GatedDeltaNet;
use super::gated_attention::GatedAttention;
use super::layers::{self, Embedding, LmHead, Mlp};
use super::rope::Rope;
use super::self_attention::{AttentionParts, Heads, SelfAttention};
use super::state_cache::StateCache;
use super::{DecoderConfig, Error, Gguf, KvCache, Result, Rounding, Weights};
use crate::{AncestorMask, DraftTree};

/// A Llama, Qwen2, Qwen3 or Qwen3.5 model.
///
/// Weights are immutable and shared by clones; what a sequence accumulates is in a [`KvCache`] of its
/// own, made by [`new_cache`](Self::new_cache).
#[derive(Debug, Clone)]
pub struct DecoderModel {
    config: DecoderConfig,
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: LmHead,
    rope: Rope,
    dtype: DType,
    /// What norms over the residual stream apply to.
    norm_dtype: DType,
    device: Device,
}

#[derive(Debug, Clone)]
struct Layer {
    input_norm: RmsNorm,
    mixer: Mixer,
    /// Its number among the layers that a cache counts with it: attention or recurrent.
    cached: usize,
    post_norm: RmsNorm,
    mlp: Mlp,
}

/// How the rows of a layer read each other.
#[derive(Debug, Clone)]
enum Mixer {
    Attention(SelfAttention),
    Gated(GatedAttention),
    DeltaNet(GatedDeltaNet),
}

/// One forward pass over `n` new rows.
#[derive(Debug, Clone, Copy)]
pub struct Forward<'a> {
    /// The token of every row.
    pub tokens: &'a [u32],
    /// The position of every row; in a tree, the root's position plus the row's depth.
    pub positions: &'a [u32],
    /// The cache row that the first new row is written to: the committed length, or more when rows
    /// of an uncommitted pass are to stay visible.
    pub start: usize,
    /// Which new rows see each other; nothing means that each sees itself and all before it.
    pub mask: Option<&'a AncestorMask>,
    /// The shape that recurrent layers follow, and whose slots [`KvCache::commit`] can choose from.
    /// Without it they run the rows one after another, and only the end can be committed
    /// ([`KvCache::extend`]). Other layers do not read it.
    pub tree: Option<&'a DraftTree>,
    /// The rows whose logits are wanted.
    pub want: Want<'a>,
    /// Layers (0-based) whose output is captured: the residual stream after the layer, which
    /// transformers calls `hidden_states[id + 1]`.
    pub taps: &'a [usize],
}

impl Forward<'_> {
    /// Number of rows whose logits are computed.
    fn wanted(&self) -> usize {
        match self.want {
            Want::Nothing => 0,
            Want::Last => 1,
            Want::Rows(rows) => rows.len(),
            Want::All => self.tokens.len(),
        }
    }
}

/// The rows of a pass whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want<'a> {
    /// None: the pass only fills the cache.
    Nothing,
    /// The last row.
    Last,
    /// These rows, in this order.
    Rows(&'a [u32]),
    /// Every row.
    All,
}

/// For every window that a layer has, the mask of each sequence; made when first asked for.
struct Masks(Vec<(Option<usize>, Vec<LayerMask>)>);

impl Masks {
    fn segments<'a>(
        &'a mut self,
        batch: &'a [(&mut KvCache, Forward<'_>)],
        window: Option<usize>,
        device: &Device,
    ) -> Result<Vec<Segment<'a>>> {
        let known = match self.0.iter().position(|(known, _)| *known == window) {
            Some(known) => known,
            None => {
                let of = |(_, pass): &(_, Forward<'_>)| {
                    LayerMask::new(pass.start, pass.positions, pass.mask, window, device)
                };
                self.0.push((window, batch.iter().map(of).collect::<Result<_>>()?));
                self.0.len() - 1
            }
        };
        let sequences = batch.iter().zip(&self.0[known].1);
        let segments = sequences.map(|((cache, pass), mask)| {
            let (rows, start) = (pass.tokens.len(), pass.start);
            Segment { rows, mask, cache, start }
        });
        Ok(segments.collect())
    }
}

/// What a forward pass gives.
#[derive(Debug, Clone)]
pub struct Output {
    /// f32, `[wanted rows, vocab_size]`; nothing for [`Want::Nothing`].
    pub logits: Option<Tensor>,
    /// `[n, taps * hidden_size]` in the type of the residual stream, in the order of the list; nothing
    /// if no tap was asked for.
    pub taps: Option<Tensor>,
}

impl DecoderModel {
    /// Loads a checkpoint folder (`config.json` and safetensors) or a `.gguf` file (dequantised, and
    /// rounded to bf16 as a converted checkpoint would be).
    ///
    /// # Errors
    /// As [`DecoderConfig::load`], [`Gguf::open`] and [`new`](Self::new).
    pub fn load(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let path = path.as_ref();
        if path.extension().is_some_and(|extension| extension == "gguf") {
            let mut gguf = Gguf::open(path)?;
            let config = gguf.config()?;
            return Self::new(config, gguf.into_weights(dtype, device, Rounding::Bf16)?);
        }
        Self::new(DecoderConfig::load(path)?, Weights::open(path, dtype, device)?)
    }

    /// Builds the model on the device and in the type of `weights`.
    ///
    /// # Errors
    /// Missing, misshapen, ill-typed or unknown tensors; an error from candle.
    pub fn new(config: DecoderConfig, mut weights: Weights) -> Result<Self> {
        let dtype = weights.dtype();
        let device = weights.device().clone();
        let residual = layers::residual_dtype(dtype);
        let norm_dtype = if config.hybrid.is_some() { DType::F32 } else { residual };
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let table_shape = [config.vocab_size, hidden];

        let mut model = "model";
        if config.hybrid.is_some() {
            // Published checkpoints hold a vision tower and a multi-token head beside the text model.
            if weights.contains("model.language_model.embed_tokens.weight") {
                model = "model.language_model";
            }
            weights.skip_all("model.visual.");
            weights.skip_all("mtp.");
        }
        let embedding = weights.take(&format!("{model}.embed_tokens.weight"), &table_shape)?;
        let head = if config.tie_word_embeddings {
            if weights.contains("lm_head.weight") {
                weights.skip("lm_head.weight", &table_shape)?;
            }
            embedding.clone()
        } else {
            weights.take("lm_head.weight", &table_shape)?
        };
        let (heads, parts) = (Heads::of(&config), AttentionParts::of(&config));
        let norm = |weights: &mut Weights, name: &str| match config.hybrid {
            Some(_) => layers::zero_centred_norm(weights, name, hidden, eps),
            None => layers::rms_norm(weights, name, hidden, eps, residual),
        };
        let mut stack: Vec<Layer> = Vec::new();
        for index in 0..config.num_layers() {
            let name = |module: &str| format!("{model}.layers.{index}.{module}");
            let (weights, attention) = (&mut weights, name("self_attn"));
            let mixer = match &config.hybrid {
                Some(hybrid) if hybrid.linear_layers.contains(&index) => {
                    let (shape, name) = (hybrid.delta_net, name("linear_attn"));
                    Mixer::DeltaNet(GatedDeltaNet::load(weights, &name, shape, hidden, eps)?)
                }
                Some(_) => {
                    let bias = config.qkv_bias;
                    Mixer::Gated(GatedAttention::load(weights, &attention, heads, bias, eps)?)
                }
                None => Mixer::Attention(SelfAttention::load(weights, &attention, heads, parts)?),
            };
            let recurrent = matches!(mixer, Mixer::DeltaNet(_));
            let of_its_kind =
                |layer: &&Layer| matches!(layer.mixer, Mixer::DeltaNet(_)) == recurrent;
            stack.push(Layer {
                cached: stack.iter().filter(of_its_kind).count(),
                mixer,
                input_norm: norm(weights, &name("input_layernorm"))?,
                post_norm: norm(weights, &name("post_attention_layernorm"))?,
                mlp: Mlp::load(
                    weights,
                    &name("mlp"),
                    hidden,
                    config.intermediate_size,
                    config.mlp_bias,
                )?,
            });
        }
        let norm = norm(&mut weights, &format!("{model}.norm"))?;
        weights.finish()?;
        let rope = Rope::new(&config.rope, config.max_positions, dtype, &device)?;
        Ok(Self {
            config,
            embed_tokens: Embedding::new(embedding),
            layers: stack,
            norm,
            lm_head: LmHead::new(head),
            rope,
            dtype,
            norm_dtype,
            device,
        })
    }

    /// The configuration that the model was built from.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The type of weights and cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the model lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The input embedding; a drafter may share it.
    pub fn embed_tokens(&self) -> &Embedding {
        &self.embed_tokens
    }

    /// The output projection; a drafter may share it.
    pub fn lm_head(&self) -> &LmHead {
        &self.lm_head
    }

    /// An empty cache for one sequence of at most `max_len` rows.
    ///
    /// # Errors
    /// `max_len` is 0 or more than the checkpoint's positions; an error from candle.
    pub fn new_cache(&self, max_len: usize) -> Result<KvCache> {
        let limit = self.rope.positions();
        if max_len == 0 || max_len > limit {
            return Err(Error::argument("max_len", max_len, format!("1 to {limit}")));
        }
        let (linear, delta_net) = match &self.config.hybrid {
            Some(hybrid) => (hybrid.linear_layers.len(), Some(hybrid.delta_net)),
            None => (0, None),
        };
        let cache = KvCache::new(
            self.layers.len() - linear,
            self.config.num_kv_heads,
            self.config.head_dim,
            max_len,
            self.dtype,
            &self.device,
        )?;
        Ok(match delta_net {
            Some(shape) => cache.with_states(StateCache::new(shape, linear)),
            None => cache,
        })
    }

    /// Runs `pass` and writes its keys and values into `cache` at `pass.start..`, without moving the
    /// committed length: until [`KvCache::commit`] the pass can be repeated or abandoned.
    ///
    /// # Errors
    /// An argument that is out of range or does not fit the others (nothing is written then), or an
    /// error from candle (the committed rows are intact).
    pub fn forward(&self, cache: &mut KvCache, pass: &Forward<'_>) -> Result<Output> {
        let mut outputs = self.forward_batch(&mut [(cache, *pass)])?;
        outputs.pop().ok_or_else(|| Error::argument("batch", "no output", "one"))
    }

    /// Runs one pass for each of several sequences: products with the weights over the rows of all of
    /// them, attention and recurrence sequence by sequence. Gives an output for each, in their order.
    ///
    /// On the CPU in f32, outputs and caches are those of [`forward`](Self::forward) bit for bit. That
    /// takes sequences apart whose products alone would add their terms in another order: those that
    /// have one row or want the logits of one, and all of a model with a product of fewer than 256
    /// outputs. They gain nothing from the batch.
    ///
    /// On other devices all sequences run as one, and their products round as the device does for that
    /// number of rows.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), for any of the sequences.
    pub fn forward_batch(&self, batch: &mut [(&mut KvCache, Forward<'_>)]) -> Result<Vec<Output>> {
        for (cache, pass) in &*batch {
            self.check(cache, pass)?;
        }
        let mut outputs = Vec::with_capacity(batch.len());
        let (mut together, mut indices) = (Vec::new(), Vec::new());
        for (index, (cache, pass)) in batch.iter_mut().enumerate() {
            if self.rounds_alike(pass) {
                together.push((&mut **cache, *pass));
                indices.push(index);
            } else {
                let alone = self.run(&mut [(&mut **cache, *pass)])?;
                outputs.extend(alone.into_iter().map(|output| (index, output)));
            }
        }
        if !together.is_empty() {
            outputs.extend(indices.into_iter().zip(self.run(&mut together)?));
        }
        outputs.sort_unstable_by_key(|(index, _)| *index);
        Ok(outputs.into_iter().map(|(_, output)| output).collect())
    }

    /// Whether the products of `pass` alone give each row the bits that they give it among more rows.
    ///
    /// candle's products on the CPU (gemm 0.19) sum an element's terms in the same order whatever the
    /// number of rows and threads, with three exceptions: one row, a result of at most 256 elements, and
    /// one of at most 64 x 64. `tests/candle_batch.rs` fails if that changes. The libraries that candle
    /// can use instead promise nothing of the kind.
    fn rounds_alike(&self, pass: &Forward<'_>) -> bool {
        if !self.device.is_cpu() {
            return true;
        }
        let other_library = utils::has_mkl() || utils::has_accelerate();
        let one_row = pass.tokens.len() == 1 || pass.wanted() == 1;
        !other_library && !one_row && self.narrowest_product() >= 256
    }

    /// The fewest outputs that a product with weights has.
    fn narrowest_product(&self) -> usize {
        let config = &self.config;
        let qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
        let delta_net = config.hybrid.as_ref().map(|hybrid| hybrid.delta_net.channels());
        let narrowest =
            config.hidden_size.min(config.vocab_size).min(qkv).min(2 * config.intermediate_size);
        narrowest.min(delta_net.unwrap_or(narrowest))
    }

    /// [`forward_batch`](Self::forward_batch) of sequences that run as one, of which there is one at
    /// least.
    fn run(&self, batch: &mut [(&mut KvCache, Forward<'_>)]) -> Result<Vec<Output>> {
        for (cache, pass) in &mut *batch {
            begin(cache, pass)?;
        }
        let rows = ranges(batch, |pass| pass.tokens.len());
        let (last, captured) = self.run_layers(batch, &rows)?;
        let logits = self.logits(batch, &rows, &last)?;
        let parts = logits.into_iter().zip(captured);
        let outputs = parts
            .map(|(logits, taps)| Ok(Output { logits, taps: side_by_side(taps)? }))
            .collect::<Result<_>>()?;
        for (cache, pass) in batch {
            finish(cache, pass);
        }
        Ok(outputs)
    }

    /// Runs all layers over the rows of all sequences. Gives what the last one puts out, and the
    /// captured outputs of each sequence, in the order of its taps.
    fn run_layers(
        &self,
        batch: &mut [(&mut KvCache, Forward<'_>)],
        rows: &[Range<usize>],
    ) -> Result<(Tensor, Vec<Vec<Option<Tensor>>>)> {
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        for (_, pass) in &*batch {
            tokens.extend_from_slice(pass.tokens);
            positions.extend_from_slice(pass.positions);
        }
        let rotation = self.rope.at(&positions)?;
        let mut masks = Masks(Vec::new());
        let mut x = self.embed_tokens.forward(&tokens)?;
        x = x.to_dtype(layers::residual_dtype(self.dtype))?;
        let mut captured: Vec<Vec<Option<Tensor>>> =
            batch.iter().map(|(_, pass)| vec![None; pass.taps.len()]).collect();
        for (index, (layer, &window)) in
            self.layers.iter().zip(&self.config.layer_windows).enumerate()
        {
            let normed = self.normalise(&layer.input_norm, &x)?;
            let cached = layer.cached;
            let mixed = match &layer.mixer {
                Mixer::Attention(attention) => {
                    let segments = masks.segments(batch, window, &self.device)?;
                    attention.forward(&normed, &rotation, &segments, cached)?
                }
                Mixer::Gated(attention) => {
                    let segments = masks.segments(batch, window, &self.device)?;
                    attention.forward(&normed, &rotation, &segments, cached)?
                }
                Mixer::DeltaNet(net) => {
                    let states = batch
                        .iter_mut()
                        .map(|(cache, pass)| (pass.tokens.len(), cache.states_mut()));
                    net.forward(&normed, states, cached)?
                }
            };
            x = (x + mixed)?;
            let normed = self.normalise(&layer.post_norm, &x)?;
            x = (&x + layer.mlp.forward(&normed)?)?;
            for (((_, pass), rows), captured) in batch.iter().zip(rows).zip(&mut captured) {
                for (slot, _) in
                    captured.iter_mut().zip(pass.taps).filter(|(_, tap)| **tap == index)
                {
                    *slot = Some(rows_of(&x, rows)?);
                }
            }
        }
        Ok((x, captured))
    }

    /// The logits of the wanted rows of each sequence, from the output of the last layer.
    fn logits(
        &self,
        batch: &[(&mut KvCache, Forward<'_>)],
        rows: &[Range<usize>],
        last: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut wanted = Vec::new();
        for ((_, pass), rows) in batch.iter().zip(rows) {
            let all = rows_of(last, rows)?;
            match pass.want {
                Want::Nothing => {}
                Want::Last => wanted.push(all.narrow(0, rows.len() - 1, 1)?),
                Want::Rows(of) => {
                    let of = Tensor::new(of, &self.device)?;
                    wanted.push(all.contiguous()?.index_select(&of, 0)?);
                }
                Want::All => wanted.push(all),
            }
        }
        if wanted.is_empty() {
            return Ok(vec![None; batch.len()]);
        }
        let hidden = Tensor::cat(&wanted, 0)?;
        let logits = self.lm_head.forward(&self.normalise(&self.norm, &hidden)?)?;
        let rows = ranges(batch, |pass| pass.wanted()).into_iter();
        rows.map(|rows| match rows.len() {
            0 => Ok(None),
            _ => rows_of(&logits, &rows).map(Some),
        })
        .collect()
    }

    /// Whether two models are clones of one.
    pub(crate) fn shares_weights_with(&self, other: &Self) -> bool {
        self.embed_tokens.table().id() == other.embed_tokens.table().id()
            && self.lm_head.weight().id() == other.lm_head.weight().id()
            && self.layers.len() == other.layers.len()
    }

    fn normalise(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        Ok(norm.forward(&x.to_dtype(self.norm_dtype)?)?.to_dtype(self.dtype)?)
    }

    fn check(&self, cache: &KvCache, pass: &Forward<'_>) -> Result<()> {
        let n = pass.tokens.len();
        if n == 0 {
            return Err(Error::argument("tokens", "none", "at least one token"));
        }
        if let Some(token) = pass.tokens.iter().find(|&&t| t as usize >= self.config.vocab_size) {
            let accepted = format!("ids below the vocabulary size {}", self.config.vocab_size);
            return Err(Error::argument("tokens", token, accepted));
        }
        if pass.positions.len() != n {
            return Err(Error::argument(
                "positions",
                format!("{} values", pass.positions.len()),
                format!("{n}, one per token"),
            ));
        }
        let limit = self.rope.positions();
        if let Some(position) = pass.positions.iter().find(|&&p| p as usize >= limit) {
            return Err(Error::argument("positions", position, format!("positions below {limit}")));
        }
        if !(cache.len()..=cache.written()).contains(&pass.start) {
            let accepted = format!(
                "from the committed length {} to {}, where the rows end that passes wrote",
                cache.len(),
                cache.written()
            );
            return Err(Error::argument("start", pass.start, accepted));
        }
        let hybrid = self.config.hybrid.as_ref();
        let recurrent = hybrid.map_or(0, |hybrid| hybrid.linear_layers.len());
        let found = (cache.num_layers(), cache.num_recurrent_layers());
        let accepted = (self.layers.len() - recurrent, recurrent);
        if found != accepted || cache.delta_net() != hybrid.map(|hybrid| &hybrid.delta_net) {
            let layers = |(attention, recurrent)| format!("{attention} + {recurrent} layers");
            let accepted = format!("a cache of this decoder, {}", layers(accepted));
            return Err(Error::argument("cache", layers(found), accepted));
        }
        if let Some(mask) = pass.mask
            && mask.slots() != n
        {
            let found = format!("{} slots", mask.slots());
            return Err(Error::argument("mask", found, format!("{n}, one per token")));
        }
        if let Want::Rows(rows) = pass.want
            && (rows.is_empty() || rows.iter().any(|&row| row as usize >= n))
        {
            return Err(Error::argument("want", format!("{rows:?}"), format!("rows below {n}")));
        }
        if let Some(tap) = pass.taps.iter().find(|&&tap| tap >= self.layers.len()) {
            let accepted = format!("layers below {}", self.layers.len());
            return Err(Error::argument("taps", tap, accepted));
        }
        Ok(())
    }
}

/// Makes room for the rows of a pass. Until it is over, none of them counts as written.
fn begin(cache: &mut KvCache, pass: &Forward<'_>) -> Result<()> {
    let n = pass.tokens.len();
    cache.reserve(pass.start + n)?;
    cache.set_written(pass.start);
    let committed = cache.len();
    match cache.states_mut() {
        Some(states) => states.begin(committed, pass.start, n, pass.tree),
        None => Ok(()),
    }
}

/// Ends a pass that no layer failed in.
fn finish(cache: &mut KvCache, pass: &Forward<'_>) {
    cache.set_written(pass.start + pass.tokens.len());
    if let Some(states) = cache.states_mut() {
        states.finish();
    }
}

/// Where each sequence's rows are among those of all, as many of each as `count` says.
fn ranges(
    batch: &[(&mut KvCache, Forward<'_>)],
    count: impl Fn(&Forward<'_>) -> usize,
) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |(_, pass): &(_, Forward<'_>)| {
        let start = end;
        end += count(pass);
        start..end
    };
    batch.iter().map(range).collect()
}

fn rows_of(matrix: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    Ok(matrix.narrow(0, rows.start, rows.len())?)
}

/// Captured outputs as columns of one matrix; nothing if there are none.
fn side_by_side(captured: Vec<Option<Tensor>>) -> Result<Option<Tensor>> {
    let captured: Vec<Tensor> = captured.into_iter().flatten().collect();
    if captured.is_empty() { Ok(None) } else { Ok(Some(Tensor::cat(&captured, D::Minus1)?)) }
}
