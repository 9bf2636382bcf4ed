//! Offsets of sequences in a batch.
//!
//! Ragged arrays concatenate what the writers of this module's siblings write
//! for each sequence ([`ragged`]); an offset array says where each begins. Padded
//! arrays have the same width for all ([`padded`]), and need none.
//!
//! ```
//! use ddtree::{DraftTree, layout::{batch, slots}};
//!
//! let trees = [
//!     DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?,
//!     DraftTree::from_parents(&[3, 8], &[-1, 0])?,
//! ];
//! let mut tokens = [0u32; 5];
//! batch::ragged(&trees, &mut tokens, |tree| tree.len(), |tree, out| slots::write_tokens(tree, out))?;
//! assert_eq!(tokens, [7, 4, 9, 3, 8]);
//!
//! let mut tokens = [0u32; 8];
//! batch::padded(&trees, &mut tokens, 4, |tree, out| slots::write_tokens(tree, out))?;
//! assert_eq!(tokens, [7, 4, 9, 7, 3, 8, 3, 3]);
//! # Ok::<(), ddtree::Error>(())
//! ```

use super::{Element, check_page_size, number, overflow, room};
use crate::Error;

/// Has `write` fill one part of `out` per sequence, one after another: `size`
/// elements for each. Returns how many elements that is in all.
///
/// # Errors
///
/// If `out` is too small, before anything is written; or an error of `write`.
pub fn ragged<S, T>(
    batch: &[S],
    out: &mut [T],
    size: impl Fn(&S) -> usize,
    mut write: impl FnMut(&S, &mut [T]) -> Result<(), Error>,
) -> Result<usize, Error> {
    // More than any buffer has if it saturates.
    let needed = batch.iter().map(&size).fold(0, usize::saturating_add);
    room(out.len(), needed)?;
    let mut rest = out;
    for sequence in batch {
        let part;
        (part, rest) = rest.split_at_mut(size(sequence));
        write(sequence, part)?;
    }
    Ok(needed)
}

/// Has `write` fill one part of `out` per sequence, one after another: `width`
/// elements for all, which writers pad to.
///
/// # Errors
///
/// As [`ragged`].
pub fn padded<S, T>(
    batch: &[S],
    out: &mut [T],
    width: usize,
    write: impl FnMut(&S, &mut [T]) -> Result<(), Error>,
) -> Result<usize, Error> {
    ragged(batch, out, |_| width, write)
}

/// A sequence of a batch, as offsets see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Committed rows, which every slot sees.
    pub prefix: usize,
    /// Slots to verify, padding included.
    pub slots: usize,
}

impl Extent {
    /// Prefix and slots; `None` if they overflow.
    fn keys(&self) -> Option<usize> {
        self.prefix.checked_add(self.slots)
    }

    fn mask_elements(&self) -> Option<usize> {
        self.slots.checked_mul(self.keys()?)
    }
}

/// Writes where the slots of each sequence begin (`qo_indptr`): also the offsets
/// of token, position, parent and link arrays.
///
/// # Errors
///
/// If `out` has fewer than one element more than there are sequences, or an
/// offset does not fit the element type. The same holds for the functions
/// below.
pub fn slot_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, |sequence| Some(sequence.slots))
}

/// Writes where the keys of each sequence begin, prefix and slots counted.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn key_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, Extent::keys)
}

/// Writes where the pages of each sequence begin (`kv_indptr`) in a list of all
/// pages in use, if each page holds `page_size` rows.
///
/// # Errors
///
/// As [`slot_offsets`], or if `page_size` is 0.
pub fn page_offsets<T: Element>(
    batch: &[Extent],
    page_size: usize,
    out: &mut [T],
) -> Result<(), Error> {
    check_page_size(page_size)?;
    offsets(batch, out, |sequence| Some(sequence.keys()?.div_ceil(page_size)))
}

/// Writes how many rows of the last page of each sequence are in use
/// (`last_page_len`): 1 to `page_size`.
///
/// # Errors
///
/// If `out` has fewer elements than there are sequences, a length does not fit
/// the element type, `page_size` is 0, or a sequence has no rows.
pub fn last_page_lens<T: Element>(
    batch: &[Extent],
    page_size: usize,
    out: &mut [T],
) -> Result<(), Error> {
    check_page_size(page_size)?;
    room(out.len(), batch.len())?;
    for (sequence, out) in batch.iter().zip(out) {
        let keys = sequence.keys().ok_or_else(|| overflow("extent"))?;
        let Some(last) = keys.checked_sub(1) else {
            return Err(Error::setting("extent", "no rows", "at least the root"));
        };
        *out = number("last_page_len", Some(last % page_size + 1))?;
    }
    Ok(())
}

/// Writes where the dense mask of each sequence begins, in elements; with
/// `prefix` columns as the extents say.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn mask_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, Extent::mask_elements)
}

/// Writes where the packed mask of each sequence begins, in **bytes**: what
/// FlashInfer's kernels read as the mask's offsets.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn packed_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, |sequence| Some(sequence.mask_elements()?.div_ceil(8)))
}

fn offsets<T: Element>(
    batch: &[Extent],
    out: &mut [T],
    size: impl Fn(&Extent) -> Option<usize>,
) -> Result<(), Error> {
    room(out.len(), batch.len() + 1)?;
    let mut offset = 0usize;
    out[0] = number("offset", Some(0))?;
    for (sequence, out) in batch.iter().zip(&mut out[1..]) {
        let end = size(sequence).and_then(|size| offset.checked_add(size));
        *out = number("offset", end)?;
        offset = end.unwrap_or(offset);
    }
    Ok(())
}
