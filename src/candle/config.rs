//! Hugging Face `config.json` as one decoder description.

use std::path::Path;

use serde_json::{Map, Value};

use super::fields::{Fields, parse_object, quoted, read_object};
use super::rope::RopeConfig;
use super::rope_fields::rope_config;
use super::{Error, Result};

/// Refuses more layers than any model has: a damaged count must not become an allocation. `field` is
/// where the count stands.
pub(crate) fn check_layers(field: impl Into<String>, count: usize) -> Result<usize> {
    const MAX_LAYERS: usize = 4096;
    if count > MAX_LAYERS {
        return Err(Error::config(field, count, format!("at most {MAX_LAYERS}")));
    }
    Ok(count)
}

/// The decoder families that one configuration describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// `LlamaForCausalLM` (Llama 2, 3.x, SmolLM2, ...).
    Llama,
    /// `Qwen2ForCausalLM` (Qwen2, Qwen2.5).
    Qwen2,
    /// `Qwen3ForCausalLM`.
    Qwen3,
    /// `Qwen3_5ForCausalLM`: Qwen3.5's text model, which alternates gated delta nets and gated
    /// attention.
    Qwen3_5,
}

impl Architecture {
    const ALL: [(Architecture, &'static str, &'static str); 5] = [
        (Architecture::Llama, "LlamaForCausalLM", "llama"),
        (Architecture::Qwen2, "Qwen2ForCausalLM", "qwen2"),
        (Architecture::Qwen3, "Qwen3ForCausalLM", "qwen3"),
        (Architecture::Qwen3_5, "Qwen3_5ForCausalLM", "qwen3_5_text"),
        (Architecture::Qwen3_5, "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ];

    fn from_model_type(found: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, _, model_type)| *model_type == found);
        known.map(|(architecture, ..)| *architecture).ok_or_else(|| {
            let accepted = "llama, qwen2, qwen3, qwen3_5_text, qwen3_5";
            Error::config("model_type", quoted(found), accepted)
        })
    }

    /// From `general.architecture` of a GGUF file.
    pub(crate) fn from_gguf(field: &str, found: &str) -> Result<Self> {
        match Self::from_model_type(found) {
            Ok(architecture) if architecture != Architecture::Qwen3_5 => Ok(architecture),
            _ => Err(Error::config(field, quoted(found), "llama, qwen2, qwen3")),
        }
    }
}

/// Everything that the shape of a pre-norm rotary decoder depends on.
///
/// ```
/// use ddtree::candle::{Architecture, DecoderConfig};
///
/// let config = DecoderConfig::from_json(
///     r#"{
///         "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
///         "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
///         "max_position_embeddings": 2048, "eos_token_id": [2, 7]
///     }"#,
/// )?;
/// assert_eq!(config.architecture, Architecture::Llama);
/// assert_eq!(config.head_dim, 64);
/// assert_eq!(config.eos_token_ids, [2, 7]);
/// # Ok::<(), ddtree::candle::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DecoderConfig {
    /// The family, from `architectures` or `model_type`.
    pub architecture: Architecture,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of a head; `num_heads * head_dim` need not equal `hidden_size`.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Positions that the checkpoint is made for.
    pub max_positions: usize,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub o_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head before rotation.
    pub qk_norm: bool,
    /// One entry per layer: the window of a sliding layer (a row sees that many positions, itself
    /// included), nothing for full attention.
    pub layer_windows: Vec<Option<usize>>,
    /// Layers other than plain attention, if the family has them.
    pub hybrid: Option<Hybrid>,
    /// Tokens that end a text; `generation_config.json` wins over `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a text, if the checkpoint names one.
    pub bos_token_id: Option<u32>,
}

impl DecoderConfig {
    /// Reads `config.json` of a checkpoint folder, and the stop tokens of `generation_config.json`
    /// if that file exists and names any.
    ///
    /// # Errors
    /// A file that cannot be read or parsed; otherwise as [`from_json`](Self::from_json).
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let mut config = Self::from_map(&read_object(&folder.join("config.json"))?)?;
        let generation = folder.join("generation_config.json");
        if generation.exists() {
            let generation = read_object(&generation)?;
            let fields = Fields::new(&generation);
            let eos = fields.token_ids("eos_token_id")?;
            if !eos.is_empty() {
                config.eos_token_ids = eos;
            }
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`.
    ///
    /// Keys that change the computation and are not understood are errors; keys that only matter
    /// for training, generation or book-keeping are ignored.
    ///
    /// # Errors
    /// Text that is no JSON object; an unsupported architecture, activation, quantisation or rope
    /// scaling; a missing, ill-typed or contradictory field.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_map(&parse_object(text, Path::new("config.json"))?)
    }

    fn from_map(map: &Map<String, Value>) -> Result<Self> {
        let fields = Fields::new(map);
        let model_type = fields.str("model_type")?;
        let architecture = match fields.value("architectures") {
            None => Architecture::from_model_type(model_type.unwrap_or("(absent)"))?,
            Some(found) => {
                let (architecture, _, expected) = Architecture::ALL
                    .into_iter()
                    .find(|(_, name, _)| {
                        found.as_array().is_some_and(|list| list.len() == 1 && list[0] == *name)
                    })
                    .ok_or_else(|| {
                        Error::config(
                            "architectures",
                            found,
                            "one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, \
                             Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration",
                        )
                    })?;
                if let Some(found) = model_type.filter(|found| *found != expected) {
                    return Err(Error::config("model_type", quoted(found), expected));
                }
                architecture
            }
        };
        // A model that also sees images describes its text model in an object of its own.
        match fields.object("text_config")? {
            Some(text) if architecture == Architecture::Qwen3_5 => {
                let mut config = Self::from_fields(&text, architecture)?;
                if let Some(tied) = fields.opt_bool("tie_word_embeddings")? {
                    config.tie_word_embeddings = tied;
                }
                Ok(config)
            }
            _ => Self::from_fields(&fields, architecture),
        }
    }

    /// Reads the keys of an `architecture` whatever `architectures` and `model_type` say: drafters
    /// reuse Qwen3's keys under a name of their own.
    pub(crate) fn from_fields(fields: &Fields<'_>, architecture: Architecture) -> Result<Self> {
        let llama = architecture == Architecture::Llama;
        let hybrid = architecture == Architecture::Qwen3_5;
        let act = fields.str("hidden_act")?.unwrap_or("silu");
        if act != "silu" {
            return Err(Error::config("hidden_act", quoted(act), "silu"));
        }
        fields.must_be_absent("quantization_config", "unquantised weights, or a GGUF file")?;

        let hidden_size = fields.positive("hidden_size")?;
        let num_heads = fields.factor("num_attention_heads")?;
        let num_kv_heads = fields.opt_factor("num_key_value_heads")?.unwrap_or(num_heads);
        if num_heads % num_kv_heads != 0 {
            return Err(Error::config(
                "num_key_value_heads",
                num_kv_heads,
                format!("a divisor of num_attention_heads = {num_heads}"),
            ));
        }
        let head_dim = match fields.opt_factor("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden_size % num_heads == 0 => hidden_size / num_heads,
            None => {
                return Err(Error::config(
                    "head_dim",
                    "nothing",
                    format!(
                        "a value, as hidden_size {hidden_size} / {num_heads} heads is not whole"
                    ),
                ));
            }
        };
        let max_position_embeddings = fields.positive("max_position_embeddings")?;
        let (rope, max_positions) =
            rope_config(fields, architecture, head_dim, max_position_embeddings)?;
        let num_layers = check_layers("num_hidden_layers", fields.positive("num_hidden_layers")?)?;
        let attention_bias = fields.bool("attention_bias", false)?;
        let bos = fields.token_ids("bos_token_id")?;
        Ok(Self {
            architecture,
            vocab_size: fields.positive("vocab_size")?,
            hidden_size,
            intermediate_size: fields.positive("intermediate_size")?,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: fields.positive_f64("rms_norm_eps")?,
            rope,
            max_positions,
            tie_word_embeddings: fields.bool("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            o_bias: attention_bias && architecture != Architecture::Qwen2,
            mlp_bias: llama && fields.bool("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3 || hybrid,
            layer_windows: if hybrid {
                vec![None; num_layers]
            } else {
                layer_windows(fields, num_layers, !llama)?
            },
            hybrid: if hybrid { Some(Hybrid::from_fields(fields, num_layers)?) } else { None },
            eos_token_ids: fields.token_ids("eos_token_id")?,
            bos_token_id: bos.first().copied(),
        })
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layer_windows.len()
    }
}

/// The layers of a Qwen3.5 text model: gated delta nets, and between them attention whose output is
/// gated. Its norms are zero-centred: they multiply by 1 + weight.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hybrid {
    /// The layers (0-based, ascending) that are gated delta nets; the others are attention.
    pub linear_layers: Vec<usize>,
    /// Sizes of the gated delta nets.
    pub delta_net: DeltaNetConfig,
}

/// Sizes of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeltaNetConfig {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values and states; a multiple of `key_heads`, in groups that share a key head.
    pub value_heads: usize,
    /// Width of a query or key head; rows of a head's state.
    pub key_dim: usize,
    /// Width of a value head; columns of a head's state.
    pub value_dim: usize,
    /// Inputs that the causal convolution reads, the current one included.
    pub conv_kernel: usize,
}

impl DeltaNetConfig {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_size()
    }

    /// Values of all heads of one row.
    pub fn value_size(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a layer's state, `[value_heads, key_dim, value_dim]`.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.head_state_len()
    }

    pub(crate) fn head_state_len(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Value heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// The convolution's input `index` of a pass, or for a negative one (-1 the last) of the window
    /// before it.
    pub(crate) fn input<'a>(&self, window: &'a [f32], inputs: &'a [f32], index: i32) -> &'a [f32] {
        let channels = self.channels();
        match usize::try_from(index) {
            Ok(row) => &inputs[row * channels..][..channels],
            Err(_) => {
                let back = index.unsigned_abs() as usize * channels;
                &window[window.len() - back..][..channels]
            }
        }
    }
}

impl Hybrid {
    fn from_fields(fields: &Fields<'_>, num_layers: usize) -> Result<Self> {
        if !fields.bool("attn_output_gate", true)? {
            return Err(Error::config("attn_output_gate", false, "true"));
        }
        let linear: Vec<bool> = match fields.value("layer_types") {
            None => {
                let interval = fields.opt_positive("full_attention_interval")?.unwrap_or(4);
                (1..=num_layers).map(|layer| layer % interval != 0).collect()
            }
            Some(found) => {
                let kind = |found: &Value| match found.as_str() {
                    Some("linear_attention") => Some(true),
                    Some("full_attention") => Some(false),
                    _ => None,
                };
                let types = found.as_array().filter(|types| types.len() == num_layers);
                types.and_then(|types| types.iter().map(kind).collect()).ok_or_else(|| {
                    let accepted = format!("{num_layers} of linear_attention and full_attention");
                    Error::config("layer_types", found, accepted)
                })?
            }
        };
        let delta_net = DeltaNetConfig {
            key_heads: fields.factor("linear_num_key_heads")?,
            value_heads: fields.factor("linear_num_value_heads")?,
            key_dim: fields.factor("linear_key_head_dim")?,
            value_dim: fields.factor("linear_value_head_dim")?,
            conv_kernel: fields.factor("linear_conv_kernel_dim")?,
        };
        if !delta_net.value_heads.is_multiple_of(delta_net.key_heads) {
            return Err(Error::config(
                "linear_num_value_heads",
                delta_net.value_heads,
                format!("a multiple of linear_num_key_heads = {}", delta_net.key_heads),
            ));
        }
        let linear_layers = (0..num_layers).filter(|&layer| linear[layer]).collect();
        Ok(Self { linear_layers, delta_net })
    }
}

/// The window of every layer. `layer_types` decides where it is given; without it, Qwen checkpoints
/// slide from layer `max_window_layers` on when `use_sliding_window` is set.
fn layer_windows(
    fields: &Fields<'_>,
    num_layers: usize,
    may_slide: bool,
) -> Result<Vec<Option<usize>>> {
    let declared = fields.opt_positive("sliding_window")?;
    let slides = if may_slide {
        fields.bool("use_sliding_window", false)?
    } else {
        fields.must_be_absent("sliding_window", "null for this architecture")?;
        false
    };
    let window = || match declared {
        Some(window) if slides => Ok(Some(window)),
        Some(_) => {
            Err(Error::config("use_sliding_window", false, "true, as there are sliding layers"))
        }
        None => {
            Err(Error::config("sliding_window", "null", "a window, as there are sliding layers"))
        }
    };
    match fields.value("layer_types") {
        None if slides => {
            let first = fields.opt_usize("max_window_layers")?.ok_or_else(|| {
                Error::config(
                    "max_window_layers",
                    "nothing",
                    "the first sliding layer, or layer_types",
                )
            })?;
            (0..num_layers).map(|layer| if layer < first { Ok(None) } else { window() }).collect()
        }
        None => Ok(vec![None; num_layers]),
        Some(found) => {
            let types =
                found.as_array().filter(|types| types.len() == num_layers).ok_or_else(|| {
                    Error::config("layer_types", found, format!("{num_layers} entries"))
                })?;
            let layer = |(index, found): (usize, &Value)| match found.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") if may_slide => window(),
                _ => {
                    let accepted = if may_slide {
                        "full_attention, sliding_attention"
                    } else {
                        "full_attention"
                    };
                    Err(Error::config(format!("layer_types[{index}]"), found, accepted))
                }
            };
            types.iter().enumerate().map(layer).collect()
        }
    }
}
