use super::DraftTree;
use crate::Proposal;

/// Where a builder gets a node's children from, best first and on demand.
///
/// The lists of a [`Proposal`] depend on the depth alone, as a block-diffusion
/// drafter gives them. Scores that depend on the path (a selector over pairs of
/// tokens, an n-gram model, a grammar that forbids continuations) implement
/// this trait instead; the builder is the same.
///
/// ```
/// use ddtree::{BestFirst, DraftTree, Expand, TreeSettings};
///
/// /// After an even token comes its successor, or, less likely, itself.
/// struct Parity;
///
/// impl Expand for Parity {
///     fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
///         let token = tree.tokens()[parent];
///         match rank {
///             _ if tree.depths()[parent] == 4 => None,
///             0 => Some((token + 1, -0.2)),
///             1 if token % 2 == 0 => Some((token, -1.7)),
///             _ => None,
///         }
///     }
/// }
///
/// let mut tree = DraftTree::new(2);
/// let settings = TreeSettings { budget: 5, ..TreeSettings::default() };
/// BestFirst::new().build_with(&mut Parity, settings, &mut tree)?;
/// assert_eq!(tree.tokens(), [2, 3, 4, 5, 6, 2]);
/// # Ok::<(), ddtree::Error>(())
/// ```
pub trait Expand {
    /// The `rank`-th best child (from 0) of the slot `parent` of `tree`, as
    /// token and log-probability given the path to `parent`; `None` if there
    /// are no more. A builder asks for slots of the tree only.
    ///
    /// For one parent, ranks are asked in ascending order and each once;
    /// tokens must be distinct and log-probabilities must not ascend, which the
    /// builder checks. An entry of `-inf` ends the list. Best-first order is
    /// optimal for entries of at most 0.
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)>;
}

impl<E: Expand + ?Sized> Expand for &mut E {
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
        (**self).child(tree, parent, rank)
    }
}

impl Expand for &Proposal {
    #[inline]
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
        self.entry(*tree.depths().get(parent)? as usize + 1, rank)
    }
}
