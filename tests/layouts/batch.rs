//! Batches: offsets, ragged and padded arrays, and the budget that trees share.

use ddtree::{
    Algorithm, AncestorMask, BestFirst, Capabilities, Config, DraftTree, Error, Need, Plan,
    Proposal, Reason, Request, Session, TreeSettings,
    layout::{
        batch::{self, Extent},
        bits, dense, slots,
    },
    tree::SharedBudget,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{VOCAB, is_ancestor, random_tree, trees};

/// One sequence: its tree, mask and number of committed rows.
struct Sequence {
    tree: DraftTree,
    mask: AncestorMask,
    prefix: usize,
}

fn random_batch(seed: u64) -> Vec<Sequence> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..rng.random_range(0..7))
        .map(|_| {
            let slots = rng.random_range(1..41);
            let tree = random_tree(&mut rng, slots, VOCAB);
            let mut mask = AncestorMask::new();
            mask.build(&tree);
            Sequence { tree, mask, prefix: rng.random_range(0..30) }
        })
        .collect()
}

fn extents(batch: &[Sequence]) -> Vec<Extent> {
    batch.iter().map(|s| Extent { prefix: s.prefix, slots: s.tree.len() }).collect()
}

#[test]
fn ragged_masks_are_read_through_their_offsets() {
    for seed in 0..100 {
        let batch = random_batch(seed);
        let extents = extents(&batch);
        let mut offsets = vec![-1i32; batch.len() + 1];
        batch::packed_offsets(&extents, &mut offsets).unwrap();
        let mut packed = vec![0xaa; offsets[batch.len()] as usize];
        let size = |s: &Sequence| bits::packed_len(s.tree.len(), s.prefix);
        let written = batch::ragged(&batch, &mut packed, size, |s, out| {
            bits::write_packed(&s.mask, s.prefix, out)
        });
        assert_eq!(written, Ok(packed.len()));

        let mut elements = vec![0u64; batch.len() + 1];
        batch::mask_offsets(&extents, &mut elements).unwrap();
        let mut boolean = vec![false; elements[batch.len()] as usize];
        let size = |s: &Sequence| s.tree.len() * (s.prefix + s.tree.len());
        batch::ragged(&batch, &mut boolean, size, |s, out| {
            dense::write_boolean(&s.mask, dense::Shape::packed(s.prefix, s.tree.len()), out)
        })
        .unwrap();

        for (b, s) in batch.iter().enumerate() {
            let keys = s.prefix + s.tree.len();
            for query in 0..s.tree.len() {
                for key in 0..keys {
                    let expected = key < s.prefix || is_ancestor(&s.tree, query, key - s.prefix);
                    let element = query * keys + key;
                    let byte = packed[offsets[b] as usize + element / 8];
                    assert_eq!(byte >> (element % 8) & 1 == 1, expected);
                    assert_eq!(boolean[elements[b] as usize + element], expected);
                }
            }
        }
    }
}

#[test]
fn offsets_count_slots_keys_and_pages() {
    for seed in 0..100 {
        let batch = random_batch(seed);
        let extents = extents(&batch);
        let n = batch.len();
        let (mut by_slot, mut by_key) = (vec![0u32; n + 1], vec![0i64; n + 1]);
        batch::slot_offsets(&extents, &mut by_slot).unwrap();
        batch::key_offsets(&extents, &mut by_key).unwrap();
        assert_eq!((by_slot[0], by_key[0]), (0, 0));
        for page_size in [1, 3, 16] {
            let (mut pages, mut last) = (vec![0i32; n + 1], vec![0i32; n]);
            batch::page_offsets(&extents, page_size, &mut pages).unwrap();
            batch::last_page_lens(&extents, page_size, &mut last).unwrap();
            for (b, s) in batch.iter().enumerate() {
                assert_eq!((by_slot[b + 1] - by_slot[b]) as usize, s.tree.len());
                let rows = s.prefix + s.tree.len();
                assert_eq!((by_key[b + 1] - by_key[b]) as usize, rows);
                // As FlashInfer counts rows: full pages, then the last one.
                let used = pages[b + 1] - pages[b];
                assert_eq!((used - 1) as usize * page_size + last[b] as usize, rows);
                assert!((1..=page_size).contains(&(last[b] as usize)));
            }
        }
    }
}

#[test]
fn padded_arrays_are_the_rows_of_sequences_on_their_own() {
    for seed in 0..100 {
        let batch = random_batch(seed);
        let width = batch.iter().map(|s| s.tree.len()).max().unwrap_or(0) + seed as usize % 3;
        let mut positions = vec![0i64; batch.len() * width];
        let written = batch::padded(&batch, &mut positions, width, |s, out| {
            slots::write_positions(&s.tree, s.prefix, out)
        });
        assert_eq!(written, Ok(positions.len()));
        let mut rows = vec![0u32; batch.len() * width * width.div_ceil(32)];
        let mut mask = AncestorMask::new();
        batch::padded(&batch, &mut rows, width * width.div_ceil(32), |s, out| {
            mask.build_padded(&s.tree, width)?;
            bits::write_rows(&mask, out)
        })
        .unwrap();
        for (b, s) in batch.iter().enumerate() {
            let mut alone = vec![0i64; width];
            slots::write_positions(&s.tree, s.prefix, &mut alone).unwrap();
            assert_eq!(positions[b * width..][..width], alone);
            for query in 0..s.tree.len() {
                let row = &rows[(b * width + query) * width.div_ceil(32)..];
                for key in 0..s.tree.len() {
                    assert_eq!(
                        row[key / 32] >> (key % 32) & 1 == 1,
                        is_ancestor(&s.tree, query, key)
                    );
                }
            }
        }
    }
}

#[test]
fn batches_that_do_not_fit_are_refused_unwritten() {
    let batch = [Extent { prefix: 3, slots: 2 }, Extent { prefix: 0, slots: 1 }];
    let mut out = [7u32; 2];
    assert!(batch::slot_offsets(&batch, &mut out).is_err());
    assert_eq!(out, [7; 2]);
    assert!(batch::page_offsets(&batch, 0, &mut [0u32; 3]).is_err());
    assert!(batch::last_page_lens(&batch, 0, &mut [0u32; 2]).is_err());
    assert!(batch::last_page_lens(&batch, 4, &mut [0u32; 1]).is_err());
    let empty = [Extent { prefix: 0, slots: 0 }];
    assert!(batch::last_page_lens(&empty, 4, &mut [0u32; 1]).is_err());
    let huge = [Extent { prefix: i32::MAX as usize, slots: 1 }];
    let error = batch::key_offsets(&huge, &mut [0i32; 2]).unwrap_err();
    assert!(matches!(error, Error::Setting { field: "offset", .. }), "{error}");
    // Neither sums, products nor conversions wrap.
    for (prefix, slots) in
        [(usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX), (0, usize::MAX)]
    {
        let huge = [Extent { prefix, slots }, Extent { prefix: 1, slots: 1 }];
        let mut out = [0i64; 3];
        assert!(batch::key_offsets(&huge, &mut out).is_err());
        assert!(batch::page_offsets(&huge, 1, &mut out).is_err());
        assert!(batch::mask_offsets(&huge, &mut out).is_err());
        assert!(batch::packed_offsets(&huge, &mut out).is_err());
        assert_eq!(batch::slot_offsets(&huge, &mut out).is_err(), slots == usize::MAX);
        assert!(batch::last_page_lens(&huge, usize::MAX, &mut out).is_err());
    }
    let write = |_: &usize, _: &mut [u8]| Ok(());
    let sizes = [usize::MAX, 2];
    let error = batch::ragged(&sizes, &mut [0; 4], |&size| size, write).unwrap_err();
    assert_eq!(error, Error::BufferTooSmall { field: "out", found: 4, needed: usize::MAX });
    let trees = [DraftTree::new(1), DraftTree::new(2)];
    let mut tokens = [7u32; 1];
    let write = |tree: &DraftTree, out: &mut [u32]| slots::write_tokens(tree, out);
    let error = batch::padded(&trees, &mut tokens, 1, write).unwrap_err();
    assert_eq!(error, Error::BufferTooSmall { field: "out", found: 1, needed: 2 });
    assert_eq!(tokens, [7]);
}

#[test]
fn a_truncated_tree_is_the_tree_of_its_first_nodes() {
    for (tree, _) in trees().take(300) {
        for nodes in 0..=tree.len() {
            let mut short = tree.clone();
            short.truncate(nodes);
            let mut built = DraftTree::new(tree.tokens()[0]);
            for slot in 1..tree.len().min(nodes + 1) {
                let parent = tree.parents()[slot] as usize;
                built.push(parent, tree.tokens()[slot], tree.scores()[slot]).unwrap();
            }
            assert_eq!(short, built);
        }
    }
}

/// Per-depth lists of a drafter that is sure of itself, or not.
fn random_proposal(rng: &mut StdRng) -> Proposal {
    let mut proposal = Proposal::new();
    let sure = rng.random_range(0.2..0.95);
    for _ in 0..rng.random_range(0..8) {
        let mut left = 1.0f32;
        let log_probs: Vec<f32> = (0..6)
            .map(|_| {
                // Coarse, so that sums tie between sequences.
                let p = left * (if rng.random_bool(0.3) { 0.5 } else { sure });
                left -= p;
                p.ln()
            })
            .collect();
        let mut log_probs = log_probs;
        log_probs.sort_by(|a, b| b.total_cmp(a));
        proposal.push(&[0, 1, 2, 3, 4, 5], &log_probs).unwrap();
    }
    proposal
}

/// Sorts the nodes of all sequences; equal ones in the order of the batch.
fn naive_split(budget: usize, trees: &[DraftTree]) -> Vec<usize> {
    let mut all: Vec<(f64, usize)> = Vec::new();
    for (sequence, tree) in trees.iter().enumerate() {
        all.extend(tree.scores()[1..].iter().map(|&score| (score, sequence)));
    }
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut nodes = vec![0; trees.len()];
    all.iter().take(budget).for_each(|&(_, sequence)| nodes[sequence] += 1);
    nodes
}

#[test]
fn a_shared_budget_takes_the_best_nodes_of_all_sequences() {
    let mut shared = SharedBudget::new();
    for seed in 0..500 {
        let mut rng = StdRng::seed_from_u64(seed);
        let proposals: Vec<Proposal> =
            (0..rng.random_range(0..20)).map(|_| random_proposal(&mut rng)).collect();
        let trees: Vec<DraftTree> = proposals
            .iter()
            .map(|proposal| {
                let mut tree = DraftTree::new(0);
                let settings = TreeSettings { budget: 24, ..TreeSettings::default() };
                BestFirst::new().build(proposal, settings, &mut tree).unwrap();
                tree
            })
            .collect();
        for budget in [0, 1, rng.random_range(0..200), 10_000] {
            let nodes = shared.split(budget, &trees, |tree| Some(tree));
            assert_eq!(nodes, naive_split(budget, &trees));
            // What is kept is what a builder with that budget would have grown.
            for ((proposal, tree), &nodes) in proposals.iter().zip(&trees).zip(nodes) {
                let mut kept = tree.clone();
                kept.truncate(nodes);
                let mut built = DraftTree::new(0);
                let settings = TreeSettings { budget: nodes, ..TreeSettings::default() };
                BestFirst::new().build(proposal, settings, &mut built).unwrap();
                assert_eq!(kept, built);
            }
        }
    }
}

#[test]
fn sequences_without_a_tree_get_nothing() {
    let tree = random_tree(&mut StdRng::seed_from_u64(1), 6, VOCAB);
    let batch = [None, Some(tree), None];
    assert_eq!(SharedBudget::new().split(3, &batch, Option::as_ref), [0, 3, 0]);
}

/// A session with a tree of five nodes: 1 and 2 below the root, 3 and 4 below 1, 3
/// below 2.
fn session_with_a_tree() -> Session {
    let capabilities = Capabilities::new(100, 200);
    let config = Config::new(Algorithm::Tree).budget(5).top_k(2);
    let mut session = Session::new(Plan::resolve(&config, &capabilities, 2).unwrap());
    session.start(&Request::new(&[7]).max_new_tokens(20)).unwrap();
    session.prefill().unwrap().1.push(9);
    session.prefilled().unwrap();
    let (_, proposal) = session.proposal().unwrap();
    proposal.push(&[1, 2], &[-0.1, -2.0]).unwrap();
    proposal.push(&[3, 4], &[-0.2, -2.5]).unwrap();
    session.proposed().unwrap();
    // Sums: -0.1, -0.3, -2.0, -2.2, -2.6.
    assert_eq!(session.tree().unwrap().parents(), [-1, 0, 1, 0, 3, 1]);
    session
}

#[test]
fn a_session_verifies_the_tree_that_was_kept_and_says_so() {
    for nodes in 0..7 {
        let mut session = session_with_a_tree();
        let mut expected = session.tree().unwrap().clone();
        expected.truncate(nodes);
        session.truncate_tree(nodes).unwrap();
        let (round, mut picks) = session.verification().unwrap();
        assert_eq!(round.tree(), &expected);
        let mut mask = AncestorMask::new();
        mask.build(&expected);
        assert_eq!(round.mask(), (!expected.is_chain()).then_some(&mask));
        (0..expected.len()).for_each(|_| picks.push(50));
        session.verified().unwrap();
        session.committed().unwrap();
        let reason = (nodes < 5).then_some(Reason::Truncated);
        assert_eq!(session.last_round().unwrap().reason, reason);
        assert_eq!(session.need(), Need::Proposal);
        assert!(matches!(session.tree(), Err(Error::OutOfTurn { call: "tree", .. })));
        let error = session.truncate_tree(1).unwrap_err();
        assert!(matches!(error, Error::OutOfTurn { call: "truncate_tree", .. }));
    }
}
