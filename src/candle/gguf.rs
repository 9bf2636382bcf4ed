//! GGUF files of the supported architectures, dequantised at load.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Tensor};

use super::config::{Architecture, DecoderConfig, check_layers};
use super::gguf_header::is_aligned_to_zero;
use super::rope::{RopeConfig, RopeScaling, yarn_attention_factor, yarn_reach};
use super::{Error, Result, Weights};

/// The input embedding.
const EMBEDDING: &str = "token_embd.weight";

/// Per-frequency divisors of the rotary embedding (Llama 3's scaling, precomputed by the exporter).
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// An opened GGUF file: metadata and tensor directory, with the weights still on disk.
#[derive(Debug)]
pub struct Gguf {
    content: Content,
    reader: BufReader<File>,
    architecture: Architecture,
    /// `general.architecture`, the prefix of the other keys.
    name: String,
}

/// Whether dequantised weights pass through bf16 on their way to the model's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// As dequantised, in f32.
    #[default]
    None,
    /// Rounded to bf16 first: the weights that a bf16 conversion of the file would hold.
    Bf16,
}

impl Gguf {
    /// Opens a file and checks that its architecture is supported (`llama`, `qwen2`, `qwen3`).
    ///
    /// # Errors
    /// An unreadable or damaged file, another architecture.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io(path))?;
        let mut reader = BufReader::new(file);
        if is_aligned_to_zero(&mut reader).map_err(Error::io(path))? {
            return Err(Error::config("general.alignment", 0, "a power of two"));
        }
        let content = Content::read(&mut reader).map_err(|e| e.with_path(path))?;
        check_sizes(&content)?;
        let field = "general.architecture";
        let name = match content.metadata.get(field) {
            Some(Value::String(name)) => name.clone(),
            _ => "(absent)".to_owned(),
        };
        let architecture = Architecture::from_gguf(field, &name)?;
        Ok(Self { content, reader, architecture, name })
    }

    /// All key/value pairs, for what the model itself does not need (tokenizer, chat template).
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.content.metadata
    }

    /// The decoder that the file holds.
    ///
    /// # Errors
    /// A missing, ill-typed or unsupported key; rotary divisors that cannot be read.
    pub fn config(&mut self) -> Result<DecoderConfig> {
        let declared = self.positive("embedding_length")?;
        let (vocab_size, hidden_size) = match self.shape(EMBEDDING) {
            Some(&[vocab, hidden]) => (vocab, hidden),
            found => {
                let found = found.map_or("nothing".to_owned(), |shape| format!("shape {shape:?}"));
                let accepted = format!("a matrix with rows of {declared}");
                return Err(Error::config(EMBEDDING, found, accepted));
            }
        };
        if declared != hidden_size {
            return Err(Error::config(
                self.key("embedding_length"),
                declared,
                hidden_size.to_string(),
            ));
        }
        let num_heads = self.positive("attention.head_count")?;
        let num_kv_heads = self.opt_positive("attention.head_count_kv")?.unwrap_or(num_heads);
        if num_heads % num_kv_heads != 0 {
            return Err(Error::config(
                self.key("attention.head_count_kv"),
                num_kv_heads,
                format!("a divisor of {num_heads}"),
            ));
        }
        let head_dim = match self.opt_positive("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if hidden_size % num_heads == 0 => hidden_size / num_heads,
            None => {
                return Err(Error::config(self.key("attention.key_length"), "nothing", "a value"));
            }
        };
        let value_dim = self.opt_positive("attention.value_length")?.unwrap_or(head_dim);
        if value_dim != head_dim {
            let accepted = format!("the key length {head_dim}");
            return Err(Error::config(self.key("attention.value_length"), value_dim, accepted));
        }
        for key in ["expert_count", "attention.sliding_window"] {
            if let Some(found) = self.opt_positive(key)? {
                return Err(Error::config(self.key(key), found, "nothing or 0"));
            }
        }
        let rotary_dim = self.opt_positive("rope.dimension_count")?.unwrap_or(head_dim);
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            let accepted = format!("an even number up to the head dimension {head_dim}");
            return Err(Error::config(self.key("rope.dimension_count"), rotary_dim, accepted));
        }
        if self.architecture == Architecture::Llama && rotary_dim != head_dim {
            // Which rows of a partly rotating head are interleaved is not recorded in the file.
            let accepted = format!("the head dimension {head_dim}");
            return Err(Error::config(self.key("rope.dimension_count"), rotary_dim, accepted));
        }
        let context = self.positive("context_length")?;
        let (scaling, max_positions) = self.rope_scaling(context, rotary_dim)?;
        let num_layers = check_layers(self.key("block_count"), self.positive("block_count")?)?;
        let theta = self.opt_positive_f64("rope.freq_base")?.unwrap_or(10_000.0);
        let has = |name: &str| self.content.tensor_infos.contains_key(name);
        let token = |key: &str| match self.content.metadata.get(key) {
            None => Ok(None),
            Some(value) => value
                .to_u32()
                .map(Some)
                .map_err(|_| Error::config(key, format!("{value:?}"), "a token id")),
        };
        let mut eos_token_ids: Vec<u32> = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            eos_token_ids.extend(token(key)?.filter(|id| !eos_token_ids.contains(id)));
        }
        Ok(DecoderConfig {
            architecture: self.architecture,
            vocab_size,
            hidden_size,
            intermediate_size: self.positive("feed_forward_length")?,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: self.positive_f64("attention.layer_norm_rms_epsilon")?,
            rope: RopeConfig { theta, rotary_dim, scaling },
            max_positions,
            tie_word_embeddings: !has("output.weight"),
            qkv_bias: self.architecture == Architecture::Qwen2 || has("blk.0.attn_q.bias"),
            o_bias: has("blk.0.attn_output.bias"),
            mlp_bias: has("blk.0.ffn_up.bias"),
            qk_norm: self.architecture == Architecture::Qwen3,
            layer_windows: vec![None; num_layers],
            hybrid: None,
            eos_token_ids,
            bos_token_id: token("tokenizer.ggml.bos_token_id")?,
        })
    }

    /// The weights under their Hugging Face names, to be dequantised to f32, rounded as asked and
    /// converted to `dtype` as a model takes them.
    ///
    /// # Errors
    /// A `dtype` the backend does not compute in; two tensors of one Hugging Face name; a missing or
    /// ill-typed number of heads.
    pub fn into_weights(
        self,
        dtype: DType,
        device: &Device,
        rounding: Rounding,
    ) -> Result<Weights> {
        let heads = self.positive("attention.head_count")?;
        let kv_heads = self.opt_positive("attention.head_count_kv")?.unwrap_or(heads);
        let mut names = BTreeMap::new();
        for (name, info) in &self.content.tensor_infos {
            if name == ROPE_DIVISORS {
                continue;
            }
            // llama.cpp stores q and k of this architecture with the halves of every head
            // interleaved, to rotate neighbours; the others are stored as published.
            let interleaved = match name.rsplit('.').nth(1) {
                Some("attn_q") if self.architecture == Architecture::Llama => Some(heads),
                Some("attn_k") if self.architecture == Architecture::Llama => Some(kv_heads),
                _ => None,
            };
            let shape = info.shape.dims().to_vec();
            let entry = Entry { name: name.clone(), shape, interleaved };
            let published = published_name(name);
            if let Some(other) = names.insert(published.clone(), entry) {
                let mut both = [name, &other.name];
                both.sort();
                let found = format!("`{}` and `{}`", both[0], both[1]);
                return Err(Error::config(published, found, "one tensor of this name"));
            }
        }
        let source = GgufSource { content: self.content, reader: self.reader, names, rounding };
        Weights::from_gguf(source, dtype, device)
    }

    fn rope_divisors(&mut self, rotary_dim: usize) -> Result<Option<Vec<f32>>> {
        let Some(shape) = self.shape(ROPE_DIVISORS) else { return Ok(None) };
        if shape != [rotary_dim / 2] {
            return Err(Error::TensorShape {
                name: ROPE_DIVISORS.to_owned(),
                found: shape.to_vec(),
                expected: vec![rotary_dim / 2],
            });
        }
        let cpu = Device::Cpu;
        let tensor = self.content.tensor(&mut self.reader, ROPE_DIVISORS, &cpu)?;
        Ok(Some(tensor.dequantize(&cpu)?.to_vec1::<f32>()?))
    }

    fn rope_scaling(&mut self, context: usize, rotary_dim: usize) -> Result<(RopeScaling, usize)> {
        let divisors = self.rope_divisors(rotary_dim)?;
        self.check_scaling_keys()?;
        let field = self.key("rope.scaling.type");
        let factor = self.scaling_factor()?;
        // As llama.cpp reads a file that does not say.
        let absent = if factor.is_some_and(|factor| factor != 1.0) { "linear" } else { "none" };
        let kind = match self.content.metadata.get(&field) {
            None => absent,
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(Error::config(field, format!("{other:?}"), "a string")),
        };
        let scaled = || {
            let field = self.key("rope.scaling.factor");
            factor.ok_or_else(|| Error::config(field, "nothing", "a positive number"))
        };
        let attention = self.opt_positive_f64("rope.scaling.attn_factor")?.unwrap_or(1.0);
        if kind != "yarn" && attention != 1.0 {
            let field = self.key("rope.scaling.attn_factor");
            return Err(Error::config(field, attention, "1, or a rope.scaling.type of yarn"));
        }
        Ok(match (kind, divisors) {
            ("none", None) => (RopeScaling::Default, context),
            ("none", Some(divisors)) => (RopeScaling::Divisors(divisors), context),
            ("linear", None) => (RopeScaling::Linear { factor: scaled()? }, context),
            ("yarn", None) => {
                let factor = scaled()?;
                let original = self.opt_positive("rope.scaling.original_context_length")?;
                let original = original.unwrap_or(context);
                let beta_fast = self.opt_positive_f64("rope.scaling.yarn_beta_fast")?;
                let beta_slow = self.opt_positive_f64("rope.scaling.yarn_beta_slow")?;
                let scaling = RopeScaling::Yarn {
                    factor,
                    beta_fast: beta_fast.unwrap_or(32.0),
                    beta_slow: beta_slow.unwrap_or(1.0),
                    original_max_position: original,
                    attention_factor: yarn_attention_factor(factor, 1.0) * attention,
                    truncate: true,
                };
                (scaling, context.max(yarn_reach(original, factor)))
            }
            (other, divisors) => {
                let with = if divisors.is_some() { " with rope_freqs.weight" } else { "" };
                let found = format!("{other:?}{with}");
                return Err(Error::config(
                    field,
                    found,
                    "none (with or without rope_freqs.weight), linear, yarn",
                ));
            }
        })
    }

    /// By how much positions are compressed, under its name of today or its first; 0 counts as absent.
    fn scaling_factor(&self) -> Result<Option<f64>> {
        for key in ["rope.scaling.factor", "rope.scale_linear"] {
            let is_zero = match self.content.metadata.get(&self.key(key)) {
                Some(Value::F32(number)) => *number == 0.0,
                Some(Value::F64(number)) => *number == 0.0,
                None => true,
                Some(_) => false,
            };
            if !is_zero {
                return self.opt_positive_f64(key);
            }
        }
        Ok(None)
    }

    /// Refuses what is said about scaled rotation and not read, unless it says what is done anyway.
    fn check_scaling_keys(&self) -> Result<()> {
        const READ: [&str; 7] = [
            "type",
            "factor",
            "original_context_length",
            "attn_factor",
            "yarn_beta_fast",
            "yarn_beta_slow",
            // Whether the model was trained further with it.
            "finetuned",
        ];
        const DEFAULTS: [(&str, f32); 3] =
            [("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)];
        let prefix = self.key("rope.scaling.");
        for (key, value) in &self.content.metadata {
            let Some(name) = key.strip_prefix(&prefix).filter(|name| !READ.contains(name)) else {
                continue;
            };
            let accepted = match DEFAULTS.iter().find(|(known, _)| *known == name) {
                Some((_, default)) if value.to_f32().is_ok_and(|found| found == *default) => {
                    continue;
                }
                Some((_, default)) => format!("{default}, or nothing"),
                None => format!("nothing: keys that are read are {}", READ.join(", ")),
            };
            return Err(Error::config(key, format!("{value:?}"), accepted));
        }
        Ok(())
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.content.tensor_infos.get(tensor).map(|info| info.shape.dims())
    }

    /// A whole number; 0 counts as absent, as exporters write it for "none".
    fn opt_positive(&self, key: &str) -> Result<Option<usize>> {
        let key = self.key(key);
        match self.content.metadata.get(&key) {
            None => Ok(None),
            Some(value) => match value.to_u64() {
                Ok(0) => Ok(None),
                Ok(number) if number <= u64::from(u32::MAX) => Ok(Some(number as usize)),
                _ => Err(Error::config(key, format!("{value:?}"), "a positive whole number")),
            },
        }
    }

    fn positive(&self, key: &str) -> Result<usize> {
        self.opt_positive(key)?
            .ok_or_else(|| Error::config(self.key(key), "nothing", "a positive whole number"))
    }

    fn opt_positive_f64(&self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        let number = match self.content.metadata.get(&key) {
            None => return Ok(None),
            Some(Value::F32(number)) => f64::from(*number),
            Some(Value::F64(number)) => *number,
            Some(other) => {
                return Err(Error::config(key, format!("{other:?}"), "a positive number"));
            }
        };
        if number > 0.0 && number.is_finite() {
            Ok(Some(number))
        } else {
            Err(Error::config(key, number, "a positive number"))
        }
    }

    fn positive_f64(&self, key: &str) -> Result<f64> {
        self.opt_positive_f64(key)?
            .ok_or_else(|| Error::config(self.key(key), "nothing", "a positive number"))
    }
}

/// Refuses a directory with a tensor whose number of elements is 0 or does not fit, which candle takes
/// for granted.
fn check_sizes(content: &Content) -> Result<()> {
    for (name, info) in &content.tensor_infos {
        let dims = info.shape.dims();
        let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        if elements.is_none_or(|elements| elements == 0 || elements > isize::MAX as usize / 4) {
            let accepted = "at least one element, and no more than fit into memory";
            return Err(Error::config(format!("shape of {name}"), format!("{dims:?}"), accepted));
        }
    }
    Ok(())
}

/// The Hugging Face name of a GGUF tensor; a name without one stays, and is reported as unknown.
fn published_name(name: &str) -> String {
    match name {
        EMBEDDING => return "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        "output.weight" => return "lm_head.weight".to_owned(),
        _ => {}
    }
    let parts: Vec<&str> = name.split('.').collect();
    let ["blk", layer, module, kind] = parts[..] else { return name.to_owned() };
    let module = match module {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return name.to_owned(),
    };
    format!("model.layers.{layer}.{module}.{kind}")
}

/// Weights of a GGUF file by Hugging Face name.
pub(super) struct GgufSource {
    content: Content,
    reader: BufReader<File>,
    names: BTreeMap<String, Entry>,
    rounding: Rounding,
}

struct Entry {
    name: String,
    shape: Vec<usize>,
    /// The number of heads whose halves are interleaved row by row.
    interleaved: Option<usize>,
}

impl GgufSource {
    pub(super) fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.names.iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect()
    }

    pub(super) fn load(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        let entry = &self.names[name];
        let tensor = self.content.tensor(&mut self.reader, &entry.name, device)?;
        let mut tensor = tensor.dequantize(device)?;
        if let Some(heads) = entry.interleaved {
            let rows = tensor.dim(0)?;
            let columns = tensor.elem_count() / rows.max(1);
            tensor = tensor
                .reshape((heads, rows / heads / 2, 2, columns))?
                .transpose(1, 2)?
                .reshape(entry.shape.as_slice())?;
        }
        match self.rounding {
            Rounding::None => Ok(tensor),
            Rounding::Bf16 => Ok(tensor.to_dtype(DType::BF16)?.to_dtype(DType::F32)?),
        }
    }
}
