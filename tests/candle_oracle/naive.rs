//! A decoder in plain loops, straight from the equations: the oracle for what candle's own models lack
//! (windows, trees, partial rotation, scaled rotation).

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use ddtree::candle::DecoderConfig;

type Rows = Vec<Vec<f64>>;

/// Logits of all `tokens`, whose rows see each other as `sees(row, other)` says (before windows).
/// `rotation` gives one angle per pair of a head's leading dimensions, and a factor on the result.
pub fn logits(
    config: &DecoderConfig,
    tensors: &HashMap<String, Tensor>,
    tokens: &[u32],
    positions: &[u32],
    sees: impl Fn(usize, usize) -> bool,
    rotation: impl Fn(u32) -> (Vec<f64>, f64),
) -> Vec<Vec<f32>> {
    // A vector counts as a matrix of one row.
    let tensors: HashMap<&str, Rows> = tensors
        .iter()
        .map(|(name, tensor)| {
            let tensor =
                if tensor.rank() == 1 { tensor.unsqueeze(0).unwrap() } else { tensor.clone() };
            (name.as_str(), tensor.to_dtype(DType::F64).unwrap().to_vec2().unwrap())
        })
        .collect();
    let matrix = |name: &str| &tensors[name];
    let vector = |name: &str| tensors.get(name).map(|rows| &rows[0]);
    let linear = |name: &str, x: &[f64]| -> Vec<f64> {
        let mut out: Vec<f64> =
            matrix(&format!("{name}.weight")).iter().map(|w| dot(w, x)).collect();
        if let Some(bias) = vector(&format!("{name}.bias")) {
            out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
        }
        out
    };
    let norm = |name: &str, x: &[f64]| -> Vec<f64> {
        let rms = (dot(x, x) / x.len() as f64 + config.rms_norm_eps).sqrt();
        let weight = vector(&format!("{name}.weight")).unwrap();
        x.iter().zip(weight).map(|(x, w)| x / rms * w).collect()
    };
    let rotate = |x: &mut [f64], position: u32| {
        let (angles, factor) = rotation(position);
        let half = angles.len();
        for (i, angle) in angles.iter().enumerate() {
            let (a, b) = (x[i], x[i + half]);
            x[i] = factor * (a * angle.cos() - b * angle.sin());
            x[i + half] = factor * (b * angle.cos() + a * angle.sin());
        }
    };
    let dim = config.head_dim;
    let heads = |rows: &[f64]| -> Rows { rows.chunks(dim).map(<[f64]>::to_vec).collect() };

    let embedding = matrix("model.embed_tokens.weight");
    let mut stream: Rows = tokens.iter().map(|&t| embedding[t as usize].clone()).collect();
    for (layer, window) in config.layer_windows.iter().enumerate() {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (x, &position) in stream.iter().zip(positions) {
            let x = norm(&at("input_layernorm"), x);
            for (out, kind) in [(&mut queries, "q"), (&mut keys, "k")] {
                let mut rows = heads(&linear(&at(&format!("self_attn.{kind}_proj")), &x));
                for head in &mut rows {
                    if config.qk_norm {
                        *head = norm(&at(&format!("self_attn.{kind}_norm")), head);
                    }
                    rotate(head, position);
                }
                out.push(rows);
            }
            values.push(heads(&linear(&at("self_attn.v_proj"), &x)));
        }
        for row in 0..stream.len() {
            let visible: Vec<usize> = (0..stream.len())
                .filter(|&other| {
                    let distance = i64::from(positions[row]) - i64::from(positions[other]);
                    sees(row, other) && window.is_none_or(|window| distance < window as i64)
                })
                .collect();
            let mut mixed = Vec::new();
            for (head, query) in queries[row].iter().enumerate() {
                let kv = head / (config.num_heads / config.num_kv_heads);
                let scores: Vec<f64> = visible
                    .iter()
                    .map(|&o| dot(query, &keys[o][kv]) / (dim as f64).sqrt())
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                mixed.extend((0..dim).map(|d| {
                    let terms = scores.iter().zip(&visible);
                    terms.map(|(s, &o)| (s - max).exp() / total * values[o][kv][d]).sum::<f64>()
                }));
            }
            add(&mut stream[row], &linear(&at("self_attn.o_proj"), &mixed));
        }
        for x in &mut stream {
            let y = norm(&at("post_attention_layernorm"), x);
            let gate = linear(&at("mlp.gate_proj"), &y);
            let up = linear(&at("mlp.up_proj"), &y);
            let inner: Vec<f64> =
                gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(x, &linear(&at("mlp.down_proj"), &inner));
        }
    }
    let head = if config.tie_word_embeddings { "model.embed_tokens" } else { "lm_head" };
    let finish = |x: &Vec<f64>| linear(head, &norm("model.norm", x));
    stream.iter().map(|x| finish(x).into_iter().map(|v| v as f32).collect()).collect()
}

/// Unscaled rotation over the leading `rotary_dim` dimensions.
pub fn plain_rotation(theta: f64, rotary_dim: usize) -> impl Fn(u32) -> (Vec<f64>, f64) {
    move |position| {
        let angle = |i: usize| f64::from(position) / theta.powf(2.0 * i as f64 / rotary_dim as f64);
        ((0..rotary_dim / 2).map(angle).collect(), 1.0)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
