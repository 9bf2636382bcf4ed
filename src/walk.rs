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
    /// An outcome to be filled by [`walk`]; holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for paths of `depth` nodes; none if memory does not hold them.
    pub fn reserve(&mut self, depth: usize) {
        reserve(&mut self.path, depth.saturating_add(1));
        reserve(&mut self.tokens, depth.saturating_add(1));
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

    /// The next root; `None` before any walk.
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
