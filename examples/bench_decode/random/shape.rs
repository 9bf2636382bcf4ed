//! Shapes of published pairs.

use anyhow::{Result, bail};
use ddtree::candle::{DecoderConfig, dflash::DFlashConfig};

/// Configurations of a target and its published drafter.
pub fn of(name: &str) -> Result<(DecoderConfig, DFlashConfig)> {
    let (target, drafter, layers, tied, layer) = match name {
        "qwen3-4b" => (QWEN3, QWEN3_DRAFTER, 36, true, qwen3(2560, 9728)),
        "qwen3-8b" => (QWEN3, QWEN3_DRAFTER, 36, false, qwen3(4096, 12_288)),
        "smollm2-135m" => (LLAMA, SMOLLM2_DRAFTER, 30, true, SMOLLM2.to_owned()),
        _ => bail!("--random: found {name}, accepted: qwen3-4b, qwen3-8b, smollm2-135m"),
    };
    let target = format!(
        r#"{{{target}, {layer}, "num_hidden_layers": {layers}, "tie_word_embeddings": {tied}}}"#
    );
    let drafter = format!(
        r#"{{"architectures": ["DFlashDraftModel"], {layer}, {drafter}, "num_target_layers": {layers},
             "block_size": 16}}"#
    );
    Ok((DecoderConfig::from_json(&target)?, DFlashConfig::from_json(&drafter)?))
}

const QWEN3: &str = r#""architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3""#;
const LLAMA: &str = r#""architectures": ["LlamaForCausalLM"], "model_type": "llama""#;

const QWEN3_DRAFTER: &str = r#""num_hidden_layers": 5,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}"#;
const SMOLLM2_DRAFTER: &str = r#""model_type": "qwen3", "num_hidden_layers": 3,
    "dflash_config": {"target_layer_ids": [1, 8, 14, 20, 27], "mask_token_id": 16}"#;

const SMOLLM2: &str = r#""hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 100000,
    "max_position_embeddings": 8192, "vocab_size": 49152"#;

/// What a target and its drafter have in common.
fn qwen3(hidden: usize, intermediate: usize) -> String {
    format!(
        r#""hidden_size": {hidden}, "intermediate_size": {intermediate}, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
           "max_position_embeddings": 40960, "vocab_size": 151936"#
    )
}
