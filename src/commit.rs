use crate::Acceptance;

/// How the target's caches have to change so that they equal what plain
/// decoding of the accepted path would have left.
///
/// During verification slot `i` of the tree was written to KV row
/// `start() + i`. Afterwards the rows of the accepted slots follow one another
/// from `start()` on, and all later rows are void. The bonus is not among them:
/// it has not been forwarded.
///
/// The same list of slots gathers the target's features of the accepted rows.
///
/// ```
/// use ddtree::{Acceptance, CommitPlan, DraftTree, walk};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 2])?;
/// let mut outcome = Acceptance::new();
/// walk(&tree, &[9, 0, 5, 8], &mut outcome)?;
///
/// let mut plan = CommitPlan::new();
/// plan.set(100, &outcome);
/// assert_eq!(plan.path(), [0, 2, 3]);
/// assert_eq!(plan.new_len(), 103);
/// assert!(!plan.is_prefix());
/// // Rows 102 and 103 move down by one; row 100, the root's, stays.
/// assert_eq!(plan.moves().collect::<Vec<_>>(), [(102, 101), (103, 102)]);
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitPlan {
    start: usize,
    path: Vec<u32>,
}

impl CommitPlan {
    /// A plan that commits nothing, to be [`set`](Self::set).
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for paths of `depth` nodes; none if memory does not hold them.
    pub fn reserve(&mut self, depth: usize) {
        reserve(&mut self.path, depth.saturating_add(1));
    }

    /// Replaces the plan by the one for an outcome of a round whose root was
    /// verified at KV row `start`, the number of rows committed before.
    pub fn set(&mut self, start: usize, outcome: &Acceptance) {
        self.start = start;
        self.path.clear();
        self.path.extend_from_slice(outcome.path());
    }

    /// KV row of the root: the number of rows committed before the round.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The accepted path: slots, root first, ascending.
    pub fn path(&self) -> &[u32] {
        &self.path
    }

    /// Number of rows committed after the round. Rows saturate where no cache could
    /// have as many, here and in [`moves`](Self::moves).
    pub fn new_len(&self) -> usize {
        self.start.saturating_add(self.path.len())
    }

    /// Whether the accepted slots are the first ones, so that no row has to
    /// move and dropping the rows from [`new_len`](Self::new_len) on is all.
    pub fn is_prefix(&self) -> bool {
        self.path.last().is_none_or(|&last| last as usize + 1 == self.path.len())
    }

    /// Row moves `(from, to)`, ascending in both. `to` is always below `from`
    /// and below every later `from`, so that moving in this order within one
    /// buffer never overwrites a row that is still needed. Rows that stay are
    /// left out.
    pub fn moves(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let rows = self.path.iter().enumerate();
        rows.filter(|&(to, &from)| to != from as usize)
            .map(|(to, &from)| (self.row(from as usize), self.row(to)))
    }

    fn row(&self, slot: usize) -> usize {
        self.start.saturating_add(slot)
    }
}

/// Makes room for `len` elements in all. A hint: what cannot be had is found where it
/// is used.
pub(crate) fn reserve<T>(list: &mut Vec<T>, len: usize) {
    let _ = list.try_reserve(len.saturating_sub(list.len()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AncestorMask, DraftTree, StatePlan, walk};

    #[test]
    fn numbers_beyond_any_memory_are_no_panic() {
        let tree = DraftTree::from_parents(&[7, 4, 9], &[-1, 0, 0]).unwrap();
        let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
        // Miri stops where an allocation would fail.
        let refused = if cfg!(miri) { usize::MAX } else { usize::MAX / 8 };
        for len in [usize::MAX, refused] {
            outcome.reserve(len);
            plan.reserve(len);
            AncestorMask::new().reserve(len);
            StatePlan::new(3).reserve(len);
        }
        walk(&tree, &[9, 0, 0], &mut outcome).unwrap();
        plan.set(usize::MAX - 1, &outcome);
        assert_eq!(plan.new_len(), usize::MAX);
        assert_eq!(plan.moves().collect::<Vec<_>>(), [(usize::MAX, usize::MAX)]);
    }
}
