//! Dense masks: one element per query slot and key, row-major.
//!
//! Row `i` belongs to slot `i`. Its first `prefix` columns are the committed
//! rows of the cache, all visible; column `prefix + j` is slot `j`. Rows start
//! `row_stride` elements apart; what lies between the end of one row and the
//! start of the next is left as it was.
//!
//! With `prefix` 0 the mask is the n × n square that kernels take which apply
//! it to the last n keys only.

use half::{bf16, f16};

use super::room;
use crate::{AncestorMask, Error};

/// Shape of a dense mask, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Columns before the one of slot 0.
    pub prefix: usize,
    /// Elements from the start of one row to the start of the next; at least
    /// `prefix` plus the number of slots.
    pub row_stride: usize,
}

impl Shape {
    /// Rows of `prefix + slots` elements without gaps.
    pub fn packed(prefix: usize, slots: usize) -> Self {
        Self { prefix, row_stride: prefix.saturating_add(slots) }
    }

    /// Elements that a mask of `slots` rows spans: the last row is not padded
    /// to the stride. Saturates where no buffer could be that large.
    pub fn needed(&self, slots: usize) -> usize {
        match slots.checked_sub(1) {
            None => 0,
            Some(full_rows) => full_rows
                .saturating_mul(self.row_stride)
                .saturating_add(self.prefix)
                .saturating_add(slots),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Element types of additive masks: `f32`, `f16` and `bf16`.
pub trait MaskElement: sealed::Sealed + Copy {
    /// Zero, which leaves a score as it is.
    const VISIBLE: Self;
    /// The lowest finite value. Unlike minus infinity it cannot make a row of
    /// masked keys NaN under softmax.
    const LOWEST: Self;
}

impl MaskElement for f32 {
    const VISIBLE: Self = 0.0;
    const LOWEST: Self = Self::MIN;
}

impl MaskElement for f16 {
    const VISIBLE: Self = Self::ZERO;
    const LOWEST: Self = Self::MIN;
}

impl MaskElement for bf16 {
    const VISIBLE: Self = Self::ZERO;
    const LOWEST: Self = Self::MIN;
}

/// Writes a mask to be added to attention scores: 0 where a slot sees a key,
/// `masked` elsewhere ([`MaskElement::LOWEST`] or minus infinity, as the kernel
/// wants it).
///
/// # Errors
///
/// If the stride is shorter than a row or `out` is too small.
///
/// ```
/// use ddtree::{AncestorMask, DraftTree, layout::dense};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// let mut mask = AncestorMask::new();
/// mask.build(&tree);
///
/// let shape = dense::Shape::packed(2, tree.len());
/// let mut out = vec![0.0f32; shape.needed(tree.len())];
/// dense::write_additive(&mask, shape, f32::NEG_INFINITY, &mut out)?;
/// let x = f32::NEG_INFINITY;
/// assert_eq!(out, [
///     0.0, 0.0, 0.0, x, x, // the root sees the prefix and itself
///     0.0, 0.0, 0.0, 0.0, x,
///     0.0, 0.0, 0.0, x, 0.0,
/// ]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn write_additive<T: MaskElement>(
    mask: &AncestorMask,
    shape: Shape,
    masked: T,
    out: &mut [T],
) -> Result<(), Error> {
    write(mask, shape, T::VISIBLE, masked, out)
}

/// Writes `true` where a slot sees a key and `false` elsewhere.
///
/// # Errors
///
/// If the stride is shorter than a row or `out` is too small.
pub fn write_boolean(mask: &AncestorMask, shape: Shape, out: &mut [bool]) -> Result<(), Error> {
    write(mask, shape, true, false, out)
}

fn write<T: Copy>(
    mask: &AncestorMask,
    shape: Shape,
    visible: T,
    masked: T,
    out: &mut [T],
) -> Result<(), Error> {
    let slots = mask.slots();
    let row = shape.prefix.saturating_add(slots);
    if shape.row_stride < row {
        let accepted = format_args!("at least {row} (prefix and slots)");
        return Err(Error::setting("row_stride", shape.row_stride, accepted));
    }
    room(out.len(), shape.needed(slots))?;
    for (slot, row) in out.chunks_mut(shape.row_stride.max(1)).take(slots).enumerate() {
        let (prefix, tree) = row[..shape.prefix + slots].split_at_mut(shape.prefix);
        prefix.fill(visible);
        for (bits, keys) in mask.row(slot).iter().zip(tree.chunks_mut(64)) {
            for (key, out) in keys.iter_mut().enumerate() {
                *out = if bits >> key & 1 == 1 { visible } else { masked };
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DraftTree;

    fn mask(parents: &[i32]) -> AncestorMask {
        let tokens: Vec<u32> = (0..parents.len() as u32).collect();
        let mut mask = AncestorMask::new();
        mask.build(&DraftTree::from_parents(&tokens, parents).unwrap());
        mask
    }

    #[test]
    fn half_types_and_strides() {
        let mask = mask(&[-1, 0, 0]);
        let shape = Shape { prefix: 1, row_stride: 6 };
        let mut out = vec![bf16::from_f32(9.0); shape.needed(3)];
        assert_eq!(out.len(), 16);
        write_additive(&mask, shape, bf16::LOWEST, &mut out).unwrap();
        let nine = bf16::from_f32(9.0);
        assert_eq!(out[4..6], [nine, nine], "the gap between rows is not written");
        assert_eq!(out[12..], [bf16::ZERO, bf16::ZERO, bf16::MIN, bf16::ZERO]);

        let mut out = vec![f16::NAN; 9];
        write_additive(&mask, Shape::packed(0, 3), f16::NEG_INFINITY, &mut out).unwrap();
        assert_eq!(out[3..6], [f16::ZERO, f16::ZERO, f16::NEG_INFINITY]);
    }

    #[test]
    fn short_buffers_and_strides_are_refused_unwritten() {
        let mask = mask(&[-1, 0, 0]);
        let mut out = vec![true; 14];
        let error = write_boolean(&mask, Shape::packed(2, 3), &mut out).unwrap_err();
        assert!(matches!(error, Error::BufferTooSmall { found: 14, needed: 15, .. }));
        let error = write_boolean(&mask, Shape { prefix: 2, row_stride: 4 }, &mut out).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "row_stride", .. }));
        assert_eq!(out, [true; 14]);
    }
}
