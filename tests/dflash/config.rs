//! `config.json`: where settings stand, and what is refused.

use ddtree::candle::dflash::{BlockAttention, DFlashConfig};
use serde_json::{Value, json};

use crate::fixture::{config, merge};

fn parse(changes: Value) -> Result<DFlashConfig, String> {
    let mut json = config();
    merge(&mut json, changes);
    DFlashConfig::from_json(&json.to_string()).map_err(|error| error.to_string())
}

/// Asserts an error that names everything in `parts`.
#[track_caller]
fn refused(changes: Value, parts: &[&str]) {
    let message = parse(changes.clone()).expect_err(&changes.to_string());
    for part in parts {
        assert!(message.contains(part), "{changes}: {message} has no {part}");
    }
}

#[test]
fn reads_the_published_layout() {
    let config = parse(json!({})).unwrap();
    assert_eq!(config.block_size(), 5);
    assert_eq!(config.target_layer_ids(), [1, 4, 6]);
    assert_eq!(config.mask_token_id(), 3);
    assert_eq!(config.attention(), [BlockAttention { causal: false, window: None }; 2]);
    assert_eq!(config.feature_size(), 48);
}

/// Case 5.
#[test]
fn block_size_stands_at_the_top_or_inside() {
    let inside = json!({ "block_size": null, "dflash_config": { "block_size": 8 } });
    assert_eq!(parse(inside).unwrap().block_size(), 8);
    let both = json!({ "block_size": 8, "dflash_config": { "block_size": 8 } });
    assert_eq!(parse(both).unwrap().block_size(), 8);
    let conflict = json!({ "block_size": 16, "dflash_config": { "block_size": 8 } });
    refused(conflict, &["dflash_config.block_size", "8", "16"]);
    refused(json!({ "block_size": null }), &["block_size", "nothing"]);
    for size in [0, 1, 4097] {
        refused(json!({ "block_size": size }), &["block_size", &size.to_string(), "at least 2"]);
    }
    assert_eq!(parse(json!({ "block_size": 2 })).unwrap().block_size(), 2);
    for size in [json!(-4), json!(8.5), json!("8"), json!(true)] {
        refused(json!({ "block_size": size }), &["block_size", &size.to_string()]);
    }
}

/// Case 5: the base that counts changes the rotation, so compare whole configurations.
#[test]
fn rope_theta_stands_at_the_top_or_in_rope_parameters() {
    let top = parse(json!({ "rope_theta": 5e5 })).unwrap();
    let parameters = |theta: f64| json!({ "rope_theta": theta, "rope_type": "default" });
    let inside = json!({ "rope_theta": null, "rope_parameters": parameters(5e5) });
    assert_eq!(parse(inside).unwrap(), top);
    let both = json!({ "rope_theta": 1e4, "rope_parameters": parameters(5e5) });
    assert_eq!(parse(both).unwrap(), top, "the inner one wins, as in transformers");
    assert_ne!(parse(json!({ "rope_theta": 1e4 })).unwrap(), top);
    refused(json!({ "rope_theta": null }), &["rope_theta", "nothing"]);
    refused(json!({ "rope_scaling": { "rope_type": "longrope" } }), &["rope_type", "longrope"]);
}

#[test]
fn target_layer_ids_stand_at_the_top_or_inside() {
    let none = json!({ "dflash_config": { "target_layer_ids": null } });
    let mut top = none.clone();
    merge(&mut top, json!({ "target_layer_ids": [8, 0] }));
    assert_eq!(parse(top).unwrap().target_layer_ids(), [8, 0], "the order of the file");
    let conflict = json!({ "target_layer_ids": [1, 4, 7] });
    refused(conflict, &["dflash_config.target_layer_ids", "[1,4,6]", "[1,4,7]"]);
    for (ids, part) in [
        (json!([]), "[]"),
        (json!([1, 1]), "[1, 1]"),
        (json!([1, 9]), "below 9"),
        (json!([1, -1]), "-1"),
        (json!([1, true]), "true"),
        (json!(3), "3"),
    ] {
        refused(
            json!({ "dflash_config": { "target_layer_ids": ids } }),
            &["target_layer_ids", part],
        );
    }
    let unknown =
        json!({ "num_target_layers": null, "dflash_config": { "target_layer_ids": null } });
    refused(unknown, &["dflash_config.target_layer_ids", "nothing"]);
}

/// The ids of published drafters follow the rule, rounding half to even included.
#[test]
fn default_target_layer_ids_are_those_of_the_published_drafters() {
    let default = |target: usize, layers: usize| {
        let changes = json!({
            "num_target_layers": target,
            "num_hidden_layers": layers,
            "dflash_config": { "target_layer_ids": null },
        });
        parse(changes).map(|config| config.target_layer_ids().to_vec())
    };
    assert_eq!(default(24, 5).unwrap(), [1, 6, 11, 16, 21]);
    assert_eq!(default(36, 5).unwrap(), [1, 9, 17, 25, 33]);
    assert_eq!(default(32, 5).unwrap(), [1, 8, 15, 22, 29]);
    assert_eq!(default(64, 5).unwrap(), [1, 16, 31, 46, 61]);
    assert_eq!(default(28, 5).unwrap(), [1, 7, 13, 19, 25]);
    // 1, 7.5, 14, 20.5, 27.
    assert_eq!(default(30, 5).unwrap(), [1, 8, 14, 20, 27]);
    assert_eq!(default(36, 1).unwrap(), [18]);
    assert_eq!(default(6, 2).unwrap(), [1, 3]);
    assert_eq!(default(8, 5).unwrap(), [1, 2, 3, 4, 5]);
    for target in 1..8 {
        let message = default(target, 5).unwrap_err();
        assert!(
            message.contains("num_target_layers") && message.contains(&target.to_string()),
            "{message}"
        );
    }
}

#[test]
fn the_mask_token_is_a_whole_number() {
    for id in [json!(true), json!(-1), json!(1.5), json!("<|MASK|>"), json!(1u64 << 32)] {
        let parts = ["dflash_config.mask_token_id", &id.to_string()];
        refused(json!({ "dflash_config": { "mask_token_id": id } }), &parts);
    }
    refused(json!({ "dflash_config": { "mask_token_id": null } }), &["mask_token_id", "nothing"]);
}

/// Case 9.
#[test]
fn sliding_layers_are_causal_unless_the_file_says_otherwise() {
    let types = json!(["sliding_attention", "full_attention"]);
    let sliding =
        json!({ "layer_types": types, "sliding_window": 2048, "use_sliding_window": true });
    let with = |causal: Value| {
        let mut changes = sliding.clone();
        merge(&mut changes, causal);
        let config = parse(changes).unwrap();
        assert_eq!(config.attention()[0].window, Some(2048));
        assert_eq!(config.attention()[1].window, None);
        [config.attention()[0].causal, config.attention()[1].causal]
    };
    assert_eq!(with(json!({})), [true, false]);
    assert_eq!(with(json!({ "is_causal": false })), [false, false]);
    assert_eq!(with(json!({ "is_causal": true })), [true, true]);
    assert_eq!(with(json!({ "dflash_config": { "is_causal": false } })), [false, false]);

    let mut changes = sliding.clone();
    merge(&mut changes, json!({ "sliding_window": null }));
    refused(changes, &["sliding_window"]);
    let mut changes = sliding.clone();
    merge(&mut changes, json!({ "use_sliding_window": false }));
    refused(changes, &["use_sliding_window"]);
    refused(json!({ "layer_types": ["full_attention"] }), &["layer_types", "2"]);
    refused(
        json!({ "layer_types": ["full_attention", "linear_attention"] }),
        &["layer_types", "linear"],
    );
}

/// Cases 4, 6 and 7: relatives of the format are told apart by any of their marks.
#[test]
fn relatives_of_the_format_are_refused_by_name() {
    for name in ["DFlash2DraftModel", "DominoDraftModel", "DSparkDraftModel", "Qwen3ForCausalLM"] {
        refused(json!({ "architectures": [name] }), &["architectures", name, "DFlashDraftModel"]);
    }
    refused(json!({ "architectures": null }), &["architectures", "nothing"]);
    refused(json!({ "architectures": ["DFlashDraftModel", "Other"] }), &["architectures", "Other"]);

    for (key, value, variant) in [
        ("conv_kernel_size", json!(2), "DFlash2"),
        ("conv_group_size", json!(16), "DFlash2"),
        ("selector_rank", json!(256), "DFlash2"),
        ("selector_top_k", json!(16), "DFlash2"),
        ("projector_type", json!("domino"), "Domino"),
        ("projector_type", json!("dspark"), "DSpark"),
        ("gru_hidden_dim", json!(1024), "Domino"),
        ("emb_dim", json!(256), "Domino"),
        ("pure_draft_prefix_len", json!(1), "Domino"),
        ("shift_label", json!(true), "Domino"),
        ("markov_head_type", json!("vanilla"), "DSpark"),
        ("markov_rank", json!(256), "DSpark"),
        ("enable_confidence_head", json!(true), "DSpark"),
        ("causal", json!(true), "JetSpec"),
        ("causal_head", json!(true), "JetSpec"),
        ("sample_from_anchor", json!(true), "anchor-first"),
        ("query_zero_predicts_next", json!(true), "anchor-first"),
        ("attention_sink_bias", json!(true), "sinks"),
        ("attention_value_scale", json!(0.5), "values"),
        ("input_embedding_scale", json!(50.6), "embeddings"),
        ("output_multiplier", json!(0.25), "logits"),
        ("final_logit_softcapping", json!(30.0), "logits"),
        ("draft_vocab_size", json!(32000), "d2t"),
    ] {
        refused(
            json!({ "dflash_config": { key: value } }),
            &["dflash_config", key, &value.to_string(), variant],
        );
        refused(json!({ key: value }), &[key, variant]);
    }
}

#[test]
fn marks_that_say_plain_dflash_are_accepted() {
    let plain = parse(json!({})).unwrap();
    for (key, value) in [
        ("projector_type", json!("dflash")),
        ("attention_mode", json!("gqa")),
        ("causal", json!(false)),
        ("sample_from_anchor", json!(false)),
        ("query_zero_predicts_next", json!(false)),
        ("shift_label", json!(false)),
        ("attention_value_scale", json!(1.0)),
        ("input_embedding_scale", json!(1)),
        ("output_multiplier", json!(1.0)),
        ("draft_vocab_size", json!(40)),
    ] {
        assert_eq!(parse(json!({ "dflash_config": { key: value } })).unwrap(), plain, "{key}");
    }
    // Null is as good as absent, and files carry keys of no concern to the computation.
    let mut json = config();
    json["dflash_config"]["conv_kernel_size"] = Value::Null;
    json["dflash_config"]["some_later_key"] = Value::Null;
    json["transformers_version"] = "5.0.0".into();
    json["auto_map"] = json!({ "AutoModel": "dflash.DFlashDraftModel" });
    assert_eq!(DFlashConfig::from_json(&json.to_string()).unwrap(), plain);
}

#[test]
fn an_unknown_setting_of_the_drafter_is_refused() {
    refused(json!({ "dflash_config": { "router_topk": 2 } }), &["dflash_config.router_topk", "2"]);
    refused(json!({ "dflash_config": 4 }), &["dflash_config", "4"]);
    refused(json!({ "mlp_bias": true }), &["mlp_bias"]);
    refused(json!({ "hidden_act": "gelu" }), &["hidden_act", "gelu"]);
    refused(json!({ "quantization_config": { "bits": 4 } }), &["quantization_config"]);
}

#[test]
fn every_size_is_needed_and_positive() {
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        refused(json!({ key: null }), &[key, "nothing"]);
        refused(json!({ key: 0 }), &[key, "0"]);
        refused(json!({ key: "many" }), &[key, "many"]);
    }
    refused(json!({ "num_key_value_heads": 3 }), &["num_key_value_heads", "3", "4"]);
    assert!(DFlashConfig::from_json("[]").is_err());
    assert!(DFlashConfig::from_json("{").is_err());
}
