//! Every array that the layout writers fill is read back by a reader that shares
//! no code with them, over random trees; KV maps are run against storage with
//! contents; batches against sequences on their own.

mod batch;
mod dense;
mod kv;
mod no_alloc;
mod rows;
#[path = "../common/tree.rs"]
mod tree;

use ddtree::DraftTree;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tree::{is_ancestor, random_tree};

/// Token 0 is as likely as any other.
const VOCAB: u32 = 400;

/// Node counts that sit at the edges of words: budget 0 and 1, 32, 33, 64 and 65
/// slots, and more.
const NODES: [usize; 12] = [0, 1, 2, 7, 15, 31, 32, 63, 64, 65, 127, 300];

/// 1,000 trees of all shapes, with a generator for whatever else a test needs.
fn trees() -> impl Iterator<Item = (DraftTree, StdRng)> {
    (0..1_000).map(|seed| {
        let mut rng = StdRng::seed_from_u64(seed);
        // Every third tree has some other size.
        let edge = NODES[seed as usize % NODES.len()];
        let nodes = if seed % 3 == 2 { rng.random_range(0..80) } else { edge };
        (random_tree(&mut rng, nodes + 1, VOCAB), rng)
    })
}

/// As [`is_ancestor`], in a mask of more slots than the tree has: padding slots are
/// children of the root.
fn sees_padded(tree: &DraftTree, query: usize, key: usize) -> bool {
    if query < tree.len() {
        key < tree.len() && is_ancestor(tree, query, key)
    } else {
        key == 0 || key == query
    }
}
