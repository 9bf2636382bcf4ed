//! Walks, commit plans, and what they do to a verifier's rows.

use ddtree::{
    Acceptance, AncestorMask, CommitPlan, DraftTree, Picks, Prefill, Round, Verifier, walk,
};
use proptest::{collection::vec, prelude::*};

use crate::{
    naive,
    toy::{Target, Text, VOCAB, mix},
};

/// Nodes as (how far back the parent is, token); duplicates among siblings are
/// left out.
fn tree() -> impl Strategy<Value = DraftTree> {
    let root = 0..VOCAB;
    (root, vec((any::<prop::sample::Index>(), 0..VOCAB), 0..40)).prop_map(|(root, nodes)| {
        let mut tree = DraftTree::new(root);
        for (parent, token) in nodes {
            let _ = tree.push(parent.index(tree.len()), token, 0.0);
        }
        tree
    })
}

/// A tree that holds the target's own continuation, in parts, so that walks go
/// deep.
fn tree_after(prompt: &[u32], seed: u64, nodes: usize) -> DraftTree {
    let mut text = Text::new(prompt);
    let mut tree = DraftTree::new(text.next());
    text.push(tree.tokens()[0]);
    let mut best = 0;
    for node in 0..nodes as u64 {
        let dice = mix(seed ^ (node + 1));
        if dice.is_multiple_of(3) {
            let truth = text.next();
            best = tree.push(best, truth, 0.0).unwrap_or_else(|_| tree.child(best, truth).unwrap());
            text.push(truth);
        } else {
            let parent = (dice >> 8) as usize % tree.len();
            let _ = tree.push(parent, (dice >> 32) as u32 % VOCAB, 0.0);
        }
    }
    tree
}

/// The same tree with its slots in another topological order, and where each
/// slot went.
fn renumbered(tree: &DraftTree, seed: u64) -> (DraftTree, Vec<usize>) {
    let mut order = vec![0];
    while order.len() < tree.len() {
        let ready: Vec<usize> = (1..tree.len())
            .filter(|slot| !order.contains(slot))
            .filter(|&slot| order.contains(&(tree.parents()[slot] as usize)))
            .collect();
        order.push(ready[mix(seed + order.len() as u64) as usize % ready.len()]);
    }
    let mut to = vec![0; tree.len()];
    order.iter().enumerate().for_each(|(new, &old)| to[old] = new);
    let mut other = DraftTree::new(tree.tokens()[0]);
    for &slot in &order[1..] {
        let parent = to[tree.parents()[slot] as usize];
        other.push(parent, tree.tokens()[slot], tree.scores()[slot]).unwrap();
    }
    (other, to)
}

/// Verifies a tree after a prompt and commits what was accepted.
fn round(target: &mut Target, prompt: &[u32], tree: &DraftTree) -> (Vec<u32>, Acceptance) {
    let mut ids = Vec::new();
    target.prefill(&Prefill::new(0, prompt), &mut Picks::new(&mut ids)).unwrap();
    let mut mask = AncestorMask::new();
    mask.build(tree);
    let mask = (!tree.is_chain()).then_some(&mask);
    let round = Round::new(prompt.len(), tree, mask);
    target.verify(&round, &mut Picks::new(&mut ids)).unwrap();
    let mut outcome = Acceptance::new();
    walk(tree, &ids, &mut outcome).unwrap();
    let mut plan = CommitPlan::new();
    plan.set(prompt.len(), &outcome);
    target.commit(&plan).unwrap();
    (ids, outcome)
}

proptest! {
    #[test]
    fn walks_follow_picks_while_they_name_a_child(tree in tree(), seed: u64) {
        // Picks that name a child half of the time.
        let picks: Vec<u32> = (0..tree.len())
            .map(|slot| {
                let dice = mix(seed.wrapping_add(slot as u64));
                let children: Vec<usize> = tree.children(slot).collect();
                match children.len() {
                    0 => dice as u32 % VOCAB,
                    _ if dice.is_multiple_of(2) => (dice >> 8) as u32 % VOCAB,
                    n => tree.tokens()[children[(dice >> 8) as usize % n]],
                }
            })
            .collect();
        let mut outcome = Acceptance::new();
        walk(&tree, &picks, &mut outcome).unwrap();
        let (path, tokens) = naive::walk(&tree, &picks);
        prop_assert_eq!(outcome.path(), &path[..]);
        prop_assert_eq!(outcome.tokens(), &tokens[..]);
        // The path is one of the tree's, and its tokens are the nodes' but for
        // the bonus, which no child of the last node carries.
        let last = *path.last().unwrap() as usize;
        let nodes = naive::path_tokens(&tree, last);
        prop_assert_eq!(&tokens[..tokens.len() - 1], &nodes[..]);
        prop_assert_eq!(outcome.accepted(), tree.depths()[last] as usize);
        prop_assert_eq!(tree.child(last, outcome.bonus().unwrap()), None);
        // The same path from elsewhere is the same outcome.
        let mut set = Acceptance::new();
        set.set(&tree, tree.len() - 1, 0).unwrap();
        set.set(&tree, last, outcome.bonus().unwrap()).unwrap();
        prop_assert_eq!(&set, &outcome);
    }

    #[test]
    fn moving_rows_by_plan_gathers_the_path(tree in tree(), leaf: prop::sample::Index, start in 0usize..9) {
        // Any path of the tree.
        let mut outcome = Acceptance::new();
        outcome.set(&tree, leaf.index(tree.len()), VOCAB).unwrap();
        let mut plan = CommitPlan::new();
        plan.set(start, &outcome);

        let before: Vec<usize> = (0..start + tree.len()).collect();
        let mut rows = before.clone();
        let mut last_to = start;
        for (from, to) in plan.moves() {
            prop_assert!(to < from && to > last_to);
            rows[to] = rows[from];
            last_to = to;
        }
        let gathered = plan.path().iter().map(|&slot| before[start + slot as usize]);
        let wanted: Vec<usize> = (0..start).chain(gathered).collect();
        prop_assert_eq!(&rows[..plan.new_len()], &wanted[..]);
        let prefix = outcome.path().iter().zip(0..).all(|(&slot, index)| slot == index);
        prop_assert_eq!(plan.is_prefix(), prefix);
        // The bonus has neither a row nor features.
        prop_assert_eq!(plan.new_len(), start + outcome.tokens().len());
        prop_assert_eq!(plan.path().len(), outcome.accepted() + 1);
    }

    // Positions taken from slots: loops, and trees slower than chains.
    #[test]
    fn renumbering_siblings_changes_nothing(
        prompt in vec(0..VOCAB, 1..6),
        seed: u64,
        nodes in 0usize..30,
    ) {
        let tree = tree_after(&prompt, seed, nodes);
        let (other, to) = renumbered(&tree, seed);
        let (mut one, mut two) = (Target::new(64), Target::new(64));
        let (picks, outcome) = round(&mut one, &prompt, &tree);
        let (other_picks, other_outcome) = round(&mut two, &prompt, &other);
        for slot in 0..tree.len() {
            prop_assert_eq!(picks[slot], other_picks[to[slot]]);
        }
        prop_assert_eq!(outcome.tokens(), other_outcome.tokens());
        prop_assert_eq!(one.committed_rows(), two.committed_rows());
        let text: Vec<u32> =
            prompt.iter().chain(&tree.tokens()[..1]).chain(outcome.tokens()).copied().collect();
        one.assert_plain(&text);
    }

    #[test]
    fn positions_are_root_position_and_depth(tree in tree(), start in 0usize..1000) {
        let round = Round::new(start, &tree, None);
        let mut written = vec![0i32; tree.len()];
        round.positions_into(&mut written).unwrap();
        for (slot, position) in round.positions().enumerate() {
            prop_assert_eq!(position, start + naive::path_tokens(&tree, slot).len());
            prop_assert_eq!(written[slot] as usize, position);
        }
    }
}

// The state of the deepest accepted node was once taken from slot `accepted`.
#[test]
fn accepting_a_sibling_commits_its_row_and_not_its_slots_neighbour() {
    let prompt = [3, 1, 4];
    let mut text = Text::new(&prompt);
    let root = text.next();
    text.push(root);
    let truth = text.next();
    text.push(truth);
    let bonus = text.next();
    // Two wrong siblings come before the right one.
    let wrong = [(truth + 1) % VOCAB, (truth + 2) % VOCAB];
    let tokens = [root, wrong[0], wrong[1], truth];
    let tree = DraftTree::from_parents(&tokens, &[-1, 0, 0, 0]).unwrap();
    let mut target = Target::new(16);
    let (_, outcome) = round(&mut target, &prompt, &tree);
    assert_eq!(outcome.path(), [0, 3]);
    assert_eq!(outcome.tokens(), [truth, bonus]);
    target.assert_plain(&[3, 1, 4, root, truth, bonus]);
}
