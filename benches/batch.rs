//! Host work of a round of a batch: 64 sequences of 32 nodes. Build and share the budget, make the
//! masks and write the arrays, walk and plan. Results are asserted before anything is timed; divide
//! by 64 for the time per sequence.
//!
//! `cargo bench --bench batch`; `-- --test` runs everything once.

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
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 + 1.0) / (1 << 24) as f32
    };
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

fn write(batch: &mut [Sequence], arrays: &mut Arrays) {
    batch.iter_mut().for_each(|s| s.mask.build(&s.tree));
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

    build(&mut batch, &mut builder, 2 * NODES);
    share(&mut batch, &mut shared);
    write(&mut batch, &mut arrays);
    finish(&mut batch);
    assert_eq!(batch.iter().map(|s| s.tree.nodes()).sum::<usize>(), SEQUENCES * NODES);
    assert!(batch.iter().any(|s| s.tree.nodes() != NODES), "nothing was shared");
    assert!(batch.iter().all(|s| s.plan.new_len() == PREFIX + s.outcome.tokens().len()));
    assert_eq!(arrays.tokens.len(), SEQUENCES * (NODES + 1));

    let mut group = criterion.benchmark_group("batch of 64 sequences, 32 nodes each");
    group.bench_function("build", |b| b.iter(|| build(&mut batch, &mut builder, NODES)));
    group.bench_function("build 64 each, share 2048", |b| {
        b.iter(|| {
            build(&mut batch, &mut builder, 2 * NODES);
            share(&mut batch, &mut shared);
        })
    });
    build(&mut batch, &mut builder, NODES);
    group.bench_function("mask and arrays", |b| b.iter(|| write(&mut batch, &mut arrays)));
    group.bench_function("walk and plan", |b| b.iter(|| finish(&mut batch)));
    group.bench_function("all", |b| {
        b.iter(|| {
            build(&mut batch, &mut builder, NODES);
            write(&mut batch, &mut arrays);
            finish(&mut batch);
        })
    });
    group.finish();
}

criterion_group!(group, benches);
criterion_main!(group);
