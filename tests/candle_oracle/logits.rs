//! Logits of whole models: against candle-transformers, against the plain loops, across splits and types.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, qwen2, qwen3};
use ddtree::candle::{Architecture, DecoderConfig, DecoderModel, Error, Forward, Want};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::naive;
use super::support::*;

/// Shapes with and without grouped heads, tied embeddings, biases, and heads wider than the stream.
fn shapes() -> Vec<Value> {
    vec![
        json!({}),
        json!({"num_key_value_heads": 1, "tie_word_embeddings": true}),
        json!({"num_key_value_heads": 4, "intermediate_size": 70}),
        json!({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "rope_theta": 500000.0}),
    ]
}

fn prompt(seed: u64, count: usize, config: &DecoderConfig) -> Vec<u32> {
    random_tokens(&mut StdRng::seed_from_u64(seed), count, config.vocab_size)
}

fn builder(tensors: &HashMap<String, Tensor>) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu)
}

fn head(
    config: &DecoderConfig,
    tensors: &HashMap<String, Tensor>,
    hidden: &Tensor,
) -> Vec<Vec<f32>> {
    let name =
        if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let hidden = hidden.squeeze(0).unwrap();
    rows(&hidden.matmul(&tensors[name].t().unwrap()).unwrap())
}

fn stock_llama(json: &Value, tensors: &HashMap<String, Tensor>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let config: llama::LlamaConfig = serde_json::from_value(json.clone()).unwrap();
    let config = config.into_config(false);
    let model = llama::Llama::load(builder(tensors), &config).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let step = |(position, &token): (usize, &u32)| {
        let input = Tensor::new(&[[token]], &Device::Cpu).unwrap();
        rows(&model.forward(&input, position, &mut cache).unwrap()).remove(0)
    };
    tokens.iter().enumerate().map(step).collect()
}

fn stock_qwen2(
    config: &DecoderConfig,
    tensors: &HashMap<String, Tensor>,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let stock = qwen2::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        num_key_value_heads: config.num_kv_heads,
        max_position_embeddings: config.max_positions,
        sliding_window: config.max_positions,
        max_window_layers: config.num_layers(),
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope.theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    let mut model = qwen2::Model::new(&stock, builder(tensors)).unwrap();
    let input = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    head(config, tensors, &model.forward(&input, 0, None).unwrap())
}

fn stock_qwen3(
    config: &DecoderConfig,
    tensors: &HashMap<String, Tensor>,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let stock = qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        head_dim: config.head_dim,
        attention_bias: config.qkv_bias,
        num_key_value_heads: config.num_kv_heads,
        max_position_embeddings: config.max_positions,
        sliding_window: None,
        max_window_layers: config.num_layers(),
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope.theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    let mut model = qwen3::Model::new(&stock, builder(tensors)).unwrap();
    let input = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    head(config, tensors, &model.forward(&input, 0).unwrap())
}

/// The same rows in one pass, split in two, and one by one.
fn check_every_split(model: &DecoderModel, tokens: &[u32], expected: &[Vec<f32>], what: &str) {
    let mut cache = model.new_cache(tokens.len()).unwrap();
    assert_rows_close(&logits(model, &mut cache, tokens), expected, 1e-4, what);

    let split = tokens.len() * 2 / 3;
    feed(model, &mut cache, &tokens[..split]);
    let rest = logits(model, &mut cache, &tokens[split..]);
    assert_rows_close(&rest, &expected[split..], 1e-4, &format!("{what}, split"));

    cache.truncate(0).unwrap();
    for (token, expected) in tokens.iter().zip(expected) {
        let row = logits(model, &mut cache, &[*token]);
        cache.extend(1).unwrap();
        assert_close(&row[0], expected, 1e-4, &format!("{what}, step by step"));
    }
}

#[test]
fn llama_equals_candle_transformers() {
    for (seed, shape) in shapes().into_iter().enumerate() {
        let json = config_json(Architecture::Llama, shape);
        let config = DecoderConfig::from_json(&json.to_string()).unwrap();
        let tensors = random_tensors(&config, seed as u64);
        let tokens = prompt(seed as u64, 37, &config);
        let expected = stock_llama(&json, &tensors, &tokens);
        check_every_split(&build(&config, tensors), &tokens, &expected, &json.to_string());
    }
}

#[test]
fn llama3_rope_scaling_equals_candle_transformers() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    });
    let json = config_json(Architecture::Llama, json!({"rope_scaling": scaling}));
    let config = DecoderConfig::from_json(&json.to_string()).unwrap();
    let tensors = random_tensors(&config, 5);
    let tokens = prompt(5, 100, &config);
    let expected = stock_llama(&json, &tensors, &tokens);
    check_every_split(&build(&config, tensors), &tokens, &expected, "llama3 scaling");
}

#[test]
fn qwen2_equals_candle_transformers() {
    for (seed, shape) in shapes().into_iter().enumerate() {
        let config = config(Architecture::Qwen2, shape);
        assert!(config.qkv_bias && !config.o_bias);
        let tensors = random_tensors(&config, seed as u64);
        let tokens = prompt(seed as u64, 37, &config);
        let expected = stock_qwen2(&config, &tensors, &tokens);
        check_every_split(&build(&config, tensors), &tokens, &expected, "qwen2");
    }
}

#[test]
fn qwen3_equals_candle_transformers() {
    let wide = json!({"head_dim": 20, "attention_bias": true});
    let narrow = json!({"head_dim": 4, "num_key_value_heads": 4, "tie_word_embeddings": true});
    for (seed, shape) in shapes().into_iter().chain([wide, narrow]).enumerate() {
        let config = config(Architecture::Qwen3, shape);
        let tensors = random_tensors(&config, seed as u64);
        let tokens = prompt(seed as u64, 37, &config);
        let expected = stock_qwen3(&config, &tensors, &tokens);
        check_every_split(&build(&config, tensors), &tokens, &expected, "qwen3");
    }
}

#[test]
fn tiny_target_equals_candle_transformers() {
    let model = DecoderModel::load(TINY, DType::F32, &Device::Cpu).unwrap();
    let file = format!("{TINY}/model.safetensors");
    let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let widen = |(name, t): (String, Tensor)| (name, t.to_dtype(DType::F32).unwrap());
    let tensors: HashMap<_, _> = tensors.into_iter().map(widen).collect();
    let tokens = prompt(3, 120, model.config());
    let expected = stock_qwen3(model.config(), &tensors, &tokens);
    check_every_split(&model, &tokens, &expected, "tiny target");
}

#[test]
fn every_bias_of_llama_and_partial_rotation_equal_the_plain_loops() {
    let changes = json!({
        "attention_bias": true, "mlp_bias": true, "partial_rotary_factor": 0.5, "head_dim": 12
    });
    let config = config(Architecture::Llama, changes);
    assert_eq!(config.rope.rotary_dim, 6);
    let tensors = random_tensors(&config, 8);
    let tokens = prompt(8, 23, &config);
    let positions: Vec<u32> = (0..23).collect();
    let rotation = naive::plain_rotation(config.rope.theta, 6);
    let expected = naive::logits(&config, &tensors, &tokens, &positions, |i, j| j <= i, rotation);
    check_every_split(&build(&config, tensors), &tokens, &expected, "biases");
}

#[test]
fn sliding_layers_equal_the_plain_loops_past_their_window() {
    for window in [1, 5, 16] {
        let changes = json!({
            "use_sliding_window": true, "sliding_window": window,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        });
        let config = config(Architecture::Qwen3, changes);
        let tensors = random_tensors(&config, 9);
        let tokens = prompt(9, 40, &config);
        let positions: Vec<u32> = (0..40).collect();
        let rotation = naive::plain_rotation(config.rope.theta, config.head_dim);
        let expected =
            naive::logits(&config, &tensors, &tokens, &positions, |i, j| j <= i, rotation);
        check_every_split(&build(&config, tensors), &tokens, &expected, "window");
    }
}

#[test]
fn wanted_rows_are_the_rows_of_all() {
    let model = random_model(Architecture::Llama, json!({}), 1);
    let tokens = prompt(1, 9, model.config());
    let positions: Vec<u32> = (0..9).collect();
    let mut cache = model.new_cache(16).unwrap();
    let all = logits(&model, &mut cache, &tokens);
    let mut want = |want: Want<'_>| {
        let pass = Forward {
            tokens: &tokens,
            positions: &positions,
            start: 0,
            mask: None,
            tree: None,
            want,
            taps: &[],
        };
        model.forward(&mut cache, &pass).unwrap().logits.map(|logits| rows(&logits))
    };
    assert_eq!(want(Want::Nothing), None);
    assert_rows_close(&want(Want::Last).unwrap(), &all[8..], 1e-5, "last");
    let some = want(Want::Rows(&[7, 2, 2])).unwrap();
    assert_rows_close(&some, &[all[7].clone(), all[2].clone(), all[2].clone()], 1e-5, "some");
}

#[test]
fn half_types_stay_near_f32() {
    for architecture in [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3] {
        let config = config(architecture, json!({}));
        let tensors = random_tensors(&config, 2);
        let tokens = prompt(2, 30, &config);
        let exact = {
            let model = build(&config, tensors.clone());
            logits(&model, &mut model.new_cache(64).unwrap(), &tokens)
        };
        for (dtype, tolerance) in [(DType::BF16, 0.25), (DType::F16, 0.04)] {
            let model = build_as(&config, tensors.clone(), dtype);
            let mut cache = model.new_cache(64).unwrap();
            let found = logits(&model, &mut cache, &tokens);
            assert_rows_close(&found, &exact, tolerance, &format!("{dtype:?}"));
            // A tree mask and commits work in the type as well.
            let tree = random_tree(&mut StdRng::seed_from_u64(2), 9, config.vocab_size as u32);
            feed(&model, &mut cache, &tokens);
            tree_logits(&model, &mut cache, &tree);
            cache.commit(30, &path(&tree, 8)).unwrap();
            assert_eq!(cache.keys(0).unwrap().dtype(), dtype);
        }
    }
}

/// Case 12: outlier channels of the projections into the residual stream exceed what f16 holds.
#[test]
fn case_12_f16_survives_projections_beyond_its_range() {
    let config = config(Architecture::Llama, json!({"num_hidden_layers": 2}));
    let mut tensors = random_tensors(&config, 4);
    for name in ["mlp.down_proj", "self_attn.o_proj"] {
        let weight = tensors.get_mut(&format!("model.layers.0.{name}.weight")).unwrap();
        *weight = (weight.clone() * 40_000.0).unwrap();
    }
    let tokens = prompt(4, 12, &config);
    let run = |dtype| {
        let model = build_as(&config, tensors.clone(), dtype);
        logits(&model, &mut model.new_cache(16).unwrap(), &tokens)
    };
    let exact = run(DType::F32);
    let hidden = {
        let model = build(&config, tensors.clone());
        let positions: Vec<u32> = (0..12).collect();
        let pass = Forward {
            tokens: &tokens,
            positions: &positions,
            start: 0,
            mask: None,
            tree: None,
            want: Want::Nothing,
            taps: &[0],
        };
        rows(&model.forward(&mut model.new_cache(16).unwrap(), &pass).unwrap().taps.unwrap())
    };
    let largest = hidden.iter().flatten().fold(0f32, |max, x| max.max(x.abs()));
    assert!(largest > 65_504.0, "the case is not provoked: {largest}");
    assert_rows_close(&run(DType::F16), &exact, 0.1, "f16");
}

#[test]
fn passes_out_of_range_are_refused_before_anything_is_written() {
    let model = random_model(Architecture::Llama, json!({}), 1);
    let mut cache = model.new_cache(8).unwrap();
    feed(&model, &mut cache, &[1, 2, 3]);
    let before = contents(&cache);
    let good = Forward {
        tokens: &[4, 5],
        positions: &[3, 4],
        start: 3,
        mask: None,
        tree: None,
        want: Want::All,
        taps: &[],
    };
    let cases = [
        ("tokens", Forward { tokens: &[], positions: &[], ..good }),
        ("tokens", Forward { tokens: &[4, 61], ..good }),
        ("positions", Forward { positions: &[3], ..good }),
        ("positions", Forward { positions: &[3, 128], ..good }),
        ("start", Forward { start: 2, ..good }),
        ("start", Forward { start: 4, ..good }),
        ("rows", Forward { tokens: &[4; 6], positions: &[3; 6], ..good }),
        ("want", Forward { want: Want::Rows(&[2]), ..good }),
        ("want", Forward { want: Want::Rows(&[]), ..good }),
        ("taps", Forward { taps: &[0, 3], ..good }),
    ];
    for (field, pass) in cases {
        match model.forward(&mut cache, &pass) {
            Err(Error::Argument { name, .. }) => assert_eq!(name, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    assert_eq!(contents(&cache), before);
    assert!(model.forward(&mut cache, &good).is_ok());
    for max_len in [0, 129] {
        assert!(matches!(model.new_cache(max_len), Err(Error::Argument { name: "max_len", .. })));
    }
}

#[test]
fn shared_embedding_and_head_are_the_model_s() {
    let model = random_model(Architecture::Qwen3, json!({"tie_word_embeddings": true}), 6);
    let (embedding, head) = (model.embed_tokens().clone(), model.lm_head().clone());
    let table = rows(embedding.table());
    assert_eq!(rows(&embedding.forward(&[7, 0]).unwrap()), [table[7].clone(), table[0].clone()]);
    assert!(embedding.forward(&[61]).is_err() && embedding.forward(&[]).is_err());
    let hidden = Tensor::ones((1, 32), DType::F32, &Device::Cpu).unwrap();
    let sums: Vec<f32> = table.iter().map(|row| row.iter().sum()).collect();
    assert_close(&rows(&head.forward(&hidden).unwrap())[0], &sums, 1e-5, "head");
    let expected = rows(&hidden.matmul(&head.weight().t().unwrap()).unwrap());
    assert_close(&rows(&head.forward(&hidden).unwrap())[0], &expected[0], 1e-6, "head");
    assert_eq!(embedding.table().dims(), [61, 32]);
}

/// Products of so few outputs that they round by their number of rows, and projections with biases.
#[test]
fn batches_of_narrow_models_equal_their_sequences_bit_for_bit() {
    let bits = |tensor: &Tensor| -> Vec<u32> {
        let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let biases = json!({"attention_bias": true, "mlp_bias": true});
    for (architecture, changes) in [
        (Architecture::Llama, biases),
        (Architecture::Qwen2, json!({})),
        (Architecture::Qwen3, json!({})),
    ] {
        let model = random_model(architecture, changes, 17);
        let tokens: Vec<u32> = (1..31).collect();
        let positions: Vec<u32> = (0..30).collect();
        let passes = [1, 2, 5, 30].map(|rows| Forward {
            tokens: &tokens[..rows],
            positions: &positions[..rows],
            start: 0,
            mask: None,
            tree: None,
            want: Want::All,
            taps: &[2],
        });
        let mut caches = passes.map(|_| model.new_cache(32).unwrap());
        let mut batch: Vec<_> = caches.iter_mut().zip(passes).collect();
        let found = model.forward_batch(&mut batch).unwrap();
        for (pass, found) in passes.iter().zip(found) {
            let expected = model.forward(&mut model.new_cache(32).unwrap(), pass).unwrap();
            assert_eq!(bits(&found.logits.unwrap()), bits(&expected.logits.unwrap()));
            assert_eq!(bits(&found.taps.unwrap()), bits(&expected.taps.unwrap()));
        }
    }
}
