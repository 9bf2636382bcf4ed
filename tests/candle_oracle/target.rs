//! The decoder as a verifier: picks, taps, faults, reset.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use ddtree::candle::{Architecture, CandleTarget, DecoderModel, Error};
use ddtree::{
    Acceptance, AncestorMask, Capabilities, CommitPlan, DraftTree, Picks, Prefill, Round, Verifier,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;

use super::support::*;

fn prefill(target: &mut CandleTarget, tokens: &[u32]) -> (u32, Option<Tensor>) {
    let mut ids = Vec::new();
    let start = target.cache().len();
    let taps = target.prefill(&Prefill::new(start, tokens), &mut Picks::new(&mut ids)).unwrap();
    assert_eq!(ids.len(), 1);
    (ids[0], taps.hidden().cloned())
}

fn verify(target: &mut CandleTarget, tree: &DraftTree) -> Vec<u32> {
    let mut mask = AncestorMask::new();
    mask.build(tree);
    let round = Round::new(target.cache().len(), tree, Some(&mask));
    let mut ids = Vec::new();
    target.verify(&round, &mut Picks::new(&mut ids)).unwrap();
    ids
}

/// The plan for accepting the path to `slot`.
fn plan(start: usize, tree: &DraftTree, slot: usize) -> CommitPlan {
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    outcome.set(tree, slot, 0).unwrap();
    plan.set(start, &outcome);
    plan
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

#[test]
fn picks_and_commits_equal_plain_decoding() {
    let rng = &mut StdRng::seed_from_u64(31);
    let model = random_model(Architecture::Qwen3, json!({}), 31);
    let mut target = CandleTarget::new(model.clone(), 128, &[]).unwrap();
    assert_eq!(target.capabilities(), Capabilities::new(61, 128));
    let mut text = random_tokens(rng, 11, 61);
    let (pick, taps) = prefill(&mut target, &text);
    assert!(taps.is_none());
    let mut plain = model.new_cache(128).unwrap();
    assert_eq!(pick, argmax(&logits(&model, &mut plain, &text)[10]));
    for round in 0..5 {
        let tree = random_tree(rng, 12, 61);
        let picks = verify(&mut target, &tree);
        assert_eq!(verify(&mut target, &tree), picks, "verifying again changes nothing");
        for (slot, pick) in picks.iter().enumerate() {
            plain.truncate(0).unwrap();
            let tokens: Vec<u32> =
                text.iter().copied().chain(tokens_of(&tree, &path(&tree, slot))).collect();
            let rows = logits(&model, &mut plain, &tokens);
            assert_eq!(*pick, argmax(&rows[tokens.len() - 1]), "round {round}, slot {slot}");
        }
        target.commit(&plan(text.len(), &tree, 11)).unwrap();
        text.extend(tokens_of(&tree, &path(&tree, 11)));
        assert_eq!(target.cache().len(), text.len());
    }
}

#[test]
fn a_prompt_of_many_chunks_equals_one_pass() {
    let model = random_model(Architecture::Llama, json!({"max_position_embeddings": 2048}), 32);
    let tokens = random_tokens(&mut StdRng::seed_from_u64(32), 1300, 61);
    let mut target = CandleTarget::new(model.clone(), 2048, &[1]).unwrap();
    let (pick, taps) = prefill(&mut target, &tokens);
    assert_eq!(taps.unwrap().dims(), [1300, 32]);
    let mut cache = model.new_cache(2048).unwrap();
    let rows = logits(&model, &mut cache, &tokens);
    assert_eq!(pick, argmax(&rows[1299]));
    cache.extend(1300).unwrap();
    assert_close(&contents(target.cache()), &contents(&cache), 1e-4, "cache");
}

/// A model whose layer `i` outputs the constant `i` in every channel: only the biases of the attention
/// output and of the feed-forward output write into a zero stream, one half each.
fn counting_model() -> DecoderModel {
    let config = config(
        Architecture::Llama,
        json!({"attention_bias": true, "mlp_bias": true, "num_hidden_layers": 5}),
    );
    let zero = |(name, tensor): (String, Tensor)| {
        let layer: Option<u32> = name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next()?.parse().ok());
        let tensor = match layer {
            Some(1..) if name.ends_with("o_proj.bias") || name.ends_with("down_proj.bias") => {
                tensor.ones_like().and_then(|ones| ones * 0.5)
            }
            _ if name.contains("norm") => Ok(tensor),
            _ => tensor.zeros_like(),
        };
        (name, tensor.unwrap())
    };
    let tensors: HashMap<_, _> = random_tensors(&config, 0).into_iter().map(zero).collect();
    build(&config, tensors)
}

/// Cases 2 and 3: tap `i` is the output of layer `i`, the last layer's included.
#[test]
fn case_2_and_3_taps_read_the_output_of_the_layer_they_name() {
    let taps = [4, 0, 2, 1, 3];
    let mut target = CandleTarget::new(counting_model(), 64, &taps).unwrap();
    let expected: Vec<f32> = taps.iter().flat_map(|&tap| [tap as f32; 32]).collect();
    let (_, hidden) = prefill(&mut target, &[5, 6, 7]);
    assert_eq!(rows(&hidden.unwrap()), vec![expected.clone(); 3]);

    let tree = DraftTree::from_parents(&[1, 2, 3], &[-1, 0, 0]).unwrap();
    verify(&mut target, &tree);
    let committed = target.commit(&plan(3, &tree, 2)).unwrap();
    assert_eq!(rows(committed.hidden().unwrap()), vec![expected; 2]);
}

/// Case 3: a tap that names no layer is an error, not a shorter list.
#[test]
fn case_3_taps_beyond_the_last_layer_are_refused() {
    let model = counting_model();
    for (taps, bad) in [(vec![5], "5"), (vec![0, 1, 99], "99")] {
        let error = CandleTarget::new(model.clone(), 64, &taps).unwrap_err();
        assert_eq!(error.to_string(), format!("`taps`: got {bad}, accepted: layers below 5"));
    }
}

/// Case 22: features are gathered by path, not by count.
#[test]
fn case_22_features_follow_the_accepted_path() {
    let rng = &mut StdRng::seed_from_u64(33);
    let model = random_model(Architecture::Qwen2, json!({}), 33);
    let mut target = CandleTarget::new(model.clone(), 64, &[0, 2]).unwrap();
    let prompt = random_tokens(rng, 6, 61);
    prefill(&mut target, &prompt);
    let tree = DraftTree::from_parents(&[1, 2, 3, 4, 5], &[-1, 0, 0, 2, 1]).unwrap();
    verify(&mut target, &tree);
    let found = target.commit(&plan(6, &tree, 3)).unwrap();

    let mut plain = CandleTarget::new(model, 64, &[0, 2]).unwrap();
    let tokens: Vec<u32> = prompt.iter().copied().chain([1, 3, 4]).collect();
    let (_, all) = prefill(&mut plain, &tokens);
    let expected = rows(&all.unwrap().narrow(0, 6, 3).unwrap());
    assert_rows_close(&rows(found.hidden().unwrap()), &expected, 1e-5, "features");
}

#[test]
fn calls_out_of_place_are_refused_and_change_nothing() {
    let model = random_model(Architecture::Llama, json!({}), 34);
    let mut target = CandleTarget::new(model, 16, &[]).unwrap();
    prefill(&mut target, &[1, 2, 3]);
    let before = contents(target.cache());
    let tree = DraftTree::from_parents(&[1, 2, 3], &[-1, 0, 0]).unwrap();
    let mut ids = Vec::new();

    let unverified = target.commit(&plan(3, &tree, 1));
    assert!(matches!(unverified, Err(Error::Argument { name: "plan", .. })));
    let elsewhere = target.verify(&Round::new(2, &tree, None), &mut Picks::new(&mut ids));
    assert!(matches!(elsewhere, Err(Error::Argument { name: "start", .. })));
    let empty = target.prefill(&Prefill::new(3, &[]), &mut Picks::new(&mut ids));
    assert!(matches!(empty, Err(Error::Argument { name: "tokens", .. })));
    let long = target.prefill(&Prefill::new(3, &[1; 14]), &mut Picks::new(&mut ids));
    assert!(matches!(long, Err(Error::Argument { name: "rows", .. })));
    let unknown = target.prefill(&Prefill::new(3, &[61]), &mut Picks::new(&mut ids));
    assert!(matches!(unknown, Err(Error::Argument { name: "tokens", .. })));

    verify(&mut target, &DraftTree::new(1));
    let larger = target.commit(&plan(3, &tree, 2));
    assert!(matches!(larger, Err(Error::Argument { name: "plan", .. })));
    assert_eq!((target.cache().len(), contents(target.cache())), (3, before));
}

#[test]
fn reset_and_reuse_equal_a_fresh_target() {
    let model = random_model(Architecture::Llama, json!({}), 35);
    let mut used = CandleTarget::new(model.clone(), 64, &[]).unwrap();
    prefill(&mut used, &[1, 2, 3, 4, 5]);
    verify(&mut used, &DraftTree::from_parents(&[1, 2, 3], &[-1, 0, 0]).unwrap());
    assert!(used.reset(6).is_err());
    used.reset(2).unwrap();
    assert_eq!(used.cache().len(), 2);
    let mut fresh = CandleTarget::new(model.clone(), 64, &[]).unwrap();
    prefill(&mut fresh, &[1, 2]);
    assert_eq!(prefill(&mut used, &[9, 8]).0, prefill(&mut fresh, &[9, 8]).0);
    assert_close(&contents(used.cache()), &contents(fresh.cache()), 1e-5, "cache");
    used.reset(0).unwrap();
    assert!(used.cache().is_empty());
    assert_eq!(used.model().config(), model.config());
}

#[test]
fn equal_logits_pick_the_lowest_id() {
    // A zero head: every logit is equal.
    let config = config(Architecture::Llama, json!({}));
    let mut tensors = random_tensors(&config, 36);
    let head = tensors["lm_head.weight"].zeros_like().unwrap();
    tensors.insert("lm_head.weight".into(), head);
    let mut target = CandleTarget::new(build(&config, tensors), 16, &[]).unwrap();
    assert_eq!(prefill(&mut target, &[7, 8]).0, 0);
}

/// Case 12: activations that overflow end in an error, not in token 0.
#[test]
fn case_12_logits_that_are_not_finite_are_an_error() {
    let config = config(Architecture::Llama, json!({}));
    let mut tensors = random_tensors(&config, 37);
    // Finite in f32, infinite once the weights are f16.
    let head = (tensors["model.layers.1.mlp.up_proj.weight"].clone() * 1e7).unwrap();
    tensors.insert("model.layers.1.mlp.up_proj.weight".into(), head);
    let prompt = Prefill::new(0, &[7, 8]);
    let mut ids = Vec::new();
    let model = build_as(&config, tensors.clone(), DType::F16);
    let mut target = CandleTarget::new(model, 16, &[]).unwrap();
    let error = target.prefill(&prompt, &mut Picks::new(&mut ids)).unwrap_err();
    assert!(matches!(error, Error::NonFiniteLogits { row: 0 }), "{error}");
    assert!(target.cache().is_empty());
    let mut target = CandleTarget::new(build(&config, tensors), 16, &[]).unwrap();
    target.prefill(&prompt, &mut Picks::new(&mut ids)).unwrap();
}

#[test]
fn the_tiny_target_continues_as_the_reference_did() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/decode-tiny-qwen3.json");
    let text = std::fs::read_to_string(golden).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let model = DecoderModel::load(TINY, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(model.config().eos_token_ids, [0]);
    assert!(check_autoregressive(&model, &golden) >= 12);
}

/// Replays the autoregressive lists of a golden file and returns the number of cases.
pub fn check_autoregressive(model: &DecoderModel, golden: &serde_json::Value) -> usize {
    let ids =
        |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let cases = golden["cases"].as_array().unwrap();
    for case in cases {
        let expected = ids(&case["autoregressive"]);
        let mut target = CandleTarget::new(model.clone(), 2048, &[]).unwrap();
        let mut next = prefill(&mut target, &ids(&case["prompt_ids"])).0;
        let mut found = vec![next];
        while found.len() < expected.len() {
            next = verify(&mut target, &DraftTree::new(next))[0];
            let root = DraftTree::new(found[found.len() - 1]);
            target.commit(&plan(target.cache().len(), &root, 0)).unwrap();
            found.push(next);
        }
        assert_eq!(found, expected, "{}", case["prompt"]);
    }
    cases.len()
}
