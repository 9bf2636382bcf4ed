//! The forward pass of a DFlash v1 drafter in plain loops: everything recomputed, nothing cached,
//! f64.

use std::f64::consts::PI;

use serde_json::Value;

use crate::fixture::{Array, Fixture};

/// Logits of slots 1.. of the block `[root, MASK, ...]` at `position`, after the tokens whose
/// `taps` are at the positions just before it.
pub fn logits(model: &Fixture, taps: &Array, root: u32, position: usize) -> Vec<Vec<f32>> {
    let config = &model.config;
    let number = |key: &str| config[key].as_f64().unwrap();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (heads, kv_heads, dim) =
        (size("num_attention_heads"), size("num_key_value_heads"), size("head_dim"));
    let eps = number("rms_norm_eps");
    let block = model.block_size();
    let mask_token = config["dflash_config"]["mask_token_id"].as_u64().unwrap() as usize;
    let tensor = |name: String| &model.tensors[&name];

    let context: Vec<Vec<f64>> = (0..taps.shape[0])
        .map(|row| {
            rms_norm(
                &linear(tensor("fc.weight".into()), None, &wide(taps.row(row))),
                tensor("hidden_norm.weight".into()),
                eps,
            )
        })
        .collect();
    let first = position - context.len();
    let mut x: Vec<Vec<f64>> = (0..block)
        .map(|slot| {
            wide(model.embed_tokens.row(if slot == 0 { root as usize } else { mask_token }))
        })
        .collect();

    for layer in 0..size("num_hidden_layers") {
        let weight = |part: &str| tensor(format!("layers.{layer}.{part}.weight"));
        let project = |part: &str, input: &[f64]| {
            linear(weight(part), model.tensors.get(&format!("layers.{layer}.{part}.bias")), input)
        };
        // Per head: normalised if it has a norm, rotated if it has a position.
        let split = |flat: Vec<f64>, norm: Option<&Array>, at: Option<usize>| -> Vec<Vec<f64>> {
            flat.chunks(dim)
                .map(|head| {
                    let head = norm.map_or(head.to_vec(), |norm| rms_norm(head, norm, eps));
                    at.map_or(head.clone(), |position| rotate(config, &head, position))
                })
                .collect()
        };
        let normed: Vec<Vec<f64>> =
            x.iter().map(|x| rms_norm(x, weight("input_layernorm"), eps)).collect();
        let sources: Vec<&Vec<f64>> = context.iter().chain(&normed).collect();
        let keys: Vec<_> = sources
            .iter()
            .enumerate()
            .map(|(i, s)| {
                split(
                    project("self_attn.k_proj", s),
                    Some(weight("self_attn.k_norm")),
                    Some(first + i),
                )
            })
            .collect();
        let values: Vec<_> =
            sources.iter().map(|s| split(project("self_attn.v_proj", s), None, None)).collect();

        for slot in 0..block {
            let here = position + slot;
            let q = split(
                project("self_attn.q_proj", &normed[slot]),
                Some(weight("self_attn.q_norm")),
                Some(here),
            );
            let mut mixed = vec![0.0; heads * dim];
            for head in 0..heads {
                let kv = head / (heads / kv_heads);
                let scores: Vec<f64> = (0..sources.len())
                    .map(|i| {
                        if visible(config, layer, here, first + i) {
                            dot(&q[head], &keys[i][kv]) / (dim as f64).sqrt()
                        } else {
                            f64::NEG_INFINITY
                        }
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                for (score, value) in scores.iter().zip(&values) {
                    for (d, v) in value[kv].iter().enumerate() {
                        mixed[head * dim + d] += (score - largest).exp() / total * v;
                    }
                }
            }
            add(&mut x[slot], &project("self_attn.o_proj", &mixed));
        }
        for x in &mut x {
            let normed = rms_norm(x, weight("post_attention_layernorm"), eps);
            let gate = project("mlp.gate_proj", &normed);
            let up = project("mlp.up_proj", &normed);
            let inner: Vec<f64> =
                gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(x, &project("mlp.down_proj", &inner));
        }
    }
    x[1..]
        .iter()
        .map(|x| linear(&model.lm_head, None, &rms_norm(x, tensor("norm.weight".into()), eps)))
        .map(|row| row.into_iter().map(|v| v as f32).collect())
        .collect()
}

/// Whether a slot at position `query` sees the token at position `key`, by the file's keys.
fn visible(config: &Value, layer: usize, query: usize, key: usize) -> bool {
    let sliding = config["layer_types"][layer] == "sliding_attention";
    let causal = config["is_causal"].as_bool().unwrap_or(sliding);
    let window = config["sliding_window"].as_i64().unwrap_or(i64::MAX);
    let ahead = key as i64 - query as i64;
    let hidden_ahead = causal && ahead > 0;
    let hidden_far = sliding && (ahead <= -window || ahead >= window);
    !hidden_ahead && !hidden_far
}

/// Rotary embedding of the "rotate half" kind: plain, partial and YaRN.
fn rotate(config: &Value, head: &[f64], position: usize) -> Vec<f64> {
    let part = config["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let rotary = (head.len() as f64 * part) as usize;
    let base = config["rope_theta"].as_f64().unwrap();
    let mut out = head.to_vec();
    for i in 0..rotary / 2 {
        let mut frequency = base.powf(-2.0 * i as f64 / rotary as f64);
        let mut length = 1.0;
        let yarn = &config["rope_scaling"];
        if !yarn.is_null() {
            let factor = yarn["factor"].as_f64().unwrap();
            let trained = yarn["original_max_position_embeddings"].as_f64().unwrap();
            let turns_at = |turns: f64| {
                rotary as f64 * (trained / (turns * 2.0 * PI)).ln() / (2.0 * base.ln())
            };
            let low = turns_at(32.0).floor().max(0.0);
            let high = turns_at(1.0).ceil().min(rotary as f64 - 1.0);
            let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            frequency = frequency * (1.0 - ramp) + frequency / factor * ramp;
            length = 0.1 * factor.ln() + 1.0;
        }
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        let (a, b) = (head[i], head[i + rotary / 2]);
        out[i] = length * (a * cos - b * sin);
        out[i + rotary / 2] = length * (b * cos + a * sin);
    }
    out
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&v| v as f64).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], what: &[f64]) {
    to.iter_mut().zip(what).for_each(|(to, what)| *to += what);
}

fn linear(weight: &Array, bias: Option<&Array>, x: &[f64]) -> Vec<f64> {
    (0..weight.shape[0])
        .map(|out| {
            dot(&wide(weight.row(out)), x) + bias.map_or(0.0, |bias| bias.values[out] as f64)
        })
        .collect()
}

fn rms_norm(x: &[f64], weight: &Array, eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(&weight.values).map(|(x, &w)| x * scale * w as f64).collect()
}
