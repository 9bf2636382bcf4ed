//! Checks of what an engine hands to its kernels, or gets from them.

use super::{Check, Failure, Finding};
use crate::{CommitPlan, DraftTree};

/// Positions of all slots, padding aside: the root's plus the depth.
///
/// # Errors
///
/// With the first slot whose position is another one.
///
/// ```
/// use ddtree::{DraftTree, conformance::{Check, arrays}};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// arrays::positions(&tree, 100, [100, 101, 101]).unwrap();
/// let failure = arrays::positions(&tree, 100, [100, 101, 102]).unwrap_err();
/// assert_eq!(failure.check, Check::PositionsFollowDepth);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn positions<T: Into<i64>>(
    tree: &DraftTree,
    start: usize,
    positions: impl IntoIterator<Item = T>,
) -> Result<(), Failure> {
    let check = Check::PositionsFollowDepth;
    let mut found = positions.into_iter();
    for slot in 0..tree.len() {
        let expected = start as i128 + i128::from(tree.depths()[slot]);
        let found = found.next().map(|position| i128::from(position.into()));
        if found != Some(expected) {
            return differs(check, format!("position of slot {slot}"), expected, found);
        }
    }
    Ok(())
}

/// A mask in any layout, read by `sees(slot, column)`: columns below `prefix` are
/// committed rows, column `prefix + j` is slot `j`. Slots from the tree's number on,
/// up to `width`, are padding.
///
/// # Errors
///
/// [`Check::SiblingsDoNotSeeEachOther`] with the first key that a slot of the tree
/// sees and should not, or does not see and should; [`Check::Padding`] if a slot
/// of the tree sees padding, a padding slot sees nothing, or `width` is less than
/// the tree.
///
/// ```
/// use ddtree::{AncestorMask, DraftTree, conformance::arrays, layout::bits};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// let mut mask = AncestorMask::new();
/// mask.build_padded(&tree, 8)?;
/// let mut rows = [0u8; 8];
/// bits::write_rows(&mask, &mut rows)?;
/// arrays::mask(&tree, 8, 0, |slot, column| rows[slot] >> column & 1 == 1).unwrap();
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn mask(
    tree: &DraftTree,
    width: usize,
    prefix: usize,
    sees: impl Fn(usize, usize) -> bool,
) -> Result<(), Failure> {
    if width < tree.len() {
        let expected = format!("at least {}, the slots of the tree", tree.len());
        return differs(Check::Padding, "width".into(), expected, Some(width));
    }
    for slot in 0..tree.len() {
        for column in 0..prefix.saturating_add(width) {
            let key = column.checked_sub(prefix);
            let expected = key.is_none_or(|key| tree.ancestors(slot).any(|above| above == key));
            let found = sees(slot, column);
            if found != expected {
                let check = match key {
                    Some(key) if key >= tree.len() => Check::Padding,
                    _ => Check::SiblingsDoNotSeeEachOther,
                };
                let place = match key {
                    None => format!("whether slot {slot} sees committed row {column}"),
                    Some(key) => format!("whether slot {slot} sees slot {key}"),
                };
                return differs(check, place, expected, Some(found));
            }
        }
    }
    for slot in tree.len()..width {
        if !(0..prefix.saturating_add(width)).any(|column| sees(slot, column)) {
            let place = format!("keys that padding slot {slot} sees");
            return differs(Check::Padding, place, "at least one", Some("none"));
        }
    }
    Ok(())
}

/// Tokens and parents (-1 for the root) of a tree that an engine built or padded
/// itself: no token twice below one parent.
///
/// # Errors
///
/// With the first slot that repeats one.
pub fn siblings(tokens: &[u32], parents: &[i32]) -> Result<(), Failure> {
    let check = Check::DistinctSiblings;
    if tokens.len() != parents.len() {
        return differs(check, "length of parents".into(), tokens.len(), Some(parents.len()));
    }
    for slot in 1..tokens.len() {
        let same = (1..slot)
            .find(|&other| parents[other] == parents[slot] && tokens[other] == tokens[slot]);
        if let Some(other) = same {
            let place = format!("child of slot {} in slot {slot}", parents[slot]);
            let expected = format!("another token than slot {other}'s");
            return differs(check, place, expected, Some(format!("token {}", tokens[slot])));
        }
    }
    Ok(())
}

/// Rows of a cache after a commit, if before it every row held its own number:
/// `row_at(r)` is what row `r` holds now. Rows below the plan's start have to be as
/// they were, and those from there on are the accepted slots'.
///
/// # Errors
///
/// [`Check::CommitScatteredPath`] with the first row that holds another one's
/// contents.
///
/// ```
/// use ddtree::{Acceptance, CommitPlan, DraftTree, conformance::arrays, walk};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0])?;
/// let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
/// walk(&tree, &[9, 0, 1], &mut outcome)?;
/// plan.set(2, &outcome);
///
/// let mut rows: Vec<usize> = (0..5).collect();
/// for (from, to) in plan.moves() {
///     rows[to] = rows[from]; // the kernel under test
/// }
/// arrays::compaction(&plan, |row| rows[row]).unwrap();
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn compaction(plan: &CommitPlan, row_at: impl Fn(usize) -> usize) -> Result<(), Failure> {
    for row in 0..plan.new_len() {
        let slot = row.checked_sub(plan.start()).map(|step| plan.path()[step] as usize);
        let expected = slot.map_or(row, |slot| plan.start().saturating_add(slot));
        let found = row_at(row);
        if found != expected {
            let place = format!("row whose contents row {row} holds");
            return differs(Check::CommitScatteredPath, place, expected, Some(found));
        }
    }
    Ok(())
}

/// One row of tapped features of a toy target whose layer `i` (from 0) writes
/// the constant `i` into all of its output: the row has to be the numbers of
/// `layers`, each repeated over an equal part of it.
///
/// # Errors
///
/// [`Check::Taps`] with the first column that holds another layer's output, or if
/// the row cannot be divided.
///
/// ```
/// use ddtree::conformance::{Check, arrays};
///
/// arrays::taps(&[1, 5], &[1.0, 1.0, 5.0, 5.0]).unwrap();
/// let failure = arrays::taps(&[1, 5], &[2.0, 2.0, 6.0, 6.0]).unwrap_err();
/// assert_eq!(failure.check, Check::Taps);
/// ```
pub fn taps(layers: &[usize], row: &[f32]) -> Result<(), Failure> {
    let width = row.len() / layers.len().max(1);
    if width * layers.len() != row.len() || row.is_empty() {
        let expected = format!("a multiple of the {} taps", layers.len());
        return differs(Check::Taps, "columns".into(), expected, Some(row.len()));
    }
    for (column, &found) in row.iter().enumerate() {
        let expected = layers[column / width] as f32;
        if found != expected {
            let place = format!("layer whose output is in column {column}");
            return differs(Check::Taps, place, expected, Some(found));
        }
    }
    Ok(())
}

fn differs(
    check: Check,
    place: String,
    expected: impl ToString,
    found: Option<impl ToString>,
) -> Result<(), Failure> {
    let found = found.map_or("nothing".into(), |found| found.to_string());
    Err(Failure { check, finding: Finding::Value { place, expected: expected.to_string(), found } })
}
