//! Scaled rotary frequencies against the published formulas, written out independently.

use std::f64::consts::PI;

use ddtree::candle::Architecture;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::naive;
use super::support::*;

/// Checks frequencies one by one, and a whole model that uses them against the plain loops.
fn check(changes: Value, frequencies: impl Fn(f64, usize, usize) -> f64, factor: f64) {
    let config = config(Architecture::Qwen3, changes);
    let (theta, dim) = (config.rope.theta, config.rope.rotary_dim);
    let expected: Vec<f64> = (0..dim / 2).map(|i| frequencies(theta, dim, i)).collect();
    let found = config.rope.inv_freq().unwrap();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert!((f64::from(*found) / expected - 1.0).abs() < 1e-6, "{found} is not {expected}");
    }
    let tensors = random_tensors(&config, 7);
    let tokens = random_tokens(&mut StdRng::seed_from_u64(7), 30, config.vocab_size);
    let positions: Vec<u32> = (60..90).collect();
    let rotation = |p: u32| (expected.iter().map(|f| f * f64::from(p)).collect::<Vec<_>>(), factor);
    let loops = naive::logits(&config, &tensors, &tokens, &positions, |i, j| j <= i, rotation);
    let model = build(&config, tensors);
    let mut cache = model.new_cache(64).unwrap();
    let pass = ddtree::candle::Forward {
        tokens: &tokens,
        positions: &positions,
        start: 0,
        mask: None,
        tree: None,
        want: ddtree::candle::Want::All,
        taps: &[],
    };
    let found = rows(&model.forward(&mut cache, &pass).unwrap().logits.unwrap());
    assert_rows_close(&found, &loops, 1e-4, "scaled rotation");
}

fn plain(theta: f64, dim: usize, i: usize) -> f64 {
    1.0 / theta.powf(2.0 * i as f64 / dim as f64)
}

fn yarn(theta: f64, dim: usize, i: usize, factor: f64, original: f64, fast: f64, slow: f64) -> f64 {
    let correction = |rotations: f64| {
        (dim as f64 * (original / (rotations * 2.0 * PI)).ln()) / (2.0 * theta.ln())
    };
    let low = correction(fast).floor().max(0.0);
    let high = correction(slow).ceil().min(dim as f64 - 1.0);
    let high = if low == high { high + 0.001 } else { high };
    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
    let extrapolation = 1.0 - ramp;
    let freq = plain(theta, dim, i);
    freq / factor * (1.0 - extrapolation) + freq * extrapolation
}

#[test]
fn unscaled_frequencies() {
    check(json!({"head_dim": 16}), plain, 1.0);
}

#[test]
fn linear_scaling_divides_positions() {
    let scaling = json!({"rope_type": "linear", "factor": 4.0});
    check(json!({"rope_scaling": scaling}), |t, d, i| plain(t, d, i) / 4.0, 1.0);
}

#[test]
fn llama3_scaling_blends_by_wavelength() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 1000.0
    });
    let frequency = |theta, dim, i| {
        let freq = plain(theta, dim, i);
        let wavelength = 2.0 * PI / freq;
        if wavelength < 64.0 / 4.0 {
            freq
        } else if wavelength > 64.0 / 1.0 {
            freq / 8.0
        } else {
            let smooth = (64.0 / wavelength - 1.0) / (4.0 - 1.0);
            (1.0 - smooth) * freq / 8.0 + smooth * freq
        }
    };
    check(json!({"head_dim": 32, "rope_parameters": scaling}), frequency, 1.0);
}

#[test]
fn yarn_scaling_ramps_over_dimensions_and_scales_attention() {
    let scaling = json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128
    });
    let frequency = |theta, dim, i| yarn(theta, dim, i, 4.0, 128.0, 32.0, 1.0);
    let changes = json!({"head_dim": 32, "rope_theta": 100.0, "rope_scaling": scaling});
    check(changes, frequency, 0.1 * 4f64.ln() + 1.0);
}

#[test]
fn yarn_parameters_are_honoured() {
    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3
    });
    let frequency = |theta, dim, i| yarn(theta, dim, i, 4.0, 128.0, 8.0, 2.0);
    check(json!({"head_dim": 32, "rope_theta": 50.0, "rope_scaling": scaling}), frequency, 1.3);

    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "mscale": 1.0, "mscale_all_dim": 0.8
    });
    let factor = (0.1 * 4f64.ln() + 1.0) / (0.08 * 4f64.ln() + 1.0);
    let frequency = |theta, dim, i| yarn(theta, dim, i, 4.0, 128.0, 32.0, 1.0);
    check(json!({"head_dim": 32, "rope_scaling": scaling}), frequency, factor);
}

#[test]
fn yarn_extends_the_positions_of_a_checkpoint() {
    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100
    });
    let config = config(Architecture::Qwen3, json!({"rope_scaling": scaling}));
    assert_eq!(config.max_positions, 400);
}

/// Case 10: a rotation over part of a head, with YaRN over that part.
#[test]
fn case_10_partial_rotation_with_yarn() {
    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5, "rope_theta": 100.0
    });
    let changes = json!({"head_dim": 32, "rope_parameters": scaling});
    assert_eq!(config(Architecture::Qwen3, changes.clone()).rope.rotary_dim, 16);
    let frequency = |theta, dim, i| yarn(theta, dim, i, 4.0, 128.0, 32.0, 1.0);
    check(changes, frequency, 0.1 * 4f64.ln() + 1.0);
}
