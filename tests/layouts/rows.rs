//! One number per slot, and links.

use ddtree::{
    DraftTree, Error,
    layout::{links, slots},
};
use rand::Rng;

use crate::{is_ancestor, trees};

#[test]
fn numbers_per_slot_and_their_padding() {
    for (tree, mut rng) in trees() {
        let (start, width) = (rng.random_range(0..5_000), tree.len() + rng.random_range(0..5));
        let depth =
            |slot: usize| (0..tree.len()).filter(|&key| is_ancestor(&tree, slot, key)).count() - 1;

        let (mut tokens, mut positions) = (vec![u32::MAX; width], vec![-7i64; width]);
        let (mut parents, mut depths) = (vec![-7i32; width], vec![7u64; width]);
        slots::write_tokens(&tree, &mut tokens).unwrap();
        slots::write_positions(&tree, start, &mut positions).unwrap();
        slots::write_parents(&tree, &mut parents).unwrap();
        slots::write_depths(&tree, &mut depths).unwrap();
        for slot in 0..tree.len() {
            assert_eq!(positions[slot], (start + depth(slot)) as i64);
            assert_eq!(depths[slot], depth(slot) as u64);
        }
        assert_eq!(
            DraftTree::from_parents(&tokens[..tree.len()], &parents[..tree.len()])
                .map(|read| (read.tokens().to_vec(), read.parents().to_vec())),
            Ok((tree.tokens().to_vec(), tree.parents().to_vec()))
        );
        for slot in tree.len()..width {
            let row = (tokens[slot], positions[slot], parents[slot], depths[slot]);
            assert_eq!(row, (tree.tokens()[0], start as i64 + 1, 0, 1));
        }
    }
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let tree = DraftTree::from_parents(&[7, 4], &[-1, 0]).unwrap();
    let field = |result: Result<(), Error>| match result.unwrap_err() {
        Error::Setting { field, .. } | Error::BufferTooSmall { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(field(slots::write_parents(&tree, &mut [0u32; 2])), "parent");
    let large = u32::MAX as usize;
    assert_eq!(field(slots::write_positions(&tree, large, &mut [0u32; 2])), "position");
    assert!(slots::write_positions(&tree, large - 1, &mut [0u32; 2]).is_ok());
    assert_eq!(field(slots::write_tokens(&tree, &mut [0i64; 1])), "out");
    assert_eq!(field(links::write(&tree, &mut [0u32; 2], &mut [0; 2])), "next_token");
    assert_eq!(field(links::write(&tree, &mut [0i32; 1], &mut [0; 1])), "next_token");
    let error = links::write(&tree, &mut [0i32; 2], &mut [0; 3]).unwrap_err();
    assert_eq!(error, Error::Length { field: "next_sibling", found: 3, accepted: 2 });
    assert_eq!(field(links::write_index(large, &mut [0i32; 2])), "index");
    // Neither a sum nor a conversion wraps.
    for start in [usize::MAX, usize::MAX - 1, i64::MAX as usize] {
        assert_eq!(field(slots::write_positions(&tree, start, &mut [0i64; 2])), "position");
        assert_eq!(field(slots::write_positions(&tree, start, &mut [0u64; 2])), "position");
        assert_eq!(field(links::write_index(start, &mut [0i64; 2])), "index");
    }
}

#[test]
fn links_lead_to_every_slot_of_the_tree_once_and_to_no_padding() {
    for (tree, mut rng) in trees() {
        let width = tree.len() + rng.random_range(0..5);
        let (mut child, mut sibling) = (vec![7i64; width], vec![7i64; width]);
        links::write(&tree, &mut child, &mut sibling).unwrap();
        let mut parents = vec![None; width];
        let mut open = vec![0];
        while let Some(slot) = open.pop() {
            let mut next = child[slot];
            while next >= 0 {
                let found = parents[next as usize].replace(slot as i32);
                assert_eq!(found, None, "slot {next} is reached twice");
                open.push(next as usize);
                next = sibling[next as usize];
            }
        }
        assert_eq!((child.len(), sibling[0]), (width, -1));
        for (found, &parent) in parents.iter().zip(tree.parents()).skip(1) {
            assert_eq!(*found, Some(parent));
        }
        assert!(parents[tree.len()..].iter().all(Option::is_none), "padding is reached");
        assert!(child[tree.len()..].iter().chain(&sibling[tree.len()..]).all(|&link| link == -1));

        let first = rng.random_range(0..1_000);
        let mut index = vec![0u32; width];
        links::write_index(first, &mut index).unwrap();
        assert!(index.iter().enumerate().all(|(slot, &row)| row as usize == first + slot));
    }
}

#[test]
fn sequences_of_leaves_give_every_slot_its_ancestors() {
    for (tree, mut rng) in trees() {
        let first = rng.random_range(0..50);
        let needed = links::sequence_ids(&tree);
        let (mut counts, mut ids) = (vec![-7; tree.len()], vec![-7; needed + 1]);
        links::write_sequences(&tree, first, &mut counts, &mut ids).unwrap();
        assert_eq!(ids.pop(), Some(-7), "written beyond the last id");
        assert_eq!(counts.iter().sum::<i32>() as usize, needed);

        let mut rest = &ids[..];
        let sequences: Vec<&[i32]> = counts
            .iter()
            .map(|&count| {
                let slot;
                (slot, rest) = rest.split_at(count as usize);
                slot
            })
            .collect();
        assert_eq!(sequences[0].len(), links::leaves(&tree), "the root is in all of them");
        let last = first + links::leaves(&tree) as i32;
        assert!(sequences[0].iter().copied().eq(first..last));
        assert!(sequences.iter().all(|ids| ids.is_sorted() && !ids.is_empty()));
        // "Same sequence and not later", whichever of its sequences a slot goes by.
        for query in 0..tree.len() {
            for id in sequences[query] {
                for (key, ids) in sequences.iter().enumerate() {
                    let earlier = tree.depths()[key] <= tree.depths()[query];
                    let visible = earlier && ids.contains(id);
                    assert_eq!(visible, is_ancestor(&tree, query, key), "{query} {key}");
                }
            }
        }
    }
}

#[test]
fn sequence_ids_that_do_not_fit_are_refused_unwritten() {
    let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0]).unwrap();
    let (mut counts, mut ids) = ([-7; 3], [-7; 4]);
    for first in [-1, i32::MAX] {
        let error = links::write_sequences(&tree, first, &mut counts, &mut ids).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "first", .. }), "{error}");
    }
    assert!(links::write_sequences(&tree, 0, &mut counts[..2], &mut ids).is_err());
    assert!(links::write_sequences(&tree, 0, &mut counts, &mut ids[..3]).is_err());
    assert_eq!((counts, ids), ([-7; 3], [-7; 4]));
    let mut counts = [-7; 5];
    links::write_sequences(&tree, i32::MAX - 1, &mut counts, &mut ids).unwrap();
    assert_eq!(ids, [i32::MAX - 1, i32::MAX, i32::MAX - 1, i32::MAX]);
    assert_eq!(counts, [2, 1, 1, 0, 0]);
}
