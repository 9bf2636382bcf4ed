//! Draft trees and the builders that grow them.
//!
//! * [`DraftTree`]: the tree itself, flat arrays with the root first.
//! * [`BestFirst`]: the most probable prefixes under a node budget (DDTree).
//! * [`chain`]: the single path of best tokens (DFlash).
//! * [`Expand`]: where builders get children from; [`Filter`] leaves some out.
//! * [`SharedBudget`]: one node budget for the trees of a batch.

pub mod chain;

mod best_first;
mod expand;
mod filter;
mod frontier;
mod shared;

pub use best_first::{BestFirst, TreeSettings};
pub use expand::Expand;
pub use filter::Filter;
pub use shared::SharedBudget;

use crate::Error;

/// Marks the absence of a slot in [`DraftTree::parents`],
/// [`DraftTree::first_children`] and [`DraftTree::next_siblings`].
pub const NONE: i32 = -1;

/// A tree of drafted tokens, root first.
///
/// Slot 0 is the root: the last sampled token, which has no row in the target's
/// KV cache yet. Slots `1..len` are nodes: drafted tokens. All arrays are
/// contiguous and indexed by slot, so that an engine can hand them to a kernel
/// as they are.
///
/// These hold for every value of this type; there is no way to build another:
///
/// * there is a root, `parents[0] == -1` and `depths[0] == 0`;
/// * a parent's slot is smaller than its child's;
/// * `depths[i] == depths[parents[i]] + 1`;
/// * siblings carry distinct tokens;
/// * siblings are linked in ascending slot order.
///
/// A slot is not a position. The position of slot `i` is
/// `root position + depths[i]`, see [`Round::positions`](crate::Round::positions).
///
/// ```
/// use ddtree::DraftTree;
///
/// //        7
/// //      /   \
/// //     4     9
/// //     |
/// //     5
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
/// assert_eq!(tree.depths(), [0, 1, 1, 2]);
/// assert_eq!(tree.children(0).collect::<Vec<_>>(), [1, 2]);
/// assert_eq!(tree.child(0, 9), Some(2));
/// assert!(!tree.is_chain());
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DraftTree {
    tokens: Vec<u32>,
    parents: Vec<i32>,
    depths: Vec<u32>,
    first_children: Vec<i32>,
    next_siblings: Vec<i32>,
    scores: Vec<f64>,
    branches: bool,
}

impl DraftTree {
    /// A tree that is only a root.
    pub fn new(root: u32) -> Self {
        let mut tree = Self {
            tokens: Vec::new(),
            parents: Vec::new(),
            depths: Vec::new(),
            first_children: Vec::new(),
            next_siblings: Vec::new(),
            scores: Vec::new(),
            branches: false,
        };
        tree.reset(root);
        tree
    }

    /// A tree from tokens and parent slots, root first.
    ///
    /// # Errors
    ///
    /// If the slices are empty or of different lengths, the first parent is not
    /// -1, a parent is not an earlier slot, or siblings share a token.
    ///
    /// # Complexity
    ///
    /// Linear in the sum over nodes of their earlier siblings.
    pub fn from_parents(tokens: &[u32], parents: &[i32]) -> Result<Self, Error> {
        if tokens.len() != parents.len() {
            return Err(Error::Length {
                field: "parents",
                found: parents.len(),
                accepted: tokens.len(),
            });
        }
        let fault = |slot, found, accepted| Err(Error::Tree { slot, found, accepted });
        let (Some(&root), Some(&first)) = (tokens.first(), parents.first()) else {
            return fault(0, "no slots".into(), "at least the root");
        };
        if first != NONE {
            return fault(0, format!("parent {first}"), "parent -1 for the root");
        }
        let mut tree = Self::new(root);
        for slot in 1..tokens.len() {
            let parent = match usize::try_from(parents[slot]) {
                Ok(parent) if parent < slot => parent,
                _ => {
                    let found = format!("parent {}", parents[slot]);
                    return fault(slot, found, "the slot of an earlier node or of the root");
                }
            };
            tree.push(parent, tokens[slot], 0.0)?;
        }
        Ok(tree)
    }

    /// Makes this tree a lone root again; keeps the memory.
    pub fn reset(&mut self, root: u32) {
        self.tokens.clear();
        self.parents.clear();
        self.depths.clear();
        self.first_children.clear();
        self.next_siblings.clear();
        self.scores.clear();
        self.branches = false;
        self.append(root, NONE, 0, 0.0);
    }

    /// Appends a child and returns its slot. `score` is the sum of
    /// log-probabilities from the root to the new node; builders set it, and
    /// [`scores`](Self::scores) returns it.
    ///
    /// # Errors
    ///
    /// If `parent` is not a slot of this tree or already has a child with this
    /// token. The tree is unchanged then.
    pub fn push(&mut self, parent: usize, token: u32, score: f64) -> Result<usize, Error> {
        if parent >= self.len() {
            return Err(Error::Tree {
                slot: self.len(),
                found: format!("parent {parent}"),
                accepted: "the slot of an earlier node or of the root",
            });
        }
        let mut elder = None;
        for child in self.children(parent) {
            if self.tokens[child] == token {
                return Err(Error::Tree {
                    slot: self.len(),
                    found: format!("token {token} a second time below slot {parent}"),
                    accepted: "distinct tokens among siblings",
                });
            }
            elder = Some(child);
        }
        Ok(self.push_distinct(parent, elder, token, score))
    }

    /// [`push`](Self::push) for callers that know the token to be new among its
    /// siblings, the youngest of which is `elder`, and the parent to exist.
    #[inline(always)]
    pub(crate) fn push_distinct(
        &mut self,
        parent: usize,
        elder: Option<usize>,
        token: u32,
        score: f64,
    ) -> usize {
        debug_assert!(parent < self.len() && self.child(parent, token).is_none());
        debug_assert_eq!(elder, self.children(parent).last());
        let slot = self.len();
        self.append(token, parent as i32, self.depths[parent] + 1, score);
        match elder {
            None => self.first_children[parent] = slot as i32,
            Some(elder) => self.next_siblings[elder] = slot as i32,
        }
        self.branches |= parent + 1 != slot;
        slot
    }

    #[inline]
    fn append(&mut self, token: u32, parent: i32, depth: u32, score: f64) {
        self.tokens.push(token);
        self.parents.push(parent);
        self.depths.push(depth);
        self.first_children.push(NONE);
        self.next_siblings.push(NONE);
        self.scores.push(score);
    }

    /// Keeps the root and the first `nodes` nodes, which are a tree since parents
    /// come before their children. No effect if there are no more.
    ///
    /// # Complexity
    ///
    /// Linear in the number of nodes kept.
    pub fn truncate(&mut self, nodes: usize) {
        if nodes >= self.nodes() {
            return;
        }
        let slots = nodes + 1;
        self.tokens.truncate(slots);
        self.parents.truncate(slots);
        self.depths.truncate(slots);
        self.scores.truncate(slots);
        for links in [&mut self.first_children, &mut self.next_siblings] {
            links.truncate(slots);
            for link in links.iter_mut().filter(|link| **link >= slots as i32) {
                *link = NONE;
            }
        }
        self.branches = (1..slots).any(|slot| self.parents[slot] + 1 != slot as i32);
    }

    /// Makes room for `slots` slots, so that building up to there allocates
    /// nothing.
    pub fn reserve(&mut self, slots: usize) {
        let more = slots.saturating_sub(self.len());
        self.tokens.reserve(more);
        self.parents.reserve(more);
        self.depths.reserve(more);
        self.first_children.reserve(more);
        self.next_siblings.reserve(more);
        self.scores.reserve(more);
    }

    /// Number of slots: the nodes and the root.
    #[expect(clippy::len_without_is_empty, reason = "a tree always has a root")]
    #[inline]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Number of nodes, which is what a budget counts; the root is none.
    pub fn nodes(&self) -> usize {
        self.len() - 1
    }

    /// Token id of every slot.
    #[inline]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Parent slot of every slot; -1 for the root.
    #[inline]
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Depth of every slot; 0 for the root.
    #[inline]
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// First child of every slot; -1 where there is none.
    #[inline]
    pub fn first_children(&self) -> &[i32] {
        &self.first_children
    }

    /// Next sibling of every slot; -1 where there is none.
    #[inline]
    pub fn next_siblings(&self) -> &[i32] {
        &self.next_siblings
    }

    /// Sum of log-probabilities from the root to every slot, as the builder
    /// added them up; 0 for the root and in trees made
    /// [`from_parents`](Self::from_parents).
    #[inline]
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// Greatest depth; 0 for a lone root.
    ///
    /// # Complexity
    ///
    /// Linear in the number of slots.
    pub fn max_depth(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0) as usize
    }

    /// Whether every slot's parent is the slot before it. Such a tree needs no
    /// mask beyond the causal one. A lone root is a chain.
    #[inline]
    pub fn is_chain(&self) -> bool {
        !self.branches
    }

    /// Slots of a slot's children, ascending; none for a slot outside the tree.
    pub fn children(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        let first = self.first_children.get(slot).copied().unwrap_or(NONE);
        std::iter::successors(usize::try_from(first).ok(), |&child| {
            usize::try_from(self.next_siblings[child]).ok()
        })
    }

    /// The child of a slot that carries `token`.
    ///
    /// # Complexity
    ///
    /// Linear in the number of children.
    #[inline]
    pub fn child(&self, slot: usize, token: u32) -> Option<usize> {
        self.children(slot).find(|&child| self.tokens[child] == token)
    }

    /// Slots from `slot` up to the root, both included; none for a slot outside
    /// the tree.
    pub fn ancestors(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        let start = (slot < self.len()).then_some(slot);
        std::iter::successors(start, |&slot| usize::try_from(self.parents[slot]).ok())
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        4 * (self.tokens.capacity()
            + self.parents.capacity()
            + self.depths.capacity()
            + self.first_children.capacity()
            + self.next_siblings.capacity())
            + 8 * self.scores.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(tokens: &[u32], parents: &[i32]) -> usize {
        match DraftTree::from_parents(tokens, parents).unwrap_err() {
            Error::Tree { slot, .. } => slot,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn refuses_what_is_no_tree() {
        assert_eq!(refused(&[], &[]), 0);
        assert_eq!(refused(&[1], &[0]), 0);
        assert_eq!(refused(&[1, 2], &[-1, -1]), 1);
        assert_eq!(refused(&[1, 2], &[-1, 1]), 1);
        assert_eq!(refused(&[1, 2, 3], &[-1, 2, 0]), 1);
        assert!(DraftTree::from_parents(&[1, 2], &[-1]).is_err());
    }

    #[test]
    fn refuses_duplicate_siblings_and_stays_as_it_was() {
        assert_eq!(refused(&[1, 2, 2], &[-1, 0, 0]), 2);
        let mut tree = DraftTree::from_parents(&[1, 2, 2], &[-1, 0, 1]).unwrap();
        let before = tree.clone();
        assert!(tree.push(0, 2, 0.0).is_err());
        assert!(tree.push(9, 2, 0.0).is_err());
        assert_eq!(tree, before);
    }

    #[test]
    fn token_zero_is_a_token_like_any_other() {
        let tree = DraftTree::from_parents(&[0, 0, 0, 5], &[-1, 0, 1, 1]).unwrap();
        assert_eq!(tree.nodes(), 3);
        assert_eq!(tree.child(0, 0), Some(1));
        assert_eq!(tree.child(1, 0), Some(2));
        assert_eq!(tree.child(2, 0), None);
    }

    #[test]
    fn links_and_shape() {
        let tree = DraftTree::from_parents(&[9, 1, 2, 3, 4], &[-1, 0, 0, 1, 0]).unwrap();
        assert_eq!(tree.first_children(), [1, 3, -1, -1, -1]);
        assert_eq!(tree.next_siblings(), [-1, 2, 4, -1, -1]);
        assert_eq!(tree.ancestors(3).collect::<Vec<_>>(), [3, 1, 0]);
        assert_eq!(tree.max_depth(), 2);
        assert!(!tree.is_chain());
        assert!(DraftTree::new(3).is_chain());
        assert!(DraftTree::from_parents(&[9, 1, 2], &[-1, 0, 1]).unwrap().is_chain());
        assert!(!DraftTree::from_parents(&[9, 1, 2], &[-1, 0, 0]).unwrap().is_chain());
    }
}
