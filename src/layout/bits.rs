//! Masks of one bit per query and key.

use super::room;
use crate::{AncestorMask, Error};

mod sealed {
    pub trait Sealed {
        const BITS: usize;
        fn from_bits(bits: u64) -> Self;
    }
}

/// Words that bit rows are written in: `u8`, `u16`, `u32`, `u64`, and `i32` for
/// engines that store them in signed tensors.
pub trait Word: sealed::Sealed + Copy {}

macro_rules! words {
    ($($word:ty),*) => {$(
        impl sealed::Sealed for $word {
            const BITS: usize = <$word>::BITS as usize;

            fn from_bits(bits: u64) -> Self {
                bits as $word
            }
        }
        impl Word for $word {}
    )*};
}

words!(u8, u16, u32, u64, i32);

/// Words in a row of `slots` bits.
pub fn words_per_row<W: Word>(slots: usize) -> usize {
    slots.div_ceil(W::BITS)
}

/// Writes one row of bits per slot, over the slots alone: bit `j % bits` of word
/// `j / bits` of row `i` says whether slot `i` sees slot `j`. Rows take
/// [`words_per_row`] words.
///
/// TensorRT-LLM takes `u32` or `i32` rows; SGLang's `QLEN_ONLY_BITPACKING` takes
/// one `u8`, `u16` or `u32` per slot, for up to 8, 16 or 32 slots.
///
/// # Errors
///
/// If `out` is too small.
///
/// ```
/// use ddtree::{AncestorMask, DraftTree, layout::bits};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// let mut mask = AncestorMask::new();
/// mask.build(&tree);
/// let mut out = [0u8; 3];
/// bits::write_rows(&mask, &mut out)?;
/// assert_eq!(out, [0b001, 0b011, 0b101]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn write_rows<W: Word>(mask: &AncestorMask, out: &mut [W]) -> Result<(), Error> {
    let words = words_per_row::<W>(mask.slots());
    room(out.len(), words * mask.slots())?;
    for (slot, out) in out.chunks_exact_mut(words.max(1)).take(mask.slots()).enumerate() {
        let row = mask.row(slot);
        for (word, out) in out.iter_mut().enumerate() {
            let bit = word * W::BITS;
            *out = W::from_bits(row[bit / 64] >> (bit % 64));
        }
    }
    Ok(())
}

/// Bytes of a packed mask of `slots` queries over `prefix + slots` keys.
/// Saturates where no buffer could be that large.
pub fn packed_len(slots: usize, prefix: usize) -> usize {
    slots.saturating_mul(prefix.saturating_add(slots)).div_ceil(8)
}

/// Writes one bit per query and key, prefix included, without gaps between rows:
/// element `e = i * (prefix + slots) + j` is bit `e % 8` of byte `e / 8`. The
/// last byte is filled up with zeros.
///
/// This is FlashInfer's `packed_custom_mask` of one sequence. In a batch every
/// sequence starts at a byte, and the kernel reads **byte** offsets
/// ([`batch::packed_offsets`](super::batch::packed_offsets)). Its Python planner
/// keeps element offsets next to a packed mask, which is right for the first
/// sequence only.
///
/// # Errors
///
/// If `out` is smaller than [`packed_len`].
///
/// ```
/// use ddtree::{AncestorMask, DraftTree, layout::bits};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// let mut mask = AncestorMask::new();
/// mask.build(&tree);
/// let mut out = [0u8; 2];
/// bits::write_packed(&mask, 1, &mut out)?;
/// // Rows, key 0 first: 1 100, 1 110, 1 101.
/// assert_eq!(out, [0b0111_0011, 0b0000_1011]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn write_packed(mask: &AncestorMask, prefix: usize, out: &mut [u8]) -> Result<(), Error> {
    let slots = mask.slots();
    let needed = packed_len(slots, prefix);
    room(out.len(), needed)?;
    let out = &mut out[..needed];
    out.fill(0);
    let mut element = 0;
    for slot in 0..slots {
        set_ones(out, element, prefix);
        element += prefix;
        for (word, bits) in mask.row(slot).iter().enumerate() {
            let width = (slots - word * 64).min(64);
            or_bits(out, element, *bits, width);
            element += width;
        }
    }
    Ok(())
}

/// Sets `count` bits from bit `start` on.
fn set_ones(out: &mut [u8], start: usize, count: usize) {
    if count == 0 {
        return;
    }
    let end = start + count;
    let (first, last) = (start / 8, (end - 1) / 8);
    let from_start = 0xff << (start % 8);
    let to_end = 0xff >> (7 - (end - 1) % 8);
    if first == last {
        out[first] |= from_start & to_end;
    } else {
        out[first] |= from_start;
        out[first + 1..last].fill(0xff);
        out[last] |= to_end;
    }
}

/// Adds the lowest `width` bits of `bits` from bit `start` on. Bits above
/// `width` are zero.
fn or_bits(out: &mut [u8], start: usize, bits: u64, width: usize) {
    let shifted = u128::from(bits) << (start % 8);
    let bytes = (start % 8 + width).div_ceil(8);
    for (out, byte) in out[start / 8..][..bytes].iter_mut().zip(shifted.to_le_bytes()) {
        *out |= byte;
    }
}
