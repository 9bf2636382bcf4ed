//! Checkpoints: all tensors and nothing else, and the target they are for.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{
    DecoderModel, Error, Weights,
    dflash::{DFlash, DFlashConfig, SharedWeights},
};
use serde_json::json;

use crate::{
    fixture::{Array, Fixture, merge, rows},
    naive,
};

fn vector(size: usize) -> Array {
    Array { shape: vec![size], values: vec![1.0; size] }
}

#[test]
fn every_missing_tensor_is_named_with_its_shape() {
    let mut model = Fixture::new(0, json!({ "attention_bias": true }));
    for name in model.tensors.keys().cloned().collect::<Vec<_>>() {
        let array = model.tensors.remove(&name).unwrap();
        let error = model.load(DType::F32).unwrap_err();
        assert!(
            matches!(&error, Error::MissingTensor { name: n, expected }
                if *n == name && *expected == array.shape),
            "{error}",
        );
        model.tensors.insert(name, array);
    }
    model.drafter();
}

#[test]
fn every_misshapen_tensor_is_named_with_both_shapes() {
    let mut model = Fixture::new(0, json!({ "attention_bias": true }));
    for name in model.tensors.keys().cloned().collect::<Vec<_>>() {
        let array = model.tensors.remove(&name).unwrap();
        model.tensors.insert(name.clone(), vector(5));
        let error = model.load(DType::F32).unwrap_err();
        assert!(
            matches!(&error, Error::TensorShape { name: n, found, expected }
                if *n == name && *found == [5] && *expected == array.shape),
            "{error}",
        );
        model.tensors.insert(name, array);
    }
}

/// Case 6: tensors of a relative of the format are not skipped.
#[test]
fn unknown_tensors_are_errors() {
    for name in [
        "layers.0.attention_conv.base_kernel",
        "candidate_selector.hidden_projection.weight",
        "prefix_gru.weight_ih_l0",
        "lm_head.weight",
        "d2t",
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.sinks",
        "layers.2.input_layernorm.weight",
        "model.norm.weight",
    ] {
        let mut model = Fixture::new(0, json!({}));
        model.tensors.insert(name.to_owned(), vector(16));
        let error = model.load(DType::F32).unwrap_err();
        assert!(matches!(&error, Error::UnknownTensors { names } if *names == [name]), "{error}");
    }
}

#[test]
fn names_may_be_nested_in_model_all_or_none() {
    let mut model = Fixture::new(2, json!({}));
    let taps = model.taps(4);
    let expected = naive::logits(&model, &taps, 7, 4);
    let plain = model.tensors.clone();
    model.tensors = plain.iter().map(|(name, t)| (format!("model.{name}"), t.clone())).collect();
    let mut drafter = model.drafter();
    drafter.observe(0, &taps.tensor()).unwrap();
    let found = rows(&drafter.logits(7, 4, 4).unwrap());
    assert!(crate::fixture::difference(&found, &expected) < 1e-4);

    let norm = model.tensors.remove("model.norm.weight").unwrap();
    model.tensors.insert("norm.weight".into(), norm);
    let error = model.load(DType::F32).unwrap_err();
    assert!(
        matches!(&error, Error::MissingTensor { name, .. } if name == "model.norm.weight"),
        "{error}"
    );
}

#[test]
fn fc_is_as_wide_as_the_taps_whatever_the_layers() {
    for (layers, taps) in [(1, 5), (8, 5), (5, 1)] {
        let ids: Vec<usize> = (0..taps).collect();
        let changes =
            json!({ "num_hidden_layers": layers, "dflash_config": { "target_layer_ids": ids } });
        let mut model = Fixture::new(0, changes);
        let drafter = model.drafter();
        assert_eq!(drafter.config().feature_size(), taps * 16);
        // Case 3: a wrong number of taps is an error, not cut to fit.
        let taps = model.taps(1).tensor();
        let wrong = Tensor::cat(&[&taps, &taps.narrow(1, 0, 16).unwrap()], 1).unwrap();
        assert!(model.drafter().observe(0, &wrong).is_err());
    }
}

#[test]
fn taps_may_be_wider_than_the_drafter() {
    let mut model = Fixture::new(21, json!({}));
    merge(&mut model.config, json!({ "dflash_config": { "target_hidden_size": 10 } }));
    let fc = Fixture::new(22, json!({ "hidden_size": 16 })).tensors["fc.weight"].clone();
    let narrow = Array { shape: vec![16, 30], values: fc.values[..480].to_vec() };
    model.tensors.insert("fc.weight".into(), narrow);
    let taps = model.taps(6);
    assert_eq!(taps.shape, [6, 30]);
    let mut drafter = model.drafter();
    drafter.observe(0, &taps.tensor()).unwrap();
    let found = rows(&drafter.logits(7, 6, 4).unwrap());
    assert!(crate::fixture::difference(&found, &naive::logits(&model, &taps, 7, 6)) < 1e-4);
}

/// Case 11.
#[test]
fn the_mask_token_must_be_in_the_targets_embedding() {
    // The vocabulary of the file may be larger than the table.
    let mut model = Fixture::new(0, json!({ "dflash_config": { "mask_token_id": 39 } }));
    model.drafter();
    model.config["dflash_config"]["mask_token_id"] = 40.into();
    let message = model.load(DType::F32).unwrap_err().to_string();
    assert!(
        message.contains("mask_token_id")
            && message.contains("found 40")
            && message.contains("below 40")
    );
}

#[test]
fn hidden_size_layers_and_taps_are_compared_with_the_target() {
    let mut model = Fixture::new(0, json!({}));
    model.num_target_layers = 12;
    let message = model.load(DType::F32).unwrap_err().to_string();
    assert!(
        message.contains("num_target_layers") && message.contains('9') && message.contains("12"),
        "{message}"
    );

    merge(&mut model.config, json!({ "num_target_layers": null }));
    model.num_target_layers = 7;
    model.drafter();
    model.num_target_layers = 6;
    let message = model.load(DType::F32).unwrap_err().to_string();
    assert!(message.contains("target_layer_ids") && message.contains("found 6"), "{message}");

    let mut model = Fixture::new(0, json!({}));
    let wider = Array { shape: vec![20, 32], values: model.embed_tokens.values.clone() };
    (model.embed_tokens, model.lm_head) = (wider.clone(), wider);
    let message = model.load(DType::F32).unwrap_err().to_string();
    assert!(
        message.contains("hidden_size") && message.contains("16") && message.contains("32"),
        "{message}"
    );
}

/// Where the target is at hand, a drafter of another one's taps is not loaded.
#[test]
fn the_width_of_taps_is_compared_with_the_target() {
    let models =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3");
    let target = DecoderModel::load(models.join("target"), DType::F32, &Device::Cpu).unwrap();
    let config = std::fs::read_to_string(models.join("drafter/config.json")).unwrap();
    let mut config = serde_json::from_str(&config).unwrap();
    for (width, loads) in [(target.config().hidden_size, true), (64, false)] {
        merge(&mut config, json!({ "dflash_config": { "target_hidden_size": width } }));
        let weights = Weights::open(models.join("drafter"), DType::F32, &Device::Cpu).unwrap();
        let config = DFlashConfig::from_json(&config.to_string()).unwrap();
        let error = DFlash::new(config, weights, &target).err().map(|error| error.to_string());
        assert!(
            error.as_ref().map_or(loads, |error| error.contains("target_hidden_size") && !loads),
            "{width}: {error:?}"
        );
    }
}

/// Its frequencies change at a length of its own, which the target may exceed.
#[test]
fn dynamic_scaling_must_reach_as_far_as_the_target() {
    for scaling in ["dynamic", "default"] {
        let mut rope = json!({ "rope_type": scaling });
        if scaling == "dynamic" {
            rope["factor"] = 2.0.into();
        }
        let mut model =
            Fixture::new(0, json!({ "max_position_embeddings": 2048, "rope_scaling": rope }));
        model.max_positions = 2048;
        model.drafter();
        model.max_positions = 2049;
        let error = model.load(DType::F32).err().map(|error| error.to_string());
        let expected = "config field `max_position_embeddings`: found 2048, accepted: at least 2049, \
            the target's positions, as dynamic scaling changes beyond";
        assert_eq!(error.as_deref(), (scaling == "dynamic").then_some(expected));
    }
}

#[test]
fn positions_are_32_bit_numbers() {
    let table = || Tensor::zeros((40, 16), DType::F32, &Device::Cpu).unwrap();
    let error = SharedWeights::new(table(), table(), 9, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("max_positions") && error.contains("at most 4294967295"), "{error}");
    let mut model = Fixture::new(0, json!({}));
    model.max_positions = u32::MAX as usize;
    let mut drafter = model.drafter();
    let last = u32::MAX as usize - model.block_size();
    let taps = model.taps(1).tensor();
    drafter.observe(last - 1, &taps).unwrap();
    drafter.logits(7, last, 4).unwrap();
    drafter.observe(last, &taps).unwrap();
    assert!(drafter.logits(7, last + 1, 4).is_err());
}

#[test]
fn shared_weights_must_be_two_matrices_of_one_shape() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    for (embed, head) in [(&[40, 16][..], &[16, 40][..]), (&[40, 16], &[39, 16]), (&[640], &[640])]
    {
        let error = SharedWeights::new(zeros(embed), zeros(head), 9, 64).unwrap_err();
        assert!(error.to_string().contains("lm_head"), "{error}");
    }
}

/// Case 8: one type for drafter, cache and shared weights.
#[test]
fn types_must_agree_and_be_floating_point() {
    let model = Fixture::new(0, json!({}));
    let config = DFlashConfig::from_json(&model.config.to_string()).unwrap();
    let tensors: HashMap<_, _> =
        model.tensors.iter().map(|(name, array)| (name.clone(), array.tensor())).collect();
    let weights = Weights::from_tensors(tensors, DType::BF16, &Device::Cpu).unwrap();
    let error = DFlash::new(config, weights, model.shared(DType::F32)).unwrap_err();
    assert!(error.to_string().contains("BF16") && error.to_string().contains("F32"), "{error}");
}

#[test]
fn loads_a_folder() {
    let mut model = Fixture::new(3, json!({}));
    let folder = tempfile::tempdir().unwrap();
    let error = DFlash::load(folder.path(), model.shared(DType::F32)).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");

    std::fs::write(folder.path().join("config.json"), model.config.to_string()).unwrap();
    let tensors: HashMap<_, _> =
        model.tensors.iter().map(|(n, a)| (n.clone(), a.tensor())).collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let mut drafter = DFlash::load(folder.path(), model.shared(DType::F32)).unwrap();
    let taps = model.taps(4);
    drafter.observe(0, &taps.tensor()).unwrap();
    let found = rows(&drafter.logits(7, 4, 4).unwrap());
    assert!(crate::fixture::difference(&found, &naive::logits(&model, &taps, 7, 4)) < 1e-4);
}
