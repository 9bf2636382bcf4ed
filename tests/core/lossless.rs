//! The text is that of plain decoding, whatever is drafted and however it is
//! verified, and so are the target's rows after every round.

use ddtree::{
    Algorithm, Capabilities, Config, Decoder, Drafter, Finish, Joint, Recurrence, Request,
};
use proptest::{collection::vec, prelude::*};

use crate::toy::{Both, Guesser, Row, Target, VOCAB, decode, plain};

const PROMPT: [u32; 4] = [3, 1, 4, 1];

fn config(algorithm: Algorithm) -> Config {
    Config::new(algorithm)
}

fn tree(budget: usize) -> Config {
    config(Algorithm::Tree).budget(budget)
}

/// Settings that reach every way through a round.
fn configs() -> Vec<Config> {
    let mut configs = vec![
        config(Algorithm::Autoregressive),
        config(Algorithm::Chain),
        config(Algorithm::Chain).block_size(3),
        config(Algorithm::Chain).shadow(true).budget(20).top_k(4),
        tree(24).top_k(1),
        tree(24).top_k(3),
        tree(24).block_size(2),
        tree(6).spine(true),
        tree(24).spine(true),
        tree(24).log_prob_cutoff(-2.5),
        tree(24).log_prob_cutoff(0.0),
        tree(24).expand_below_stop(false),
    ];
    configs.extend([0, 1, 2, 3, 5, 8, 13, 24, 64, 65, 200].map(tree));
    configs
}

/// Decodes step by step and holds rows and tokens against plain decoding after
/// every one.
fn assert_lossless<D: Drafter<Vec<Row>>>(
    target: Target,
    drafter: D,
    config: &Config,
    prompt: &[u32],
    limit: usize,
) -> Decoder<(Target, D)>
where
    D::Error: Send + Sync,
{
    let mut decoder = Decoder::new((target, drafter), config).unwrap();
    let (wanted, _) = plain(prompt, limit, &[], usize::MAX);
    let mut text = prompt.to_vec();
    decoder.start(&Request::new(prompt).max_new_tokens(limit)).unwrap();
    while let Some(tokens) = decoder.step().unwrap() {
        text.extend_from_slice(tokens);
        let target = &decoder.engine().0;
        target.assert_plain(&text);
        assert_eq!(decoder.session().tokens(), text);
    }
    assert_eq!(text[prompt.len()..], wanted, "{config:?}");
    assert_eq!(decoder.session().finish(), Some(Finish::TokenLimit));
    decoder
}

#[test]
fn every_setting_gives_the_text_of_plain_decoding() {
    for config in configs() {
        for skill in [0, 50, 90, 100] {
            for target in [Target::new(200), Target::links(200)] {
                assert_lossless(target, Guesser::new(6, skill), &config, &PROMPT, 60);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_prompt_budget_and_drafter_gives_the_text_of_plain_decoding(
        prompt in vec(0..VOCAB, 1..8),
        limit in 1usize..50,
        horizon in 0usize..9,
        skill in 0u64..=100,
        budget in 0usize..90,
        top_k in 1usize..VOCAB as usize + 3,
        spine: bool,
        links: bool,
        max_slots in 1usize..100,
    ) {
        let mut capabilities = Capabilities::new(VOCAB as usize, 80);
        capabilities.max_slots = max_slots;
        if links {
            capabilities.mask = ddtree::MaskForm::Links;
        }
        let config = tree(budget).top_k(top_k).spine(spine);
        assert_lossless(Target::with(capabilities), Guesser::new(horizon, skill), &config, &prompt, limit);
    }
}

// A drafter that guesses well pays: the toys accept deep paths, and trees more
// than chains. Otherwise the tests above would show little.
#[test]
fn the_toys_accept_and_trees_accept_more_than_chains() {
    let tau = |config: &Config, skill| {
        let decoder =
            assert_lossless(Target::new(400), Guesser::new(7, skill), config, &PROMPT, 300);
        decoder.session().stats().tau()
    };
    let chain = tau(&config(Algorithm::Chain), 70);
    assert!(chain > 1.5, "{chain}");
    assert!(tau(&tree(64), 70) > chain + 0.3);
    assert!(tau(&config(Algorithm::Chain), 100) > 7.5);
}

// Capability probe says causal only: trees ran with siblings seeing one another.
#[test]
fn a_causal_verifier_gets_chains_and_never_a_mask() {
    for budget in [1, 4, 64] {
        let decoder =
            assert_lossless(Target::causal(200), Guesser::new(6, 80), &tree(budget), &PROMPT, 60);
        let stats = decoder.session().stats();
        assert_eq!(stats.rounds_as(Algorithm::Tree), 0);
        assert!(stats.rounds_as(Algorithm::Chain) > 0);
        let target = &decoder.engine().0;
        assert!(!target.masks.contains(&true));
        assert!(target.widths.iter().all(|&slots| slots <= 1 + budget), "the budget asked for");
    }
}

#[test]
fn recurrent_layers_that_verify_trees_exactly_need_no_gate() {
    let mut capabilities = Capabilities::new(VOCAB as usize, 200);
    capabilities.recurrence = Recurrence::ExactTrees;
    let target = Target::with(capabilities);
    let decoder = assert_lossless(target, Guesser::new(6, 60), &tree(24), &PROMPT, 60);
    assert!(decoder.session().stats().rounds_as(Algorithm::Tree) > 0);
}

// A greedy tree accepted less than the chain elsewhere, since the states that
// the two left drifted apart.
#[test]
fn a_tree_of_one_child_per_node_runs_as_the_chain_round_by_round() {
    let trace = |config: Config| {
        let config = config.trace(true);
        let decoder = assert_lossless(Target::new(400), Guesser::new(6, 75), &config, &PROMPT, 300);
        assert!(!decoder.engine().0.masks.contains(&true), "no mask for a chain");
        let rounds = decoder.session().trace().iter();
        let rounds: Vec<_> = rounds
            .map(|round| {
                let mut round = round.clone();
                round.stats.reason = None;
                round
            })
            .collect();
        (rounds, decoder.into_engine().0.committed_rows().to_vec())
    };
    let chain = trace(config(Algorithm::Chain));
    assert!(chain.0.len() > 50);
    assert_eq!(trace(tree(64).top_k(1)), chain);
    assert_eq!(trace(tree(64).top_k(1).spine(true)), chain);
}

// Rounds of every kind in turn: the state after a round that accepts nothing,
// or has no draft, was stale elsewhere while acceptance looked healthy.
#[test]
fn rounds_that_accept_much_nothing_or_draft_nothing_mix() {
    for skill in [30, 70, 100] {
        let mut decoder =
            Decoder::new((Target::new(400), Guesser::new(5, skill)), &tree(12)).unwrap();
        decoder.start(&Request::new(&PROMPT).max_new_tokens(300)).unwrap();
        let mut text = PROMPT.to_vec();
        let mut accepted = Vec::new();
        for step in 0.. {
            let plain = step % 5 == 2 || step % 7 == 3;
            let tokens = if plain { decoder.step_plain() } else { decoder.step() }.unwrap();
            let Some(tokens) = tokens else { break };
            accepted.push(tokens.len() - 1);
            text.extend_from_slice(tokens);
            decoder.engine().0.assert_plain(&text);
        }
        assert_eq!(text[PROMPT.len()..], plain(&PROMPT, 300, &[], usize::MAX).0);
        assert!(skill == 100 || accepted.contains(&0));
        assert!(accepted.iter().any(|&n| n > 0));
    }
}

// Greedy identity was lost on long runs elsewhere.
#[test]
fn long_runs_stay_exact() {
    let decoder = assert_lossless(Target::new(900), Guesser::new(8, 85), &tree(40), &PROMPT, 800);
    assert!(decoder.session().stats().rounds > 100);
}

// Features followed slot order, or the first n slots, instead of the path. The
// drafter checks every row that it is handed; here paths do skip slots.
#[test]
fn features_are_those_of_the_path_not_of_the_first_slots() {
    let config = tree(40).trace(true);
    let decoder = assert_lossless(Target::new(300), Guesser::new(6, 40), &config, &PROMPT, 200);
    let skips = |path: &[u32]| path.iter().zip(0..).any(|(&slot, index)| slot != index);
    let skipping = decoder.session().trace().iter().filter(|round| skips(&round.path)).count();
    assert!(skipping > 20, "{skipping}");
    let (target, guesser) = decoder.into_engine();
    let observed = guesser.features();
    assert_eq!(observed, &target.committed_rows()[..observed.len()]);
}

// The correction token was taken for cached.
#[test]
fn the_bonus_has_neither_row_nor_features() {
    let mut decoder = Decoder::new((Target::new(200), Guesser::new(5, 60)), &tree(12)).unwrap();
    decoder.start(&Request::new(&PROMPT).max_new_tokens(60)).unwrap();
    while decoder.step().unwrap().is_some() {
        let session = decoder.session();
        let (target, guesser) = decoder.engine();
        assert_eq!(session.committed_len(), session.tokens().len() - 1);
        assert_eq!(target.committed_rows().len(), session.committed_len());
        assert!(guesser.context().end <= session.committed_len());
    }
}

#[test]
fn one_object_that_is_verifier_and_drafter_decodes_the_same() {
    for config in configs() {
        let both = Both { target: Target::new(200), guesser: Guesser::new(6, 60) };
        let mut decoder = Decoder::new(Joint(both), &config).unwrap();
        let (text, _) = decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(60));
        assert_eq!(text, plain(&PROMPT, 60, &[], usize::MAX).0);
        let Joint(both) = decoder.into_engine();
        both.target.assert_plain(&[&PROMPT[..], &text].concat());
    }
}
