use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, binary_heap::PeekMut},
};

use super::DraftTree;

/// Splits one node budget over the trees of a batch, by expected gain.
///
/// The cost of a batched verification depends on all of its slots together, so
/// what one sequence gains from another node has to be held against what the
/// other sequences would. The expected gain of a node is the probability of its
/// path under the drafter. One heap over all sequences takes the best node that
/// any tree has left, until the budget is spent. With a fixed budget, trees
/// shrink as the batch grows, and a sequence whose drafter is sure of itself gets
/// more than one whose drafter is not.
///
/// Best-first trees make this exact: their nodes come in descending order, and
/// any number of leading nodes is a tree. So every tree is grown on its own
/// first, up to what one sequence may have, and the split says how much of it to
/// keep ([`DraftTree::truncate`], or
/// [`Session::truncate_tree`](crate::Session::truncate_tree)). The nodes of a
/// [spine](crate::TreeSettings::spine) come before better ones and are kept in
/// that order.
///
/// ```
/// use ddtree::{BestFirst, DraftTree, Proposal, TreeSettings, tree::SharedBudget};
///
/// let mut trees = Vec::new();
/// for depths in [[0.9f32, 0.8], [0.6, 0.5]] {
///     let mut proposal = Proposal::new();
///     for (token, probability) in [4, 5].into_iter().zip(depths) {
///         proposal.push(&[token], &[probability.ln()])?;
///     }
///     let mut tree = DraftTree::new(0);
///     BestFirst::new().build(&proposal, TreeSettings::default(), &mut tree)?;
///     trees.push(tree);
/// }
/// // 0.9 and 0.9 * 0.8 of the one, 0.6 of the other; 0.6 * 0.5 is left out.
/// let mut shared = SharedBudget::new();
/// assert_eq!(shared.split(3, &trees, |tree| Some(tree)), [2, 1]);
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SharedBudget {
    heap: BinaryHeap<Next>,
    nodes: Vec<usize>,
}

/// The next node of a sequence.
#[derive(Clone, Copy, Debug)]
struct Next {
    score: f64,
    // Of equal scores, the sequence that comes first in the batch.
    sequence: Reverse<usize>,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(self.sequence.cmp(&other.sequence))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Next {}

impl SharedBudget {
    /// A split with empty scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many leading nodes to keep of every tree of `batch`, `budget` in all
    /// or fewer if the trees have fewer. `tree` finds the tree of an entry; one
    /// without, for instance a sequence that waits for something else, gets 0.
    ///
    /// # Complexity
    ///
    /// O((n + B) log n) for n sequences and B nodes; allocates for the largest
    /// batch so far only.
    pub fn split<T>(
        &mut self,
        budget: usize,
        batch: &[T],
        tree: impl Fn(&T) -> Option<&DraftTree>,
    ) -> &[usize] {
        self.heap.clear();
        self.nodes.clear();
        self.nodes.resize(batch.len(), 0);
        let next = |sequence: usize, node: usize| {
            let score = *tree(&batch[sequence])?.scores().get(node)?;
            Some(Next { score, sequence: Reverse(sequence) })
        };
        self.heap.extend((0..batch.len()).filter_map(|sequence| next(sequence, 1)));
        for _ in 0..budget {
            let Some(mut best) = self.heap.peek_mut() else { break };
            let sequence = best.sequence.0;
            self.nodes[sequence] += 1;
            match next(sequence, self.nodes[sequence] + 1) {
                Some(next) => *best = next,
                None => drop(PeekMut::pop(best)),
            }
        }
        &self.nodes
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        self.heap.capacity() * size_of::<Next>() + self.nodes.capacity() * size_of::<usize>()
    }
}
