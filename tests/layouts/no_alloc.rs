//! A batch of sequences allocates nothing per round after its first one.

#[path = "../../benches/common/counting.rs"]
mod counting;

use counting::allocations;
use ddtree::{
    Acceptance, AncestorMask, BestFirst, CommitPlan, DraftTree, Proposal, TreeSettings,
    layout::{batch, batch::Extent, bits, dense, kv, links, slots},
    tree::SharedBudget,
    walk,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

struct Sequence {
    proposal: Proposal,
    builder: BestFirst,
    tree: DraftTree,
    mask: AncestorMask,
    outcome: Acceptance,
    plan: CommitPlan,
    prefix: usize,
}

const WIDTH: usize = 33;

fn sequence(seed: u64) -> Sequence {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut proposal = Proposal::new();
    for _ in 0..7 {
        let mut log_probs: Vec<f32> = (0..8).map(|_| -rng.random_range(0.01f32..5.0)).collect();
        log_probs.sort_by(|a, b| b.total_cmp(a));
        proposal.push(&[0, 1, 2, 3, 4, 5, 6, 7], &log_probs).unwrap();
    }
    Sequence {
        proposal,
        builder: BestFirst::new(),
        tree: DraftTree::new(0),
        mask: AncestorMask::new(),
        outcome: Acceptance::new(),
        plan: CommitPlan::new(),
        prefix: 10 + seed as usize,
    }
}

/// Everything between proposals and row moves, into arrays made beforehand.
fn round(sequences: &mut [Sequence], shared: &mut SharedBudget, arrays: &mut Arrays) {
    let settings = TreeSettings { budget: WIDTH - 1, ..TreeSettings::default() };
    for s in sequences.iter_mut() {
        s.builder.build(&s.proposal, settings, &mut s.tree).unwrap();
    }
    let nodes = shared.split(16 * sequences.len(), sequences, |s| Some(&s.tree));
    for (s, &nodes) in sequences.iter_mut().zip(nodes) {
        s.tree.truncate(nodes);
        s.mask.build(&s.tree);
    }
    let extents = &mut arrays.extents;
    extents.clear();
    extents.extend(sequences.iter().map(|s| Extent { prefix: s.prefix, slots: s.tree.len() }));
    batch::slot_offsets(extents, &mut arrays.offsets).unwrap();
    batch::packed_offsets(extents, &mut arrays.offsets).unwrap();
    let tokens = |s: &Sequence, out: &mut [u32]| slots::write_tokens(&s.tree, out);
    batch::ragged(sequences, &mut arrays.tokens, |s| s.tree.len(), tokens).unwrap();
    batch::padded(sequences, &mut arrays.tokens, WIDTH, tokens).unwrap();
    let size = |s: &Sequence| bits::packed_len(s.tree.len(), s.prefix);
    let packed = |s: &Sequence, out: &mut [u8]| bits::write_packed(&s.mask, s.prefix, out);
    batch::ragged(sequences, &mut arrays.packed, size, packed).unwrap();
    for s in sequences.iter_mut() {
        let n = s.tree.len();
        let shape = dense::Shape::packed(s.prefix, n);
        dense::write_additive(&s.mask, shape, f32::MIN, &mut arrays.additive).unwrap();
        bits::write_rows(&s.mask, &mut arrays.rows).unwrap();
        links::write(&s.tree, &mut arrays.children[..n], &mut arrays.siblings[..n]).unwrap();
        links::write_sequences(&s.tree, 0, &mut arrays.counts, &mut arrays.ids).unwrap();
        walk(&s.tree, &arrays.picks[..n], &mut s.outcome).unwrap();
        s.plan.set(s.prefix, &s.outcome);
        let pages = kv::Pages::new(&arrays.table, 16).unwrap();
        kv::write_places(&pages, s.prefix, n, &mut arrays.places).unwrap();
        kv::write_moves(&s.plan, &pages, &mut arrays.moves).unwrap();
        s.mask.build_padded(&s.tree, WIDTH).unwrap();
    }
}

struct Arrays {
    extents: Vec<Extent>,
    offsets: Vec<i32>,
    tokens: Vec<u32>,
    packed: Vec<u8>,
    additive: Vec<f32>,
    rows: Vec<u32>,
    children: Vec<i64>,
    siblings: Vec<i64>,
    counts: Vec<i32>,
    ids: Vec<i32>,
    picks: Vec<u32>,
    table: Vec<u32>,
    places: Vec<i64>,
    moves: Vec<(usize, usize)>,
}

#[test]
fn rounds_of_a_batch_allocate_nothing() {
    let mut sequences: Vec<Sequence> = (0..16).map(sequence).collect();
    let mut shared = SharedBudget::new();
    let mut arrays = Arrays {
        extents: Vec::with_capacity(16),
        offsets: vec![0; 17],
        tokens: vec![0; 16 * WIDTH],
        packed: vec![0; 16 * 512],
        additive: vec![0.0; 64 * WIDTH],
        rows: vec![0; 2 * WIDTH],
        children: vec![0; WIDTH],
        siblings: vec![0; WIDTH],
        counts: vec![0; WIDTH],
        ids: vec![0; WIDTH * 8],
        // Accepts the best token of every depth.
        picks: vec![0; WIDTH],
        table: (0..8).collect(),
        places: vec![0; WIDTH],
        moves: vec![(0, 0); WIDTH],
    };
    round(&mut sequences, &mut shared, &mut arrays);
    // The next round has other, and larger, trees for most sequences.
    for s in &mut sequences[..8] {
        s.proposal.truncate(3);
    }
    for s in &mut sequences {
        s.builder.reserve(WIDTH);
        s.tree.reserve(WIDTH);
        s.mask.reserve(WIDTH);
        s.outcome.reserve(7);
        s.plan.reserve(7);
    }
    let one = allocations(|| drop(std::hint::black_box(vec![1u8])));
    assert_eq!(one, 1, "the allocator does not count");
    let rounds = allocations(|| {
        for _ in 0..3 {
            round(&mut sequences, &mut shared, &mut arrays);
        }
    });
    assert_eq!(rounds, 0);
}
