//! Many rounds of one sequence, through the `Verifier` trait.

use candle_core::DType;
use ddtree::candle::{CandleTarget, DecoderModel, StateMethod};
use ddtree::{
    Acceptance, AncestorMask, Capabilities, CommitPlan, DraftTree, Picks, Prefill, Recurrence,
    Round, Verifier,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::common::{
    METHODS, Shape, cache_difference, committed, random_model, random_model_as, state_difference,
    states, tiny,
};

const VOCAB: u32 = 40;
const SMALL: Shape = Shape {
    layers: 3,
    hidden: 16,
    key_heads: 2,
    group: 2,
    key_dim: 6,
    value_dim: 5,
    conv_kernel: 4,
    vocab: VOCAB as usize,
};

fn target(model: &DecoderModel, max_len: usize, method: StateMethod) -> CandleTarget {
    CandleTarget::new(model.clone(), max_len, &[]).unwrap().state_method(method)
}

fn prefill(target: &mut CandleTarget, start: usize, tokens: &[u32]) {
    target.prefill(&Prefill::new(start, tokens), &mut Picks::new(&mut Vec::new())).unwrap();
}

fn verify(target: &mut CandleTarget, tree: &DraftTree) {
    let mut mask = AncestorMask::new();
    mask.build(tree);
    let mask = (!tree.is_chain()).then_some(&mask);
    let round = Round::new(target.cache().len(), tree, mask);
    target.verify(&round, &mut Picks::new(&mut Vec::new())).unwrap();
}

/// The plan that commits the path to `slot`, whatever the model would have picked.
fn plan(start: usize, tree: &DraftTree, slot: usize) -> CommitPlan {
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    outcome.set(tree, slot, 0).unwrap();
    plan.set(start, &outcome);
    plan
}

fn chain(tokens: &[u32]) -> DraftTree {
    let parents: Vec<i32> = (-1..tokens.len() as i32 - 1).collect();
    DraftTree::from_parents(tokens, &parents).unwrap()
}

/// A tree whose slots alternate between two branches, so that paths are never contiguous.
fn siblings(rng: &mut StdRng) -> DraftTree {
    let mut tree = DraftTree::new(rng.random_range(0..VOCAB));
    let mut ends = [0, 0];
    for _ in 0..rng.random_range(2..5) {
        for end in &mut ends {
            if let Ok(slot) = tree.push(*end, rng.random_range(0..VOCAB), 0.0) {
                *end = slot;
            }
        }
    }
    tree
}

/// Random rounds of every kind; `check` after each with what is committed.
fn mixed_rounds(
    target: &mut CandleTarget,
    seed: u64,
    rounds: usize,
    mut check: impl FnMut(usize, &CandleTarget, &[u32]),
) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut text: Vec<u32> = (0..5).map(|_| rng.random_range(0..VOCAB)).collect();
    target.reset(0).unwrap();
    prefill(target, 0, &text);
    for round in 0..rounds {
        let mut tokens = |n| -> Vec<u32> { (0..n).map(|_| rng.random_range(0..VOCAB)).collect() };
        let (tree, slot) = match round % 7 {
            // A chain accepted as a whole, not at all, in part.
            0 => (chain(&tokens(5)), 4),
            1 => (chain(&tokens(5)), 0),
            2 => (chain(&tokens(5)), 2),
            // No draft.
            3 => (chain(&tokens(1)), 0),
            // Tokens of the host.
            4 => {
                let added = tokens(2);
                prefill(target, text.len(), &added);
                text.extend(added);
                continue;
            }
            // A path between whose slots others lie; a tree nobody accepts anything of.
            5 => {
                let tree = siblings(&mut rng);
                let last = tree.len() - 1;
                (tree, last)
            }
            _ => (siblings(&mut rng), 0),
        };
        verify(target, &tree);
        let plan = plan(text.len(), &tree, slot);
        target.commit(&plan).unwrap();
        text.extend(plan.path().iter().map(|&slot| tree.tokens()[slot as usize]));
        check(round, target, &text);
    }
}

#[test]
fn states_never_differ_from_a_recomputation() {
    for (seed, method) in [(1, StateMethod::PerSlot), (2, StateMethod::Factors)] {
        let model = random_model(SMALL, seed);
        let mut fresh = target(&model, 512, method);
        mixed_rounds(&mut target(&model, 512, method), seed, 63, |round, target, text| {
            fresh.reset(0).unwrap();
            prefill(&mut fresh, 0, text);
            let difference = cache_difference(target.cache(), fresh.cache());
            assert!(difference < 1e-4, "{method:?}, round {round}: {difference}");
        });
    }
}

#[test]
fn states_do_not_drift_over_2000_rounds() {
    for (seed, method) in [(3, StateMethod::PerSlot), (4, StateMethod::Factors)] {
        let model = random_model(Shape { hidden: 8, ..SMALL }, seed);
        let mut fresh = target(&model, 8192, method);
        let mut checked = 0;
        mixed_rounds(&mut target(&model, 8192, method), seed, 2000, |round, target, text| {
            if round % 400 == 398 || round == 1999 {
                fresh.reset(0).unwrap();
                prefill(&mut fresh, 0, text);
                // Over so many rows the keys and values have outliers of their own.
                let difference = state_difference(target.cache(), fresh.cache());
                assert!(difference < 1e-5, "{method:?}, round {round}: {difference}");
                checked += 1;
            }
        });
        assert!(checked >= 5);
    }
}

#[test]
fn a_reset_target_is_as_good_as_new() {
    let model = random_model(SMALL, 5);
    for method in METHODS {
        let run = |target: &mut CandleTarget| {
            let mut all = Vec::new();
            mixed_rounds(target, 6, 14, |_, target, _| all = committed(target.cache()));
            all
        };
        let mut used = target(&model, 256, method);
        mixed_rounds(&mut used, 7, 20, |_, _, _| {});
        // A round in progress does not survive either.
        verify(&mut used, &chain(&[1, 2, 3]));
        assert_eq!(run(&mut used), run(&mut target(&model, 256, method)));
    }
}

#[test]
fn only_lengths_whose_state_is_known_can_be_kept() {
    let model = random_model(SMALL, 8);
    let mut target = target(&model, 64, StateMethod::default());
    prefill(&mut target, 0, &[1, 2, 3, 4]);
    let before = committed(target.cache());
    let error = target.reset(2).unwrap_err().to_string();
    assert!(error.contains("0 or 4"), "{error}");
    target.reset(4).unwrap();
    assert_eq!(committed(target.cache()), before);
    target.reset(0).unwrap();
    assert!(target.cache().is_empty());
    assert!(values_are_zero(&target));
}

fn values_are_zero(target: &CandleTarget) -> bool {
    committed(target.cache()).iter().flatten().all(|&x| x == 0.0)
}

#[test]
fn a_target_with_recurrent_layers_says_that_it_verifies_trees() {
    let target = target(&random_model(SMALL, 9), 64, StateMethod::default());
    let capabilities: Capabilities = target.capabilities();
    assert_eq!(capabilities.recurrence, Recurrence::ExactTrees);
}

/// Rejected tokens leave no trace: whatever they were, the committed state is the same to the bit.
#[test]
fn rollback_of_a_chain_is_exact_to_the_bit() {
    for model in [random_model(SMALL, 10), tiny()] {
        for method in METHODS {
            let draft = [7, 8, 9, 10, 11, 12];
            for accepted in 0..draft.len() {
                let after = |rest: u32| {
                    let mut tokens = draft;
                    tokens[accepted + 1..].iter_mut().for_each(|token| *token = rest);
                    let mut target = target(&model, 64, method);
                    prefill(&mut target, 0, &[3, 1, 4, 1, 5]);
                    let tree = chain(&tokens);
                    verify(&mut target, &tree);
                    target.commit(&plan(5, &tree, accepted)).unwrap();
                    // The next round reads the state.
                    let next = chain(&[20, 21]);
                    verify(&mut target, &next);
                    target.commit(&plan(5 + accepted + 1, &next, 0)).unwrap();
                    committed(target.cache())
                };
                assert_eq!(after(33), after(2), "{method:?}, {accepted} accepted");
            }
        }
    }
}

/// A root alone leaves the state that a token of plain decoding leaves, to the bit, in types that round
/// as well: what one way rounds and the other does not would show here.
///
/// With factors that is so of the first layer. Outputs then have their terms added in another order, so
/// that the layers behind read other rounding errors.
#[test]
fn a_root_alone_leaves_the_state_of_a_plain_token() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let model = random_model_as(SMALL, 13, dtype);
        for method in METHODS {
            let [mut verified, mut plain] = [0; 2].map(|_| target(&model, 64, method));
            for target in [&mut verified, &mut plain] {
                prefill(target, 0, &[3, 1, 4]);
            }
            for (round, token) in (3..40).enumerate() {
                let start = plain.cache().len();
                prefill(&mut plain, start, &[token]);
                let root = DraftTree::new(token);
                verify(&mut verified, &root);
                verified.commit(&plan(start, &root, 0)).unwrap();
                let (found, expected) = (states(verified.cache()), states(plain.cache()));
                let at = format!("{dtype:?}, {method:?}, round {round}");
                assert!(found[..2] == expected[..2], "{at}");
                if method == StateMethod::PerSlot {
                    assert!(committed(verified.cache()) == committed(plain.cache()), "{at}");
                }
            }
        }
    }
}

/// A tree that is a single path gives what the chain gives, to the bit, with a mask too.
#[test]
fn a_spine_is_a_chain_to_the_bit() {
    let model = random_model(SMALL, 11);
    for method in METHODS {
        let after = |masked: bool| {
            let mut target = target(&model, 256, method);
            prefill(&mut target, 0, &[3, 1, 4]);
            let mut picks = Vec::new();
            let mut all = Vec::new();
            for round in 0..20 {
                let start = target.cache().len();
                let tree = chain(&[round, 5, 6, 7]);
                let mut mask = AncestorMask::new();
                mask.build(&tree);
                let mask = masked.then_some(&mask);
                let round_ = Round::new(start, &tree, mask);
                target.verify(&round_, &mut Picks::new(&mut picks)).unwrap();
                all.extend_from_slice(&picks);
                target.commit(&plan(start, &tree, round as usize % 4)).unwrap();
            }
            (all, committed(target.cache()))
        };
        assert_eq!(after(true), after(false), "{method:?}");
    }
}

#[test]
fn failures_and_repetitions_leave_the_committed_state_alone() {
    let model = random_model(SMALL, 12);
    for method in METHODS {
        let mut target = target(&model, 16, method);
        prefill(&mut target, 0, &[3, 1, 4]);
        let before = committed(target.cache());
        let mut ids = Vec::new();
        let mut picks = Picks::new(&mut ids);

        // Tokens outside the vocabulary, another start, more rows than the cache has.
        let unknown = chain(&[1, VOCAB]);
        assert!(target.verify(&Round::new(3, &unknown, None), &mut picks).is_err());
        assert!(target.verify(&Round::new(2, &chain(&[1]), None), &mut picks).is_err());
        assert!(target.verify(&Round::new(3, &chain(&[1; 14]), None), &mut picks).is_err());
        assert!(target.prefill(&Prefill::new(3, &[1; 14]), &mut picks).is_err());
        // Nothing to commit, a path that is none, another start.
        let tree = DraftTree::from_parents(&[1, 2, 3, 4], &[-1, 0, 0, 1]).unwrap();
        assert!(target.commit(&plan(3, &tree, 3)).is_err());
        verify(&mut target, &tree);
        let other = chain(&[1, 2, 3, 4]);
        assert!(target.commit(&plan(3, &other, 2)).is_err());
        verify(&mut target, &tree);
        assert!(target.commit(&plan(4, &tree, 3)).is_err());
        assert_eq!(committed(target.cache()), before);

        // Verified twice, once with another tree, and committed once.
        verify(&mut target, &other);
        verify(&mut target, &tree);
        assert_eq!(committed(target.cache()), before);
        target.commit(&plan(3, &tree, 3)).unwrap();
        let mut straight = self::target(&model, 16, method);
        prefill(&mut straight, 0, &[3, 1, 4]);
        verify(&mut straight, &tree);
        straight.commit(&plan(3, &tree, 3)).unwrap();
        assert_eq!(committed(target.cache()), committed(straight.cache()));
        // A plan commits once.
        assert!(target.commit(&plan(3, &tree, 3)).is_err());
        assert_eq!(committed(target.cache()), committed(straight.cache()));
    }
}
