//! Trees for tests of any kind.

use ddtree::DraftTree;
use rand::{Rng, rngs::StdRng};

/// A tree of `slots` slots between a chain and a star, with tokens below `vocab_size`, as many as
/// slots at least, and falling scores.
pub fn random_tree(rng: &mut StdRng, slots: usize, vocab_size: u32) -> DraftTree {
    let mut tree = DraftTree::new(rng.random_range(0..vocab_size));
    let last_parents = [1, 2, 5, 9, usize::MAX][rng.random_range(0..5)];
    let mut score = 0.0;
    while tree.len() < slots {
        let parent = rng.random_range(tree.len().saturating_sub(last_parents)..tree.len());
        score -= rng.random_range(0.0..0.1);
        // Refused if a sibling has the token already.
        let _ = tree.push(parent, rng.random_range(0..vocab_size), score);
    }
    tree
}

/// Whether `ancestor` is `slot` or on the way from it to the root, from the parents alone.
#[allow(dead_code, reason = "some tests need trees alone")]
pub fn is_ancestor(tree: &DraftTree, slot: usize, ancestor: usize) -> bool {
    let mut at = slot as i32;
    while at >= 0 {
        if at as usize == ancestor {
            return true;
        }
        at = tree.parents()[at as usize];
    }
    false
}
