//! Drafters of random weights and any shape.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{
    Result, Weights,
    dflash::{DFlash, DFlashConfig, SharedWeights},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

/// A matrix (`[rows, columns]`) or vector (`[size]`) of a checkpoint.
#[derive(Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Array {
    pub fn tensor(&self) -> Tensor {
        Tensor::from_slice(&self.values, self.shape.as_slice(), &Device::Cpu).unwrap()
    }

    pub fn row(&self, index: usize) -> &[f32] {
        let width = self.shape[1];
        &self.values[index * width..][..width]
    }
}

pub struct Fixture {
    pub config: Value,
    pub tensors: BTreeMap<String, Array>,
    pub embed_tokens: Array,
    pub lm_head: Array,
    pub num_target_layers: usize,
    pub max_positions: usize,
    rng: StdRng,
}

/// The keys of a small drafter that loads.
pub fn config() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "num_target_layers": 9,
        "block_size": 5,
        "dflash_config": { "target_layer_ids": [1, 4, 6], "mask_token_id": 3 },
    })
}

impl Fixture {
    /// Random weights for [`config`] with `changes` merged in.
    pub fn new(seed: u64, changes: Value) -> Self {
        let mut config = config();
        merge(&mut config, changes);
        let mut rng = StdRng::seed_from_u64(seed);
        let size = |key: &str| config[key].as_u64().unwrap() as usize;
        let (hidden, inner, vocab) =
            (size("hidden_size"), size("intermediate_size"), size("vocab_size"));
        let (queries, keys) = (
            size("num_attention_heads") * size("head_dim"),
            size("num_key_value_heads") * size("head_dim"),
        );
        let taps = config["dflash_config"]["target_layer_ids"].as_array().unwrap().len();

        let mut tensors = BTreeMap::new();
        let mut add = |name: &str, shape: &[usize]| {
            tensors.insert(name.to_owned(), random(&mut rng, shape));
        };
        add("fc.weight", &[hidden, taps * hidden]);
        add("hidden_norm.weight", &[hidden]);
        add("norm.weight", &[hidden]);
        for i in 0..size("num_hidden_layers") {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                add(&format!("layers.{i}.{norm}.weight"), &[hidden]);
            }
            for norm in ["q_norm", "k_norm"] {
                add(&format!("layers.{i}.self_attn.{norm}.weight"), &[size("head_dim")]);
            }
            for (name, out, input) in [
                ("q", queries, hidden),
                ("k", keys, hidden),
                ("v", keys, hidden),
                ("o", hidden, queries),
            ] {
                add(&format!("layers.{i}.self_attn.{name}_proj.weight"), &[out, input]);
                if config["attention_bias"] == true {
                    add(&format!("layers.{i}.self_attn.{name}_proj.bias"), &[out]);
                }
            }
            for (name, out, input) in
                [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)]
            {
                add(&format!("layers.{i}.mlp.{name}_proj.weight"), &[out, input]);
            }
        }
        let embed_tokens = random(&mut rng, &[vocab, hidden]);
        let lm_head = random(&mut rng, &[vocab, hidden]);
        let num_target_layers = size("num_target_layers");
        Self { config, tensors, embed_tokens, lm_head, num_target_layers, max_positions: 2048, rng }
    }

    pub fn drafter(&self) -> DFlash {
        self.load(DType::F32).unwrap()
    }

    pub fn load(&self, dtype: DType) -> Result<DFlash> {
        let tensors: HashMap<_, _> =
            self.tensors.iter().map(|(name, array)| (name.clone(), array.tensor())).collect();
        let config = DFlashConfig::from_json(&self.config.to_string())?;
        DFlash::new(
            config,
            Weights::from_tensors(tensors, dtype, &Device::Cpu)?,
            self.shared(dtype),
        )
    }

    pub fn shared(&self, dtype: DType) -> SharedWeights {
        SharedWeights::new(
            self.embed_tokens.tensor().to_dtype(dtype).unwrap(),
            self.lm_head.tensor().to_dtype(dtype).unwrap(),
            self.num_target_layers,
            self.max_positions,
        )
        .unwrap()
    }

    /// Random tap features of `rows` tokens.
    pub fn taps(&mut self, rows: usize) -> Array {
        let width = self.tensors["fc.weight"].shape[1];
        random(&mut self.rng, &[rows, width])
    }

    pub fn block_size(&self) -> usize {
        let own = &self.config["dflash_config"]["block_size"];
        own.as_u64().or(self.config["block_size"].as_u64()).unwrap() as usize
    }
}

/// Weights of a size that keeps activations around 1; vectors (norms, biases) around 1.
fn random(rng: &mut StdRng, shape: &[usize]) -> Array {
    let scale = if shape.len() == 2 { (3.0 / shape[1] as f32).sqrt() } else { 0.5 };
    let offset = if shape.len() == 2 { 0.0 } else { 1.0 };
    let mut value = || offset + scale * rng.random_range(-1.0f32..1.0);
    let values = (0..shape.iter().product()).map(|_| value()).collect();
    Array { shape: shape.to_vec(), values }
}

/// Overwrites keys of nested objects; null removes one.
pub fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, change) in changes {
                if change.is_null() {
                    into.remove(&key);
                } else {
                    merge(into.entry(key).or_insert(Value::Null), change);
                }
            }
        }
        (into, change) => *into = change,
    }
}

pub fn rows(logits: &Tensor) -> Vec<Vec<f32>> {
    logits.to_vec2().unwrap()
}

/// The largest difference of two lists of rows.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!((a.len(), a[0].len()), (b.len(), b[0].len()));
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most })
}
