//! Host work of a round of a batch: 64 sequences of 32 nodes. Build and share the budget, make the
//! masks and write the arrays, walk and plan. Times are per sequence. Before anything is timed, results
//! are asserted, and that a round allocates nothing.
//!
//! `cargo bench --bench batch`; `-- --test` runs everything once.

#[path = "common/counting.rs"]
mod counting;
#[path = "common/uniform.rs"]
mod uniform;

use std::time::Instant;

use counting::allocations;
use criterion::{Criterion, criterion_group, criterion_main};
use ddtree::{
    Acceptance, AncestorMask, BestFirst, CommitPlan, DraftTree, Proposal, TreeSettings,
    layout::{
        batch::{self, Extent},
        bits, slots,
    },
    tree::SharedBudget,
    walk,
};
use uniform::uniform;

const SEQUENCES: usize = 64;
const NODES: usize = 32;
const PREFIX: usize = 1_000;

struct Sequence {
    proposal: Proposal,
    tree: DraftTree,
    mask: AncestorMask,
    picks: Vec<u32>,
    outcome: Acceptance,
    plan: CommitPlan,
}

fn sequence(seed: u64) -> Sequence {
    let mut uniform = uniform(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut proposal = Proposal::new();
    for _ in 0..15 {
        let mut left = 1.0f32;
        let mut log_probs: Vec<f32> = Vec::new();
        for _ in 0..16 {
            let part = left * (0.2 + 0.6 * uniform());
            left -= part;
            log_probs.push(part.ln());
        }
        log_probs.sort_by(|a, b| b.total_cmp(a));
        proposal.push(&Vec::from_iter(0..16), &log_probs).unwrap();
    }
    Sequence {
        proposal,
        tree: DraftTree::new(1),
        mask: AncestorMask::new(),
        // Accepts the best token of every depth.
        picks: vec![0; 2 * NODES + 1],
        outcome: Acceptance::new(),
        plan: CommitPlan::new(),
    }
}

fn build(batch: &mut [Sequence], builder: &mut BestFirst, budget: usize) {
    let settings = TreeSettings { budget, ..TreeSettings::default() };
    for s in batch {
        builder.build(&s.proposal, settings, &mut s.tree).unwrap();
    }
}

fn share(batch: &mut [Sequence], shared: &mut SharedBudget) {
    let nodes = shared.split(SEQUENCES * NODES, batch, |s| Some(&s.tree));
    for (s, &nodes) in batch.iter_mut().zip(nodes) {
        s.tree.truncate(nodes);
    }
}

#[derive(Default)]
struct Arrays {
    extents: Vec<Extent>,
    offsets: Vec<i32>,
    tokens: Vec<u32>,
    positions: Vec<i64>,
    packed: Vec<u8>,
}

fn mask(batch: &mut [Sequence]) {
    batch.iter_mut().for_each(|s| s.mask.build(&s.tree));
}

fn write(batch: &[Sequence], arrays: &mut Arrays) {
    arrays.extents.clear();
    arrays.extents.extend(batch.iter().map(|s| Extent { prefix: PREFIX, slots: s.tree.len() }));
    arrays.offsets.resize(SEQUENCES + 1, 0);
    batch::packed_offsets(&arrays.extents, &mut arrays.offsets).unwrap();
    arrays.packed.resize(arrays.offsets[SEQUENCES] as usize, 0);
    batch::ragged(
        batch,
        &mut arrays.packed,
        |s| bits::packed_len(s.tree.len(), PREFIX),
        |s, out| bits::write_packed(&s.mask, PREFIX, out),
    )
    .unwrap();
    batch::slot_offsets(&arrays.extents, &mut arrays.offsets).unwrap();
    arrays.tokens.resize(arrays.offsets[SEQUENCES] as usize, 0);
    arrays.positions.resize(arrays.tokens.len(), 0);
    let size = |s: &Sequence| s.tree.len();
    batch::ragged(batch, &mut arrays.tokens, size, |s, out| slots::write_tokens(&s.tree, out))
        .unwrap();
    batch::ragged(batch, &mut arrays.positions, size, |s, out| {
        slots::write_positions(&s.tree, PREFIX, out)
    })
    .unwrap();
}

fn finish(batch: &mut [Sequence]) {
    for s in batch {
        walk(&s.tree, &s.picks[..s.tree.len()], &mut s.outcome).unwrap();
        s.plan.set(PREFIX, &s.outcome);
    }
}

fn benches(criterion: &mut Criterion) {
    let mut batch: Vec<Sequence> = (0..SEQUENCES as u64).map(sequence).collect();
    let (mut builder, mut shared, mut arrays) =
        (BestFirst::new(), SharedBudget::new(), Arrays::default());

    let mut round = || {
        build(&mut batch, &mut builder, 2 * NODES);
        share(&mut batch, &mut shared);
        mask(&mut batch);
        write(&batch, &mut arrays);
        finish(&mut batch);
    };
    assert!(allocations(&mut round) > 0, "the allocator does not count");
    assert_eq!(allocations(&mut round), 0, "a round allocates");
    assert_eq!(batch.iter().map(|s| s.tree.nodes()).sum::<usize>(), SEQUENCES * NODES);
    assert!(batch.iter().any(|s| s.tree.nodes() != NODES), "nothing was shared");
    assert!(batch.iter().all(|s| s.plan.new_len() == PREFIX + s.outcome.tokens().len()));
    assert_eq!(arrays.tokens.len(), SEQUENCES * (NODES + 1));

    let mut group = criterion.benchmark_group("per sequence of 64 with 32 nodes each");
    let mut measure = |name: &str, run: &mut dyn FnMut()| {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|count| {
                let start = Instant::now();
                (0..count).for_each(|_| run());
                start.elapsed() / SEQUENCES as u32
            });
        });
    };
    measure("build 64 each, share 2048", &mut || {
        build(&mut batch, &mut builder, 2 * NODES);
        share(&mut batch, &mut shared);
    });
    measure("build", &mut || build(&mut batch, &mut builder, NODES));
    measure("mask", &mut || mask(&mut batch));
    measure("arrays", &mut || write(&batch, &mut arrays));
    measure("walk and plan", &mut || finish(&mut batch));
    measure("build, mask, walk and plan", &mut || {
        build(&mut batch, &mut builder, NODES);
        mask(&mut batch);
        finish(&mut batch);
    });
    measure("all, with arrays", &mut || {
        build(&mut batch, &mut builder, NODES);
        mask(&mut batch);
        write(&batch, &mut arrays);
        finish(&mut batch);
    });
    group.finish();
}

criterion_group!(group, benches);
criterion_main!(group);
