//! One number per slot, padded to a fixed width: tokens, positions, parents,
//! depths.
//!
//! Without padding the first, third and fourth are [`DraftTree::tokens`],
//! [`DraftTree::parents`] and [`DraftTree::depths`] as they are.
//!
//! A padding slot repeats the root's token at depth 1 below the root, which fits
//! [`AncestorMask::build_padded`](crate::AncestorMask::build_padded). It is in no
//! list of links, so that no walk can reach it.

use super::{Element, element, number, room};
use crate::{DraftTree, Error};

/// Writes the token of every slot; padding repeats the root's.
///
/// # Errors
///
/// If `out` is shorter than the tree, or a value does not fit the element type.
/// `out` is unspecified then.
pub fn write_tokens<T: Element>(tree: &DraftTree, out: &mut [T]) -> Result<(), Error> {
    let root = tree.tokens()[0];
    fill(tree, out, |slot| {
        element("token", tree.tokens().get(slot).copied().unwrap_or(root).into())
    })
}

/// Writes the position of every slot: `start` (the root's position) plus its
/// depth.
///
/// # Errors
///
/// As [`write_tokens`].
pub fn write_positions<T: Element>(
    tree: &DraftTree,
    start: usize,
    out: &mut [T],
) -> Result<(), Error> {
    fill(tree, out, |slot| number("position", start.checked_add(depth(tree, slot) as usize)))
}

/// Writes the parent slot of every slot, -1 for the root. Recurrent layers start
/// a slot from the state after its parent, the root from the committed state.
///
/// # Errors
///
/// As [`write_tokens`]; the element type must be signed.
pub fn write_parents<T: Element>(tree: &DraftTree, out: &mut [T]) -> Result<(), Error> {
    fill(tree, out, |slot| element("parent", tree.parents().get(slot).copied().unwrap_or(0).into()))
}

/// Writes the depth of every slot.
///
/// # Errors
///
/// As [`write_tokens`].
pub fn write_depths<T: Element>(tree: &DraftTree, out: &mut [T]) -> Result<(), Error> {
    fill(tree, out, |slot| element("depth", depth(tree, slot).into()))
}

fn depth(tree: &DraftTree, slot: usize) -> u32 {
    tree.depths().get(slot).copied().unwrap_or(1)
}

fn fill<T: Element>(
    tree: &DraftTree,
    out: &mut [T],
    value: impl Fn(usize) -> Result<T, Error>,
) -> Result<(), Error> {
    room(out.len(), tree.len())?;
    for (slot, out) in out.iter_mut().enumerate() {
        *out = value(slot)?;
    }
    Ok(())
}
