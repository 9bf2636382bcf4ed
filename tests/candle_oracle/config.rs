//! `config.json`: precedence, defaults and refusals.

use ddtree::candle::{Architecture, DecoderConfig, Error, RopeScaling};
use serde_json::{Value, json};

use super::support::*;

fn parse(architecture: Architecture, changes: Value) -> Result<DecoderConfig, Error> {
    DecoderConfig::from_json(&config_json(architecture, changes).to_string())
}

/// Asserts that `changes` are refused with an error that names `field`.
#[track_caller]
fn refuse(architecture: Architecture, changes: Value, field: &str) {
    match parse(architecture, changes) {
        Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{field}: {other:?}"),
    }
}

/// Case 5: transformers 5 moved `rope_theta` into `rope_parameters`, which wins.
#[test]
fn case_5_rope_theta_precedence() {
    let theta = |changes| parse(Architecture::Qwen3, changes).unwrap().rope.theta;
    assert_eq!(theta(json!({"rope_theta": 5e5})), 5e5);
    let inner = json!({"rope_theta": 1e6, "rope_type": "default"});
    assert_eq!(theta(json!({"rope_theta": null, "rope_parameters": inner})), 1e6);
    assert_eq!(theta(json!({"rope_theta": 5e5, "rope_parameters": inner})), 1e6);
    let scaling = json!({"rope_type": "linear", "factor": 2.0});
    assert_eq!(theta(json!({"rope_theta": 5e5, "rope_scaling": scaling})), 5e5);
    let both = json!({"rope_theta": 7e5, "rope_scaling": scaling, "rope_parameters": scaling});
    assert_eq!(theta(both), 7e5);
}

#[test]
fn case_5_rope_theta_may_be_absent_in_llama_only() {
    let config = parse(Architecture::Llama, json!({"rope_theta": null})).unwrap();
    assert_eq!(config.rope.theta, 10_000.0);
    refuse(Architecture::Qwen3, json!({"rope_theta": null}), "rope_theta");
    refuse(Architecture::Qwen2, json!({"rope_theta": null}), "rope_theta");
}

#[test]
fn case_5_two_different_rope_objects_are_ambiguous() {
    let changes = json!({
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}
    });
    refuse(Architecture::Qwen3, changes, "rope_scaling");
}

#[test]
fn rope_scaling_variants() {
    let scaling = |changes: Value| {
        parse(Architecture::Llama, json!({"rope_scaling": changes})).unwrap().rope.scaling
    };
    assert_eq!(scaling(json!(null)), RopeScaling::Default);
    assert_eq!(
        scaling(json!({"type": "linear", "factor": 2})),
        RopeScaling::Linear { factor: 2.0 }
    );
    let dynamic = RopeScaling::Dynamic { max_position: 128 };
    assert_eq!(scaling(json!({"rope_type": "dynamic", "factor": 2.0})), dynamic);
    let both = json!({"type": "linear", "rope_type": "linear", "factor": 3.0});
    assert_eq!(scaling(both), RopeScaling::Linear { factor: 3.0 });
    let yarn = scaling(json!({"rope_type": "yarn", "original_max_position_embeddings": 32}));
    assert!(
        matches!(yarn, RopeScaling::Yarn { factor: 4.0, original_max_position: 32, .. }),
        "{yarn:?}"
    );
}

/// Case 10: what scales or cuts the rotation is either understood or refused.
#[test]
fn case_10_unknown_rope_scaling_is_refused() {
    let refuse = |scaling: Value, field: &str| {
        refuse(Architecture::Llama, json!({"rope_scaling": scaling}), field);
    };
    refuse(json!({"rope_type": "longrope", "factor": 2.0}), "rope_scaling.rope_type");
    refuse(json!({"factor": 2.0}), "rope_scaling.rope_type");
    refuse(json!({"rope_type": "linear", "type": "yarn", "factor": 2.0}), "rope_scaling.type");
    refuse(json!({"rope_type": "linear"}), "rope_scaling.factor");
    refuse(json!({"rope_type": "linear", "factor": 0}), "rope_scaling.factor");
    refuse(json!({"rope_type": "linear", "factor": "2"}), "rope_scaling.factor");
    refuse(json!({"rope_type": "linear", "factor": 2.0, "bet_fast": 1}), "rope_scaling.bet_fast");
    refuse(json!({"rope_type": "default", "mrope_section": [1, 2]}), "rope_scaling.mrope_section");
    refuse(json!({"rope_type": "llama3", "factor": 8.0}), "rope_scaling.low_freq_factor");
    let flat = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8
    });
    refuse(flat, "rope_scaling.high_freq_factor");
    refuse(json!("yarn"), "rope_scaling");
}

#[test]
fn case_10_partial_rotation() {
    let partial = |part: Value| {
        parse(Architecture::Llama, json!({"head_dim": 8, "partial_rotary_factor": part}))
    };
    assert_eq!(partial(json!(null)).unwrap().rope.rotary_dim, 8);
    assert_eq!(partial(json!(0.5)).unwrap().rope.rotary_dim, 4);
    for part in [0.0, -0.5, 1.5, 0.4] {
        let error = partial(json!(part)).unwrap_err().to_string();
        assert!(error.contains("partial_rotary_factor"), "{error}");
    }
    let inner = json!({"rope_type": "default", "partial_rotary_factor": 0.25});
    let changes = json!({"head_dim": 8, "rope_parameters": inner, "partial_rotary_factor": 1.0});
    assert_eq!(parse(Architecture::Llama, changes).unwrap().rope.rotary_dim, 2);
}

#[test]
fn families_have_the_biases_and_norms_of_their_kind() {
    let flags = |architecture, bias: bool| {
        let config =
            parse(architecture, json!({"attention_bias": bias, "mlp_bias": bias})).unwrap();
        (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)
    };
    assert_eq!(flags(Architecture::Llama, false), (false, false, false, false));
    assert_eq!(flags(Architecture::Llama, true), (true, true, true, false));
    assert_eq!(flags(Architecture::Qwen2, false), (true, false, false, false));
    assert_eq!(flags(Architecture::Qwen3, false), (false, false, false, true));
    assert_eq!(flags(Architecture::Qwen3, true), (true, true, false, true));
}

#[test]
fn head_sizes() {
    let config = parse(Architecture::Llama, json!({"num_key_value_heads": null})).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim), (4, 8));
    let config = parse(Architecture::Qwen3, json!({"head_dim": 20})).unwrap();
    assert_eq!(config.head_dim, 20);
    refuse(Architecture::Llama, json!({"num_key_value_heads": 3}), "num_key_value_heads");
    refuse(Architecture::Llama, json!({"hidden_size": 33}), "head_dim");
}

#[test]
fn sliding_windows() {
    let windows = |changes| parse(Architecture::Qwen2, changes).map(|c| c.layer_windows);
    let none = vec![None; 3];
    assert_eq!(
        windows(json!({"sliding_window": 4096, "use_sliding_window": false})).unwrap(),
        none
    );
    assert_eq!(windows(json!({"sliding_window": 4096, "max_window_layers": 0})).unwrap(), none);
    let changes = json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 2});
    assert_eq!(windows(changes).unwrap(), [None, None, Some(9)]);
    let changes = json!({
        "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]
    });
    assert_eq!(windows(changes).unwrap(), [None, Some(9), None]);

    let types = json!(["sliding_attention", "full_attention", "full_attention"]);
    let refuse_qwen = |changes, field| refuse(Architecture::Qwen3, changes, field);
    refuse_qwen(json!({"layer_types": types, "sliding_window": 9}), "use_sliding_window");
    refuse_qwen(json!({"layer_types": types, "use_sliding_window": true}), "sliding_window");
    refuse_qwen(json!({"layer_types": ["full_attention"]}), "layer_types");
    refuse_qwen(json!({"use_sliding_window": true, "sliding_window": 9}), "max_window_layers");
    let hybrid = json!(["linear_attention", "full_attention", "full_attention"]);
    refuse_qwen(json!({"layer_types": hybrid}), "layer_types[0]");
    refuse(Architecture::Llama, json!({"sliding_window": 9}), "sliding_window");
    refuse(Architecture::Llama, json!({"layer_types": types}), "layer_types[0]");
}

#[test]
fn stop_tokens_are_one_or_a_list() {
    let eos =
        |value| parse(Architecture::Llama, json!({"eos_token_id": value})).map(|c| c.eos_token_ids);
    assert_eq!(eos(json!(null)).unwrap(), Vec::<u32>::new());
    assert_eq!(eos(json!(0)).unwrap(), [0]);
    assert_eq!(eos(json!([128001, 128009])).unwrap(), [128001, 128009]);
    for bad in [json!(-1), json!("2"), json!([1, 2.5]), json!(true)] {
        refuse(Architecture::Llama, json!({"eos_token_id": bad}), "eos_token_id");
    }
}

#[test]
fn generation_config_decides_the_stop_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    };
    write("config.json", &config_json(Architecture::Qwen2, json!({"bos_token_id": 5})));
    let load = || DecoderConfig::load(folder.path()).unwrap();
    assert_eq!((load().eos_token_ids, load().bos_token_id), (vec![0], Some(5)));
    write("generation_config.json", &json!({"temperature": 0.7}));
    assert_eq!(load().eos_token_ids, [0]);
    write("generation_config.json", &json!({"eos_token_id": [7, 3]}));
    assert_eq!(load().eos_token_ids, [7, 3]);
}

#[test]
fn unsupported_checkpoints_are_refused() {
    let refuse_llama = |changes, field| refuse(Architecture::Llama, changes, field);
    refuse_llama(json!({"architectures": ["Gemma3ForCausalLM"]}), "architectures");
    refuse_llama(json!({"architectures": ["LlamaForCausalLM", "Other"]}), "architectures");
    refuse_llama(json!({"architectures": "LlamaForCausalLM"}), "architectures");
    refuse_llama(json!({"architectures": null, "model_type": "qwen3_moe"}), "model_type");
    refuse_llama(json!({"architectures": null, "model_type": null}), "model_type");
    refuse_llama(json!({"model_type": "qwen3"}), "model_type");
    refuse_llama(json!({"hidden_act": "gelu"}), "hidden_act");
    refuse_llama(json!({"quantization_config": {"bits": 4}}), "quantization_config");
    let config = parse(Architecture::Qwen2, json!({"architectures": null})).unwrap();
    assert_eq!(config.architecture, Architecture::Qwen2);
}

#[test]
fn ill_typed_and_missing_fields_are_named() {
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        for bad in [json!(null), json!(0), json!(-4), json!("8")] {
            refuse(Architecture::Qwen3, json!({(field): bad}), field);
        }
    }
    refuse(Architecture::Llama, json!({"hidden_size": 1u64 << 40}), "hidden_size");
    for architecture in [Architecture::Llama, Architecture::Qwen2] {
        refuse(architecture, json!({"num_hidden_layers": u32::MAX}), "num_hidden_layers");
    }
    refuse(Architecture::Llama, json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings");
    refuse(Architecture::Llama, json!({"rope_theta": 1.0}), "rope_theta");
    let error = parse(Architecture::Llama, json!({"vocab_size": -4})).unwrap_err();
    let expected = "config field `vocab_size`: found -4, accepted: a positive whole number";
    assert_eq!(error.to_string(), expected);
}

/// What the source says is not in the message as well: chains are printed whole.
fn assert_said_once(error: &Error) {
    let source = std::error::Error::source(error).unwrap().to_string();
    assert!(!source.is_empty() && !error.to_string().contains(&source), "{error}: {source}");
}

#[test]
fn files_that_are_no_json_object_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = DecoderConfig::load(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("config.json")), "{error}");
    assert_said_once(&error);
    for text in ["", "[]", "{\"a\":", "3"] {
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        let error = DecoderConfig::load(folder.path()).unwrap_err();
        assert!(matches!(&error, Error::Json { path, .. } if path.ends_with("config.json")));
        assert!(error.to_string().contains("config.json"), "{error}");
        assert_said_once(&error);
    }
}
