//! What a DFlash drafter's `config.json` says, and whether it is a drafter this module runs.

use std::path::Path;

use serde_json::{Map, Value};

use crate::candle::{
    Architecture, DecoderConfig, Error, Result,
    fields::{Fields, parse_object, read_object},
};

/// The configuration of a DFlash v1 drafter, read from its `config.json`.
///
/// Reading fails closed: a key that marks one of the format's relatives (DFlash2, Domino, DSpark,
/// causal heads, reduced vocabularies, an anchor-first layout, ...) is an error that names it, and
/// so is any key of `dflash_config` that is not known. `block_size`, `target_layer_ids`,
/// `num_target_layers` and `is_causal` may stand at the top level or in `dflash_config`, and in both
/// if they agree: checkpoints with two values have been run with the wrong one. The other settings
/// are those of a Qwen3 [`DecoderConfig`].
///
/// # Examples
///
/// ```
/// use ddtree::candle::dflash::DFlashConfig;
///
/// let config = DFlashConfig::from_json(r#"{
///     "architectures": ["DFlashDraftModel"], "vocab_size": 4096, "max_position_embeddings": 2048,
///     "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 640,
///     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
///     "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
///     "dflash_config": { "block_size": 8, "target_layer_ids": [1, 2, 3], "mask_token_id": 1 }
/// }"#)?;
/// assert_eq!(config.block_size(), 8);
/// // The number of taps does not follow the number of layers.
/// assert_eq!(config.target_layer_ids(), [1, 2, 3]);
/// # Ok::<(), ddtree::candle::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DFlashConfig {
    pub(in crate::candle) decoder: DecoderConfig,
    pub(super) attention: Vec<BlockAttention>,
    pub(super) block_size: usize,
    pub(super) mask_token_id: u32,
    pub(super) target_layer_ids: Vec<usize>,
    pub(in crate::candle) num_target_layers: Option<usize>,
    pub(in crate::candle) target_hidden_size: usize,
}

/// What a slot of the block sees in one drafter layer.
///
/// Distances are between absolute positions, so that a window reaches back into the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAttention {
    /// Whether a slot sees only itself and what lies before it. Otherwise the block is
    /// bidirectional.
    pub causal: bool,
    /// With `Some(w)` a slot sees only positions less than `w` away: back only if `causal`, else
    /// both ways.
    pub window: Option<usize>,
}

impl BlockAttention {
    /// Whether the query at position `query` sees the key at position `key`.
    ///
    /// ```
    /// use ddtree::candle::dflash::BlockAttention;
    ///
    /// let causal = BlockAttention { causal: true, window: Some(3) };
    /// assert!(causal.sees(10, 8) && !causal.sees(10, 7) && !causal.sees(10, 11));
    /// let symmetric = BlockAttention { causal: false, window: Some(3) };
    /// assert!(symmetric.sees(10, 8) && !symmetric.sees(10, 7) && symmetric.sees(10, 12));
    /// ```
    pub fn sees(&self, query: usize, key: usize) -> bool {
        (!self.causal || key <= query) && self.window.is_none_or(|w| query.abs_diff(key) < w)
    }
}

impl DFlashConfig {
    /// Reads the `config.json` in `folder`.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and when the file cannot be read.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        Self::from_map(&read_object(&folder.as_ref().join("config.json"))?)
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Text that is no JSON object; a key that is missing, malformed or contradicts another; keys
    /// of a drafter that is not DFlash v1.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_map(&parse_object(text, Path::new("config.json"))?)
    }

    fn from_map(map: &Map<String, Value>) -> Result<Self> {
        let top = Fields::new(map);
        let empty = Map::new();
        let own = top.object("dflash_config")?.unwrap_or(Fields::new(&empty));
        classify(&top, &own)?;
        // A drafter layer is a Qwen3 layer.
        let decoder = DecoderConfig::from_fields(&top, Architecture::Qwen3)?;
        let num_target_layers = one_of(&top, &own, "num_target_layers", Fields::opt_positive)?;
        Ok(Self {
            attention: attention(&top, &own, &decoder)?,
            block_size: block_size(&top, &own, decoder.max_positions)?,
            mask_token_id: mask_token_id(&own)?,
            target_layer_ids: target_layer_ids(
                &top,
                &own,
                num_target_layers,
                decoder.num_layers(),
            )?,
            num_target_layers,
            target_hidden_size: own
                .opt_positive("target_hidden_size")?
                .unwrap_or(decoder.hidden_size),
            decoder,
        })
    }

    /// Slots of a block, root included. At least 2.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The target layers whose outputs the drafter reads, 0-based, in the order of concatenation.
    ///
    /// The feature of id `i` is the output of layer `i`, before the target's final norm; in lists of
    /// hidden states that begin with the embeddings it is the one after entry `i`.
    pub fn target_layer_ids(&self) -> &[usize] {
        &self.target_layer_ids
    }

    /// The token that stands in every slot of a block but the first.
    pub fn mask_token_id(&self) -> u32 {
        self.mask_token_id
    }

    /// What the block sees, layer by layer.
    pub fn attention(&self) -> &[BlockAttention] {
        &self.attention
    }

    /// Width of one row of tap features: number of taps times the target's hidden size.
    pub fn feature_size(&self) -> usize {
        self.target_layer_ids.len() * self.target_hidden_size
    }
}

/// Reads a setting that may stand in either object, or in both with one value.
fn one_of<'a, T: PartialEq>(
    top: &Fields<'a>,
    own: &Fields<'a>,
    key: &str,
    read: impl Fn(&Fields<'a>, &str) -> Result<Option<T>>,
) -> Result<Option<T>> {
    match (read(top, key)?, read(own, key)?) {
        (Some(outer), Some(inner)) if outer != inner => {
            let values = [top, own].map(|fields| fields.value(key).unwrap_or(&Value::Null));
            let accepted = format!(
                "the value of the top-level `{key}`, {}, or only one of the two",
                values[0]
            );
            Err(Error::config(own.name(key), values[1], accepted))
        }
        (outer, inner) => Ok(inner.or(outer)),
    }
}

/// A value of a marker that leaves plain DFlash v1 as it is. Null and false always do.
enum Neutral {
    Absent,
    One,
    Text(&'static str),
}

/// Keys that change the computation, and what each stands for.
const MARKERS: &[(&str, Neutral, &str)] = &[
    ("conv_kernel_size", Neutral::Absent, "DFlash2 (block convolutions)"),
    ("conv_group_size", Neutral::Absent, "DFlash2 (block convolutions)"),
    ("selector_rank", Neutral::Absent, "DFlash2 (candidate selector)"),
    ("selector_top_k", Neutral::Absent, "DFlash2 (candidate selector)"),
    (
        "projector_type",
        Neutral::Text("dflash"),
        "a drafter with another output head (Domino, DSpark)",
    ),
    ("emb_dim", Neutral::Absent, "Domino (recurrent head)"),
    ("gru_hidden_dim", Neutral::Absent, "Domino (recurrent head)"),
    ("pure_draft_prefix_len", Neutral::Absent, "Domino (recurrent head)"),
    ("shift_label", Neutral::Absent, "Domino (shifted labels)"),
    ("markov_head_type", Neutral::Absent, "DSpark (Markov head)"),
    ("markov_rank", Neutral::Absent, "DSpark (Markov head)"),
    ("enable_confidence_head", Neutral::Absent, "DSpark (confidence head)"),
    ("confidence_head_with_markov", Neutral::Absent, "DSpark (confidence head)"),
    ("attention_mode", Neutral::Text("gqa"), "another attention than grouped-query attention"),
    ("causal", Neutral::Absent, "JetSpec (causal heads)"),
    ("causal_head", Neutral::Absent, "JetSpec (causal heads)"),
    (
        "sample_from_anchor",
        Neutral::Absent,
        "the anchor-first layout, where slot k predicts position k + 1",
    ),
    (
        "query_zero_predicts_next",
        Neutral::Absent,
        "the anchor-first layout, where slot k predicts position k + 1",
    ),
    ("attention_sink_bias", Neutral::Absent, "attention sinks"),
    ("attention_value_scale", Neutral::One, "scaled attention values"),
    ("input_embedding_scale", Neutral::One, "scaled embeddings"),
    ("output_multiplier", Neutral::One, "scaled logits"),
    ("final_logit_softcapping", Neutral::Absent, "soft-capped logits"),
    ("mlp_bias", Neutral::Absent, "biased MLP projections"),
    ("speculators_model_type", Neutral::Absent, "a speculators export"),
];

/// The keys of `dflash_config` that are read as settings.
const OWN_KEYS: &[&str] = &[
    "block_size",
    "is_causal",
    "mask_token_id",
    "num_target_layers",
    "target_hidden_size",
    "target_layer_ids",
];

/// Errors unless the keys describe DFlash v1 and nothing else.
fn classify(top: &Fields<'_>, own: &Fields<'_>) -> Result<()> {
    let accepted = "[\"DFlashDraftModel\"]";
    match top.value("architectures") {
        None => return Err(Error::config("architectures", "nothing", accepted)),
        Some(Value::Array(names)) if names.len() == 1 && names[0] == "DFlashDraftModel" => {}
        Some(found) => return Err(Error::config("architectures", found, accepted)),
    }
    for (key, neutral, variant) in MARKERS {
        for keys in [own, top] {
            let plain = match (keys.value(key), neutral) {
                (None | Some(Value::Bool(false)), _) => true,
                (Some(value), Neutral::One) => value.as_f64() == Some(1.0),
                (Some(value), Neutral::Text(text)) => value.as_str() == Some(text),
                (Some(_), Neutral::Absent) => false,
            };
            if !plain {
                return Err(unsupported(keys, key, variant));
            }
        }
    }
    for keys in [own, top] {
        let reduced = keys.value("draft_vocab_size");
        if reduced.is_some() && reduced != top.value("vocab_size") {
            return Err(unsupported(keys, "draft_vocab_size", "a vocabulary of its own (d2t map)"));
        }
    }
    let known = |key: &str| {
        key == "draft_vocab_size"
            || OWN_KEYS.contains(&key)
            || MARKERS.iter().any(|(marker, ..)| *marker == key)
    };
    match own.map().keys().find(|key| own.value(key).is_some() && !known(key)) {
        Some(key) => Err(unsupported(own, key, "a setting that this loader does not know")),
        None => Ok(()),
    }
}

fn unsupported(fields: &Fields<'_>, key: &str, variant: &str) -> Error {
    let found = fields.value(key).unwrap_or(&Value::Null);
    let accepted = "the keys of a DFlash v1 drafter (`DFlashDraftModel`)";
    Error::config(fields.name(key), format!("{found}, which marks {variant}"), accepted)
}

fn block_size<'a>(top: &Fields<'a>, own: &Fields<'a>, max_positions: usize) -> Result<usize> {
    match one_of(top, own, "block_size", Fields::opt_usize)? {
        Some(size) if (2..=max_positions).contains(&size) => Ok(size),
        found => {
            let found = found.map_or("nothing".to_owned(), |size| size.to_string());
            let accepted =
                format!("at least 2 (the root and one drafted slot), at most {max_positions}");
            Err(Error::config("block_size", found, accepted))
        }
    }
}

fn mask_token_id(own: &Fields<'_>) -> Result<u32> {
    let id = own.opt_usize("mask_token_id")?;
    id.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
        let found = id.map_or("nothing".to_owned(), |id| id.to_string());
        Error::config("dflash_config.mask_token_id", found, "a token id")
    })
}

/// Sliding layers are causal and full ones are not, unless the file decides for all of them.
fn attention<'a>(
    top: &Fields<'a>,
    own: &Fields<'a>,
    decoder: &DecoderConfig,
) -> Result<Vec<BlockAttention>> {
    let causal = one_of(top, own, "is_causal", Fields::opt_bool)?;
    let layer = |&window: &Option<usize>| BlockAttention {
        causal: causal.unwrap_or(window.is_some()),
        window,
    };
    Ok(decoder.layer_windows.iter().map(layer).collect())
}

fn target_layer_ids<'a>(
    top: &Fields<'a>,
    own: &Fields<'a>,
    num_target_layers: Option<usize>,
    num_layers: usize,
) -> Result<Vec<usize>> {
    let accepted = "a list of distinct layers of the target, counted from 0";
    let Some(ids) = one_of(top, own, "target_layer_ids", Fields::opt_usizes)? else {
        let Some(count) = num_target_layers else {
            return Err(Error::config("dflash_config.target_layer_ids", "nothing", accepted));
        };
        return default_target_layer_ids(count, num_layers).ok_or_else(|| {
            let accepted =
                format!("enough layers for {num_layers} distinct taps, or target_layer_ids");
            Error::config("num_target_layers", count, accepted)
        });
    };
    let distinct = ids.iter().enumerate().all(|(i, id)| !ids[..i].contains(id));
    let in_range = ids.iter().all(|id| num_target_layers.is_none_or(|count| *id < count));
    if ids.is_empty() || !distinct || !in_range {
        let limit = num_target_layers.map_or(String::new(), |count| format!(", below {count}"));
        let accepted = format!("{accepted}{limit}");
        return Err(Error::config("dflash_config.target_layer_ids", format!("{ids:?}"), accepted));
    }
    Ok(ids)
}

/// The layers that a drafter of `num_taps` taps reads when its configuration names none: evenly
/// spread from layer 1 to the third last, rounded half to even; the middle one for a single tap.
///
/// `None` if the target has too few layers for distinct taps.
fn default_target_layer_ids(num_target_layers: usize, num_taps: usize) -> Option<Vec<usize>> {
    if num_taps == 1 {
        return Some(vec![num_target_layers / 2]);
    }
    let span = num_target_layers.checked_sub(4)?;
    let id =
        |i: usize| (1.0 + (i * span) as f64 / (num_taps - 1) as f64).round_ties_even() as usize;
    let ids: Vec<usize> = (0..num_taps).map(id).collect();
    ids.windows(2).all(|pair| pair[0] < pair[1]).then_some(ids)
}
