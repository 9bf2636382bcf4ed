//! Masks, in all their forms.

use ddtree::{
    AncestorMask, Error,
    layout::{bits, dense},
};
use half::{bf16, f16};
use rand::Rng;

use crate::{is_ancestor, sees_padded, trees};

#[test]
fn masks_of_every_form_say_what_the_parents_say() {
    for (tree, mut rng) in trees() {
        let mut mask = AncestorMask::new();
        mask.build(&tree);
        check_all_forms(&mask, rng.random_range(0..20), &|query, key| {
            is_ancestor(&tree, query, key)
        });
    }
}

#[test]
fn padded_masks_hide_padding_and_leave_no_row_without_a_key() {
    for (tree, mut rng) in trees() {
        let width = tree.len() + rng.random_range(0..9);
        let mut mask = AncestorMask::new();
        mask.build_padded(&tree, width).unwrap();
        assert_eq!(mask.slots(), width);
        for query in 0..width {
            assert!((0..width).any(|key| mask.is_visible(query, key)), "row {query} is masked");
            let padding = (tree.len()..width).filter(|&key| key != query);
            assert!(padding.into_iter().all(|key| !mask.is_visible(query, key)));
        }
        let prefix = rng.random_range(0..3);
        check_all_forms(&mask, prefix, &|query, key| sees_padded(&tree, query, key));

        let mut unpadded = AncestorMask::new();
        unpadded.build(&tree);
        mask.build_padded(&tree, tree.len()).unwrap();
        assert_eq!(mask, unpadded);
        let before = mask.clone();
        for width in [usize::MAX, usize::MAX / 8, usize::MAX / 512] {
            let error = mask.build_padded(&tree, width).unwrap_err();
            assert!(matches!(error, Error::Setting { field: "width", .. }), "{error}");
            assert_eq!(mask, before);
        }
        let error = mask.build_padded(&tree, tree.len() - 1).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "width", .. }), "{error}");
        assert_eq!(mask, unpadded, "a refused width changes nothing");
    }
}

fn check_all_forms(mask: &AncestorMask, prefix: usize, sees: &dyn Fn(usize, usize) -> bool) {
    let n = mask.slots();
    let expected = |query: usize, column: usize| column < prefix || sees(query, column - prefix);
    let all = || (0..n).flat_map(|query| (0..prefix + n).map(move |column| (query, column)));

    // A gap between rows, so that a wrong stride shows.
    let shape = dense::Shape { prefix, row_stride: prefix + n + 3 };
    let mut boolean = vec![false; shape.needed(n)];
    dense::write_boolean(mask, shape, &mut boolean).unwrap();
    let mut single = vec![9.0f32; shape.needed(n)];
    dense::write_additive(mask, shape, f32::NEG_INFINITY, &mut single).unwrap();
    let mut half = vec![f16::ONE; shape.needed(n)];
    dense::write_additive(mask, shape, f16::MIN, &mut half).unwrap();
    let mut brain = vec![bf16::ONE; shape.needed(n)];
    dense::write_additive(mask, shape, bf16::MIN, &mut brain).unwrap();
    let mut packed = vec![0xaa; bits::packed_len(n, prefix)];
    bits::write_packed(mask, prefix, &mut packed).unwrap();
    for (query, column) in all() {
        let visible = expected(query, column);
        let at = query * shape.row_stride + column;
        assert_eq!(boolean[at], visible, "{query} {column}");
        assert_eq!(single[at], if visible { 0.0 } else { f32::NEG_INFINITY });
        assert_eq!(half[at], if visible { f16::ZERO } else { f16::MIN });
        assert_eq!(brain[at], if visible { bf16::ZERO } else { bf16::MIN });
        // As FlashInfer's kernel reads it.
        let offset = query * (prefix + n) + column;
        assert_eq!(packed[offset / 8] >> (offset % 8) & 1 == 1, visible, "{query} {column}");
    }
    let used = n * (prefix + n);
    let rest = packed
        .last()
        .map_or(0, |&last| if used.is_multiple_of(8) { 0 } else { last >> (used % 8) });
    assert_eq!(rest, 0, "the last byte is filled up with zeros");

    check_rows::<u8>(mask, sees, |word, bit| word >> bit & 1 == 1);
    check_rows::<u16>(mask, sees, |word, bit| word >> bit & 1 == 1);
    check_rows::<u32>(mask, sees, |word, bit| word >> bit & 1 == 1);
    check_rows::<u64>(mask, sees, |word, bit| word >> bit & 1 == 1);
    check_rows::<i32>(mask, sees, |word, bit| word >> bit & 1 == 1);
}

fn check_rows<W: bits::Word + Default + PartialEq>(
    mask: &AncestorMask,
    sees: &dyn Fn(usize, usize) -> bool,
    bit: fn(W, usize) -> bool,
) {
    let (n, width) = (mask.slots(), 8 * size_of::<W>());
    let words = n.div_ceil(width);
    assert_eq!(bits::words_per_row::<W>(n), words);
    let mut rows = vec![W::default(); n * words + 1];
    bits::write_rows(mask, &mut rows).unwrap();
    assert!(rows[n * words] == W::default(), "written beyond the last row");
    for query in 0..n {
        for key in 0..words * width {
            let expected = key < n && sees(query, key);
            assert_eq!(bit(rows[query * words + key / width], key % width), expected);
        }
    }
}

#[test]
fn short_buffers_are_refused_unwritten() {
    for (tree, _) in trees().take(40) {
        let mut mask = AncestorMask::new();
        mask.build(&tree);
        let needed = bits::packed_len(tree.len(), 3);
        let mut packed = vec![0xaa; needed - 1];
        let error = bits::write_packed(&mask, 3, &mut packed).unwrap_err();
        assert_eq!(error, Error::BufferTooSmall { field: "out", found: needed - 1, needed });
        assert!(packed.iter().all(|&byte| byte == 0xaa));
        let needed = tree.len() * tree.len().div_ceil(16);
        let mut rows = vec![7u16; needed - 1];
        assert!(bits::write_rows(&mask, &mut rows).is_err());
        assert!(rows.iter().all(|&word| word == 7));
    }
}
