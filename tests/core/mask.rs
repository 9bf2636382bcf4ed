//! Masks against walks to the root, and dense writers against the mask.

use ddtree::{
    AncestorMask, DraftTree, Error,
    layout::dense::{self, MaskElement, Shape},
};
use half::{bf16, f16};
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng};

use crate::random::{is_ancestor, random_tree};

/// A tree whose shape is drawn from `seed`.
fn tree_of(slots: usize, seed: u64) -> DraftTree {
    random_tree(&mut StdRng::seed_from_u64(seed), slots, 400)
}

fn assert_ancestors(tree: &DraftTree, mask: &AncestorMask) {
    assert_eq!(mask.slots(), tree.len());
    assert_eq!(mask.rows().len(), mask.slots() * mask.words_per_row());
    for query in 0..tree.len() {
        for key in 0..tree.len() {
            assert_eq!(mask.is_visible(query, key), is_ancestor(tree, query, key));
        }
        // Nothing beyond the slots, so that rows can be handed out as words.
        let ones: u32 = mask.row(query).iter().map(|word| word.count_ones()).sum();
        assert_eq!(ones, tree.depths()[query] + 1);
        assert_eq!(tree.ancestors(query).count() as u32, ones);
    }
}

#[test]
fn rows_are_the_ways_to_the_root_at_sizes_around_word_bounds() {
    let mut mask = AncestorMask::new();
    for slots in [300, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        for seed in 0..4 {
            let tree = tree_of(slots, seed);
            // One object for all sizes: nothing of a larger tree may stay.
            mask.build(&tree);
            assert_ancestors(&tree, &mask);
        }
    }
}

#[test]
fn a_chain_is_causal_and_siblings_are_blind_to_one_another() {
    let slots = 70;
    let tokens: Vec<u32> = (0..slots).collect();
    let line: Vec<i32> = (-1..slots as i32 - 1).collect();
    let mut fan = vec![0; slots as usize];
    fan[0] = -1;
    let mut mask = AncestorMask::new();
    mask.build(&DraftTree::from_parents(&tokens, &line).unwrap());
    assert!((0..70).all(|query| (0..70).all(|key| mask.is_visible(query, key) == (key <= query))));
    mask.build(&DraftTree::from_parents(&tokens, &fan).unwrap());
    let seen = |query, key| key == 0 || key == query;
    assert!(
        (0..70).all(|query| (0..70).all(|key| mask.is_visible(query, key) == seen(query, key)))
    );
}

#[test]
fn a_causal_mask_is_that_of_a_chain() {
    let (mut mask, mut of_chain) = (AncestorMask::new(), AncestorMask::new());
    // One object for all sizes: nothing of a larger mask may stay.
    for slots in [300, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        let line: Vec<i32> = (-1..slots - 1).collect();
        let chain = DraftTree::from_parents(&vec![5; slots as usize], &line).unwrap();
        mask.build_causal(slots as usize).unwrap();
        assert_ancestors(&chain, &mask);
        of_chain.build(&chain);
        assert_eq!(mask, of_chain);
    }
    let before = mask.clone();
    for slots in [usize::MAX, usize::MAX / 8] {
        let error = mask.build_causal(slots).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "slots", .. }), "{error}");
        assert_eq!(mask, before);
    }
    mask.build_causal(0).unwrap();
    assert_eq!(mask, AncestorMask::new());
}

#[test]
fn nothing_outside_the_tree_is_visible() {
    let mut mask = AncestorMask::new();
    assert!(!mask.is_visible(0, 0));
    mask.build(&DraftTree::new(1));
    assert!(mask.is_visible(0, 0));
    assert!(!mask.is_visible(0, 1) && !mask.is_visible(1, 0) && !mask.is_visible(0, 64));
    assert!(mask.row(1).is_empty());
}

fn assert_dense<T: MaskElement + PartialEq + std::fmt::Debug>(
    mask: &AncestorMask,
    shape: Shape,
    masked: T,
    untouched: T,
) {
    let needed = shape.needed(mask.slots());
    let mut out = vec![untouched; needed + 3];
    dense::write_additive(mask, shape, masked, &mut out).unwrap();
    for (index, &element) in out.iter().enumerate() {
        let (query, column) = (index / shape.row_stride, index % shape.row_stride);
        let wanted = if query >= mask.slots() || column >= shape.prefix + mask.slots() {
            untouched
        } else if column < shape.prefix || mask.is_visible(query, column - shape.prefix) {
            T::VISIBLE
        } else {
            masked
        };
        assert_eq!(element, wanted, "row {query}, column {column}");
    }
}

proptest! {
    #[test]
    fn dense_masks_say_what_the_bits_say(
        slots in 1usize..140,
        seed: u64,
        prefix in 0usize..70,
        gap in 0usize..5,
    ) {
        let mut mask = AncestorMask::new();
        mask.build(&tree_of(slots, seed % 1000));
        let shape = Shape { prefix, row_stride: prefix + slots + gap };
        assert_dense(&mask, shape, f32::LOWEST, 7.0);
        assert_dense(&mask, shape, f32::NEG_INFINITY, 7.0);
        assert_dense(&mask, shape, f16::LOWEST, f16::ONE);
        assert_dense(&mask, shape, bf16::NEG_INFINITY, bf16::ONE);

        let mut bits = vec![false; shape.needed(slots)];
        dense::write_boolean(&mask, shape, &mut bits).unwrap();
        let mut sum = vec![1.0f32; shape.needed(slots)];
        dense::write_additive(&mask, shape, -1.0, &mut sum).unwrap();
        for row in 0..slots {
            let row = row * shape.row_stride..row * shape.row_stride + prefix + slots;
            for index in row.clone() {
                prop_assert_eq!(bits[index], sum[index] == 0.0);
            }
            // A row of nothing but masked keys would be NaN after softmax.
            prop_assert!(bits[row].contains(&true));
        }

        let short = shape.needed(slots) - 1;
        let error = dense::write_additive(&mask, shape, f32::LOWEST, &mut sum[..short]);
        prop_assert_eq!(
            error,
            Err(Error::BufferTooSmall { field: "out", found: short, needed: short + 1 })
        );
    }
}

#[test]
fn shapes_that_no_buffer_has_are_refused() {
    let mut mask = AncestorMask::new();
    mask.build(&tree_of(3, 1));
    let mut out = vec![0.0f32; 64];
    for shape in [
        Shape { prefix: usize::MAX, row_stride: usize::MAX },
        Shape { prefix: 0, row_stride: usize::MAX },
        Shape { prefix: 0, row_stride: usize::MAX / 2 + 1 },
        Shape::packed(usize::MAX - 1, 3),
    ] {
        let error = dense::write_additive(&mask, shape, 1.0, &mut out).unwrap_err();
        assert!(matches!(error, Error::BufferTooSmall { field: "out", found: 64, .. }), "{error}");
    }
    assert_eq!(out, [0.0; 64], "refused before anything is written");
}
