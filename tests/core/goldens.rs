//! Trees that the published reference implementation built.

use ddtree::{AncestorMask, BestFirst, DraftTree, Proposal, TreeSettings};
use serde::Deserialize;

use crate::random;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    kind: String,
    budget: usize,
    topk_tokens: Vec<Vec<u32>>,
    topk_logprobs: Vec<Vec<f32>>,
    // Without the root.
    tokens: Vec<u32>,
    depths: Vec<u32>,
    // With the root.
    parents: Vec<i32>,
    // The reference's file leaves it out of large trees.
    visibility: Option<Vec<String>>,
}

#[test]
fn all_trees_equal_the_reference_slot_by_slot() {
    let file: File = serde_json::from_str(include_str!("../goldens/build-trees.json")).unwrap();
    assert_eq!(file.cases.len(), 80);
    let mut builder = BestFirst::new();
    let mut proposal = Proposal::new();
    let mut tree = DraftTree::new(0);
    let mut mask = AncestorMask::new();
    for (index, case) in file.cases.iter().enumerate() {
        let name = format!("case {index} ({})", case.kind);
        proposal.clear();
        for (tokens, log_probs) in case.topk_tokens.iter().zip(&case.topk_logprobs) {
            proposal.push(tokens, log_probs).unwrap();
        }
        tree.reset(7);
        let settings = TreeSettings { budget: case.budget, ..TreeSettings::default() };
        builder.build(&proposal, settings, &mut tree).unwrap();
        assert_eq!(tree.tokens()[0], 7, "{name}");
        assert_eq!(tree.tokens()[1..], case.tokens, "{name}");
        assert_eq!(tree.depths()[1..], case.depths, "{name}");
        assert_eq!(tree.parents(), case.parents, "{name}");
        mask.build(&tree);
        for query in 0..tree.len() {
            let seen: String = (0..tree.len())
                .map(|key| if mask.is_visible(query, key) { '1' } else { '0' })
                .collect();
            let wanted = match &case.visibility {
                Some(rows) => rows[query].clone(),
                None => (0..tree.len())
                    .map(|key| if random::is_ancestor(&tree, query, key) { '1' } else { '0' })
                    .collect(),
            };
            assert_eq!(seen, wanted, "{name}, row {query}");
        }
    }
}
