//! Trees in one pass against their paths run alone.

use ddtree::DraftTree;
use ddtree::candle::{Architecture, DecoderModel, Forward, Want};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::naive;
use super::support::*;

fn check_paths(model: &DecoderModel, prefix: &[u32], tree: &DraftTree, what: &str) {
    let mut cache = model.new_cache(128).unwrap();
    feed(model, &mut cache, prefix);
    let found = tree_logits(model, &mut cache, tree);
    for (slot, found) in found.iter().enumerate() {
        let tokens = tokens_of(tree, &path(tree, slot));
        let alone = logits(model, &mut cache, &tokens);
        assert_close(found, &alone[tokens.len() - 1], 1e-4, &format!("{what}, slot {slot}"));
    }
}

fn variants() -> [(Architecture, Value); 4] {
    let sliding = json!({"use_sliding_window": true, "sliding_window": 6, "max_window_layers": 1});
    [
        (Architecture::Llama, json!({"num_key_value_heads": 1})),
        (Architecture::Qwen2, json!({})),
        (Architecture::Qwen3, json!({"head_dim": 12})),
        (Architecture::Qwen3, sliding),
    ]
}

#[test]
fn every_slot_equals_its_path_run_alone() {
    let rng = &mut StdRng::seed_from_u64(11);
    for (architecture, changes) in variants() {
        let model = random_model(architecture, changes.clone(), 11);
        for slots in [1, 2, 7, 20, 70] {
            let prefix_len = rng.random_range(0..30);
            let prefix = random_tokens(rng, prefix_len, model.config().vocab_size);
            let tree = random_tree(rng, slots, model.config().vocab_size as u32);
            check_paths(&model, &prefix, &tree, &format!("{changes}, {slots} slots"));
        }
    }
}

#[test]
fn every_slot_of_the_tiny_target_equals_its_path_run_alone() {
    let device = candle_core::Device::Cpu;
    let model = DecoderModel::load(TINY, candle_core::DType::F32, &device).unwrap();
    let rng = &mut StdRng::seed_from_u64(12);
    let prefix = random_tokens(rng, 50, model.config().vocab_size);
    let tree = random_tree(rng, 40, model.config().vocab_size as u32);
    check_paths(&model, &prefix, &tree, "tiny target");
}

/// The window of a sliding layer counts positions: a tree wider than the window still shows every
/// slot the ancestors within it.
#[test]
fn windowed_trees_equal_the_plain_loops() {
    let changes = json!({"use_sliding_window": true, "sliding_window": 4, "max_window_layers": 0});
    let config = config(Architecture::Qwen2, changes);
    let tensors = random_tensors(&config, 13);
    let rng = &mut StdRng::seed_from_u64(13);
    let prefix = random_tokens(rng, 9, config.vocab_size);
    let tree = random_tree(rng, 24, config.vocab_size as u32);

    let tokens: Vec<u32> = prefix.iter().chain(tree.tokens()).copied().collect();
    let depths = tree.depths().iter().map(|depth| 9 + depth);
    let positions: Vec<u32> = (0..9).chain(depths).collect();
    let sees = |row: usize, other: usize| match (row.checked_sub(9), other.checked_sub(9)) {
        (None, None) => other <= row,
        (None, Some(_)) => false,
        (Some(_), None) => true,
        (Some(row), Some(other)) => path(&tree, row).contains(&(other as u32)),
    };
    let rotation = naive::plain_rotation(config.rope.theta, config.head_dim);
    let expected = naive::logits(&config, &tensors, &tokens, &positions, sees, rotation);

    let model = build(&config, tensors);
    let mut cache = model.new_cache(64).unwrap();
    feed(&model, &mut cache, &prefix);
    let found = tree_logits(&model, &mut cache, &tree);
    assert_rows_close(&found, &expected[9..], 1e-4, "windowed tree");
}

/// Case 13: positions follow depth, so the order of siblings changes nothing.
#[test]
fn case_13_permuting_siblings_leaves_logits_unchanged() {
    let rng = &mut StdRng::seed_from_u64(14);
    let model = random_model(Architecture::Qwen3, json!({}), 14);
    let prefix = random_tokens(rng, 12, 61);
    for _ in 0..5 {
        let tree = random_tree(rng, 25, 61);
        // Any order that keeps parents before children: repeatedly take a random ready slot.
        let mut order = vec![0usize];
        while order.len() < tree.len() {
            let ready: Vec<usize> = (1..tree.len())
                .filter(|slot| {
                    !order.contains(slot) && order.contains(&(tree.parents()[*slot] as usize))
                })
                .collect();
            order.push(ready[rng.random_range(0..ready.len())]);
        }
        let place = |old: usize| order.iter().position(|&slot| slot == old).unwrap();
        let tokens: Vec<u32> = order.iter().map(|&old| tree.tokens()[old]).collect();
        let parents: Vec<i32> = order
            .iter()
            .map(|&old| usize::try_from(tree.parents()[old]).map_or(-1, |p| place(p) as i32))
            .collect();
        let permuted = DraftTree::from_parents(&tokens, &parents).unwrap();

        let mut cache = model.new_cache(64).unwrap();
        feed(&model, &mut cache, &prefix);
        let expected = tree_logits(&model, &mut cache, &tree);
        let found = tree_logits(&model, &mut cache, &permuted);
        for (new, &old) in order.iter().enumerate() {
            assert_close(&found[new], &expected[old], 1e-5, &format!("slot {old} as {new}"));
        }
    }
}

#[test]
fn a_chain_shaped_tree_equals_the_chain_bit_for_bit() {
    let rng = &mut StdRng::seed_from_u64(15);
    let changes = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1});
    let model = random_model(Architecture::Qwen3, changes, 15);
    let (prefix, tokens) = (random_tokens(rng, 10, 61), random_tokens(rng, 9, 61));
    let parents: Vec<i32> = (-1..8).collect();
    let tree = DraftTree::from_parents(&tokens, &parents).unwrap();
    let run = |as_tree: bool| {
        let mut cache = model.new_cache(64).unwrap();
        feed(&model, &mut cache, &prefix);
        let found = if as_tree {
            tree_logits(&model, &mut cache, &tree)
        } else {
            logits(&model, &mut cache, &tokens)
        };
        cache.extend(9).unwrap();
        (found, contents(&cache))
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_mask_of_another_tree_size_is_refused() {
    let model = random_model(Architecture::Llama, json!({}), 1);
    let mut mask = ddtree::AncestorMask::new();
    mask.build(&DraftTree::from_parents(&[1, 2], &[-1, 0]).unwrap());
    let mut cache = model.new_cache(16).unwrap();
    let pass = Forward {
        tokens: &[1, 2, 3],
        positions: &[0, 1, 2],
        start: 0,
        mask: Some(&mask),
        tree: None,
        want: Want::All,
        taps: &[],
    };
    let error = model.forward(&mut cache, &pass).unwrap_err();
    assert_eq!(error.to_string(), "`mask`: got 2 slots, accepted: 3, one per token");
}
