//! Where KV rows lie, and which of them move after acceptance.

use super::{check_page_size, number, overflow, room};
use crate::{CommitPlan, Error};

/// Where the rows of one KV group lie in its storage. Groups with tables or
/// windows of their own have a map each, and the plan is applied to each.
pub trait RowMap {
    /// The place of a row (0-based, the row of position `row` if the sequence
    /// starts at 0), in rows of the storage.
    ///
    /// # Errors
    ///
    /// If the storage has no such row.
    fn place(&self, row: usize) -> Result<usize, Error>;

    /// Refuses a tree of `slots` slots verified from row `start` on that the
    /// storage cannot hold without overwriting rows that are still needed.
    ///
    /// # Errors
    ///
    /// If it cannot.
    fn check(&self, start: usize, slots: usize) -> Result<(), Error>;
}

/// Pages of a fixed number of rows, in the order of a block table: row `r` is
/// row `r % page_size` of page `block_table[r / page_size]`.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    block_table: &'a [u32],
    page_size: usize,
}

impl<'a> Pages<'a> {
    /// Pages of `page_size` rows each.
    ///
    /// # Errors
    ///
    /// If `page_size` is 0.
    pub fn new(block_table: &'a [u32], page_size: usize) -> Result<Self, Error> {
        check_page_size(page_size)?;
        Ok(Self { block_table, page_size })
    }
}

impl RowMap for Pages<'_> {
    fn place(&self, row: usize) -> Result<usize, Error> {
        match self.block_table.get(row / self.page_size) {
            Some(&page) => (page as usize)
                .checked_mul(self.page_size)
                .and_then(|first| first.checked_add(row % self.page_size))
                .ok_or_else(|| overflow("place")),
            None => {
                let rows = self.block_table.len().saturating_mul(self.page_size);
                Err(Error::setting("row", row, format_args!("below {rows}, the pages' rows")))
            }
        }
    }

    fn check(&self, start: usize, slots: usize) -> Result<(), Error> {
        match slots.checked_sub(1) {
            None => Ok(()),
            Some(last) => self.place(row(start, last)?).map(drop),
        }
    }
}

/// A ring buffer, as sliding-window layers keep: row `r` is at `r % capacity`.
///
/// While a tree is verified the ring has to hold the window before the root and
/// all slots at once, rejected ones included.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    capacity: usize,
    window: usize,
}

impl Ring {
    /// A ring of `capacity` rows for a window of `window` positions, the query's
    /// own included.
    ///
    /// # Errors
    ///
    /// If the window is 0 or larger than the capacity.
    pub fn new(capacity: usize, window: usize) -> Result<Self, Error> {
        if window == 0 || window > capacity {
            let accepted = format_args!("1 to the capacity, {capacity}");
            return Err(Error::setting("window", window, accepted));
        }
        Ok(Self { capacity, window })
    }
}

impl RowMap for Ring {
    fn place(&self, row: usize) -> Result<usize, Error> {
        Ok(row % self.capacity)
    }

    /// The root sees `window - 1` rows before it. Those and the slots have to be
    /// in the ring together.
    fn check(&self, start: usize, slots: usize) -> Result<(), Error> {
        // The rows themselves have to be numbers.
        row(start, slots)?;
        let needed = start.min(self.window - 1).saturating_add(slots);
        if needed > self.capacity {
            let accepted = format_args!(
                "at most {}, beside the window in a ring of {}",
                self.capacity - start.min(self.window - 1),
                self.capacity,
            );
            return Err(Error::setting("slots", slots, accepted));
        }
        Ok(())
    }
}

/// The row of a slot of a round that starts at row `start`.
fn row(start: usize, slot: usize) -> Result<usize, Error> {
    start.checked_add(slot).ok_or_else(|| overflow("row"))
}

/// Writes the place of each of `slots` slots verified from row `start` on: the
/// `slot_mapping` that paged engines write new keys and values by.
///
/// # Errors
///
/// If `out` is too small or the storage cannot hold the slots; nothing is
/// written then. If a place does not fit the element type.
pub fn write_places(
    map: &impl RowMap,
    start: usize,
    slots: usize,
    out: &mut [i64],
) -> Result<(), Error> {
    room(out.len(), slots)?;
    map.check(start, slots)?;
    for (slot, out) in out.iter_mut().take(slots).enumerate() {
        *out = number("place", Some(map.place(row(start, slot)?)?))?;
    }
    Ok(())
}

/// Writes the moves `(from, to)` of a plan as places, to be done in order and in
/// place, and returns how many there are: at most one per accepted node.
///
/// In order is enough: a move never overwrites the source of a later one, also
/// where a ring wraps around.
///
/// # Errors
///
/// If `out` is too small or the storage cannot have held the accepted slots.
/// Nothing is written then.
///
/// ```
/// use ddtree::{Acceptance, CommitPlan, DraftTree, layout::kv, walk};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 2])?;
/// let mut outcome = Acceptance::new();
/// walk(&tree, &[9, 0, 5, 8], &mut outcome)?;
/// let mut plan = CommitPlan::new();
/// plan.set(5, &outcome); // rows 5 to 8 were verified, 5, 7 and 8 accepted
///
/// let pages = kv::Pages::new(&[30, 10, 20], 3)?;
/// let mut moves = [(0, 0); 2];
/// assert_eq!(kv::write_moves(&plan, &pages, &mut moves)?, 2);
/// assert_eq!(moves, [(61, 60), (62, 61)]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn write_moves(
    plan: &CommitPlan,
    map: &impl RowMap,
    out: &mut [(usize, usize)],
) -> Result<usize, Error> {
    let needed = plan.moves().count();
    room(out.len(), needed)?;
    let slots = plan.path().last().map_or(0, |&last| last as usize + 1);
    map.check(plan.start(), slots)?;
    for ((from, to), out) in plan.moves().zip(out) {
        *out = (map.place(from)?, map.place(to)?);
    }
    Ok(needed)
}
