//! Host work of a round: take a proposal, build, mask, walk, plan. Horizon 15,
//! top-k 64, as a drafter of block size 16 gives it. Results are asserted before
//! anything is timed.
//!
//! `cargo bench --bench core`; `-- --test` runs everything once.

#[path = "common/uniform.rs"]
mod uniform;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ddtree::{
    Acceptance, AncestorMask, BestFirst, CommitPlan, DraftTree, Proposal, TreeSettings, walk,
};
use uniform::uniform;

const HORIZON: usize = 15;
const TOP_K: usize = 64;
const SIZES: [usize; 4] = [16, 64, 256, 1024];

/// Log-softmax of the 64 best of 4,096 logits, of which the spread between the
/// best and the rest grows with `peak`: from nearly uniform to nearly certain.
fn proposal(peak: f32) -> Proposal {
    let mut uniform = uniform(0x9e37_79b9_7f4a_7c15);
    let mut proposal = Proposal::new();
    for _ in 0..HORIZON {
        // Exponential gaps give a few large logits and a long tail.
        let mut logits: Vec<f32> = (0..4096).map(|_| -peak * uniform().ln()).collect();
        logits.sort_by(|a, b| b.total_cmp(a));
        let max = logits[0];
        let normaliser = max + logits.iter().map(|x| (x - max).exp()).sum::<f32>().ln();
        let tokens: Vec<u32> = (0..TOP_K as u32).map(|rank| rank * 37 % 4096).collect();
        let log_probs: Vec<f32> = logits[..TOP_K].iter().map(|x| x - normaliser).collect();
        proposal.push(&tokens, &log_probs).unwrap();
    }
    proposal
}

const KINDS: [(&str, f32); 2] = [("peaked", 3.0), ("flat", 0.1)];

fn build(proposal: &Proposal, budget: usize) -> DraftTree {
    let mut tree = DraftTree::new(1);
    let settings = TreeSettings { budget, ..TreeSettings::default() };
    BestFirst::new().build(proposal, settings, &mut tree).unwrap();
    tree
}

/// Picks that lead to the deepest slot of a tree.
fn deepest(tree: &DraftTree) -> Vec<u32> {
    let mut picks = vec![u32::MAX; tree.len()];
    let end = (0..tree.len()).max_by_key(|&slot| tree.depths()[slot]).unwrap();
    for slot in tree.ancestors(end).filter(|&slot| slot > 0) {
        picks[tree.parents()[slot] as usize] = tree.tokens()[slot];
    }
    picks
}

/// Best-first order, checked without the heap: no child that was left out beats
/// a node that is in, and nodes come in descending order.
fn assert_best_first(proposal: &Proposal, tree: &DraftTree) {
    let scores = tree.scores();
    assert!(scores[1..].is_sorted_by(|a, b| a >= b));
    let last = scores[tree.len() - 1];
    for slot in 0..tree.len() {
        let (tokens, log_probs) = proposal.depth(tree.depths()[slot] as usize + 1);
        for (&token, &log_prob) in tokens.iter().zip(log_probs) {
            let score = scores[slot] + f64::from(log_prob);
            match tree.child(slot, token) {
                Some(child) => assert_eq!(scores[child], score),
                None => assert!(score <= last),
            }
        }
    }
}

fn benches(criterion: &mut Criterion) {
    let of = proposal(KINDS[0].1);
    let mut copy = Proposal::new();
    let take = |of: &Proposal, copy: &mut Proposal| {
        copy.clear();
        for depth in 1..=HORIZON {
            let (tokens, log_probs) = of.depth(depth);
            copy.push(tokens, log_probs).unwrap();
        }
    };
    take(&of, &mut copy);
    assert_eq!(copy, of);
    criterion.bench_function("proposal", |bencher| {
        bencher.iter(|| take(black_box(&of), &mut copy));
    });

    let mut group = criterion.benchmark_group("best_first");
    for (kind, peak) in KINDS {
        let proposal = proposal(peak);
        for budget in SIZES {
            let mut builder = BestFirst::new();
            let mut tree = DraftTree::new(1);
            let settings = TreeSettings { budget, ..TreeSettings::default() };
            builder.build(&proposal, settings, &mut tree).unwrap();
            assert_eq!(tree.nodes(), budget);
            assert_best_first(&proposal, &tree);
            group.bench_function(BenchmarkId::new(kind, budget), |bencher| {
                bencher.iter(|| builder.build(black_box(&proposal), settings, &mut tree));
            });
        }
    }
    group.finish();

    let peaked = proposal(KINDS[0].1);
    let mut group = criterion.benchmark_group("mask");
    for budget in SIZES {
        let tree = build(&peaked, budget);
        let mut mask = AncestorMask::new();
        mask.build(&tree);
        for slot in 0..tree.len() {
            let seen = (0..tree.len()).filter(|&key| mask.is_visible(slot, key));
            let mut ancestors: Vec<usize> = tree.ancestors(slot).collect();
            ancestors.reverse();
            assert!(seen.eq(ancestors));
        }
        group.bench_function(BenchmarkId::from_parameter(budget), |bencher| {
            bencher.iter(|| mask.build(black_box(&tree)));
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("walk_and_plan");
    for budget in SIZES {
        let tree = build(&peaked, budget);
        let picks = deepest(&tree);
        let mut outcome = Acceptance::new();
        let mut plan = CommitPlan::new();
        walk(&tree, &picks, &mut outcome).unwrap();
        assert_eq!(outcome.accepted(), tree.max_depth());
        group.bench_function(BenchmarkId::from_parameter(budget), |bencher| {
            bencher.iter(|| {
                walk(black_box(&tree), black_box(&picks), &mut outcome).unwrap();
                plan.set(100, &outcome);
                plan.moves().map(|(from, to)| from ^ to).sum::<usize>()
            });
        });
    }
    group.finish();
}

criterion_group!(core, benches);
criterion_main!(core);
