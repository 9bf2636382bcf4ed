//! The committed pair, random small models, and comparisons.

use std::{collections::HashMap, path::PathBuf};

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{DecoderConfig, DecoderModel, KvCache, StateMethod, Weights};
use rand::{Rng, SeedableRng, rngs::StdRng};

pub const METHODS: [StateMethod; 2] = [StateMethod::PerSlot, StateMethod::Factors];

pub fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// The committed hybrid target in f32.
pub fn tiny() -> DecoderModel {
    let folder = path("examples/models/tiny-qwen3_5/target");
    DecoderModel::load(folder, DType::F32, &Device::Cpu).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The greatest difference, relative to the greatest expected value.
pub fn relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let greatest = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, f32::max);
    let difference = greatest(&mut found.iter().zip(expected).map(|(a, b)| (a - b).abs()));
    assert!(!found.iter().any(|x| x.is_nan()));
    difference / greatest(&mut expected.iter().map(|x| x.abs())).max(1e-6)
}

/// Everything a cache has committed, layer by layer.
pub fn committed(cache: &KvCache) -> Vec<Vec<f32>> {
    let mut all = states(cache);
    for layer in 0..cache.num_layers() {
        all.push(values(&cache.keys(layer).unwrap()));
        all.push(values(&cache.values(layer).unwrap()));
    }
    all
}

/// What recurrent layers have committed.
pub fn states(cache: &KvCache) -> Vec<Vec<f32>> {
    let layers = 0..cache.num_recurrent_layers();
    let state = |layer| [cache.recurrent_state(layer).unwrap(), cache.conv_window(layer).unwrap()];
    layers.flat_map(state).map(|tensor| values(&tensor)).collect()
}

/// The greatest relative difference between what two caches have committed.
pub fn cache_difference(found: &KvCache, expected: &KvCache) -> f32 {
    assert_eq!(found.len(), expected.len());
    greatest(committed(found), committed(expected))
}

/// The same of recurrent layers only.
pub fn state_difference(found: &KvCache, expected: &KvCache) -> f32 {
    greatest(states(found), states(expected))
}

fn greatest(found: Vec<Vec<f32>>, expected: Vec<Vec<f32>>) -> f32 {
    let pairs = found.iter().zip(&expected);
    pairs.map(|(a, b)| relative_difference(a, b)).fold(0.0, f32::max)
}

/// Sizes of a random model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub key_heads: usize,
    pub group: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub conv_kernel: usize,
    pub vocab: usize,
}

/// A hybrid model of random weights, strong enough that a wrong state shows in the logits.
pub fn random_model(shape: Shape, seed: u64) -> DecoderModel {
    random_model_as(shape, seed, DType::F32)
}

/// The same in another type.
pub fn random_model_as(shape: Shape, seed: u64, dtype: DType) -> DecoderModel {
    let Shape { layers, hidden, key_heads, group, key_dim, value_dim, conv_kernel, vocab } = shape;
    let (value_heads, mlp, heads, kv_heads, head_dim) = (key_heads * group, 2 * hidden, 2, 1, 8);
    let config = format!(
        r#"{{"model_type": "qwen3_5_text", "vocab_size": {vocab}, "hidden_size": {hidden},
        "intermediate_size": {mlp}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
        "num_key_value_heads": {kv_heads}, "head_dim": {head_dim}, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "tie_word_embeddings": false,
        "rope_parameters": {{"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "full_attention_interval": 3, "linear_num_key_heads": {key_heads},
        "linear_num_value_heads": {value_heads}, "linear_key_head_dim": {key_dim},
        "linear_value_head_dim": {value_dim}, "linear_conv_kernel_dim": {conv_kernel}}}"#
    );
    let config = DecoderConfig::from_json(&config).unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tensors = HashMap::new();
    let mut add = |name: String, dims: &[usize], scale: f32| {
        let len = dims.iter().product();
        let data: Vec<f32> = (0..len).map(|_| scale * rng.random_range(-1f32..1.0)).collect();
        tensors.insert(name, Tensor::from_vec(data, dims, &Device::Cpu).unwrap());
    };
    let unit = |inputs: usize| (3.0 / inputs as f32).sqrt();
    add("model.embed_tokens.weight".into(), &[vocab, hidden], 1.0);
    add("lm_head.weight".into(), &[vocab, hidden], unit(hidden));
    add("model.norm.weight".into(), &[hidden], 0.3);
    let value_size = value_heads * value_dim;
    let channels = 2 * key_heads * key_dim + value_size;
    for layer in 0..layers {
        let mut add = |module: &str, dims: &[usize], scale| {
            add(format!("model.layers.{layer}.{module}"), dims, scale);
        };
        add("input_layernorm.weight", &[hidden], 0.3);
        add("post_attention_layernorm.weight", &[hidden], 0.3);
        add("mlp.gate_proj.weight", &[mlp, hidden], unit(hidden));
        add("mlp.up_proj.weight", &[mlp, hidden], unit(hidden));
        add("mlp.down_proj.weight", &[hidden, mlp], unit(mlp));
        if (layer + 1) % 3 == 0 {
            add("self_attn.q_proj.weight", &[2 * heads * head_dim, hidden], unit(hidden));
            add("self_attn.k_proj.weight", &[kv_heads * head_dim, hidden], unit(hidden));
            add("self_attn.v_proj.weight", &[kv_heads * head_dim, hidden], unit(hidden));
            add("self_attn.o_proj.weight", &[hidden, heads * head_dim], unit(heads * head_dim));
            add("self_attn.q_norm.weight", &[head_dim], 0.3);
            add("self_attn.k_norm.weight", &[head_dim], 0.3);
        } else {
            add("linear_attn.in_proj_qkv.weight", &[channels, hidden], unit(hidden));
            add("linear_attn.in_proj_z.weight", &[value_size, hidden], unit(hidden));
            add("linear_attn.in_proj_b.weight", &[value_heads, hidden], unit(hidden));
            add("linear_attn.in_proj_a.weight", &[value_heads, hidden], unit(hidden));
            add("linear_attn.conv1d.weight", &[channels, 1, conv_kernel], 1.0);
            add("linear_attn.A_log", &[value_heads], 2.0);
            add("linear_attn.dt_bias", &[value_heads], 1.0);
            add("linear_attn.norm.weight", &[value_dim], 1.0);
            add("linear_attn.out_proj.weight", &[hidden, value_size], unit(value_size));
        }
    }
    let weights = Weights::from_tensors(tensors, dtype, &Device::Cpu).unwrap();
    DecoderModel::new(config, weights).unwrap()
}
