//! KV maps, run against storage that holds contents: after every round, the
//! committed rows have to be those of plain decoding.

use ddtree::{
    Acceptance, CommitPlan, DraftTree, Error,
    layout::kv::{self, Pages, Ring, RowMap},
    walk,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{VOCAB, random_tree};

/// What a row holds: the token and its position.
type Row = (u32, usize);

/// Verifies trees of at most `max_nodes` nodes for `rounds` rounds in `storage`,
/// which holds rows as `map` places them, and compares what `window` rows before
/// every root should be with what is there, before and after every commit.
fn decode(
    map: &impl RowMap,
    places: usize,
    rounds: usize,
    max_nodes: usize,
    window: usize,
    rng: &mut StdRng,
) {
    let mut storage: Vec<Row> = vec![(u32::MAX, 0); places];
    let mut plain: Vec<Row> = Vec::new();
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    for _ in 0..rounds {
        let start = plain.len();
        let slots = rng.random_range(1..=max_nodes + 1);
        let tree = random_tree(rng, slots, VOCAB);
        let mut slots = vec![-1; tree.len()];
        kv::write_places(map, start, tree.len(), &mut slots).unwrap();
        let mut distinct = slots.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), tree.len(), "two slots in one place");
        for (slot, &place) in slots.iter().enumerate() {
            let row = (tree.tokens()[slot], start + tree.depths()[slot] as usize);
            storage[place as usize] = row;
        }
        let held = |storage: &[Row], plain: &[Row], end: usize| {
            for row in end.saturating_sub(window)..end {
                assert_eq!(storage[map.place(row).unwrap()], plain[row], "row {row} of {end}");
            }
        };
        held(&storage, &plain, start);

        walk(&tree, &random_picks(&tree, rng), &mut outcome).unwrap();
        plan.set(start, &outcome);
        let mut moves = vec![(0, 0); plan.path().len()];
        let count = kv::write_moves(&plan, map, &mut moves).unwrap();
        for &(from, to) in &moves[..count] {
            storage[to] = storage[from];
        }
        for (step, &slot) in plan.path().iter().enumerate() {
            plain.push((tree.tokens()[slot as usize], start + step));
        }
        held(&storage, &plain, plain.len());
    }
}

/// Picks that lead along a random path, which is rarely a prefix of the slots.
fn random_picks(tree: &DraftTree, rng: &mut StdRng) -> Vec<u32> {
    let nobody = 1_000;
    let picks = (0..tree.len()).map(|slot| {
        let children: Vec<usize> = tree.children(slot).collect();
        let stop = children.is_empty() || rng.random_bool(0.2);
        if stop { nobody } else { tree.tokens()[children[rng.random_range(0..children.len())]] }
    });
    picks.collect()
}

#[test]
fn paged_rows_are_those_of_plain_decoding() {
    for page_size in [1, 3, 16] {
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            // Every KV group has a table of its own.
            for _group in 0..3 {
                let pages = 400usize.div_ceil(page_size);
                let mut table: Vec<u32> = (0..2 * pages as u32).collect();
                table.shuffle(&mut rng);
                table.truncate(pages);
                let map = Pages::new(&table, page_size).unwrap();
                decode(&map, 2 * pages * page_size, 20, 12, usize::MAX, &mut rng);
            }
        }
    }
}

#[test]
fn rings_hold_the_window_through_every_wrap_around() {
    for (capacity, window, max_nodes) in [(16, 1, 15), (20, 8, 12), (64, 50, 14), (33, 33, 0)] {
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            let map = Ring::new(capacity, window).unwrap();
            // What the root sees besides itself.
            decode(&map, capacity, 60, max_nodes, window - 1, &mut rng);
        }
    }
}

#[test]
fn trees_that_would_overwrite_the_window_are_refused() {
    let ring = Ring::new(20, 8).unwrap();
    let mut out = [0; 32];
    // Before the window is full there is more room.
    assert!(kv::write_places(&ring, 0, 20, &mut out).is_ok());
    assert!(kv::write_places(&ring, 3, 17, &mut out).is_ok());
    assert!(kv::write_places(&ring, 100, 13, &mut out).is_ok());
    for (start, slots) in [(0, 21), (3, 18), (100, 14)] {
        let mut out = [-7; 32];
        let error = kv::write_places(&ring, start, slots, &mut out).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "slots", .. }), "{error}");
        assert_eq!(out, [-7; 32]);
    }
    for window in [0, 21] {
        assert!(matches!(Ring::new(20, window), Err(Error::Setting { field: "window", .. })));
    }
}

#[test]
fn rows_beyond_the_pages_are_refused_unwritten() {
    assert!(matches!(Pages::new(&[], 0), Err(Error::Setting { field: "page_size", .. })));
    let pages = Pages::new(&[5, 2], 3).unwrap();
    let mut out = [-7; 4];
    assert!(kv::write_places(&pages, 3, 4, &mut out).is_err());
    assert!(kv::write_places(&pages, 2, 4, &mut out[..3]).is_err());
    assert_eq!(out, [-7; 4]);
    kv::write_places(&pages, 2, 4, &mut out).unwrap();
    assert_eq!(out, [17, 6, 7, 8]);

    let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0]).unwrap();
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    walk(&tree, &[9, 0, 1], &mut outcome).unwrap();
    plan.set(4, &outcome);
    let mut moves = [(7, 7)];
    let error = kv::write_moves(&plan, &pages, &mut moves).unwrap_err();
    assert!(matches!(error, Error::Setting { field: "row", .. }), "{error}");
    assert_eq!(moves, [(7, 7)]);
    plan.set(3, &outcome);
    assert!(kv::write_moves(&plan, &pages, &mut []).is_err());
    assert_eq!(kv::write_moves(&plan, &pages, &mut moves), Ok(1));
    assert_eq!(moves, [(8, 7)]);
}

#[test]
fn rows_and_places_that_overflow_are_refused() {
    let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0]).unwrap();
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    walk(&tree, &[9, 0, 1], &mut outcome).unwrap();
    plan.set(usize::MAX - 1, &outcome);

    let (pages, ring) = (Pages::new(&[5, 2], 3).unwrap(), Ring::new(8, 4).unwrap());
    let maps: [&dyn RowMap; 2] = [&pages, &ring];
    for map in maps {
        assert!(map.check(usize::MAX, 2).is_err());
        assert!(map.check(2, usize::MAX).is_err());
        assert!(map.check(usize::MAX, usize::MAX).is_err());
    }
    let (mut out, mut moves) = ([-7; 2], [(7, 7); 2]);
    assert!(kv::write_places(&pages, usize::MAX, 2, &mut out).is_err());
    assert!(kv::write_places(&ring, usize::MAX, 2, &mut out).is_err());
    assert!(kv::write_moves(&plan, &pages, &mut moves).is_err());
    assert!(kv::write_moves(&plan, &ring, &mut moves).is_err());
    assert_eq!((out, moves), ([-7; 2], [(7, 7); 2]));

    // Places of large pages: beyond all numbers, and beyond those of the elements.
    let large = Pages::new(&[5, 2], usize::MAX / 4).unwrap();
    assert!(large.place(0).is_err());
    assert!(large.place(usize::MAX).is_err());
    let half = Pages::new(&[3], usize::MAX / 4).unwrap();
    assert!(half.place(1).is_ok() && kv::write_places(&half, 1, 1, &mut out).is_err());
}
