//! Checkpoints load whole or not at all.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{DecoderConfig, DecoderModel, Error, Forward, Want, Weights};
use serde_json::{Value, json};

use crate::common::{path, relative_difference, tiny, values};

fn config() -> Value {
    let text = std::fs::read(path("examples/models/tiny-qwen3_5/target/config.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn tensors() -> HashMap<String, Tensor> {
    let file = path("examples/models/tiny-qwen3_5/target/model.safetensors");
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

fn load(config: &Value, tensors: HashMap<String, Tensor>) -> Result<DecoderModel, Error> {
    let config = DecoderConfig::from_json(&config.to_string())?;
    DecoderModel::new(config, Weights::from_tensors(tensors, DType::F32, &Device::Cpu)?)
}

fn logits(model: &DecoderModel) -> Vec<f32> {
    let (tokens, positions) = ([590, 27, 357, 323, 491], [0, 1, 2, 3, 4]);
    let pass = Forward {
        tokens: &tokens,
        positions: &positions,
        start: 0,
        mask: None,
        tree: None,
        want: Want::All,
        taps: &[],
    };
    let mut cache = model.new_cache(8).unwrap();
    values(&model.forward(&mut cache, &pass).unwrap().logits.unwrap())
}

#[test]
fn the_configuration_says_what_the_layers_are() {
    let config = DecoderConfig::from_json(&config().to_string()).unwrap();
    let hybrid = config.hybrid.unwrap();
    assert_eq!(hybrid.linear_layers, [0, 1, 3, 4]);
    assert_eq!(hybrid.delta_net.channels(), 512);
    assert_eq!(hybrid.delta_net.state_len(), 8 * 32 * 32);
    assert_eq!(config.rope.rotary_dim, 16);

    let mut by_interval = self::config();
    by_interval["layer_types"] = Value::Null;
    by_interval["full_attention_interval"] = json!(3);
    let by_interval = DecoderConfig::from_json(&by_interval.to_string()).unwrap();
    assert_eq!(by_interval.hybrid, Some(hybrid));
}

#[test]
fn configurations_of_other_models_are_refused_by_field() {
    for (field, value) in [
        ("layer_types", json!(["linear_attention"])),
        ("layer_types", json!(vec!["mamba"; 6])),
        ("attn_output_gate", json!(false)),
        ("linear_num_key_heads", json!(null)),
        ("linear_num_value_heads", json!(6)),
        ("linear_key_head_dim", json!(0)),
        ("linear_conv_kernel_dim", json!("4")),
        ("full_attention_interval", json!(0)),
        ("model_type", json!("qwen3_next")),
        ("architectures", json!(["Qwen3_5MoeForCausalLM"])),
        ("hidden_act", json!("gelu")),
    ] {
        let mut config = config();
        if field == "full_attention_interval" {
            config["layer_types"] = Value::Null;
        }
        config[field] = value.clone();
        let error = DecoderConfig::from_json(&config.to_string()).unwrap_err();
        let named = matches!(&error, Error::Config { field: named, .. } if named == field);
        assert!(named, "{field} = {value}: {error}");
    }
}

#[test]
fn tensors_that_are_missing_misshapen_or_unknown_are_refused_by_name() {
    let layer = "model.layers.0.linear_attn";
    for module in ["A_log", "dt_bias", "conv1d.weight", "in_proj_a.weight", "norm.weight"] {
        let name = format!("{layer}.{module}");
        let mut without = tensors();
        let tensor = without.remove(&name).unwrap();
        let error = load(&config(), without).unwrap_err();
        assert!(matches!(&error, Error::MissingTensor { name: n, .. } if *n == name), "{error}");

        let mut misshapen = tensors();
        misshapen.insert(name.clone(), tensor.unsqueeze(0).unwrap());
        let error = load(&config(), misshapen).unwrap_err();
        assert!(matches!(&error, Error::TensorShape { name: n, .. } if *n == name), "{error}");
    }
    let mut more = tensors();
    more.insert(format!("{layer}.D"), Tensor::zeros(8, DType::F32, &Device::Cpu).unwrap());
    let error = load(&config(), more).unwrap_err();
    assert!(matches!(&error, Error::UnknownTensors { names } if names.len() == 1), "{error}");
}

/// Published checkpoints nest the text model beside a vision tower.
#[test]
fn the_text_model_of_a_larger_checkpoint_loads() {
    let nested = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config(),
        "tie_word_embeddings": true,
    });
    let rename = |(name, tensor): (String, Tensor)| {
        (name.replacen("model.", "model.language_model.", 1), tensor)
    };
    let mut renamed: HashMap<String, Tensor> = tensors().into_iter().map(rename).collect();
    for name in ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"] {
        let tensor = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
        renamed.insert(name.to_owned(), tensor);
    }
    assert_eq!(logits(&load(&nested, renamed).unwrap()), logits(&tiny()));
}

/// Norms, decays and states stay f32: what is left is the rounding of activations.
#[test]
fn half_precision_gives_nearly_the_same_logits() {
    let folder = path("examples/models/tiny-qwen3_5/target");
    let expected = logits(&tiny());
    for (dtype, tolerance) in [(DType::BF16, 5e-2), (DType::F16, 1e-2)] {
        let model = DecoderModel::load(&folder, dtype, &Device::Cpu).unwrap();
        let difference = relative_difference(&logits(&model), &expected);
        assert!(difference < tolerance, "{dtype:?}: {difference}");
    }
}
