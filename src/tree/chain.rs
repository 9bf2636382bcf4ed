//! The chain: the best token of every depth, one path.

use super::DraftTree;
use crate::Proposal;

/// Grows the chain of a proposal below the root of `tree`, which is replaced:
/// at most `horizon` nodes, up to the first depth without a candidate. Slot `d`
/// is the node of depth `d`.
///
/// The result equals, byte for byte, a best-first tree over lists of one
/// candidate.
///
/// ```
/// use ddtree::{DraftTree, Proposal, tree::chain};
///
/// let mut proposal = Proposal::new();
/// proposal.push(&[7, 3], &[-0.1, -2.5])?;
/// proposal.push(&[4, 9], &[-0.7, -0.9])?;
/// let mut tree = DraftTree::new(1);
/// chain::build(&proposal, 15, &mut tree);
/// assert_eq!(tree.tokens(), [1, 7, 4]);
/// assert!(tree.is_chain());
/// # Ok::<(), ddtree::Error>(())
/// ```
///
/// # Complexity
///
/// Linear in the number of nodes, no scratch.
pub fn build(proposal: &Proposal, horizon: usize, tree: &mut DraftTree) {
    tree.reset(tree.tokens()[0]);
    let mut score = 0.0;
    for slot in 0..horizon {
        let (tokens, log_probs) = proposal.depth(slot + 1);
        let Some((&token, &log_prob)) = tokens.first().zip(log_probs.first()) else {
            break;
        };
        if log_prob == f32::NEG_INFINITY {
            break;
        }
        score += f64::from(log_prob);
        tree.push_distinct(slot, None, token, score);
    }
}
