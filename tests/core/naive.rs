//! Obviously right versions of what the crate does cleverly.

use ddtree::{DraftTree, TreeSettings};

/// A prefix of a draft: ranks and tokens from the root down, and the sum of its
/// log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    pub ranks: Vec<usize>,
    pub tokens: Vec<u32>,
    pub score: f64,
}

/// The children after a path of tokens, with their log-probabilities.
pub type Lists<'a> = dyn Fn(&[u32]) -> Vec<(u32, f32)> + 'a;

/// All prefixes that can be drafted, in no particular order. `children` gives
/// the ordered children after a path of tokens.
pub fn prefixes(children: &Lists<'_>, top_k: usize, horizon: usize) -> Vec<Prefix> {
    let root = Prefix { ranks: vec![], tokens: vec![], score: 0.0 };
    let mut all = Vec::new();
    let mut layer = vec![root];
    for _ in 0..horizon {
        let mut next = Vec::new();
        for prefix in &layer {
            let list = children(&prefix.tokens);
            // Lists are ordered, so nothing follows an impossible entry.
            let possible = list.iter().take_while(|(_, log_prob)| *log_prob > f32::NEG_INFINITY);
            for (rank, &(token, log_prob)) in possible.enumerate().take(top_k) {
                let mut child = prefix.clone();
                child.ranks.push(rank);
                child.tokens.push(token);
                child.score += f64::from(log_prob);
                next.push(child);
            }
        }
        all.extend(next.iter().cloned());
        layer = next;
    }
    all
}

/// The prefixes that the best-first tree has to hold, in its order.
pub fn best_first(mut all: Vec<Prefix>, settings: TreeSettings) -> Vec<Prefix> {
    let mut kept = Vec::new();
    if settings.spine {
        let spine = |prefix: &Prefix| prefix.ranks.iter().all(|&rank| rank == 0);
        kept = all.iter().filter(|prefix| spine(prefix)).cloned().collect();
        kept.sort_by_key(|prefix| prefix.ranks.len());
        kept.truncate(settings.budget);
        all.retain(|prefix| !kept.contains(prefix));
    }
    all.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| a.ranks.cmp(&b.ranks)));
    all.retain(|prefix| prefix.score >= settings.log_prob_cutoff);
    kept.extend(all);
    kept.truncate(settings.budget);
    kept
}

/// Tokens from the root (left out) to a slot.
pub fn path_tokens(tree: &DraftTree, slot: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut at = slot;
    while at != 0 {
        tokens.insert(0, tree.tokens()[at]);
        at = tree.parents()[at] as usize;
    }
    tokens
}

/// Path and emitted tokens of a walk.
pub fn walk(tree: &DraftTree, picks: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let (mut path, mut tokens) = (vec![0u32], vec![picks[0]]);
    'descend: loop {
        let (at, pick) = (*path.last().unwrap(), *tokens.last().unwrap());
        for (slot, &next) in picks.iter().enumerate() {
            if tree.parents()[slot] == at as i32 && tree.tokens()[slot] == pick {
                path.push(slot as u32);
                tokens.push(next);
                continue 'descend;
            }
        }
        return (path, tokens);
    }
}
