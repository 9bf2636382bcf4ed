use super::frontier::{Candidate, Frontier, Place};
use super::{DraftTree, Expand, NONE};
use crate::{Error, Proposal};

/// How large a tree grows, and where it stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeSettings {
    /// Nodes at most, not counting the root. Zero gives a lone root.
    pub budget: usize,
    /// Children of one node at most.
    pub top_k: usize,
    /// Growth stops at the first path whose log-probability is below this.
    /// Since paths come in descending order, the stop is exact. NaN is no limit.
    pub log_prob_cutoff: f64,
    /// Whether the chain of best tokens, or as much of it as the budget holds,
    /// is in the tree whatever its probability. Its nodes then come first. The
    /// cut-off does not apply to them.
    pub spine: bool,
}

impl Default for TreeSettings {
    /// 64 nodes, no other limit, no spine guarantee.
    fn default() -> Self {
        Self { budget: 64, top_k: usize::MAX, log_prob_cutoff: f64::NEG_INFINITY, spine: false }
    }
}

/// Grows the tree of the most probable prefixes: DDTree's builder.
///
/// The candidates are the unvisited children of the tree so far; the one with
/// the greatest path log-probability becomes the next node, until the budget is
/// spent. If scores are at most 0, the result is the prefix-closed set of
/// `budget` prefixes with the greatest sum of path probabilities, hence of
/// expected accepted tokens under the drafter's own marginals (Propositions 1
/// to 3 of the DDTree paper).
///
/// Order is that of the published reference implementation, exactly: path sums
/// in f64 over f32 log-probabilities, added from the root down; equal sums are
/// ordered by the ranks along the path, lexicographically. Entries of `-inf` are
/// never drafted.
///
/// A builder owns the scratch it needs and reuses it; one per sequence or one
/// per thread are both fine, since nothing carries over between builds.
///
/// # When not to use it
///
/// If verification costs grow steeply with the number of slots (a CPU, a large
/// batch, a mixture of experts), a [`chain`](super::chain) can be faster even
/// though it accepts less. Measure.
///
/// ```
/// use ddtree::{BestFirst, DraftTree, Proposal, TreeSettings};
///
/// let mut proposal = Proposal::new();
/// proposal.push(&[7, 3], &[0.5f32.ln(), 0.4f32.ln()])?;
/// proposal.push(&[4, 9], &[0.9f32.ln(), 0.1f32.ln()])?;
///
/// let mut tree = DraftTree::new(1);
/// let settings = TreeSettings { budget: 4, ..TreeSettings::default() };
/// BestFirst::new().build(&proposal, settings, &mut tree)?;
/// // 0.5, 0.5 * 0.9, 0.4, 0.4 * 0.9
/// assert_eq!(tree.tokens(), [1, 7, 4, 3, 4]);
/// assert_eq!(tree.parents(), [-1, 0, 1, 0, 3]);
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct BestFirst {
    frontier: Frontier,
}

impl BestFirst {
    /// A builder with empty scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for trees of `budget` nodes, so that building them allocates
    /// nothing.
    pub fn reserve(&mut self, budget: usize) {
        self.frontier.reserve(budget + 1);
    }

    /// Grows a tree over per-depth lists below the root of `tree`; what `tree`
    /// held below its root is dropped.
    ///
    /// # Errors
    ///
    /// None with lists that a [`Proposal`] holds: those are valid. The result
    /// is there for symmetry with [`build_with`](Self::build_with).
    ///
    /// # Complexity
    ///
    /// O(B log B) time for B nodes and O(B) scratch; ties cost O(depth) more
    /// per comparison.
    pub fn build(
        &mut self,
        proposal: &Proposal,
        settings: TreeSettings,
        tree: &mut DraftTree,
    ) -> Result<(), Error> {
        self.grow::<_, false>(&mut &*proposal, settings, tree)
    }

    /// Grows a tree over whatever children `expand` gives.
    ///
    /// # Errors
    ///
    /// If `expand` gives a NaN or +inf, a child that is better than the one of
    /// the rank before, or a token twice below one parent; the error names
    /// depth and rank. `tree` then holds a valid part of the tree.
    ///
    /// # Complexity
    ///
    /// As [`build`](Self::build), plus one call of `expand` per candidate (at
    /// most 2 B + 1) and a look at the earlier siblings of each node.
    pub fn build_with<E: Expand>(
        &mut self,
        expand: &mut E,
        settings: TreeSettings,
        tree: &mut DraftTree,
    ) -> Result<(), Error> {
        self.grow::<_, true>(expand, settings, tree)
    }

    fn grow<E: Expand, const CHECK: bool>(
        &mut self,
        expand: &mut E,
        settings: TreeSettings,
        tree: &mut DraftTree,
    ) -> Result<(), Error> {
        tree.reset(tree.tokens()[0]);
        self.frontier.clear();
        if settings.budget == 0 || settings.top_k == 0 {
            return Ok(());
        }
        if settings.spine {
            self.lay_spine::<_, CHECK>(expand, settings, tree)?;
        } else {
            let first = first_child::<_, CHECK>(expand, tree, 0)?;
            if !first.is_nothing() {
                self.frontier.push(first, |_, _| false);
            }
        }
        while tree.nodes() < settings.budget {
            let Some(best) = self.frontier.first() else { break };
            if best.score() < settings.log_prob_cutoff {
                break;
            }
            let slot = insert::<CHECK>(best, tree)?;
            let child = first_child::<_, CHECK>(expand, tree, slot)?;
            let sibling = next_sibling::<_, CHECK>(expand, settings.top_k, tree, slot, best.place)?;
            let before = |a, b| path_before(tree, a, b);
            // The better of the new candidates takes the place of the old one,
            // which saves its removal; the other comes in from below, near which
            // it belongs.
            // A child's path comes first among equal sums.
            let (better, worse) =
                if child.is_at_least(&sibling) { (child, sibling) } else { (sibling, child) };
            if better.is_nothing() {
                self.frontier.pop(before);
                continue;
            }
            self.frontier.replace(better, before);
            if !worse.is_nothing() {
                self.frontier.push(worse, before);
            }
        }
        Ok(())
    }

    /// Inserts the chain of best tokens and makes its siblings candidates.
    fn lay_spine<E: Expand, const CHECK: bool>(
        &mut self,
        expand: &mut E,
        settings: TreeSettings,
        tree: &mut DraftTree,
    ) -> Result<(), Error> {
        while tree.nodes() < settings.budget {
            let last = tree.len() - 1;
            let best = first_child::<_, CHECK>(expand, tree, last)?;
            if best.is_nothing() {
                break;
            }
            insert::<CHECK>(best, tree)?;
        }
        for slot in 1..tree.len() {
            let place =
                Place { parent: slot as u32 - 1, rank: 0, token: tree.tokens()[slot], elder: NONE };
            let sibling = next_sibling::<_, CHECK>(expand, settings.top_k, tree, slot, place)?;
            if !sibling.is_nothing() {
                self.frontier.push(sibling, |a, b| path_before(tree, a, b));
            }
        }
        Ok(())
    }

    /// Bytes of scratch held, used or not.
    pub fn memory_usage(&self) -> usize {
        self.frontier.memory_usage()
    }
}

/// Compares the ranks along the paths of two candidates lexicographically. Neither
/// path is a prefix of the other, since candidates are never below one another.
///
/// Siblings come into the tree in the order of their ranks, so slots say what
/// ranks would; a candidate comes after all siblings that are in, and there is no
/// other candidate among them.
#[cold]
#[inline(never)]
fn path_before(tree: &DraftTree, a: Place, b: Place) -> bool {
    let (parents, depths) = (tree.parents(), tree.depths());
    let (mut a, mut b) = ((a.parent as usize, usize::MAX), (b.parent as usize, usize::MAX));
    let lift = |(parent, _)| (parents[parent] as usize, parent);
    while depths[a.0] > depths[b.0] {
        a = lift(a);
    }
    while depths[b.0] > depths[a.0] {
        b = lift(b);
    }
    while a.0 != b.0 {
        a = lift(a);
        b = lift(b);
    }
    a.1 < b.1
}

/// The best child of a slot, unless there is none that can be drafted.
#[inline(always)]
fn first_child<E: Expand, const CHECK: bool>(
    expand: &mut E,
    tree: &DraftTree,
    parent: usize,
) -> Result<Candidate, Error> {
    candidate::<_, CHECK>(expand, tree, (parent, 0), NONE, f64::INFINITY)
}

/// The sibling of the rank after that of the node `slot`, unless there is none that can
/// be drafted.
#[inline(always)]
fn next_sibling<E: Expand, const CHECK: bool>(
    expand: &mut E,
    top_k: usize,
    tree: &DraftTree,
    slot: usize,
    node: Place,
) -> Result<Candidate, Error> {
    let rank = node.rank as usize + 1;
    if rank >= top_k {
        return Ok(Candidate::NOTHING);
    }
    let limit = tree.scores()[slot];
    candidate::<_, CHECK>(expand, tree, (node.parent as usize, rank), slot as i32, limit)
}

/// A child by parent and rank, unless there is none that can be drafted. `limit` is the
/// score of the sibling before it.
#[inline(always)]
fn candidate<E: Expand, const CHECK: bool>(
    expand: &mut E,
    tree: &DraftTree,
    (parent, rank): (usize, usize),
    elder: i32,
    limit: f64,
) -> Result<Candidate, Error> {
    let Some((token, log_prob)) = expand.child(tree, parent, rank) else {
        return Ok(Candidate::NOTHING);
    };
    if log_prob == f32::NEG_INFINITY {
        return Ok(Candidate::NOTHING);
    }
    let score = tree.scores()[parent] + f64::from(log_prob);
    if CHECK && (!log_prob.is_finite() || score > limit) {
        return Err(refused(tree, parent, rank, log_prob));
    }
    let place = Place { parent: parent as u32, rank: rank as u32, token, elder };
    Ok(Candidate::new(score, place))
}

#[inline]
fn insert<const CHECK: bool>(node: Candidate, tree: &mut DraftTree) -> Result<usize, Error> {
    let Place { parent, rank, token, elder } = node.place;
    let parent = parent as usize;
    if CHECK && tree.child(parent, token).is_some() {
        return Err(Error::Proposal {
            depth: tree.depths()[parent] as usize + 1,
            rank: rank as usize,
            found: format!("token {token} a second time below slot {parent}"),
            accepted: "distinct tokens",
        });
    }
    let elder = usize::try_from(elder).ok();
    Ok(tree.push_distinct(parent, elder, token, node.score()))
}

#[cold]
fn refused(tree: &DraftTree, parent: usize, rank: usize, log_prob: f32) -> Error {
    Error::Proposal {
        depth: tree.depths()[parent] as usize + 1,
        rank,
        found: format!("log-probability {log_prob}"),
        accepted: "numbers below infinity, descending among siblings",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(rows: &[&[f32]]) -> Proposal {
        let mut proposal = Proposal::new();
        for row in rows {
            let tokens: Vec<u32> = (10..).take(row.len()).collect();
            let log_probs: Vec<f32> = row.iter().map(|p| p.ln()).collect();
            proposal.push(&tokens, &log_probs).unwrap();
        }
        proposal
    }

    fn build(proposal: &Proposal, settings: TreeSettings) -> DraftTree {
        let mut tree = DraftTree::new(1);
        BestFirst::new().build(proposal, settings, &mut tree).unwrap();
        tree
    }

    fn budget(budget: usize) -> TreeSettings {
        TreeSettings { budget, ..TreeSettings::default() }
    }

    #[test]
    fn equal_sums_take_the_smaller_rank_path_first() {
        // Popping in push order would give two siblings instead.
        let tree = build(&proposal(&[&[0.5, 0.25, 0.25], &[0.5, 0.3, 0.2]]), budget(2));
        assert_eq!(tree.parents(), [-1, 0, 1]);
    }

    #[test]
    fn impossible_tokens_are_never_drafted() {
        let tree = build(&proposal(&[&[1.0, 0.0], &[0.6, 0.4, 0.0]]), budget(64));
        assert_eq!(tree.tokens(), [1, 10, 10, 11]);
        let nothing = build(&proposal(&[&[0.0, 0.0], &[1.0]]), budget(64));
        assert_eq!(nothing, DraftTree::new(1));
        let spine = TreeSettings { spine: true, ..budget(64) };
        assert_eq!(build(&proposal(&[&[1.0], &[0.0], &[1.0]]), spine).nodes(), 1);
    }

    #[test]
    fn no_budget_no_lists_or_no_children_give_a_lone_root() {
        let lists = proposal(&[&[0.9, 0.1]]);
        assert_eq!(build(&lists, budget(0)), DraftTree::new(1));
        assert_eq!(build(&lists, TreeSettings { top_k: 0, ..budget(4) }), DraftTree::new(1));
        assert_eq!(build(&Proposal::new(), budget(4)), DraftTree::new(1));
    }

    #[test]
    fn one_candidate_per_depth_is_the_chain_byte_for_byte() {
        let lists = proposal(&[&[0.9, 0.1], &[0.5, 0.4], &[0.3, 0.3]]);
        for spine in [false, true] {
            let tree = build(&lists, TreeSettings { top_k: 1, spine, ..budget(9) });
            let mut chain = DraftTree::new(1);
            super::super::chain::build(&lists, 15, &mut chain);
            assert_eq!(tree, chain);
        }
    }

    #[test]
    fn the_spine_is_kept_when_breadth_is_more_probable() {
        let flat: &[f32] = &[0.3, 0.25, 0.2, 0.15, 0.1];
        let lists = proposal(&[flat, flat, flat, flat]);
        assert_eq!(build(&lists, budget(5)).max_depth(), 1);
        let spine = TreeSettings { spine: true, ..budget(5) };
        let tree = build(&lists, spine);
        assert_eq!(tree.parents(), [-1, 0, 1, 2, 3, 0]);
        assert_eq!(tree.tokens(), [1, 10, 10, 10, 10, 11]);
        let short = build(&lists, TreeSettings { budget: 3, ..spine });
        assert_eq!(short.parents(), [-1, 0, 1, 2]);
    }

    #[test]
    fn cutoff_stops_at_the_first_path_below_it() {
        let lists = proposal(&[&[0.6, 0.4], &[0.5, 0.5]]);
        let cutoff = f64::from(0.35f32.ln());
        let tree = build(&lists, TreeSettings { log_prob_cutoff: cutoff, ..budget(64) });
        assert_eq!(tree.tokens(), [1, 10, 11]);
    }

    #[test]
    fn top_k_bounds_the_children_of_every_node() {
        let lists = proposal(&[&[0.4, 0.3, 0.3], &[0.4, 0.3, 0.3]]);
        let tree = build(&lists, TreeSettings { top_k: 2, ..budget(64) });
        assert_eq!(tree.nodes(), 2 + 4);
        assert!((0..tree.len()).all(|slot| tree.children(slot).count() <= 2));
    }

    /// Gives one parent a fixed list of children.
    struct List(Vec<(u32, f32)>);

    impl Expand for List {
        fn child(&mut self, _: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
            (parent == 0).then(|| self.0.get(rank).copied()).flatten()
        }
    }

    #[test]
    fn faulty_scores_and_duplicates_are_errors_that_say_where() {
        for (children, at) in [
            (vec![(1, f32::NAN)], 0),
            (vec![(1, -1.0), (2, f32::INFINITY)], 1),
            (vec![(1, -1.0), (2, -2.0), (3, -1.5)], 2),
            (vec![(1, -1.0), (2, -2.0), (1, -3.0)], 2),
        ] {
            let mut tree = DraftTree::new(0);
            let error = BestFirst::new()
                .build_with(&mut List(children), budget(64), &mut tree)
                .unwrap_err();
            assert!(
                matches!(error, Error::Proposal { depth: 1, rank, .. } if rank == at),
                "{error}"
            );
        }
    }
}
