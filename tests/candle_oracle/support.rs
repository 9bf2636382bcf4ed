//! Random models of small shapes, and comparing what they give.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{
    Architecture, DecoderConfig, DecoderModel, Error, Forward, KvCache, Output, Want, Weights,
};
use ddtree::{AncestorMask, DraftTree};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

pub use crate::random::random_tree;

pub const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3/target");

/// A small `config.json` of a family, with `changes` on top (`null` removes nothing, it sets null).
pub fn config_json(architecture: Architecture, changes: Value) -> Value {
    let (name, model_type) = match architecture {
        Architecture::Llama => ("LlamaForCausalLM", "llama"),
        Architecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        _ => ("Qwen3ForCausalLM", "qwen3"),
    };
    let mut config = json!({
        "architectures": [name], "model_type": model_type, "hidden_act": "silu",
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": false,
        "attention_bias": false, "eos_token_id": 0
    });
    for (key, value) in changes.as_object().expect("changes are an object") {
        config[key] = value.clone();
    }
    config
}

pub fn config(architecture: Architecture, changes: Value) -> DecoderConfig {
    DecoderConfig::from_json(&config_json(architecture, changes).to_string()).unwrap()
}

/// A tensor of uniform numbers in `centre - spread ..= centre + spread`.
pub fn uniform(rng: &mut StdRng, shape: &[usize], centre: f32, spread: f32) -> Tensor {
    let count = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| centre + rng.random_range(-spread..=spread)).collect();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// Random weights for every tensor that `config` implies.
pub fn random_tensors(config: &DecoderConfig, seed: u64) -> HashMap<String, Tensor> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut tensors = HashMap::new();
    let mut weight = |name: String, outputs: usize, inputs: usize, bias: bool| {
        let spread = (3.0 / inputs as f32).sqrt();
        tensors.insert(format!("{name}.weight"), uniform(rng, &[outputs, inputs], 0.0, spread));
        if bias {
            tensors.insert(format!("{name}.bias"), uniform(rng, &[outputs], 0.0, 0.5));
        }
    };
    weight("model.embed_tokens".into(), config.vocab_size, hidden, false);
    if !config.tie_word_embeddings {
        weight("lm_head".into(), config.vocab_size, hidden, false);
    }
    for layer in 0..config.num_layers() {
        let prefix = format!("model.layers.{layer}");
        weight(format!("{prefix}.self_attn.q_proj"), q, hidden, config.qkv_bias);
        weight(format!("{prefix}.self_attn.k_proj"), kv, hidden, config.qkv_bias);
        weight(format!("{prefix}.self_attn.v_proj"), kv, hidden, config.qkv_bias);
        weight(format!("{prefix}.self_attn.o_proj"), hidden, q, config.o_bias);
        weight(format!("{prefix}.mlp.gate_proj"), inner, hidden, config.mlp_bias);
        weight(format!("{prefix}.mlp.up_proj"), inner, hidden, config.mlp_bias);
        weight(format!("{prefix}.mlp.down_proj"), hidden, inner, config.mlp_bias);
    }
    let mut norm = |name: String, size: usize| {
        tensors.insert(format!("{name}.weight"), uniform(rng, &[size], 1.0, 0.3));
    };
    norm("model.norm".into(), hidden);
    for layer in 0..config.num_layers() {
        norm(format!("model.layers.{layer}.input_layernorm"), hidden);
        norm(format!("model.layers.{layer}.post_attention_layernorm"), hidden);
        if config.qk_norm {
            norm(format!("model.layers.{layer}.self_attn.q_norm"), config.head_dim);
            norm(format!("model.layers.{layer}.self_attn.k_norm"), config.head_dim);
        }
    }
    tensors
}

pub fn build(config: &DecoderConfig, tensors: HashMap<String, Tensor>) -> DecoderModel {
    build_as(config, tensors, DType::F32)
}

pub fn build_as(
    config: &DecoderConfig,
    tensors: HashMap<String, Tensor>,
    dtype: DType,
) -> DecoderModel {
    let weights = Weights::from_tensors(tensors, dtype, &Device::Cpu).unwrap();
    DecoderModel::new(config.clone(), weights).unwrap()
}

pub fn random_model(architecture: Architecture, changes: Value, seed: u64) -> DecoderModel {
    let config = config(architecture, changes);
    build(&config, random_tensors(&config, seed))
}

pub fn random_tokens(rng: &mut StdRng, count: usize, vocab_size: usize) -> Vec<u32> {
    (0..count).map(|_| rng.random_range(0..vocab_size as u32)).collect()
}

pub fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

/// Logits of all `tokens` after the committed rows, which stay as they are.
pub fn logits(model: &DecoderModel, cache: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
    let start = cache.len();
    rows(&pass_from(model, cache, start, tokens).unwrap().logits.unwrap())
}

/// A causal pass over `tokens` as the rows from `start` on, uncommitted.
pub fn pass_from(
    model: &DecoderModel,
    cache: &mut KvCache,
    start: usize,
    tokens: &[u32],
) -> Result<Output, Error> {
    let positions: Vec<u32> = (start as u32..).take(tokens.len()).collect();
    let want = Want::All;
    let pass =
        Forward { tokens, positions: &positions, start, mask: None, tree: None, want, taps: &[] };
    model.forward(cache, &pass)
}

/// Logits of all slots of `tree` after the committed rows.
pub fn tree_logits(model: &DecoderModel, cache: &mut KvCache, tree: &DraftTree) -> Vec<Vec<f32>> {
    let start = cache.len();
    let mut mask = AncestorMask::new();
    mask.build(tree);
    let positions: Vec<u32> = tree.depths().iter().map(|depth| start as u32 + depth).collect();
    let pass = Forward {
        tokens: tree.tokens(),
        positions: &positions,
        start,
        mask: Some(&mask),
        tree: None,
        want: Want::All,
        taps: &[],
    };
    rows(&model.forward(cache, &pass).unwrap().logits.unwrap())
}

/// Commits `tokens` as one causal pass.
pub fn feed(model: &DecoderModel, cache: &mut KvCache, tokens: &[u32]) {
    if !tokens.is_empty() {
        logits(model, cache, tokens);
        cache.extend(tokens.len()).unwrap();
    }
}

/// The slots from the root to `slot`.
pub fn path(tree: &DraftTree, slot: usize) -> Vec<u32> {
    let mut path = vec![slot as u32];
    while let Ok(parent) = u32::try_from(tree.parents()[path[path.len() - 1] as usize]) {
        path.push(parent);
    }
    path.reverse();
    path
}

pub fn tokens_of(tree: &DraftTree, slots: &[u32]) -> Vec<u32> {
    slots.iter().map(|&slot| tree.tokens()[slot as usize]).collect()
}

#[track_caller]
pub fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        // Written so that a NaN fails.
        assert!((a - b).abs() <= tolerance, "{what}: element {index} is {a}, expected {b}");
    }
}

#[track_caller]
pub fn assert_rows_close(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: rows");
    for (row, (a, b)) in found.iter().zip(expected).enumerate() {
        assert_close(a, b, tolerance, &format!("{what}, row {row}"));
    }
}

/// All committed keys and values, layer by layer.
pub fn contents(cache: &KvCache) -> Vec<f32> {
    let mut all = Vec::new();
    for layer in 0..cache.num_layers() {
        for tensor in [cache.keys(layer).unwrap(), cache.values(layer).unwrap()] {
            all.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
    }
    all
}
