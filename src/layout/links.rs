//! Links between slots, for kernels that walk the tree themselves.

use super::{Element, element, number, room_in};
use crate::{DraftTree, Error};

/// Writes the first child's and the next sibling's slot of every slot, -1 where
/// there is none: SGLang's `retrive_next_token` and `retrive_next_sibling`. Both
/// buffers are filled; slots beyond the tree have no links.
///
/// Siblings are in slot order, which for a best-first tree is from the most
/// probable on, and carry distinct tokens, so that the order in which a kernel
/// tries them does not matter.
///
/// # Errors
///
/// If a buffer is shorter than the tree, they differ in length, or the element
/// type is unsigned.
///
/// ```
/// use ddtree::{DraftTree, layout::links};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
/// let (mut next_token, mut next_sibling) = ([0i64; 5], [0i64; 5]);
/// links::write(&tree, &mut next_token, &mut next_sibling)?;
/// assert_eq!(next_token, [1, 3, -1, -1, -1]);
/// assert_eq!(next_sibling, [-1, 2, -1, -1, -1]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn write<T: Element>(
    tree: &DraftTree,
    next_token: &mut [T],
    next_sibling: &mut [T],
) -> Result<(), Error> {
    room_in("next_token", next_token.len(), tree.len())?;
    if next_sibling.len() != next_token.len() {
        let (found, accepted) = (next_sibling.len(), next_token.len());
        return Err(Error::Length { field: "next_sibling", found, accepted });
    }
    let none = element("next_token", -1)?;
    for (links, out) in [(tree.first_children(), next_token), (tree.next_siblings(), next_sibling)]
    {
        let (tree_part, padding) = out.split_at_mut(links.len());
        for (link, out) in links.iter().zip(tree_part) {
            *out = element("next_token", i64::from(*link))?;
        }
        padding.fill(none);
    }
    Ok(())
}

/// Writes the row of every slot in a batch whose rows for this sequence begin at
/// `first`: `first + i`, for all of `out`. SGLang's `retrive_index`.
///
/// # Errors
///
/// If a row does not fit the element type.
pub fn write_index<T: Element>(first: usize, out: &mut [T]) -> Result<(), Error> {
    for (slot, out) in out.iter_mut().enumerate() {
        *out = number("index", first.checked_add(slot))?;
    }
    Ok(())
}

/// Slots without children, ascending; the root if it is alone.
fn leaf_slots(tree: &DraftTree) -> impl DoubleEndedIterator<Item = usize> + '_ {
    (0..tree.len()).filter(|&slot| tree.first_children()[slot] == crate::tree::NONE)
}

/// Number of leaves: nodes without children; 1 for a lone root.
pub fn leaves(tree: &DraftTree) -> usize {
    leaf_slots(tree).count()
}

/// Number of ids that [`write_sequences`] writes: over all leaves, the slots on
/// the path to it.
pub fn sequence_ids(tree: &DraftTree) -> usize {
    leaf_slots(tree).map(|leaf| tree.depths()[leaf] as usize + 1).sum()
}

/// Writes, for engines without a tree mask, the sequences that every slot
/// belongs to: one sequence per leaf, and each slot is in those of all leaves
/// below it. With `position = prefix + depth` and the rule "same sequence and not
/// later" (llama.cpp), a slot then sees its ancestors and nothing else of the
/// tree.
///
/// Leaves are numbered from `first` on in slot order. `counts[i]` is how many
/// ids slot `i` has (`n_seq_id`), none beyond the tree; `ids` holds them one slot
/// after another, ascending, and what is behind them stays. The committed prefix
/// has to be part of every sequence. Engines limit the number of sequences, for
/// which [`leaves`] is there to ask.
///
/// # Errors
///
/// If `counts` is shorter than the tree, `ids` shorter than [`sequence_ids`],
/// `first` negative, or the last id or the number of ids above `i32::MAX`.
///
/// ```
/// use ddtree::{DraftTree, layout::links};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
/// let (mut counts, mut ids) = ([0; 4], [0; 6]);
/// links::write_sequences(&tree, 10, &mut counts, &mut ids[..5])?;
/// assert_eq!(counts, [2, 1, 1, 1]);
/// // The leaves are slots 2 and 3: the root is in both of their sequences.
/// assert_eq!(ids[..5], [10, 11, 11, 10, 11]);
/// # Ok::<(), ddtree::Error>(())
/// ```
///
/// # Complexity
///
/// Linear in the number of ids written; no scratch.
pub fn write_sequences(
    tree: &DraftTree,
    first: i32,
    counts: &mut [i32],
    ids: &mut [i32],
) -> Result<(), Error> {
    let (leaves, needed) = (leaves(tree), sequence_ids(tree));
    room_in("counts", counts.len(), tree.len())?;
    room_in("ids", ids.len(), needed)?;
    let limit = i32::MAX as usize;
    if first < 0 || first as usize + leaves - 1 > limit || needed > limit {
        let accepted = format_args!("0 to {limit}, less the {leaves} leaves of the tree");
        return Err(Error::setting("first", first, accepted));
    }
    // Until all ids are written, `counts[i]` is where those of slot `i` end. The
    // last leaf's id is written first, each time one place before the ids that
    // the slot has already, so that every end becomes a beginning.
    counts.fill(0);
    let ends = &mut counts[..tree.len()];
    for leaf in leaf_slots(tree) {
        tree.ancestors(leaf).for_each(|slot| ends[slot] += 1);
    }
    let mut end = 0;
    for count in ends.iter_mut() {
        end += *count;
        *count = end;
    }
    let mut number = leaves as i32;
    for leaf in leaf_slots(tree).rev() {
        number -= 1;
        for slot in tree.ancestors(leaf) {
            ends[slot] -= 1;
            ids[ends[slot] as usize] = first + number;
        }
    }
    // A slot has as many ids as lie between its beginning and the next one's.
    let mut next = end;
    for beginning in ends.iter_mut().rev() {
        let count = next - *beginning;
        next = *beginning;
        *beginning = count;
    }
    Ok(())
}
