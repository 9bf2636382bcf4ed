//! Commits, truncation and growth of the cache against plain decoding.

use ddtree::candle::{Architecture, Error, KvCache};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use super::support::*;

#[test]
fn compaction_leaves_what_plain_decoding_of_the_path_leaves() {
    let rng = &mut StdRng::seed_from_u64(21);
    let sliding = json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 1});
    for changes in [json!({}), json!({"num_key_value_heads": 1}), sliding] {
        let model = random_model(Architecture::Qwen3, changes, 21);
        let mut cache = model.new_cache(128).unwrap();
        let mut text = Vec::new();
        // Several rounds on one cache: stale rows of earlier rounds must not show.
        for _ in 0..6 {
            let slots = rng.random_range(1..20);
            let tree = random_tree(rng, slots, 61);
            tree_logits(&model, &mut cache, &tree);
            let accepted = path(&tree, rng.random_range(0..slots));
            cache.commit(text.len(), &accepted).unwrap();
            text.extend(tokens_of(&tree, &accepted));

            let mut plain = model.new_cache(128).unwrap();
            text.iter().for_each(|token| feed(&model, &mut plain, &[*token]));
            assert_eq!(cache.len(), text.len());
            assert_close(&contents(&cache), &contents(&plain), 1e-5, "cache");
            let (a, b) = (logits(&model, &mut cache, &[3]), logits(&model, &mut plain, &[3]));
            assert_rows_close(&a, &b, 1e-4, "next row");
        }
    }
}

#[test]
fn compaction_moves_rows_bit_for_bit() {
    let rng = &mut StdRng::seed_from_u64(22);
    let model = random_model(Architecture::Llama, json!({}), 22);
    let prefix = random_tokens(rng, 5, 61);
    let tree = random_tree(rng, 16, 61);
    let run = || {
        let mut cache = model.new_cache(64).unwrap();
        feed(&model, &mut cache, &prefix);
        tree_logits(&model, &mut cache, &tree);
        cache
    };
    for slots in [vec![0], vec![0, 1, 2], vec![0, 2, 3], vec![0, 1, 15], vec![4, 7, 8], vec![]] {
        let (mut all, mut kept) = (run(), run());
        all.extend(16).unwrap();
        kept.commit(5, &slots).unwrap();
        assert_eq!(kept.len(), 5 + slots.len());
        let rows: Vec<u32> = (0..5).chain(slots.iter().map(|slot| 5 + slot)).collect();
        let rows = candle_core::Tensor::new(rows, &candle_core::Device::Cpu).unwrap();
        for layer in 0..all.num_layers() {
            for (found, source) in [
                (kept.keys(layer).unwrap(), all.keys(layer).unwrap()),
                (kept.values(layer).unwrap(), all.values(layer).unwrap()),
            ] {
                let expected = source.index_select(&rows, 1).unwrap();
                assert_eq!(
                    found.to_vec3::<f32>().unwrap(),
                    expected.to_vec3::<f32>().unwrap(),
                    "{slots:?}"
                );
            }
        }
    }
}

#[test]
fn wrong_commits_change_nothing() {
    let model = random_model(Architecture::Llama, json!({}), 23);
    let mut cache = model.new_cache(16).unwrap();
    feed(&model, &mut cache, &[1, 2, 3]);
    logits(&model, &mut cache, &[4, 5, 6]);
    let before = contents(&cache);
    for (base, slots) in [(2, vec![0]), (3, vec![1, 1]), (3, vec![2, 1]), (3, vec![0, 3])] {
        assert!(matches!(cache.commit(base, &slots), Err(Error::Argument { .. })), "{slots:?}");
    }
    assert!(cache.extend(4).is_err() && cache.truncate(4).is_err());
    assert!(cache.keys(3).is_err() && cache.values(3).is_err());
    assert_eq!((cache.len(), contents(&cache)), (3, before));
}

/// Zeroes, or what was there before, would become the text's rows.
#[test]
fn rows_that_no_pass_wrote_are_not_committed() {
    let model = random_model(Architecture::Llama, json!({}), 25);
    let mut cache = model.new_cache(16).unwrap();
    assert!(cache.extend(1).is_err() && cache.commit(0, &[0]).is_err());
    let pass = |cache: &mut KvCache, start| pass_from(&model, cache, start, &[4, 5, 6]);
    assert!(pass(&mut cache, 1).is_err());
    pass(&mut cache, 0).unwrap();
    pass(&mut cache, 3).unwrap();
    assert!(pass(&mut cache, 7).is_err());
    // A pass that begins further ahead voids what is behind it.
    pass(&mut cache, 2).unwrap();
    assert!(cache.extend(6).is_err());
    cache.extend(5).unwrap();
    cache.truncate(2).unwrap();
    assert!(cache.extend(1).is_err() && cache.commit(2, &[0]).is_err());
    assert_eq!(cache.len(), 2);
}

#[test]
fn truncation_equals_never_having_gone_on() {
    let rng = &mut StdRng::seed_from_u64(24);
    let model = random_model(Architecture::Qwen2, json!({}), 24);
    let tokens = random_tokens(rng, 30, 61);
    let mut long = model.new_cache(64).unwrap();
    feed(&model, &mut long, &tokens[..12]);
    feed(&model, &mut long, &tokens[12..]);
    long.truncate(12).unwrap();
    let mut short = model.new_cache(64).unwrap();
    feed(&model, &mut short, &tokens[..12]);
    assert_eq!(contents(&long), contents(&short));
    let other = random_tokens(rng, 4, 61);
    assert_eq!(logits(&model, &mut long, &other), logits(&model, &mut short, &other));
}

#[test]
fn growth_keeps_rows_and_ends_at_the_limit() {
    let rng = &mut StdRng::seed_from_u64(25);
    let model = random_model(Architecture::Llama, json!({"max_position_embeddings": 700}), 25);
    let tokens = random_tokens(rng, 700, 61);
    let mut cache = model.new_cache(700).unwrap();
    assert!(cache.is_empty());
    let small = cache.memory_usage();
    let mut sizes = vec![small];
    let mut expected = Vec::new();
    for chunk in tokens.chunks(100) {
        feed(&model, &mut cache, chunk);
        sizes.push(cache.memory_usage());
        let keys = cache.keys(2).unwrap();
        let first = keys.narrow(1, 0, 100).unwrap().to_vec3::<f32>().unwrap();
        if expected.is_empty() {
            expected = first;
        } else {
            assert_eq!(first, expected);
        }
    }
    sizes.dedup();
    // 256 rows, doubled once, then cut to the limit.
    assert_eq!(sizes, [small, small * 2, small * 700 / 256]);
    assert_eq!((cache.len(), cache.max_len()), (700, 700));
    let full = ddtree::candle::Forward {
        tokens: &[1],
        positions: &[699],
        start: 700,
        mask: None,
        tree: None,
        want: ddtree::candle::Want::Last,
        taps: &[],
    };
    let error = model.forward(&mut cache, &full).unwrap_err();
    assert_eq!(error.to_string(), "`rows`: got 701, accepted: at most 700 (the cache limit)");
}
