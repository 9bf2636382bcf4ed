use crate::{DraftTree, Error, commit::reserve};

/// The outcome of a round: the path that was accepted, and the bonus.
///
/// The path starts with the root. A round commits the rows of the path and
/// emits as many tokens: the accepted nodes', then the bonus. The bonus has
/// been chosen but not forwarded: it has no KV row and no features, and is the
/// next root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    path: Vec<u32>,
    tokens: Vec<u32>,
}

impl Acceptance {
    /// An outcome to be filled by [`walk`] or [`set`](Self::set); holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for paths of `depth` nodes; none if memory does not hold them.
    pub fn reserve(&mut self, depth: usize) {
        reserve(&mut self.path, depth.saturating_add(1));
        reserve(&mut self.tokens, depth.saturating_add(1));
    }

    /// Replaces the outcome by the path from the root of `tree` to slot `last`, and
    /// `bonus` after it: for engines whose kernels walk the tree themselves. Whether
    /// the target picks that path is theirs to know, and so is whether the bonus
    /// could have gone on to a child of `last`.
    ///
    /// # Errors
    ///
    /// If the tree has no slot `last`. The outcome is unchanged then.
    ///
    /// # Complexity
    ///
    /// Linear in the depth of `last`.
    ///
    /// ```
    /// use ddtree::{Acceptance, DraftTree, walk};
    ///
    /// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
    /// let mut outcome = Acceptance::new();
    /// outcome.set(&tree, 3, 8)?;
    /// assert_eq!(outcome.path(), [0, 1, 3]);
    /// assert_eq!(outcome.tokens(), [4, 5, 8]);
    ///
    /// let mut walked = Acceptance::new();
    /// walk(&tree, &[4, 5, 0, 8], &mut walked)?;
    /// assert_eq!(outcome, walked);
    /// # Ok::<(), ddtree::Error>(())
    /// ```
    pub fn set(&mut self, tree: &DraftTree, last: usize, bonus: u32) -> Result<(), Error> {
        let Some(&depth) = tree.depths().get(last) else {
            let accepted = format_args!("a slot of the tree, below {}", tree.len());
            return Err(Error::setting("last", last, accepted));
        };
        self.path.clear();
        self.path.resize(depth as usize + 1, 0);
        for (out, slot) in self.path.iter_mut().rev().zip(tree.ancestors(last)) {
            *out = slot as u32;
        }
        self.tokens.clear();
        self.tokens.extend(self.path[1..].iter().map(|&slot| tree.tokens()[slot as usize]));
        self.tokens.push(bonus);
        Ok(())
    }

    /// Slots accepted, root first, ascending.
    pub fn path(&self) -> &[u32] {
        &self.path
    }

    /// Tokens that the round emits: those of the accepted nodes, then the
    /// bonus. As many as the path has slots.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The next root; `None` before any outcome.
    pub fn bonus(&self) -> Option<u32> {
        self.tokens.last().copied()
    }

    /// Number of drafted tokens accepted.
    pub fn accepted(&self) -> usize {
        self.path.len().saturating_sub(1)
    }

    /// Shortens the outcome to `tokens` emitted tokens (at least one): the last
    /// one kept becomes the bonus, as if the target had been asked no further.
    /// The rows committed shrink with it. No effect if it is that short.
    pub fn truncate(&mut self, tokens: usize) {
        self.path.truncate(tokens.max(1));
        self.tokens.truncate(tokens.max(1));
    }
}

/// Follows the target's picks from the root while they name a child.
///
/// `picks[i]` is the token that the target chooses after the path to slot `i`.
/// The first pick that names no child is the bonus. Since each emitted token is
/// the target's own choice given its true prefix, the text is that of decoding
/// without a draft, greedy or sampled, whatever the tree.
///
/// # Errors
///
/// If there are not exactly as many picks as slots.
///
/// # Complexity
///
/// Linear in the number of children along the path.
///
/// ```
/// use ddtree::{Acceptance, DraftTree, walk};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
/// let mut outcome = Acceptance::new();
/// walk(&tree, &[4, 5, 0, 8], &mut outcome)?;
/// assert_eq!(outcome.path(), [0, 1, 3]);
/// assert_eq!(outcome.tokens(), [4, 5, 8]);
/// assert_eq!(outcome.bonus(), Some(8));
/// # Ok::<(), ddtree::Error>(())
/// ```
pub fn walk(tree: &DraftTree, picks: &[u32], outcome: &mut Acceptance) -> Result<(), Error> {
    if picks.len() != tree.len() {
        return Err(Error::Length { field: "picks", found: picks.len(), accepted: tree.len() });
    }
    outcome.path.clear();
    outcome.tokens.clear();
    let mut slot = 0;
    loop {
        outcome.path.push(slot as u32);
        outcome.tokens.push(picks[slot]);
        match tree.child(slot, picks[slot]) {
            Some(child) => slot = child,
            None => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_of_another_length_are_refused() {
        let tree = DraftTree::new(1);
        let mut outcome = Acceptance::new();
        for picks in [&[][..], &[1, 2]] {
            let error = walk(&tree, picks, &mut outcome).unwrap_err();
            assert!(matches!(error, Error::Length { field: "picks", accepted: 1, .. }));
        }
        assert_eq!(outcome.bonus(), None);
    }

    #[test]
    fn a_path_ends_in_the_tree() {
        let tree = DraftTree::from_parents(&[7, 4, 5], &[-1, 0, 0]).unwrap();
        let mut outcome = Acceptance::new();
        outcome.set(&tree, 2, 6).unwrap();
        let before = outcome.clone();
        for last in [3, usize::MAX] {
            let error = outcome.set(&tree, last, 6).unwrap_err();
            assert!(matches!(error, Error::Setting { field: "last", .. }), "{error}");
            assert_eq!(outcome, before);
        }
        // A lone root, and a bonus that names a child.
        outcome.set(&tree, 0, 5).unwrap();
        assert_eq!((outcome.path(), outcome.tokens()), (&[0][..], &[5][..]));
    }

    #[test]
    fn a_shortened_outcome_ends_in_a_bonus_without_a_row() {
        let tree = DraftTree::from_parents(&[7, 4, 5, 6], &[-1, 0, 1, 2]).unwrap();
        let mut outcome = Acceptance::new();
        walk(&tree, &[4, 5, 6, 8], &mut outcome).unwrap();
        assert_eq!((outcome.path(), outcome.tokens()), (&[0, 1, 2, 3][..], &[4, 5, 6, 8][..]));
        outcome.truncate(2);
        assert_eq!((outcome.path(), outcome.tokens()), (&[0, 1][..], &[4, 5][..]));
        assert_eq!((outcome.accepted(), outcome.bonus()), (1, Some(5)));
        outcome.truncate(0);
        assert_eq!((outcome.path(), outcome.tokens()), (&[0][..], &[4][..]));
    }
}
