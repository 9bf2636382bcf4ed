//! The rotary embedding of a `config.json`.

use serde_json::{Map, Value};

use super::fields::{Fields, quoted};
use super::rope::{RopeConfig, RopeScaling, yarn_attention_factor, yarn_reach};
use super::{Architecture, Error, Result};

const ROPE_TYPES: &str = "default, linear, dynamic, llama3, yarn";
const COMMON_ROPE_KEYS: &[&str] = &["rope_type", "type", "rope_theta", "partial_rotary_factor"];
/// How frequencies are shared between time, height and width; all three are the same for text.
const MROPE_KEYS: &[&str] = &["mrope_section", "mrope_interleaved"];
const LLAMA3_KEYS: &[&str] =
    &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
const YARN_KEYS: &[&str] = &[
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// The rotary embedding, and how many positions it reaches.
///
/// transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` and a top-level
/// `rope_theta`; an inner `rope_theta` wins over the top-level one, as it does there.
pub(crate) fn rope_config(
    fields: &Fields<'_>,
    architecture: Architecture,
    head_dim: usize,
    max_positions: usize,
) -> Result<(RopeConfig, usize)> {
    let none = Map::new();
    let rope = rope_object(fields)?.unwrap_or(Fields::new(&none));
    let theta = theta(fields, &rope, architecture)?;
    let rotary_dim = rotary_dim(fields, &rope, architecture, head_dim)?;
    let kind = kind(&rope)?;
    let (scaling, reach) = scaling(&rope, kind, max_positions)?;
    check_keys(&rope, kind, architecture)?;
    Ok((RopeConfig { theta, rotary_dim, scaling }, reach))
}

/// The object with the settings, under either name.
fn rope_object<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    match (fields.object("rope_scaling")?, fields.object("rope_parameters")?) {
        (Some(old), Some(new)) if old.map() != new.map() => Err(Error::config(
            "rope_scaling",
            Value::Object(old.map().clone()),
            "the same as rope_parameters, or only one of the two",
        )),
        (old, new) => Ok(old.or(new)),
    }
}

/// The base of the wavelengths.
fn theta(fields: &Fields<'_>, rope: &Fields<'_>, architecture: Architecture) -> Result<f64> {
    let default = (architecture == Architecture::Llama).then_some(10_000.0);
    let theta = rope.opt_f64("rope_theta")?.or(fields.opt_f64("rope_theta")?).or(default);
    match theta {
        Some(theta) if theta > 1.0 => Ok(theta),
        Some(theta) => Err(Error::config("rope_theta", theta, "a number above 1")),
        None => Err(Error::config("rope_theta", "nothing", "a base frequency")),
    }
}

/// How many dimensions of a head rotate.
fn rotary_dim(
    fields: &Fields<'_>,
    rope: &Fields<'_>,
    architecture: Architecture,
    head_dim: usize,
) -> Result<usize> {
    let key = "partial_rotary_factor";
    let default = if architecture == Architecture::Qwen3_5 { 0.25 } else { 1.0 };
    let part = rope.opt_f64(key)?.or(fields.opt_f64(key)?).unwrap_or(default);
    let rotary_dim = (head_dim as f64 * part) as usize;
    if part > 0.0 && part <= 1.0 && rotary_dim > 0 && rotary_dim.is_multiple_of(2) {
        return Ok(rotary_dim);
    }
    let accepted = format!("a share of head_dim = {head_dim} that is even and not empty");
    Err(Error::config(key, part, accepted))
}

/// The name of the scaling rule.
fn kind<'a>(rope: &Fields<'a>) -> Result<&'a str> {
    match (rope.str("rope_type")?, rope.str("type")?) {
        (Some(kind), Some(old)) if kind != old => {
            Err(Error::config(rope.name("type"), quoted(old), "the same as rope_type"))
        }
        (Some(kind), _) | (None, Some(kind)) => Ok(kind),
        (None, None) if rope.map().keys().all(|key| COMMON_ROPE_KEYS.contains(&key.as_str())) => {
            Ok("default")
        }
        (None, None) => Err(Error::config(rope.name("rope_type"), "nothing", ROPE_TYPES)),
    }
}

/// The scaling rule `kind` with its parameters, and how many positions it reaches.
fn scaling(rope: &Fields<'_>, kind: &str, max_positions: usize) -> Result<(RopeScaling, usize)> {
    let scaling = match kind {
        "default" => RopeScaling::Default,
        "dynamic" => {
            rope.positive_f64("factor")?;
            RopeScaling::Dynamic { max_position: max_positions }
        }
        "linear" => RopeScaling::Linear { factor: rope.positive_f64("factor")? },
        "llama3" => llama3(rope)?,
        "yarn" => return yarn(rope, max_positions),
        other => return Err(Error::config(rope.name("rope_type"), quoted(other), ROPE_TYPES)),
    };
    Ok((scaling, max_positions))
}

fn llama3(rope: &Fields<'_>) -> Result<RopeScaling> {
    let low_freq_factor = rope.positive_f64("low_freq_factor")?;
    let high_freq_factor = rope.positive_f64("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(Error::config(
            rope.name("high_freq_factor"),
            high_freq_factor,
            format!("more than low_freq_factor = {low_freq_factor}"),
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: rope.positive_f64("factor")?,
        low_freq_factor,
        high_freq_factor,
        original_max_position: rope.positive("original_max_position_embeddings")?,
    })
}

fn yarn(rope: &Fields<'_>, max_positions: usize) -> Result<(RopeScaling, usize)> {
    let original = rope.opt_positive("original_max_position_embeddings")?;
    let original = original.unwrap_or(max_positions);
    let stretched = max_positions as f64 / original as f64;
    let factor = rope.opt_positive_f64("factor")?.unwrap_or(stretched);
    let scaling = RopeScaling::Yarn {
        factor,
        beta_fast: rope.opt_positive_f64("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.opt_positive_f64("beta_slow")?.unwrap_or(1.0),
        original_max_position: original,
        attention_factor: attention_factor(rope, factor)?,
        truncate: rope.bool("truncate", true)?,
    };
    Ok((scaling, max_positions.max(yarn_reach(original, factor))))
}

/// The factor given, else the one that the paper derives from the interpolation factor, with the
/// two `mscale` weights where both are given.
fn attention_factor(rope: &Fields<'_>, factor: f64) -> Result<f64> {
    if let Some(factor) = rope.opt_positive_f64("attention_factor")? {
        return Ok(factor);
    }
    let derived = |weight| yarn_attention_factor(factor, weight);
    let (mscale, all_dim) = (rope.opt_f64("mscale")?, rope.opt_f64("mscale_all_dim")?);
    Ok(match (mscale.filter(|m| *m != 0.0), all_dim.filter(|m| *m != 0.0)) {
        (Some(mscale), Some(all_dim)) => derived(mscale) / derived(all_dim),
        _ => derived(1.0),
    })
}

/// Refuses parameters that the scaling rule `kind` does not have.
fn check_keys(rope: &Fields<'_>, kind: &str, architecture: Architecture) -> Result<()> {
    let own: &[&str] = match kind {
        "dynamic" => &["factor", "original_max_position_embeddings"],
        "linear" => &["factor"],
        "llama3" => LLAMA3_KEYS,
        "yarn" => YARN_KEYS,
        _ => &[],
    };
    let unknown = |key: &&String| {
        let key = key.as_str();
        let sections = architecture == Architecture::Qwen3_5 && MROPE_KEYS.contains(&key);
        !COMMON_ROPE_KEYS.contains(&key) && !own.contains(&key) && !sections
    };
    match rope.map().keys().find(unknown) {
        None => Ok(()),
        Some(key) => Err(Error::config(
            rope.name(key),
            &rope.map()[key],
            format!("nothing, as rope type {kind} has no such parameter"),
        )),
    }
}
