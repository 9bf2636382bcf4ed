//! Safetensors checkpoints: what is missing, misshapen, unknown or damaged is named.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{Architecture, DecoderConfig, DecoderModel, Error, Weights};
use serde_json::{Value, json};

use super::support::*;

fn small() -> (DecoderConfig, HashMap<String, Tensor>) {
    let config = config(Architecture::Qwen3, json!({"num_hidden_layers": 2}));
    let tensors = random_tensors(&config, 41);
    (config, tensors)
}

fn load(config: &DecoderConfig, tensors: HashMap<String, Tensor>) -> Result<DecoderModel, Error> {
    DecoderModel::new(
        config.clone(),
        Weights::from_tensors(tensors, DType::F32, &Device::Cpu).unwrap(),
    )
}

/// Case 6: every tensor is needed.
#[test]
fn case_6_each_missing_tensor_is_named_with_its_shape() {
    let (config, tensors) = small();
    for (name, tensor) in &tensors {
        let mut tensors = tensors.clone();
        tensors.remove(name);
        match load(&config, tensors) {
            Err(Error::MissingTensor { name: found, expected }) => {
                assert_eq!((&found, expected.as_slice()), (name, tensor.dims()));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Case 6: every shape is checked, and transposed is not good enough.
#[test]
fn case_6_each_misshapen_tensor_is_named_with_both_shapes() {
    let (config, tensors) = small();
    for (name, tensor) in &tensors {
        let mut shape = tensor.dims().to_vec();
        shape[0] += 1;
        let mut tensors = tensors.clone();
        tensors.insert(name.clone(), Tensor::zeros(&*shape, DType::F32, &Device::Cpu).unwrap());
        match load(&config, tensors) {
            Err(Error::TensorShape { name: bad, found, expected }) => {
                assert_eq!((&bad, &found, expected.as_slice()), (name, &shape, tensor.dims()));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut transposed = tensors.clone();
    let name = "model.layers.0.mlp.down_proj.weight";
    transposed.insert(name.into(), tensors[name].t().unwrap().contiguous().unwrap());
    assert_eq!(
        load(&config, transposed).unwrap_err().to_string(),
        format!("tensor `{name}` has shape [48, 32], expected [32, 48]")
    );
}

/// Case 6: a tensor that nobody reads means a different model.
#[test]
fn case_6_unknown_tensors_are_named() {
    let (config, tensors) = small();
    for name in [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "d2t",
    ] {
        let mut tensors = tensors.clone();
        tensors.insert(name.into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
        match load(&config, tensors) {
            Err(Error::UnknownTensors { names }) => assert_eq!(names, [name]),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn buffers_that_follow_from_the_configuration_are_ignored() {
    let (config, mut tensors) = small();
    let buffer = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), buffer);
    assert!(load(&config, tensors).is_ok());
}

#[test]
fn a_copy_of_the_tied_embedding_is_ignored_if_its_shape_is_right() {
    let config = config(Architecture::Llama, json!({"tie_word_embeddings": true}));
    let mut tensors = random_tensors(&config, 42);
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    assert!(load(&config, tensors.clone()).is_ok());
    let other = Tensor::zeros((60, 32), DType::F32, &Device::Cpu).unwrap();
    tensors.insert("lm_head.weight".into(), other);
    assert!(matches!(load(&config, tensors), Err(Error::TensorShape { .. })));
}

#[test]
fn types_that_are_no_weights_are_refused() {
    let (config, tensors) = small();
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = tensors;
    let name = "model.norm.weight";
    tensors.insert(name.into(), Tensor::zeros(32, DType::I64, &Device::Cpu).unwrap());
    save(folder.path(), "model.safetensors", &tensors);
    let weights = Weights::open(folder.path(), DType::F32, &Device::Cpu).unwrap();
    for result in [DecoderModel::new(config.clone(), weights), load(&config, tensors)] {
        let expected = "tensor `model.norm.weight` is stored as I64, accepted: F64, F32, F16, BF16";
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
    let error = Weights::open(folder.path(), DType::U32, &Device::Cpu).unwrap_err();
    assert!(matches!(error, Error::UnsupportedDtype { found: DType::U32 }));
}

fn save(folder: &Path, file: &str, tensors: &HashMap<String, Tensor>) {
    candle_core::safetensors::save(tensors, folder.join(file)).unwrap();
}

/// Writes `tensors` as two shards and an index, changed by `change`.
fn save_shards(folder: &Path, tensors: &HashMap<String, Tensor>, change: impl Fn(&mut Value)) {
    let mut shards = [HashMap::new(), HashMap::new()];
    let mut index = json!({"metadata": {"total_size": 1}, "weight_map": {}});
    let mut names: Vec<_> = tensors.keys().collect();
    names.sort();
    for (i, name) in names.into_iter().enumerate() {
        shards[i % 2].insert(name.clone(), tensors[name].clone());
        index["weight_map"][name] = json!(format!("part-{}.safetensors", i % 2));
    }
    save(folder, "part-0.safetensors", &shards[0]);
    save(folder, "part-1.safetensors", &shards[1]);
    change(&mut index);
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn one_file_shards_and_a_plain_folder_load_alike() {
    let (config, tensors) = small();
    let (one, shards, plain) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(one.path(), "model.safetensors", &tensors);
    save_shards(shards.path(), &tensors, |_| {});
    save_shards(plain.path(), &tensors, |_| {});
    std::fs::remove_file(plain.path().join("model.safetensors.index.json")).unwrap();
    let json = config_json(Architecture::Qwen3, json!({"num_hidden_layers": 2}));
    let expected = {
        let model = load(&config, tensors).unwrap();
        logits(&model, &mut model.new_cache(8).unwrap(), &[1, 2, 3])
    };
    for folder in [&one, &shards, &plain] {
        std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        let model = DecoderModel::load(folder.path(), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(logits(&model, &mut model.new_cache(8).unwrap(), &[1, 2, 3]), expected);
    }
}

#[test]
fn an_index_that_disagrees_with_its_files_is_refused() {
    let (_, tensors) = small();
    let open = |change: &dyn Fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        save_shards(folder.path(), &tensors, change);
        Weights::open(folder.path(), DType::F32, &Device::Cpu)
    };
    assert!(open(&|_| {}).is_ok());
    let absent = open(&|index| index["weight_map"]["ghost"] = json!("part-0.safetensors"));
    assert!(matches!(absent, Err(Error::Config { field, .. }) if field == "weight_map.ghost"));
    for file in ["../part-0.safetensors", "/part-0.safetensors", "", "."] {
        let outside = open(&|index| index["weight_map"]["model.norm.weight"] = json!(file));
        let field = "weight_map.model.norm.weight";
        assert!(matches!(outside, Err(Error::Config { field: f, .. }) if f == field), "{file}");
    }
    let gone = open(&|index| index["weight_map"]["model.norm.weight"] = json!("gone.safetensors"));
    assert!(gone.unwrap_err().to_string().contains("gone.safetensors"));
    assert!(matches!(open(&|index| *index = json!({})), Err(Error::Json { .. })));
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let (_, mut tensors) = small();
    let folder = tempfile::tempdir().unwrap();
    save_shards(folder.path(), &tensors, |_| {});
    std::fs::remove_file(folder.path().join("model.safetensors.index.json")).unwrap();
    tensors.retain(|name, _| name == "model.norm.weight");
    save(folder.path(), "part-2.safetensors", &tensors);
    match Weights::open(folder.path(), DType::F32, &Device::Cpu) {
        Err(Error::DuplicateTensor { name, second, .. }) => {
            assert_eq!(name, "model.norm.weight");
            assert!(second.ends_with("part-2.safetensors"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn damaged_and_absent_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Weights::open(folder.path(), DType::F32, &Device::Cpu).unwrap_err().to_string();
    assert!(open().contains("no weights in"), "{}", open());
    let absent = Weights::open(folder.path().join("absent"), DType::F32, &Device::Cpu);
    assert!(matches!(absent, Err(Error::Io { path, .. }) if path.ends_with("absent")));

    let (_, tensors) = small();
    save(folder.path(), "model.safetensors", &tensors);
    let file = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        assert!(open().contains("model.safetensors"), "{length}: {}", open());
    }
}
