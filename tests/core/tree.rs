//! Builders against an enumeration of all prefixes.

use ddtree::{BestFirst, DraftTree, Expand, Proposal, TreeSettings, tree::chain};
use proptest::{collection::vec, prelude::*};

use crate::{
    naive::{self, Prefix},
    toy::mix,
};

/// Log-probabilities with ties, certainties and impossible entries.
fn log_prob() -> impl Strategy<Value = f32> {
    prop_oneof![
        3 => (0u32..6).prop_map(|half| -0.5 * half as f32),
        3 => -5.0f32..0.0,
        1 => Just(f32::NEG_INFINITY),
    ]
}

/// Ragged lists, ordered, the token of a rank being another at every depth. The
/// first is token 0.
fn lists() -> impl Strategy<Value = Vec<Vec<(u32, f32)>>> {
    vec(vec(log_prob(), 0..5), 0..5).prop_map(|rows| {
        let order = |(depth, mut row): (usize, Vec<f32>)| {
            row.sort_by(|a, b| b.total_cmp(a));
            let tokens = (0u32..5).map(move |rank| (rank + 3 * depth as u32) % 7);
            tokens.zip(row).collect()
        };
        rows.into_iter().enumerate().map(order).collect()
    })
}

fn settings() -> impl Strategy<Value = TreeSettings> {
    let cutoff = prop_oneof![2 => Just(f64::NEG_INFINITY), 1 => -6.0f64..0.0, 1 => Just(-1.5)];
    let top_k = prop_oneof![1 => Just(usize::MAX), 2 => 1usize..6];
    (0usize..80, top_k, cutoff, any::<bool>()).prop_map(
        |(budget, top_k, log_prob_cutoff, spine)| TreeSettings {
            budget,
            top_k,
            log_prob_cutoff,
            spine,
        },
    )
}

fn proposal(lists: &[Vec<(u32, f32)>]) -> Proposal {
    let mut proposal = Proposal::new();
    for list in lists {
        let (tokens, log_probs): (Vec<u32>, Vec<f32>) = list.iter().copied().unzip();
        proposal.push(&tokens, &log_probs).unwrap();
    }
    proposal
}

fn build(proposal: &Proposal, settings: TreeSettings) -> DraftTree {
    let mut tree = DraftTree::new(99);
    BestFirst::new().build(proposal, settings, &mut tree).unwrap();
    tree
}

fn assert_holds(tree: &DraftTree, prefixes: &[Prefix]) {
    let found: Vec<(Vec<u32>, f64)> =
        (1..tree.len()).map(|slot| (naive::path_tokens(tree, slot), tree.scores()[slot])).collect();
    let wanted: Vec<(Vec<u32>, f64)> =
        prefixes.iter().map(|prefix| (prefix.tokens.clone(), prefix.score)).collect();
    assert_eq!(found, wanted);
}

fn assert_valid(tree: &DraftTree) {
    let rebuilt = DraftTree::from_parents(tree.tokens(), tree.parents()).unwrap();
    assert_eq!(rebuilt.depths(), tree.depths());
    assert_eq!(rebuilt.first_children(), tree.first_children());
    assert_eq!(rebuilt.next_siblings(), tree.next_siblings());
    assert_eq!(rebuilt.is_chain(), tree.is_chain());
    for slot in 1..tree.len() {
        let parent = tree.parents()[slot] as usize;
        assert!(parent < slot);
        assert_eq!(tree.depths()[slot], tree.depths()[parent] + 1);
        assert!(tree.children(parent).any(|child| child == slot));
    }
    let mut steps = tree.parents().iter().zip(-1..);
    assert_eq!(tree.is_chain(), steps.all(|(parent, before)| *parent == before));
}

/// Lists that depend on the whole path: another number of children, other
/// tokens and other scores below every node.
struct PathLists {
    seed: u64,
    horizon: usize,
}

impl PathLists {
    fn list(&self, path: &[u32]) -> Vec<(u32, f32)> {
        if path.len() == self.horizon {
            return Vec::new();
        }
        let dice = path.iter().fold(self.seed, |dice, &token| mix(dice ^ u64::from(token + 1)));
        let mut score = -0.25 * (dice % 4) as f32;
        (0..dice as u32 / 16 % 4)
            .map(|rank| {
                let entry = ((dice as u32 / 64 + 2 * rank) % 9, score);
                score -= 0.5 * (mix(dice + u64::from(rank)) % 3) as f32;
                entry
            })
            .collect()
    }
}

impl Expand for PathLists {
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
        self.list(&naive::path_tokens(tree, parent)).get(rank).copied()
    }
}

/// Records in which order children are asked for.
struct Asked<'a> {
    lists: &'a Proposal,
    asked: Vec<(usize, usize)>,
}

impl Expand for Asked<'_> {
    fn child(&mut self, tree: &DraftTree, parent: usize, rank: usize) -> Option<(u32, f32)> {
        self.asked.push((parent, rank));
        self.lists.child(tree, parent, rank)
    }
}

impl Asked<'_> {
    fn assert_once_in_order(&self, nodes: usize) {
        assert!(self.asked.len() <= 2 * nodes + 1);
        for (index, &(parent, rank)) in self.asked.iter().enumerate() {
            let earlier = self.asked[..index].iter().filter(|asked| asked.0 == parent).count();
            assert_eq!(rank, earlier, "{:?}", self.asked);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn best_first_holds_the_best_prefixes_in_order(lists in lists(), settings in settings()) {
        // A depth without entries ends the draft.
        let children = |path: &[u32]| lists.get(path.len()).cloned().unwrap_or_default();
        let all = naive::prefixes(&children, settings.top_k, lists.len());
        let proposal = proposal(&lists);
        let tree = build(&proposal, settings);
        assert_valid(&tree);
        assert_holds(&tree, &naive::best_first(all, settings));

        // The general way asks the lists sparingly and gives the same.
        let mut asked = Asked { lists: &proposal, asked: Vec::new() };
        let mut general = DraftTree::new(99);
        BestFirst::new().build_with(&mut asked, settings, &mut general).unwrap();
        prop_assert_eq!(general, tree);
        asked.assert_once_in_order(settings.budget);
    }

    #[test]
    fn best_first_follows_scores_that_depend_on_the_path(
        seed: u64,
        horizon in 0usize..6,
        settings in settings(),
    ) {
        let mut expand = PathLists { seed, horizon };
        let mut tree = DraftTree::new(99);
        BestFirst::new().build_with(&mut expand, settings, &mut tree).unwrap();
        assert_valid(&tree);
        let all = naive::prefixes(&|path| expand.list(path), settings.top_k, horizon);
        assert_holds(&tree, &naive::best_first(all, settings));
    }

    #[test]
    fn a_builder_carries_nothing_over(first in lists(), second in lists(), settings in settings()) {
        let mut builder = BestFirst::new();
        let mut tree = DraftTree::new(99);
        builder.build(&proposal(&first), settings, &mut tree).unwrap();
        builder.build(&proposal(&second), settings, &mut tree).unwrap();
        prop_assert_eq!(tree, build(&proposal(&second), settings));
    }

    #[test]
    fn a_tree_of_one_entry_per_depth_is_the_chain(lists in lists(), budget in 0usize..6, spine: bool) {
        let proposal = proposal(&lists);
        let mut line = DraftTree::new(99);
        chain::build(&proposal, budget, &mut line);
        let settings = TreeSettings { budget, top_k: 1, spine, ..TreeSettings::default() };
        let tree = build(&proposal, settings);
        prop_assert!(tree.is_chain() && line.is_chain());
        prop_assert_eq!(tree, line);
    }

    #[test]
    fn a_tree_that_comes_out_as_a_chain_is_the_chain(lists in lists(), budget in 0usize..6) {
        let proposal = proposal(&lists);
        let tree = build(&proposal, TreeSettings { budget, ..TreeSettings::default() });
        if tree.is_chain() {
            let mut line = DraftTree::new(99);
            chain::build(&proposal, tree.nodes(), &mut line);
            // Byte for byte, links and scores included.
            prop_assert_eq!(tree, line);
        }
    }
}

// Frontier widths that are no multiple of anything were rejected elsewhere.
#[test]
fn every_budget_builds_a_valid_tree_that_extends_the_smaller_one() {
    let list: Vec<(u32, f32)> = (0..7).map(|rank| (rank, -0.3 - 0.45 * rank as f32)).collect();
    let proposal = proposal(&vec![list; 4]);
    let reachable = 7 + 49 + 343 + 2401;
    let full = build(&proposal, TreeSettings { budget: 9999, ..TreeSettings::default() });
    assert_eq!(full.nodes(), reachable);
    for budget in (1..=300).chain([reachable - 1, reachable, reachable + 1]) {
        let tree = build(&proposal, TreeSettings { budget, ..TreeSettings::default() });
        assert_eq!(tree.nodes(), budget.min(reachable));
        assert_valid(&tree);
        assert_eq!(tree.tokens(), &full.tokens()[..tree.len()]);
        assert_eq!(tree.parents(), &full.parents()[..tree.len()]);
    }
}

// The number of nodes was once derived from `token != 0`.
#[test]
fn trees_of_nothing_but_token_zero_are_whole() {
    let proposal = proposal(&[vec![(0, -0.1), (5, -2.0)], vec![(0, -0.1)], vec![(0, -0.1)]]);
    let tree = build(&proposal, TreeSettings { budget: 3, ..TreeSettings::default() });
    assert_eq!(tree.tokens(), [99, 0, 0, 0]);
    assert_eq!(tree.nodes(), 3);
}

/// Sums that differ in the last bit of an f64 only: the order is that of sums
/// from the root down.
#[test]
fn sums_are_added_from_the_root_down_in_f64() {
    let (a, b, c) = (-0.7f32, -7.7e-10f32, -1e-10f32);
    let proposal = proposal(&[vec![(1, a)], vec![(2, b)], vec![(3, c)]]);
    let tree = build(&proposal, TreeSettings::default());
    let [a, b, c] = [a, b, c].map(f64::from);
    assert_eq!(tree.scores()[1..], [a, a + b, a + b + c]);
    assert_ne!(a + b + c, a + (b + c), "the case is not provoked");
}
