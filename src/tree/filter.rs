use super::{DraftTree, Expand};

/// Leaves out children before a builder spends budget on them: tokens that a grammar forbids, or
/// anything below a certain token.
///
/// The remaining children move up in rank, so that [`top_k`](super::TreeSettings::top_k) counts
/// these alone.
///
/// ```
/// use ddtree::{BestFirst, DraftTree, Filter, Proposal, TreeSettings};
///
/// let mut proposal = Proposal::new();
/// proposal.push(&[7, 3, 5], &[-0.5, -1.0, -4.0])?;
/// proposal.push(&[4, 9], &[-0.1, -2.5])?;
///
/// // Nothing even may follow something odd.
/// let mut taken = Vec::new();
/// let allowed = |tree: &DraftTree, parent: usize, token: u32| {
///     tree.tokens()[parent] % 2 == 0 || token % 2 == 1
/// };
/// let mut children = Filter::new(&proposal, allowed, &mut taken);
/// let mut tree = DraftTree::new(2);
/// let settings = TreeSettings { budget: 4, ..TreeSettings::default() };
/// BestFirst::new().build_with(&mut children, settings, &mut tree)?;
/// assert_eq!(tree.tokens(), [2, 7, 3, 9, 9]);
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Debug)]
pub struct Filter<'a, E, F> {
    inner: E,
    allows: F,
    // Entries of the inner list that each slot has been asked for.
    taken: &'a mut Vec<u32>,
}

impl<'a, E: Expand, F: FnMut(&DraftTree, usize, u32) -> bool> Filter<'a, E, F> {
    /// The children that `inner` gives and `allows(tree, parent, token)` is true for. `taken` is
    /// scratch.
    pub fn new(inner: E, allows: F, taken: &'a mut Vec<u32>) -> Self {
        taken.clear();
        Self { inner, allows, taken }
    }
}

impl<E: Expand, F: FnMut(&DraftTree, usize, u32) -> bool> Expand for Filter<'_, E, F> {
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
        if parent >= tree.len() {
            return None;
        }
        if self.taken.len() <= parent {
            self.taken.resize(tree.len(), 0);
        }
        // Each tree asks for ranks from 0 on.
        if rank == 0 {
            self.taken[parent] = 0;
        }
        loop {
            let rank = self.taken[parent] as usize;
            let child = self.inner.child(tree, parent, rank)?;
            self.taken[parent] += 1;
            if (self.allows)(tree, parent, child.0) {
                return Some(child);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BestFirst, Proposal, TreeSettings};

    #[test]
    fn a_slot_outside_the_tree_has_no_children() {
        let mut proposal = Proposal::new();
        proposal.push(&[7], &[-0.5]).unwrap();
        let (tree, mut taken) = (DraftTree::new(2), Vec::new());
        assert_eq!((&proposal).child(&tree, 1, 0), None);
        let mut children = Filter::new(&proposal, |_: &_, _, _| true, &mut taken);
        assert_eq!(children.child(&tree, 1, 0), None);
        assert_eq!(children.child(&tree, 0, 0), Some((7, -0.5)));
    }

    #[test]
    fn a_filter_serves_one_tree_after_the_other() {
        let mut proposal = Proposal::new();
        proposal.push(&[7, 3, 5], &[-0.5, -1.0, -4.0]).unwrap();
        let mut taken = Vec::new();
        let mut children = Filter::new(&proposal, |_: &_, _, token| token != 7, &mut taken);
        let settings = TreeSettings { budget: 1, ..TreeSettings::default() };
        for _ in 0..3 {
            let mut tree = DraftTree::new(2);
            BestFirst::new().build_with(&mut children, settings, &mut tree).unwrap();
            assert_eq!(tree.tokens(), [2, 3]);
        }
    }
}
