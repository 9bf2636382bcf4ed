//! GGUF files against the same weights as safetensors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value as Meta};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use ddtree::candle::{
    Architecture, DecoderConfig, DecoderModel, Error, Gguf, RopeScaling, Rounding,
};
use serde_json::json;

use super::support::*;

/// The GGUF name of a Hugging Face tensor.
fn gguf_name(name: &str) -> String {
    let replaced = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    replaced.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// What the exporter of llama.cpp does to q and k of the Llama family: dimensions `i` and
/// `i + head_dim / 2` of a head become neighbours.
fn interleave(tensor: &Tensor, heads: usize) -> Tensor {
    let rows = tensor.dim(0).unwrap();
    let order: Vec<u32> = (0..rows)
        .map(|row| {
            let dim = rows / heads;
            let (head, i) = (row / dim, row % dim);
            (head * dim + (i % 2) * dim / 2 + i / 2) as u32
        })
        .collect();
    tensor.index_select(&Tensor::new(order, &Device::Cpu).unwrap(), 0).unwrap()
}

fn metadata(config: &DecoderConfig) -> Vec<(String, Meta)> {
    let name = match config.architecture {
        Architecture::Llama => "llama",
        Architecture::Qwen2 => "qwen2",
        _ => "qwen3",
    };
    let count = |key: &str, value: usize| (format!("{name}.{key}"), Meta::U32(value as u32));
    let mut metadata = vec![
        ("general.architecture".to_owned(), Meta::String(name.to_owned())),
        count("block_count", config.num_layers()),
        count("context_length", config.max_positions),
        count("embedding_length", config.hidden_size),
        count("feed_forward_length", config.intermediate_size),
        count("attention.head_count", config.num_heads),
        count("attention.head_count_kv", config.num_kv_heads),
        (format!("{name}.rope.freq_base"), Meta::F32(config.rope.theta as f32)),
        (format!("{name}.attention.layer_norm_rms_epsilon"), Meta::F32(config.rms_norm_eps as f32)),
        ("tokenizer.ggml.eos_token_id".to_owned(), Meta::U32(0)),
    ];
    if config.head_dim * config.num_heads != config.hidden_size {
        metadata.push(count("attention.key_length", config.head_dim));
        metadata.push(count("attention.value_length", config.head_dim));
    }
    metadata
}

fn set(metadata: &mut Vec<(String, Meta)>, key: &str, value: Meta) {
    metadata.retain(|(known, _)| known != key);
    metadata.push((key.to_owned(), value));
}

/// Writes a file and returns the tensors as a reader should see them, under their published names.
fn write(
    path: &Path,
    config: &DecoderConfig,
    metadata: &[(String, Meta)],
    tensors: &HashMap<String, Tensor>,
    quantised: GgmlDType,
) -> HashMap<String, Tensor> {
    let (mut stored, mut expected) = (Vec::new(), HashMap::new());
    for (name, tensor) in tensors {
        // Blocks of quantised types are 32 long.
        let blocks = tensor.rank() == 2 && tensor.dims()[1] % 32 == 0;
        let dtype = if blocks { quantised } else { GgmlDType::F32 };
        let llama = config.architecture == Architecture::Llama;
        let exported = match name {
            _ if llama && name.contains("q_proj") => interleave(tensor, config.num_heads),
            _ if llama && name.contains("k_proj") => interleave(tensor, config.num_kv_heads),
            _ => tensor.clone(),
        };
        // Quantisation is by row, so it commutes with the order of rows.
        let plain = QTensor::quantize(tensor, dtype).unwrap().dequantize(&Device::Cpu).unwrap();
        expected.insert(name.clone(), plain);
        stored.push((gguf_name(name), QTensor::quantize(&exported, dtype).unwrap()));
    }
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let stored: Vec<_> = stored.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &metadata, &stored).unwrap();
    expected
}

fn load(path: &Path, rounding: Rounding) -> Result<DecoderModel, Error> {
    let mut gguf = Gguf::open(path)?;
    let config = gguf.config()?;
    DecoderModel::new(config, gguf.into_weights(DType::F32, &Device::Cpu, rounding)?)
}

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn file() -> File {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    File { _folder: folder, path }
}

fn run(model: &DecoderModel) -> Vec<Vec<f32>> {
    logits(model, &mut model.new_cache(32).unwrap(), &[5, 9, 60, 0, 17, 33])
}

#[test]
fn every_family_equals_its_safetensors() {
    let cases = [
        (Architecture::Llama, json!({"tie_word_embeddings": true}), GgmlDType::Q8_0),
        (Architecture::Llama, json!({"num_key_value_heads": 1}), GgmlDType::F32),
        (Architecture::Llama, json!({"attention_bias": true, "mlp_bias": true}), GgmlDType::F16),
        (Architecture::Qwen2, json!({}), GgmlDType::Q4_1),
        (Architecture::Qwen3, json!({"head_dim": 16}), GgmlDType::BF16),
    ];
    for (architecture, changes, quantised) in cases {
        let config = config(architecture, changes.clone());
        let tensors = random_tensors(&config, 51);
        let file = file();
        let expected = write(&file.path, &config, &metadata(&config), &tensors, quantised);
        let model = load(&file.path, Rounding::None).unwrap();
        let mut found = model.config().clone();
        // GGUF stores these two as f32.
        found.rms_norm_eps = config.rms_norm_eps;
        found.rope.theta = config.rope.theta;
        assert_eq!(found, config, "{changes}");
        assert_rows_close(
            &run(&model),
            &run(&build(&config, expected)),
            1e-6,
            &changes.to_string(),
        );
    }
}

#[test]
fn weights_can_be_rounded_to_bf16() {
    let config = config(Architecture::Llama, json!({}));
    let tensors = random_tensors(&config, 52);
    let file = file();
    let exact = write(&file.path, &config, &metadata(&config), &tensors, GgmlDType::F32);
    let round = |(name, t): (String, Tensor)| {
        (name, t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap())
    };
    let rounded: HashMap<_, _> = exact.clone().into_iter().map(round).collect();
    let (exact, rounded) = (run(&build(&config, exact)), run(&build(&config, rounded)));
    assert_ne!(exact, rounded);
    assert_rows_close(&run(&load(&file.path, Rounding::None).unwrap()), &exact, 1e-6, "exact");
    assert_rows_close(&run(&load(&file.path, Rounding::Bf16).unwrap()), &rounded, 1e-6, "rounded");
    let by_name = DecoderModel::load(&file.path, DType::F32, &Device::Cpu).unwrap();
    assert_rows_close(&run(&by_name), &rounded, 1e-6, "by path");
}

#[test]
fn frequency_divisors_equal_the_scaling_they_were_made_from() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    });
    let scaled = config(Architecture::Llama, json!({"rope_scaling": scaling}));
    let plain = config(Architecture::Llama, json!({}));
    let ratios = plain.rope.inv_freq().unwrap().into_iter().zip(scaled.rope.inv_freq().unwrap());
    let divisors: Vec<f32> = ratios.map(|(plain, scaled)| plain / scaled).collect();
    assert!(divisors.iter().any(|divisor| *divisor > 1.5));

    let mut tensors = random_tensors(&plain, 53);
    let expected = run(&build(&scaled, tensors.clone()));
    tensors.insert("rope_freqs.weight".into(), Tensor::new(divisors, &Device::Cpu).unwrap());
    let file = file();
    write(&file.path, &plain, &metadata(&plain), &tensors, GgmlDType::F32);
    let model = load(&file.path, Rounding::None).unwrap();
    assert!(matches!(model.config().rope.scaling, RopeScaling::Divisors(_)));
    assert_rows_close(&run(&model), &expected, 1e-5, "divisors");

    let short = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
    tensors.insert("rope_freqs.weight".into(), short);
    write(&file.path, &plain, &metadata(&plain), &tensors, GgmlDType::F32);
    assert!(matches!(load(&file.path, Rounding::None), Err(Error::TensorShape { .. })));
}

#[test]
fn scaling_keys_are_read() {
    let config = config(Architecture::Qwen2, json!({}));
    let tensors = random_tensors(&config, 54);
    let scaling = |changes: &[(&str, Meta)]| {
        let mut metadata = metadata(&config);
        for (key, value) in changes {
            let key = match *key {
                "scale_linear" => "qwen2.rope.scale_linear".to_owned(),
                key => format!("qwen2.rope.scaling.{key}"),
            };
            set(&mut metadata, &key, value.clone());
        }
        let file = file();
        write(&file.path, &config, &metadata, &tensors, GgmlDType::F32);
        Gguf::open(&file.path).unwrap().config().map(|c| (c.rope.scaling, c.max_positions))
    };
    let kind = |name: &str| ("type", Meta::String(name.to_owned()));
    let factor = || ("factor", Meta::F32(4.0));
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[kind("none")]).unwrap(), (RopeScaling::Default, 128));
    assert_eq!(scaling(&[kind("linear"), factor()]).unwrap(), (linear.clone(), 128));
    // What llama.cpp makes of files that give no type.
    let number = |key, value: f32| (key, Meta::F32(value));
    for scaled in [vec![factor()], vec![number("scale_linear", 4.0)]] {
        assert_eq!(scaling(&scaled).unwrap(), (linear.clone(), 128), "{scaled:?}");
    }
    let defaults = [
        ("finetuned", Meta::Bool(true)),
        number("yarn_ext_factor", 1.0),
        number("yarn_attn_factor", 1.0),
        number("yarn_log_multiplier", 0.0),
        number("attn_factor", 1.0),
    ];
    for plain in [number("factor", 0.0), number("factor", 1.0), number("scale_linear", 1.0)] {
        let keys = [&[plain], &defaults[..]].concat();
        assert_eq!(scaling(&keys).unwrap(), (RopeScaling::Default, 128), "{keys:?}");
    }
    let original = ("original_context_length", Meta::U32(64));
    let json = json!({"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64
    }});
    let yarn = super::support::config(Architecture::Qwen2, json).rope.scaling;
    assert_eq!(scaling(&[kind("yarn"), factor(), original.clone()]).unwrap(), (yarn, 256));
    let json = json!({"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 2.0 * (0.1 * 4f64.ln() + 1.0)
    }});
    let yarn = super::support::config(Architecture::Qwen2, json).rope.scaling;
    let betas = [number("yarn_beta_fast", 16.0), number("yarn_beta_slow", 2.0)];
    let keys =
        [&[kind("yarn"), factor(), original, number("attn_factor", 2.0)], &betas[..]].concat();
    assert_eq!(scaling(&keys).unwrap(), (yarn, 256));
    for bad in [
        vec![kind("longrope")],
        vec![kind("linear")],
        vec![("type", Meta::U32(1))],
        vec![number("factor", -2.0)],
        vec![kind("linear"), factor(), number("attn_factor", 2.0)],
        vec![kind("yarn"), factor(), number("yarn_ext_factor", 0.0)],
        vec![kind("yarn"), factor(), number("yarn_attn_factor", 3.0)],
        vec![kind("yarn"), factor(), number("yarn_log_multiplier", 0.1)],
        vec![kind("yarn"), factor(), number("yarn_beta_fast", 0.0)],
        vec![kind("none"), number("alpha", 1.0)],
    ] {
        assert!(matches!(scaling(&bad), Err(Error::Config { .. })), "{bad:?}");
    }
}

#[test]
fn stop_tokens_include_the_end_of_a_turn() {
    let config = config(Architecture::Llama, json!({}));
    let mut metadata = metadata(&config);
    set(&mut metadata, "tokenizer.ggml.eot_token_id", Meta::U32(9));
    set(&mut metadata, "tokenizer.ggml.bos_token_id", Meta::U32(3));
    let file = file();
    write(&file.path, &config, &metadata, &random_tensors(&config, 55), GgmlDType::F32);
    let mut gguf = Gguf::open(&file.path).unwrap();
    assert!(gguf.metadata().contains_key("tokenizer.ggml.eot_token_id"));
    let config = gguf.config().unwrap();
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![0, 9], Some(3)));
}

/// Case 6, for GGUF: unknown keys of weight, missing and misshapen tensors, unsupported metadata.
#[test]
fn case_6_gguf_files_that_do_not_fit_are_refused() {
    let config = config(Architecture::Llama, json!({}));
    let tensors = random_tensors(&config, 56);
    let attempt = |tensors: &HashMap<String, Tensor>, changes: &[(&str, Meta)]| {
        let mut metadata = metadata(&config);
        changes.iter().for_each(|(key, value)| set(&mut metadata, key, value.clone()));
        let file = file();
        write(&file.path, &config, &metadata, tensors, GgmlDType::F32);
        load(&file.path, Rounding::None)
    };
    assert!(attempt(&tensors, &[]).is_ok());

    let mut changed = tensors.clone();
    changed.insert("blk.0.ffn_gate_inp.weight".into(), tensors["model.norm.weight"].clone());
    let unknown = attempt(&changed, &[]);
    assert!(
        matches!(&unknown, Err(Error::UnknownTensors { names }) if names == &["blk.0.ffn_gate_inp.weight"]),
        "{unknown:?}"
    );
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let mut changed = tensors.clone();
    changed.remove(name);
    assert!(matches!(attempt(&changed, &[]), Err(Error::MissingTensor { .. })));
    changed.insert(name.into(), zeros(&[8, 31]));
    assert!(matches!(attempt(&changed, &[]), Err(Error::TensorShape { .. })));

    // Sizes are read from the embedding.
    let mut changed = tensors.clone();
    changed.remove("model.embed_tokens.weight");
    let accepted = "accepted: a matrix with rows of 32";
    let missing = attempt(&changed, &[]).unwrap_err().to_string();
    assert_eq!(missing, format!("config field `token_embd.weight`: found nothing, {accepted}"));
    changed.insert("model.embed_tokens.weight".into(), zeros(&[32]));
    let vector = attempt(&changed, &[]).unwrap_err().to_string();
    assert_eq!(vector, format!("config field `token_embd.weight`: found shape [32], {accepted}"));
    changed.insert("model.embed_tokens.weight".into(), zeros(&[61, 31]));
    assert!(
        matches!(attempt(&changed, &[]), Err(Error::Config { field, .. }) if field == "llama.embedding_length")
    );
    for (key, value) in [
        ("llama.block_count", Meta::U32(u32::MAX)),
        ("general.architecture", Meta::String("gemma3".into())),
        ("llama.embedding_length", Meta::U32(33)),
        ("llama.attention.head_count", Meta::String("4".into())),
        ("llama.attention.head_count_kv", Meta::U32(3)),
        ("llama.attention.value_length", Meta::U32(9)),
        ("llama.rope.dimension_count", Meta::U32(4)),
        ("llama.rope.freq_base", Meta::F32(-1.0)),
        ("llama.expert_count", Meta::U32(8)),
        ("llama.attention.sliding_window", Meta::U32(8)),
        ("llama.block_count", Meta::U32(0)),
        ("tokenizer.ggml.eos_token_id", Meta::String("2".into())),
    ] {
        match attempt(&tensors, &[(key, value)]) {
            Err(Error::Config { field, .. }) => assert_eq!(field, key),
            other => panic!("{key}: {other:?}"),
        }
    }
}

/// Which of the two is meant would depend on the order of a map.
#[test]
fn two_tensors_of_one_published_name_are_refused() {
    let config = config(Architecture::Llama, json!({}));
    let tensors = random_tensors(&config, 60);
    let file = file();
    let stored: Vec<(String, QTensor)> = tensors
        .iter()
        .flat_map(|(name, tensor)| {
            let names = if name == "model.norm.weight" { vec![name.clone()] } else { vec![] };
            let tensor = || QTensor::quantize(tensor, GgmlDType::F32).unwrap();
            names.into_iter().chain([gguf_name(name)]).map(move |name| (name, tensor()))
        })
        .collect();
    let stored: Vec<_> = stored.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let metadata = metadata(&config);
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    gguf_file::write(&mut std::fs::File::create(&file.path).unwrap(), &metadata, &stored).unwrap();
    let error = load(&file.path, Rounding::None).unwrap_err().to_string();
    let expected = "config field `model.norm.weight`: found `model.norm.weight` and \
        `output_norm.weight`, accepted: one tensor of this name";
    assert_eq!(error, expected);
}

/// A context of 4,294,967,295 tokens, which a corrupted header may declare, costs nothing.
#[test]
fn declared_positions_are_not_allocated() {
    let config = config(Architecture::Llama, json!({}));
    let mut metadata = metadata(&config);
    set(&mut metadata, "llama.context_length", Meta::U32(u32::MAX));
    let file = file();
    write(&file.path, &config, &metadata, &random_tensors(&config, 58), GgmlDType::F32);
    let model = load(&file.path, Rounding::None).unwrap();
    assert_eq!(model.config().max_positions, u32::MAX as usize);
    run(&model);
}

/// candle's writer always aligns to 32; its reader divides by what the file says.
#[test]
fn an_alignment_of_zero_is_refused_wherever_it_is() {
    let config = config(Architecture::Llama, json!({}));
    let tensors = random_tensors(&config, 59);
    let strings = Meta::Array(vec![Meta::String("a".into()), Meta::String("bc".into())]);
    let nested = Meta::Array(vec![strings.clone(), Meta::Array(vec![Meta::String("d".into())])]);
    let before = [
        ("an.alignment.of.0", Meta::U32(0)),
        ("strings", strings),
        ("nested", nested),
        ("numbers", Meta::Array(vec![Meta::F64(0.5), Meta::F64(1.5)])),
        ("flag", Meta::Bool(true)),
        ("wide", Meta::U64(7)),
    ];
    let mut kept = metadata(&config);
    kept.extend(before.map(|(key, value)| (key.to_owned(), value)));
    let open_with = |key: &str, value: Meta| {
        let mut metadata = kept.clone();
        metadata.push((key.to_owned(), value));
        let file = file();
        write(&file.path, &config, &metadata, &tensors, GgmlDType::F32);
        Gguf::open(&file.path).map(|_| ())
    };
    let open = |value| open_with("general.alignment", value);
    // candle takes zeroes off the end of keys.
    for (key, refused) in [("general.alignment\0\0", true), ("general.alignment\0x", false)] {
        assert_eq!(open_with(key, Meta::U32(0)).is_err(), refused, "{key:?}");
    }
    for zero in [Meta::U8(0), Meta::I8(0), Meta::U16(0), Meta::I16(0), Meta::U32(0), Meta::I32(0)] {
        let error = open(zero).unwrap_err();
        assert!(error.to_string().contains("`general.alignment`: found 0"), "{error}");
    }
    // What candle does not read as a number stands for the default.
    for other in [Meta::U32(32), Meta::U8(32), Meta::U64(0), Meta::String(String::new())] {
        open(other.clone()).unwrap_or_else(|error| panic!("{other:?}: {error}"));
    }
}

#[test]
fn damaged_gguf_files_are_errors() {
    let config = config(Architecture::Llama, json!({}));
    let file = file();
    write(&file.path, &config, &metadata(&config), &random_tensors(&config, 57), GgmlDType::F32);
    let bytes = std::fs::read(&file.path).unwrap();
    for length in [0, 3, 40, 700, bytes.len() / 2] {
        std::fs::write(&file.path, &bytes[..length]).unwrap();
        assert!(load(&file.path, Rounding::None).is_err(), "{length}");
    }
    assert!(matches!(Gguf::open(file.path.with_extension("absent")), Err(Error::Io { .. })));
}

/// The published Q4_1 file of SmolLM2-135M-Instruct continues its golden prompts as the reference did,
/// with weights dequantised, rounded to bf16 and run in f32.
#[test]
#[ignore = "needs DDTREE_SMOLLM2_GGUF and DDTREE_SMOLLM2_GOLDENS to name the model and its golden file"]
fn smollm2_continues_as_the_reference_did() {
    let var = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let golden = std::fs::read_to_string(var("DDTREE_SMOLLM2_GOLDENS")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let model = DecoderModel::load(var("DDTREE_SMOLLM2_GGUF"), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(model.config().eos_token_ids, [2]);
    assert_eq!(super::target::check_autoregressive(&model, &golden), 4);
}
