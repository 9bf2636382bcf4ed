//! The forward pass against the naive one, and what may and may not change it.

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

use crate::{
    fixture::{Array, Fixture, difference, rows},
    naive,
};

/// Largest accepted difference of logits, which are of size 1 to 10.
const TOLERANCE: f32 = 1e-4;

fn slice(taps: &Array, first: usize, count: usize) -> Tensor {
    taps.tensor().narrow(0, first, count).unwrap()
}

/// Drafter and naive pass agree after `context` tokens that begin at `start`.
fn check(seed: u64, changes: Value, start: usize, context: usize) {
    let mut model = Fixture::new(seed, changes.clone());
    let taps = model.taps(context);
    let mut drafter = model.drafter();
    drafter.observe(start, &taps.tensor()).unwrap();
    let horizon = model.block_size() - 1;
    let position = start + context;
    let found = rows(&drafter.logits(7, position, horizon).unwrap());
    let expected = naive::logits(&model, &taps, 7, position);
    let difference = difference(&found, &expected);
    assert!(difference < TOLERANCE, "{difference} at {changes}, context {start} + {context}");
}

#[test]
fn equals_the_naive_pass_on_random_shapes() {
    for seed in 0..24 {
        let (kv_heads, group) = ([1, 2, 3][seed as usize % 3], [1, 2, 4][seed as usize / 3 % 3]);
        let layers = 1 + seed as usize % 4;
        let taps = 1 + seed as usize / 2 % 5;
        let head_dim = [4, 8, 10][seed as usize / 2 % 3];
        let changes = json!({
            "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_size": 12 + 4 * (seed % 4),
            "num_hidden_layers": layers,
            "block_size": 2 + seed % 7,
            "attention_bias": seed % 2 == 1,
            "rope_theta": 100.0 * (1 + seed) as f64,
            "dflash_config": { "target_layer_ids": (0..taps).rev().collect::<Vec<_>>() },
        });
        check(seed, changes, 0, 1 + seed as usize * 2);
    }
}

fn sliding(window: usize, causal: Option<bool>, types: [&str; 3]) -> Value {
    let mut changes = json!({
        "num_hidden_layers": 3,
        "layer_types": types.map(|kind| format!("{kind}_attention")),
        "sliding_window": window,
        "use_sliding_window": true,
    });
    if let Some(causal) = causal {
        changes["is_causal"] = causal.into();
    }
    changes
}

/// Case 9: a sliding layer run as full attention drafts worse as the context grows, without an
/// error.
#[test]
fn windows_are_respected_causal_and_symmetric() {
    for window in [1, 2, 3, 5, 6, 17, 40] {
        for causal in [None, Some(false), Some(true)] {
            for types in [["sliding", "sliding", "full"], ["full", "sliding", "full"]] {
                for (start, context) in [(0, 1), (0, 4), (0, 30), (11, 30)] {
                    check(window as u64, sliding(window, causal, types), start, context);
                }
            }
        }
    }
}

#[test]
fn a_window_changes_the_result_once_the_context_exceeds_it() {
    for causal in [None, Some(false)] {
        let window = 12;
        let mut narrow = Fixture::new(1, sliding(window, causal, ["sliding"; 3]));
        let mut full = Fixture::new(1, sliding(1000, causal, ["sliding"; 3]));
        let taps = narrow.taps(40);
        let both = |narrow: &mut Fixture, full: &mut Fixture, context: usize| {
            let [a, b] = [narrow, full].map(|model| {
                let mut drafter = model.drafter();
                drafter.observe(0, &slice(&taps, 0, context)).unwrap();
                rows(&drafter.logits(7, context, 4).unwrap())
            });
            difference(&a, &b)
        };
        // The last of 5 slots is `context + 4` positions away from the first token.
        assert_eq!(both(&mut narrow, &mut full, window - 5), 0.0);
        assert!(both(&mut narrow, &mut full, window - 4) > 1e-3);
        assert!(both(&mut narrow, &mut full, 40) > 1e-2);
    }
}

/// Case 10: every rotary variant of the format, on queries and on context keys.
#[test]
fn rotates_partially_and_by_yarn() {
    let yarn = json!({
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "head_dim": 16,
    });
    check(3, yarn, 0, 90);
    check(4, json!({ "partial_rotary_factor": 0.5 }), 5, 40);
    check(5, json!({ "partial_rotary_factor": 0.25, "head_dim": 16 }), 0, 40);
}

/// Case 27: tokens of a reused prefix have no taps; the context begins after them, at its true
/// position.
#[test]
fn the_context_may_begin_late() {
    check(6, json!({}), 700, 9);
    let mut model = Fixture::new(6, json!({}));
    let taps = model.taps(9);
    let [early, late] = [0, 700].map(|start| {
        let mut drafter = model.drafter();
        drafter.observe(start, &taps.tensor()).unwrap();
        rows(&drafter.logits(7, start + 9, 4).unwrap())
    });
    // Rotary positions are relative, so a common shift changes nothing but rounding.
    assert!(difference(&early, &late) < 1e-3);
}

#[test]
fn drafts_without_any_context() {
    let model = Fixture::new(8, json!({}));
    let mut drafter = model.drafter();
    let empty = Array { shape: vec![0, 48], values: vec![] };
    for position in [0, 33] {
        let found = rows(&drafter.logits(7, position, 4).unwrap());
        assert!(difference(&found, &naive::logits(&model, &empty, 7, position)) < TOLERANCE);
    }
}

#[test]
fn observing_in_pieces_equals_observing_at_once() {
    let changes = sliding(20, None, ["sliding", "full", "sliding"]);
    let mut model = Fixture::new(9, changes);
    // More than the rows that the buffers hold at first.
    let total = 600;
    let taps = model.taps(total);
    let mut whole = model.drafter();
    whole.observe(0, &taps.tensor()).unwrap();
    let expected = rows(&whole.logits(7, total, 4).unwrap());
    for pieces in [&[1][..], &[7, 1, 3], &[256, 256, 88], &[257, 343]] {
        let mut drafter = model.drafter();
        let mut done = 0;
        for &piece in pieces.iter().cycle() {
            let count = piece.min(total - done);
            if count == 0 {
                break;
            }
            drafter.observe(done, &slice(&taps, done, count)).unwrap();
            done += count;
            assert_eq!((drafter.context_len(), drafter.next_position()), (done, Some(done)));
        }
        let found = rows(&drafter.logits(7, total, 4).unwrap());
        assert!(difference(&found, &expected) < 1e-5, "{pieces:?}");
    }
}

/// Blocks between observations, whatever their roots, leave the context as it is.
#[test]
fn rejected_blocks_leave_nothing_behind() {
    let mut model = Fixture::new(10, sliding(6, Some(false), ["sliding", "full", "full"]));
    let taps = model.taps(270);
    let mut quiet = model.drafter();
    let mut busy = model.drafter();
    for (start, count) in [(0, 250), (250, 1), (251, 4), (255, 2), (257, 13)] {
        for drafter in [&mut quiet, &mut busy] {
            drafter.observe(start, &slice(&taps, start, count)).unwrap();
        }
        let end = start + count;
        for root in [0, 5, 39, 3] {
            busy.logits(root, end, 1 + root as usize % 4).unwrap();
        }
        assert_eq!(busy.context_len(), end);
    }
    let [quiet, busy] = [quiet, busy].map(|mut drafter| rows(&drafter.logits(7, 270, 4).unwrap()));
    assert_eq!(quiet, busy);
}

/// Case 1: a block of masks alone drafts badly without an error.
#[test]
fn slot_0_is_the_root() {
    let mut model = Fixture::new(11, json!({}));
    let taps = model.taps(6);
    let mut drafter = model.drafter();
    drafter.observe(0, &taps.tensor()).unwrap();
    let [seven, eight, mask] = [7, 8, 3].map(|root| rows(&drafter.logits(root, 6, 4).unwrap()));
    assert!(difference(&seven, &eight) > 1e-2);
    assert!(difference(&seven, &mask) > 1e-2);
    assert!(difference(&mask, &naive::logits(&model, &taps, 3, 6)) < TOLERANCE);
}

/// Case 4: rows are those of slots 1.., in place. Without attention and MLP a slot's logits say
/// which token it holds.
#[test]
fn the_first_row_is_slot_1() {
    let mut model = Fixture::new(12, json!({}));
    for (name, array) in &mut model.tensors {
        if name.contains("o_proj") || name.contains("down_proj") {
            array.values.fill(0.0);
        }
    }
    model.lm_head = model.embed_tokens.clone();
    for token in [&mut model.embed_tokens, &mut model.lm_head] {
        token.values.fill(0.0);
        for row in 0..16 {
            token.values[row * 16 + row] = 1.0;
        }
    }
    let mut drafter = model.drafter();
    for row in rows(&drafter.logits(7, 0, 4).unwrap()) {
        let best = (0..40).max_by(|&a: &usize, &b| row[a].total_cmp(&row[b])).unwrap();
        assert_eq!(best, 3, "the mask token, not the root 7");
    }
}

#[test]
fn a_shorter_horizon_gives_the_first_rows() {
    let mut model = Fixture::new(13, json!({ "block_size": 8 }));
    let taps = model.taps(20);
    let mut drafter = model.drafter();
    drafter.observe(0, &taps.tensor()).unwrap();
    let all = rows(&drafter.logits(7, 20, 7).unwrap());
    for horizon in 1..7 {
        let some = rows(&drafter.logits(7, 20, horizon).unwrap());
        assert!(difference(&some, &all[..horizon]) < 1e-5);
    }
}

/// Case 28.
#[test]
fn a_reset_drafter_is_a_new_one() {
    let mut model = Fixture::new(14, json!({}));
    let (first, second) = (model.taps(40), model.taps(15));
    let mut used = model.drafter();
    used.observe(9, &first.tensor()).unwrap();
    used.logits(1, 49, 4).unwrap();
    used.truncate(9).unwrap();
    assert_eq!((used.context_len(), used.next_position()), (0, None));
    let mut new = model.drafter();
    let [used, new] = [&mut used, &mut new].map(|drafter| {
        drafter.observe(0, &second.tensor()).unwrap();
        rows(&drafter.logits(7, 15, 4).unwrap())
    });
    assert_eq!(used, new);
}

#[test]
fn a_truncated_context_continues_where_it_was_cut() {
    let mut model = Fixture::new(15, json!({}));
    let (taps, other) = (model.taps(20), model.taps(10));
    let mut cut = model.drafter();
    cut.observe(100, &taps.tensor()).unwrap();
    cut.truncate(107).unwrap();
    cut.observe(107, &other.tensor()).unwrap();
    let mut straight = model.drafter();
    straight.observe(100, &slice(&taps, 0, 7)).unwrap();
    straight.observe(107, &other.tensor()).unwrap();
    let [cut_logits, straight_logits] =
        [&mut cut, &mut straight].map(|drafter| rows(&drafter.logits(7, 117, 4).unwrap()));
    assert!(difference(&cut_logits, &straight_logits) < 1e-5);
    for position in [99, 118] {
        let message = cut.truncate(position).unwrap_err().to_string();
        assert!(
            message.contains(&position.to_string()) && message.contains("100..=117"),
            "{message}"
        );
    }
}

/// Case 27: a hole in the context is an error that says where it is, and changes nothing.
#[test]
fn a_hole_in_the_context_is_an_error() {
    let mut model = Fixture::new(16, json!({}));
    let taps = model.taps(8);
    let mut drafter = model.drafter();
    drafter.observe(50, &slice(&taps, 0, 5)).unwrap();
    let before = rows(&drafter.logits(7, 55, 4).unwrap());
    for start in [0, 54, 56] {
        let message = drafter.observe(start, &slice(&taps, 5, 3)).unwrap_err().to_string();
        assert!(message.contains(&format!("got {start}")) && message.contains("55"), "{message}");
        let message = drafter.logits(7, start, 4).unwrap_err().to_string();
        assert!(message.contains(&format!("got {start}")) && message.contains("55"), "{message}");
    }
    assert_eq!(drafter.context_len(), 5);
    assert_eq!(rows(&drafter.logits(7, 55, 4).unwrap()), before);
}

#[test]
fn a_failed_call_changes_nothing() {
    let mut model = Fixture::new(17, json!({}));
    model.max_positions = 20;
    let taps = model.taps(40);
    let mut drafter = model.drafter();
    drafter.observe(0, &slice(&taps, 0, 5)).unwrap();
    let before = rows(&drafter.logits(7, 5, 4).unwrap());

    let narrow = taps.tensor().narrow(1, 0, 47).unwrap();
    let flat = taps.tensor().flatten_all().unwrap();
    for wrong in [narrow, flat, slice(&taps, 0, 0)] {
        let message = drafter.observe(5, &wrong).unwrap_err().to_string();
        assert!(
            message.contains("48") && message.contains(&format!("{:?}", wrong.dims())),
            "{message}"
        );
    }
    // 20 positions, and a block beyond the last one.
    let message = drafter.observe(5, &slice(&taps, 0, 21)).unwrap_err().to_string();
    assert!(message.contains("start") && message.contains("25"), "{message}");
    for horizon in [0, 5] {
        let message = drafter.logits(7, 5, horizon).unwrap_err().to_string();
        assert!(
            message.contains(&format!("got {horizon}")) && message.contains("1 to 4"),
            "{message}"
        );
    }
    let message = drafter.logits(40, 5, 4).unwrap_err().to_string();
    assert!(message.contains("40"), "{message}");

    assert_eq!(rows(&drafter.logits(7, 5, 4).unwrap()), before);
}

#[test]
fn drafts_at_the_last_position_of_the_target() {
    let mut model = Fixture::new(18, json!({}));
    model.max_positions = 12;
    let taps = model.taps(11);
    let mut drafter = model.drafter();
    drafter.observe(0, &taps.tensor()).unwrap();
    let found = rows(&drafter.logits(7, 11, 4).unwrap());
    assert!(difference(&found, &naive::logits(&model, &taps, 7, 11)) < TOLERANCE);
}

/// Cases 8 and 12: the same pass in half precision, in which residuals beyond f16's range do not
/// overflow.
#[test]
fn half_precision_stays_close_and_finite() {
    let mut model = Fixture::new(19, json!({}));
    let taps = model.taps(30);
    for (dtype, tolerance) in [(DType::F16, 0.05), (DType::BF16, 0.3)] {
        let mut drafter = model.load(dtype).unwrap();
        drafter.observe(0, &taps.tensor().to_dtype(dtype).unwrap()).unwrap();
        let found = rows(&drafter.logits(7, 30, 4).unwrap());
        let difference = difference(&found, &naive::logits(&model, &taps, 7, 30));
        assert!(difference < tolerance, "{dtype:?}: {difference}");
    }

    // An outlier channel: one output of every projection into the residual stream is large.
    for (name, array) in &mut model.tensors {
        if name.contains("down_proj") || name.contains("o_proj") {
            let width = array.shape[1];
            array.values[..width].iter_mut().for_each(|value| *value *= 50_000.0);
        }
    }
    let mut drafter = model.load(DType::F16).unwrap();
    let taps = Tensor::zeros((3, 48), DType::F16, &Device::Cpu).unwrap();
    drafter.observe(0, &taps).unwrap();
    let found = rows(&drafter.logits(7, 3, 4).unwrap());
    assert!(found.iter().flatten().all(|value| value.is_finite()));
}
