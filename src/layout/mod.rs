//! Writers into the arrays that engines and kernels take.
//!
//! This page is the one place that defines them. Notation: `n` slots (nodes and
//! the root), `p` committed KV rows (the prefix), `N` a fixed width that trees
//! are padded to, `B` sequences. Slot 0 is the root. All arrays are row-major
//! without gaps unless a stride is given; index bases are 0.
//!
//! # One number per slot: [`slots`]
//!
//! | array | shape | element | first element |
//! |---|---|---|---|
//! | tokens | `[N]` | token id | the root's token |
//! | positions | `[N]` | `p + depth` | `p` |
//! | parents | `[N]` | parent slot, -1 for the root | -1 |
//! | depths | `[N]` | depth (TensorRT-LLM `spec_decoding_position_offsets`) | 0 |
//!
//! # Masks over queries and keys
//!
//! Query row `i` is slot `i`. Where a layout has prefix columns, key columns
//! `0..p` are the committed rows, visible to every slot, and column `p + j` is
//! slot `j`.
//!
//! | writer | engine | shape | element |
//! |---|---|---|---|
//! | [`dense::write_additive`] | candle, mistral.rs, vLLM `qq_bias` (`p` = 0), nntrainer (stride) | `[N, p + N]` | 0 or the masked value; f32, f16, bf16 |
//! | [`dense::write_boolean`] | SGLang `FULL_MASK`, `QLEN_ONLY` (`p` = 0); FlashInfer `custom_mask` | `[N, p + N]` | `true` where visible |
//! | [`bits::write_rows`] | TensorRT-LLM `spec_decoding_packed_mask` (u32); SGLang `QLEN_ONLY_BITPACKING` (u8, u16, u32) | `[N, ceil(N / bits)]` | bit `j % bits` of word `j / bits`: slot `j` |
//! | [`bits::write_packed`] | FlashInfer `packed_custom_mask` | `ceil(N * (p + N) / 8)` bytes | bit `e % 8` of byte `e / 8`: element `e = i * (p + N) + j` |
//!
//! # Links: [`links`]
//!
//! | array | engine | shape | element | first element |
//! |---|---|---|---|---|
//! | next token | SGLang `retrive_next_token` | `[N]` | first child's slot, -1 | the root's first child |
//! | next sibling | SGLang `retrive_next_sibling` | `[N]` | next sibling's slot, -1 | -1 |
//! | index | SGLang `retrive_index` | `[N]` | the slot's row in the batch | the root's row |
//! | sequence ids | llama.cpp `llama_batch.seq_id`, `n_seq_id` | ragged | ids of all leaves below a slot | every leaf's id |
//!
//! # KV rows: [`kv`]
//!
//! Slot `i` is verified at KV row `p + i`. Row moves after acceptance are pairs
//! `(from, to)`, to be done in order and in place. A [`kv::RowMap`] turns rows
//! into places: pages of a block table, or a ring buffer.
//!
//! | writer | engine | shape | element |
//! |---|---|---|---|
//! | [`kv::write_places`] | `slot_mapping` of paged engines | `[N]` | place of row `p + i`; in pages of `s` rows, `block_table[r / s] * s + r % s` for `r = p + i` |
//! | [`kv::write_moves`] | all | `[moves]` | places `(from, to)` |
//!
//! # Padding
//!
//! A mask made by [`AncestorMask::build_padded`](crate::AncestorMask::build_padded)
//! and the writers of [`slots`] and [`links`] pad to the length of what they are
//! given. A padding slot repeats the root's token as if it were a child of the
//! root: it sees the prefix, the root and itself, so no row is fully masked.
//! Nothing links to it, no slot of the tree sees it, and [`walk`](crate::walk())
//! takes the picks of the tree's own slots only: it can never be accepted.
//!
//! # Batches: [`batch`]
//!
//! A batch concatenates sequences. Offset arrays have `B + 1` entries, start
//! with 0, and entry `b + 1` minus entry `b` is the size of sequence `b`.
//!
//! | writer | engine | size of a sequence |
//! |---|---|---|
//! | [`batch::slot_offsets`] | FlashInfer `qo_indptr`, `cu_seqlens_q` | slots |
//! | [`batch::key_offsets`] | `cu_seqlens_k` | committed rows and slots |
//! | [`batch::page_offsets`] | FlashInfer `kv_indptr` | pages in use |
//! | [`batch::mask_offsets`] | SGLang `FULL_MASK`, FlashInfer `mask_indptr` of boolean masks | elements of the dense mask |
//! | [`batch::packed_offsets`] | FlashInfer `mask_indptr` of packed masks | **bytes** of the packed mask |
//!
//! [`batch::last_page_lens`] has one entry per sequence (FlashInfer
//! `last_page_len`), as does TensorRT-LLM's `spec_decoding_generation_lengths`:
//! [`DraftTree::len`](crate::DraftTree::len).
//!
//! # Common rules
//!
//! Every writer fills memory of the caller, allocates nothing, and refuses a
//! buffer that is too small before it writes anything. A number that overflows, or
//! that the element type does not hold, is an error too.

pub mod batch;
pub mod bits;
pub mod dense;
pub mod kv;
pub mod links;
pub mod slots;

use crate::Error;

mod sealed {
    pub trait Sealed {}
}

/// Integer types that engines number things in: `u32`, `i32`, `u64`, `i64`.
pub trait Element: sealed::Sealed + Copy + TryFrom<i64> {}

macro_rules! elements {
    ($($element:ty),*) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {}
    )*};
}

elements!(u32, i32, u64, i64);

fn element<T: Element>(field: &'static str, value: i64) -> Result<T, Error> {
    T::try_from(value)
        .map_err(|_| Error::setting(field, value, "a value that the element type holds"))
}

/// A number of rows, slots or elements as an element; `None` is one that overflowed.
fn number<T: Element>(field: &'static str, value: Option<usize>) -> Result<T, Error> {
    let value = value.ok_or_else(|| overflow(field))?;
    match i64::try_from(value) {
        Ok(value) => element(field, value),
        Err(_) => Err(Error::setting(field, value, "a value that the element type holds")),
    }
}

fn overflow(field: &'static str) -> Error {
    Error::setting(field, "a sum or product that overflows", format_args!("at most {}", usize::MAX))
}

fn check_page_size(page_size: usize) -> Result<(), Error> {
    if page_size == 0 {
        return Err(Error::setting("page_size", 0, "at least 1"));
    }
    Ok(())
}

/// Refuses a buffer of fewer than `needed` elements.
fn room(found: usize, needed: usize) -> Result<(), Error> {
    room_in("out", found, needed)
}

fn room_in(field: &'static str, found: usize, needed: usize) -> Result<(), Error> {
    if found < needed { Err(Error::BufferTooSmall { field, found, needed }) } else { Ok(()) }
}
