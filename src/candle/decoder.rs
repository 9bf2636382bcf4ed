//! The config-driven decoder: one implementation for every supported family.

use std::path::Path;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{Module, RmsNorm};

use super::attention::LayerMask;
use super::delta_net::GatedDeltaNet;
use super::gated_attention::GatedAttention;
use super::layers::{self, AttentionParts, Embedding, Heads, LmHead, Mlp, SelfAttention};
use super::rope::RopeTable;
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
    rope: RopeTable,
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
        let heads = Heads {
            hidden_size: hidden,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        };
        let parts = AttentionParts {
            qkv_bias: config.qkv_bias,
            o_bias: config.o_bias,
            qk_norm: config.qk_norm.then_some(eps),
        };
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
        let rope = RopeTable::new(&config.rope, config.max_positions, dtype, &device)?;
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
        self.check(cache, pass)?;
        let n = pass.tokens.len();
        cache.reserve(pass.start + n)?;
        let committed = cache.len();
        if let Some(states) = cache.states_mut() {
            states.begin(committed, pass.start, n, pass.tree)?;
        }
        let rotation = self.rope.at(pass.positions)?;
        let mut masks: Vec<(Option<usize>, LayerMask)> = Vec::new();
        let mut x = self.embed_tokens.forward(pass.tokens)?;
        x = x.to_dtype(layers::residual_dtype(self.dtype))?;
        let mut captured: Vec<Option<Tensor>> = vec![None; pass.taps.len()];
        for (index, (layer, &window)) in
            self.layers.iter().zip(&self.config.layer_windows).enumerate()
        {
            let known = masks.iter().position(|(known, _)| *known == window);
            let known = match known {
                Some(known) => known,
                None => {
                    let (positions, mask) = (pass.positions, pass.mask);
                    let mask = LayerMask::new(pass.start, positions, mask, window, &self.device)?;
                    masks.push((window, mask));
                    masks.len() - 1
                }
            };
            let mask = &masks[known].1;
            let normed = self.normalise(&layer.input_norm, &x)?;
            let mixed = match &layer.mixer {
                Mixer::Attention(attention) => {
                    attention.forward(&normed, &rotation, mask, cache, layer.cached, pass.start)?
                }
                Mixer::Gated(attention) => {
                    attention.forward(&normed, &rotation, mask, cache, layer.cached, pass.start)?
                }
                Mixer::DeltaNet(net) => net.forward(&normed, cache.states_mut(), layer.cached)?,
            };
            x = (x + mixed)?;
            let normed = self.normalise(&layer.post_norm, &x)?;
            x = (&x + layer.mlp.forward(&normed)?)?;
            for (slot, &tap) in captured.iter_mut().zip(pass.taps) {
                if tap == index {
                    *slot = Some(x.clone());
                }
            }
        }

        let captured: Vec<Tensor> = captured.into_iter().flatten().collect();
        let taps =
            if captured.is_empty() { None } else { Some(Tensor::cat(&captured, D::Minus1)?) };
        let wanted = match pass.want {
            Want::Nothing => None,
            Want::Last => Some(x.narrow(0, n - 1, 1)?),
            Want::Rows(rows) => Some(x.index_select(&Tensor::new(rows, &self.device)?, 0)?),
            Want::All => Some(x),
        };
        let logits = match wanted {
            None => None,
            Some(hidden) => Some(self.lm_head.forward(&self.normalise(&self.norm, &hidden)?)?),
        };
        if let Some(states) = cache.states_mut() {
            states.finish();
        }
        Ok(Output { logits, taps })
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
        if pass.start < cache.len() {
            let accepted = format!("at least the committed length {}", cache.len());
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
