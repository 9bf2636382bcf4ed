//! Our trees against the reference's.

use ddtree::{AncestorMask, BestFirst, DraftTree, Proposal, RoundTrace, TreeSettings};

use crate::golden::{Build, Round, Tree};

/// Path sums that differ by less are a near tie: two implementations that add up in different order
/// may rank them differently.
pub const NEAR: f64 = 1e-4;

/// Builds the tree of a case. It has to be the reference's in every slot, without tolerance.
pub fn build(case: &Build) -> Result<(), String> {
    let mut proposal = Proposal::new();
    for (tokens, log_probs) in case.topk_tokens.iter().zip(&case.topk_logprobs) {
        proposal.push(tokens, log_probs).map_err(|error| error.to_string())?;
    }
    let mut tree = DraftTree::new(0);
    let settings = TreeSettings { budget: case.budget, ..TreeSettings::default() };
    BestFirst::new().build(&proposal, settings, &mut tree).map_err(|error| error.to_string())?;
    if let Some(slot) = first_difference(&tree, &case.tree) {
        return Err(format!(
            "{}, reference: {}",
            node(&tree, slot),
            reference_node(&case.tree, slot)
        ));
    }

    let Some(rows) = &case.visibility else { return Ok(()) };
    if rows.len() != tree.len() {
        return Err(format!("{} slots, reference: {} rows of the mask", tree.len(), rows.len()));
    }
    let mut mask = AncestorMask::new();
    mask.build(&tree);
    for (slot, expected) in rows.iter().enumerate() {
        let digit = |key| if mask.is_visible(slot, key) { '1' } else { '0' };
        let row: String = (0..tree.len()).map(digit).collect();
        if row != *expected {
            return Err(format!("slot {slot} sees {row}, reference: {expected}"));
        }
    }
    Ok(())
}

/// Compares a round's tree slot by slot, then the path. A tree that differs is tolerated if it is a
/// near tie, which is then described: as many slots as the reference's, and at every slot the path
/// sum of our node and that of the reference's node differ by less than [`NEAR`], both under our
/// drafter. As our sums descend, the reference's order is then best-first up to that. The
/// tokens along the path have to be the same in any case.
pub fn round(
    ours: &RoundTrace,
    reference: &Round,
    proposal: &Proposal,
) -> Result<Option<String>, String> {
    let tree = DraftTree::from_parents(&ours.tokens, &ours.parents).map_err(|e| e.to_string())?;
    let Some(slot) = first_difference(&tree, &reference.tree) else {
        let path: Vec<usize> = ours.path.iter().map(|&slot| slot as usize).collect();
        return if path == reference.accepted {
            Ok(None)
        } else {
            Err(format!("accepted slots {path:?}, reference: {:?}", reference.accepted))
        };
    };

    let difference =
        format!("{}, reference: {}", node(&tree, slot), reference_node(&reference.tree, slot));
    if tree.nodes() != reference.tree.tokens.len() {
        return Err(difference);
    }
    let mut sums = vec![0.0];
    for (i, (&token, &depth)) in
        reference.tree.tokens.iter().zip(&reference.tree.depths).enumerate()
    {
        let (tokens, log_probs) = proposal.depth(depth as usize);
        let Some(rank) = tokens.iter().position(|&known| known == token) else {
            return Err(format!("{difference}, which the drafter does not propose"));
        };
        sums.push(sums[reference.tree.parents[i + 1] as usize] + f64::from(log_probs[rank]));
    }
    let gap = |slot: usize| (ours.scores[slot] - sums[slot]).abs();
    if let Some(slot) = (1..sums.len()).find(|&slot| gap(slot) >= NEAR) {
        return Err(format!(
            "{difference}; no near tie, as at slot {slot} the path sums are {:.6} and {:.6}",
            ours.scores[slot], sums[slot]
        ));
    }
    let path: Vec<u32> = ours.path[1..].iter().map(|&slot| ours.tokens[slot as usize]).collect();
    let expected: Vec<u32> =
        reference.accepted[1..].iter().map(|&slot| reference.tree.tokens[slot - 1]).collect();
    if path != expected {
        return Err(format!(
            "{difference}; then accepted tokens {path:?}, reference: {expected:?}"
        ));
    }
    Ok(Some(format!("{difference}; path sums {:.6} and {:.6}", ours.scores[slot], sums[slot])))
}

/// The first slot that is not the same in both trees.
fn first_difference(tree: &DraftTree, reference: &Tree) -> Option<usize> {
    let same = |slot: usize| {
        reference.tokens.get(slot - 1) == tree.tokens().get(slot)
            && reference.depths.get(slot - 1) == tree.depths().get(slot)
            && reference.parents.get(slot) == tree.parents().get(slot)
    };
    (1..tree.len().max(reference.tokens.len() + 1)).find(|&slot| !same(slot))
}

fn node(tree: &DraftTree, slot: usize) -> String {
    describe(slot, tree.tokens().get(slot), tree.parents().get(slot))
}

fn reference_node(tree: &Tree, slot: usize) -> String {
    let node = describe(slot, tree.tokens.get(slot - 1), tree.parents.get(slot));
    node.split_once(": ").map_or(node.clone(), |(_, node)| node.to_owned())
}

fn describe(slot: usize, token: Option<&u32>, parent: Option<&i32>) -> String {
    match (token, parent) {
        (Some(token), Some(parent)) => format!("slot {slot}: token {token} below slot {parent}"),
        _ => format!("slot {slot}: none"),
    }
}
