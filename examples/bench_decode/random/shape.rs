//! Shapes of published pairs.

use anyhow::{Result, bail};
use ddtree::candle::{DecoderConfig, dflash::DFlashConfig};

/// Configurations of a target and its published drafter.
pub fn of(name: &str) -> Result<(DecoderConfig, DFlashConfig)> {
    let (hidden, intermediate, tied) = match name {
        "qwen3-4b" => (2560, 9728, true),
        "qwen3-8b" => (4096, 12_288, false),
        _ => bail!("--random: found {name}, accepted: qwen3-4b, qwen3-8b"),
    };
    let layer = format!(
        r#""hidden_size": {hidden}, "intermediate_size": {intermediate}, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
           "max_position_embeddings": 40960, "vocab_size": 151936"#
    );
    let target = format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", {layer},
             "num_hidden_layers": 36, "tie_word_embeddings": {tied}}}"#
    );
    let drafter = format!(
        r#"{{"architectures": ["DFlashDraftModel"], {layer}, "num_hidden_layers": 5,
             "num_target_layers": 36, "block_size": 16,
             "dflash_config": {{"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}}}}"#
    );
    Ok((DecoderConfig::from_json(&target)?, DFlashConfig::from_json(&drafter)?))
}
