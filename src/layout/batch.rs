//! Offsets of sequences in a batch.
//!
//! Ragged arrays concatenate what the writers of this module's siblings write
//! for each sequence; an offset array says where each begins. Padded arrays have
//! the same width for all, and need none.

use super::{Element, bits, element, room};
use crate::Error;

/// A sequence of a batch, as offsets see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Committed rows, which every slot sees.
    pub prefix: usize,
    /// Slots to verify, padding included.
    pub slots: usize,
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
    offsets(batch, out, |sequence| sequence.slots)
}

/// Writes where the keys of each sequence begin, prefix and slots counted.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn key_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, |sequence| sequence.prefix + sequence.slots)
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
    if page_size == 0 {
        return Err(Error::setting("page_size", 0, "at least 1"));
    }
    offsets(batch, out, |sequence| (sequence.prefix + sequence.slots).div_ceil(page_size))
}

/// Writes where the dense mask of each sequence begins, in elements; with
/// `prefix` columns as the extents say.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn mask_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, |sequence| sequence.slots * (sequence.prefix + sequence.slots))
}

/// Writes where the packed mask of each sequence begins, in **bytes**: what
/// FlashInfer's kernels read as the mask's offsets.
///
/// # Errors
///
/// As [`slot_offsets`].
pub fn packed_offsets<T: Element>(batch: &[Extent], out: &mut [T]) -> Result<(), Error> {
    offsets(batch, out, |sequence| bits::packed_len(sequence.slots, sequence.prefix))
}

fn offsets<T: Element>(
    batch: &[Extent],
    out: &mut [T],
    size: impl Fn(&Extent) -> usize,
) -> Result<(), Error> {
    room(out.len(), batch.len() + 1)?;
    let mut offset = 0;
    out[0] = element("offset", 0)?;
    for (sequence, out) in batch.iter().zip(&mut out[1..]) {
        offset += size(sequence);
        *out = element("offset", offset as i64)?;
    }
    Ok(())
}
