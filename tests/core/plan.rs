//! What is asked for against what can be done: every round that is not what was
//! asked for says why.

use ddtree::{
    Algorithm, Attention, Capabilities, Config, Decoder, Drafter, Error, Plan, Proposal,
    ProposalRequest, Reason, Recurrence, Request,
};
use proptest::prelude::*;

use crate::toy::{By, Guesser, Row, Target, VOCAB, decode};

fn tree(budget: usize) -> Config {
    Config::new(Algorithm::Tree).budget(budget)
}

/// Rounds by algorithm and by reason.
fn rounds<D: Drafter<Vec<Row>>>(
    target: Target,
    drafter: D,
    config: &Config,
    limit: usize,
) -> ([u64; 3], Vec<(Reason, u64)>) {
    let mut decoder = Decoder::new((target, drafter), config).unwrap();
    let (text, _) = decode(&mut decoder, &Request::new(&[2, 7, 1]).max_new_tokens(limit));
    assert_eq!(text, crate::toy::plain(&[2, 7, 1], text.len(), &[], usize::MAX).0);
    let stats = decoder.session().stats();
    let rounds = std::array::from_fn(|index| stats.rounds_as(Algorithm::ALL[index]));
    (rounds, stats.reasons().collect())
}

/// Proposes the same lists whatever is asked.
fn fixed<F>(lists: Vec<(Vec<u32>, Vec<f32>)>) -> impl Drafter<F, Error = Error> {
    By(move |_: &ProposalRequest, proposal: &mut Proposal| {
        lists.iter().try_for_each(|(tokens, log_probs)| proposal.push(tokens, log_probs))
    })
}

// A tree silently never engaged. One test per reason.
#[test]
fn causal_attention_is_a_reason() {
    let (by, reasons) = rounds(Target::causal(99), Guesser::new(4, 50), &tree(9), 20);
    assert_eq!(by[2], 0);
    assert_eq!(reasons[0].0, Reason::CausalAttention);
    assert_eq!(by[1], reasons[0].1);
}

#[test]
fn a_drafter_without_depths_is_a_reason() {
    let (by, reasons) = rounds(Target::new(99), Guesser::new(0, 50), &tree(9), 20);
    assert_eq!((by, reasons), ([19, 0, 0], vec![(Reason::NoHorizon, 19)]));
}

#[test]
fn budget_zero_is_a_reason_on_any_verifier() {
    for target in [Target::new(99), Target::causal(99)] {
        let (by, reasons) = rounds(target, Guesser::new(4, 50), &tree(0), 20);
        assert_eq!((by, reasons), ([19, 0, 0], vec![(Reason::ZeroBudget, 19)]));
    }
}

#[test]
fn few_slots_are_a_reason() {
    let mut capabilities = Capabilities::new(VOCAB as usize, 99);
    capabilities.max_slots = 4;
    let target = Target::with(capabilities);
    for config in [tree(9), Config::new(Algorithm::Chain)] {
        let (_, reasons) = rounds(target.clone(), Guesser::new(4, 50), &config, 20);
        assert_eq!(reasons[0].0, Reason::SlotLimit);
    }
    let (_, reasons) = rounds(target, Guesser::new(3, 50), &tree(3), 20);
    assert!(reasons.iter().all(|(reason, _)| *reason != Reason::SlotLimit));
}

#[test]
fn an_empty_proposal_is_a_reason_whatever_makes_it_empty() {
    for lists in [
        vec![],
        vec![(vec![], vec![])],
        vec![(vec![], vec![]), (vec![1], vec![-0.1])],
        vec![(vec![1, 2], vec![f32::NEG_INFINITY; 2])],
    ] {
        for config in [tree(9), tree(9).spine(true), Config::new(Algorithm::Chain)] {
            let (by, reasons) = rounds(Target::new(99), fixed(lists.clone()), &config, 20);
            let wanted = vec![(Reason::EmptyProposal, 18), (Reason::LastToken, 1)];
            assert_eq!((by, reasons), ([19, 0, 0], wanted));
        }
    }
}

#[test]
fn a_tree_that_comes_out_as_a_path_is_a_reason() {
    let fixed = fixed(vec![(vec![1], vec![-0.1])]);
    let (by, reasons) = rounds(Target::new(99), fixed, &tree(9), 20);
    assert_eq!(by[2], 0);
    assert_eq!(reasons[0], (Reason::SinglePath, by[1]));
}

// The plan's reason stood for all rounds, and nothing told that none had a draft.
#[test]
fn what_a_round_lacks_comes_before_what_the_plan_lacks() {
    let mut capabilities = Capabilities::new(VOCAB as usize, 99);
    capabilities.max_slots = 5;
    let last = (Reason::LastToken, 1);
    let few = Target::with(capabilities.clone());
    let (by, reasons) = rounds(few.clone(), fixed(vec![]), &tree(9), 20);
    assert_eq!((by, reasons), ([19, 0, 0], vec![(Reason::EmptyProposal, 18), last]));
    let (by, reasons) = rounds(Target::causal(99), fixed(vec![]), &tree(9), 20);
    assert_eq!((by, reasons), ([19, 0, 0], vec![(Reason::EmptyProposal, 18), last]));

    let path = || fixed(vec![(vec![1], vec![-0.1])]);
    let (by, reasons) = rounds(few, path(), &tree(9), 20);
    assert_eq!((by[2], reasons[0]), (0, (Reason::SinglePath, by[1])));
    let (by, reasons) = rounds(Target::causal(99), path(), &tree(9), 20);
    assert_eq!((by[2], reasons[0]), (0, (Reason::CausalAttention, by[1])));
    // Of one node nothing else can be made.
    capabilities.max_slots = 2;
    let (by, reasons) = rounds(Target::with(capabilities), path(), &tree(9), 20);
    assert_eq!((by[2], reasons[0]), (0, (Reason::SlotLimit, by[1])));
}

#[test]
fn the_last_token_and_the_last_rows_are_reasons() {
    let (by, reasons) = rounds(Target::new(99), Guesser::new(4, 0), &tree(9), 20);
    assert_eq!(reasons.last(), Some(&(Reason::LastToken, 1)), "{by:?}");
    for config in [tree(9), Config::new(Algorithm::Chain)] {
        let (_, reasons) = rounds(Target::new(20), Guesser::new(4, 0), &config, 99);
        assert_eq!(reasons.last().map(|reason| reason.0), Some(Reason::CacheLimit));
    }
}

// As above, for all combinations at once.
proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_round_that_is_not_what_was_asked_for_has_a_reason(
        algorithm in prop::sample::select(Algorithm::ALL),
        budget in 0usize..20,
        top_k in 1usize..5,
        horizon in 0usize..6,
        skill in 0u64..=100,
        max_slots in 1usize..20,
        max_len in 3usize..60,
        limit in 1usize..50,
        causal: bool,
        cutoff in prop_oneof![Just(f64::NEG_INFINITY), -4.0f64..0.0],
    ) {
        let mut capabilities = Capabilities::new(VOCAB as usize, max_len);
        capabilities.max_slots = max_slots;
        if causal {
            capabilities.attention = Attention::Causal;
        }
        let config = Config::new(algorithm)
            .budget(budget)
            .top_k(top_k)
            .log_prob_cutoff(cutoff)
            .trace(true);
        let engine = (Target::with(capabilities), Guesser::new(horizon, skill));
        let mut decoder = Decoder::new(engine, &config).unwrap();
        decode(&mut decoder, &Request::new(&[2, 7, 1]).max_new_tokens(limit));
        for round in decoder.session().trace() {
            prop_assert!(round.stats.algorithm == algorithm || round.stats.reason.is_some());
        }
    }
}

#[test]
fn top_k_is_at_least_one_entry() {
    let config = Config::new(Algorithm::Chain).shadow(true).budget(0);
    let plan = Plan::resolve(&config, &Capabilities::new(100, 100), 4).unwrap();
    assert_eq!(plan.tree().top_k, 1);
}

#[test]
fn limits_that_mean_none_are_taken_as_such() {
    // A verifier without a limit of its own, and a caller without one.
    let capabilities = Capabilities::new(VOCAB as usize, usize::MAX);
    let plan = Plan::resolve(&tree(9), &capabilities, 4).unwrap();
    let mut session = ddtree::Session::new(plan);
    session.start(&Request::new(&[1, 2])).unwrap();
    session.prefill().unwrap().1.push(3);
    session.prefilled().unwrap();
    assert_eq!(session.new_tokens(), [3]);
    assert_eq!(session.proposal().unwrap().0.horizon(), 4);
}

#[test]
fn sizes_that_no_machine_has_are_refused_by_name() {
    let capabilities = Capabilities::new(100, 100);
    let field = |config: Config, horizon| match Plan::resolve(&config, &capabilities, horizon)
        .unwrap_err()
    {
        Error::Setting { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(field(tree(usize::MAX), 4), "budget");
    assert_eq!(field(tree(65_537), 4), "budget");
    assert_eq!(field(Config::new(Algorithm::Chain), usize::MAX), "horizon");
    assert!(Plan::resolve(&tree(65_536), &capabilities, 65_536).is_ok());
}

#[test]
fn inexact_recurrent_trees_are_an_error_that_names_the_way_out() {
    let mut capabilities = Capabilities::new(VOCAB as usize, 99);
    capabilities.recurrence = Recurrence::Sequential;
    let error = Plan::resolve(&tree(9), &capabilities, 4).unwrap_err().to_string();
    for word in ["tree", "recurrent", "chain", "allow_inexact_recurrent"] {
        assert!(error.contains(word), "{error}");
    }
    let chain = Config::new(Algorithm::Chain);
    let (by, _) = rounds(Target::with(capabilities), Guesser::new(4, 50), &chain, 20);
    assert!(by[1] > 0);
}

#[test]
fn depths_and_entries_that_were_not_asked_for_are_left_out() {
    // A block drafter drafts its whole block, whatever the horizon asked for.
    let lists = vec![(vec![1, 2, 3], vec![-0.5, -0.6, -0.7]); 4];
    for config in [
        tree(9).top_k(2),
        tree(9).top_k(2).spine(true),
        Config::new(Algorithm::Chain).shadow(true).top_k(2),
    ] {
        let config = config.block_size(3).trace(true);
        let engine = (Target::new(99), fixed(lists.clone()));
        let mut decoder = Decoder::new(engine, &config).unwrap();
        decode(&mut decoder, &Request::new(&[2, 7, 1]).max_new_tokens(20));
        let trace = decoder.session().trace();
        assert!(trace[0].depths.contains(&2));
        for round in trace {
            assert!(round.depths.iter().all(|&depth| depth <= 2));
            assert!(!round.tokens[1..].contains(&3));
        }
    }
}

#[test]
fn a_tree_is_no_deeper_than_its_budget_and_asks_for_no_more() {
    let plan = Plan::resolve(&tree(3), &Capabilities::new(100, 100), 15).unwrap();
    assert_eq!((plan.horizon(), plan.max_slots()), (3, 4));
}
