//! Figures against a recount.

use ddtree::{
    Algorithm, Capabilities, Config, Decoder, Plan, Reason, Request, Session, Stage, TreeSettings,
};
use proptest::prelude::*;

use crate::{
    naive,
    toy::{Guesser, Target, VOCAB, decode},
};

const PROMPT: [u32; 3] = [2, 7, 1];

fn run(config: &Config, horizon: usize, skill: u64, limit: usize) -> Decoder<(Target, Guesser)> {
    let engine = (Target::new(300), Guesser::new(horizon, skill));
    let mut decoder = Decoder::new(engine, config).unwrap();
    decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(limit));
    decoder
}

/// Counts a run again from its trace.
fn assert_recount(session: &Session) {
    let (stats, trace) = (session.stats(), session.trace());
    assert_eq!(stats.rounds, trace.len() as u64);
    assert_eq!(stats.tokens, trace.iter().map(|round| round.stats.tokens as u64).sum::<u64>());
    assert_eq!(stats.tokens as usize, session.generated().len() - 1);
    assert_eq!(stats.nodes, trace.iter().map(|round| round.tokens.len() as u64 - 1).sum::<u64>());
    assert_eq!(stats.tau(), stats.tokens as f64 / stats.rounds as f64);
    for (depth, counted) in (1..).zip(stats.acceptance()) {
        let accepted = trace.iter().filter(|round| round.stats.tokens > depth).count();
        let drafted = trace.iter().filter(|round| round.depths.contains(&(depth as u32))).count();
        assert_eq!(counted, (accepted as u64, drafted as u64), "depth {depth}");
    }
    assert_eq!(stats.acceptance().count(), session.plan().horizon());
    for &algorithm in Algorithm::ALL {
        let rounds = trace.iter().filter(|round| round.stats.algorithm == algorithm).count();
        assert_eq!(stats.rounds_as(algorithm), rounds as u64);
    }
    for &reason in Reason::ALL {
        let rounds = trace.iter().filter(|round| round.stats.reason == Some(reason)).count() as u64;
        let counted = stats.reasons().find(|counted| counted.0 == reason);
        assert_eq!(counted, (rounds > 0).then_some((reason, rounds)));
    }
    let drafted = trace.iter().rev().filter(|round| round.stats.nodes > 0);
    assert_eq!(stats.zero_run, drafted.take_while(|round| round.stats.tokens == 1).count() as u64);
    // And the trace tells the text.
    let mut position = PROMPT.len();
    for round in trace {
        assert_eq!(round.start, position);
        assert_eq!(round.tokens[0], session.tokens()[position]);
        assert_eq!(round.picks.len(), round.tokens.len());
        assert_eq!(round.scores.len(), round.tokens.len());
        let path = &round.path[..round.stats.tokens];
        let emitted: Vec<u32> = path.iter().map(|&slot| round.picks[slot as usize]).collect();
        position += round.stats.tokens;
        assert_eq!(emitted, session.tokens()[position - emitted.len() + 1..=position]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn figures_are_those_of_the_trace(
        horizon in 1usize..8,
        skill in 0u64..=100,
        limit in 2usize..60,
        budget in 0usize..40,
        algorithm in prop::sample::select(Algorithm::ALL),
    ) {
        let config = Config::new(algorithm).budget(budget).trace(true);
        assert_recount(run(&config, horizon, skill, limit).session());
    }

    /// What the tree would have held, by enumeration.
    #[test]
    fn shadow_figures_are_those_of_a_brute_force_recount(
        horizon in 1usize..6,
        skill in 0u64..=100,
        limit in 2usize..60,
        budget in 0usize..30,
        top_k in 1usize..6,
    ) {
        let config = Config::new(Algorithm::Chain).shadow(true).budget(budget).top_k(top_k);
        let decoder = run(&config.trace(true), horizon, skill, limit);
        let session = decoder.session();
        assert_recount(session);
        let (mut rejections, mut caught) = (0, 0);
        for round in session.trace() {
            let path: Vec<u32> =
                round.path.iter().map(|&slot| round.picks[slot as usize]).collect();
            // The whole chain was accepted, or the walk was cut before the end.
            if path.len() == round.tokens.len() || path.len() > round.stats.tokens {
                continue;
            }
            rejections += 1;
            let log = &decoder.engine().1.log;
            let (_, proposal) = log.iter().find(|(start, _)| *start == round.start).unwrap();
            let lists = |path: &[u32]| {
                let (tokens, log_probs) = proposal.depth(path.len() + 1);
                tokens.iter().copied().zip(log_probs.iter().copied()).collect()
            };
            let settings = TreeSettings { budget, top_k, ..TreeSettings::default() };
            let all = naive::prefixes(&lists, top_k, proposal.horizon());
            let tree = naive::best_first(all, settings);
            caught += u64::from(tree.iter().any(|prefix| prefix.tokens == path));
        }
        prop_assert_eq!((session.stats().shadow.rejections, session.stats().shadow.caught), (rejections, caught));
    }
}

#[test]
fn the_shadow_catches_some_and_changes_nothing() {
    let chain = Config::new(Algorithm::Chain);
    let shadowed = run(&chain.clone().shadow(true).budget(40), 5, 60, 200);
    let bare = run(&chain, 5, 60, 200);
    let shadow = shadowed.session().stats().shadow;
    assert!(shadow.caught > 10 && shadow.caught < shadow.rejections, "{shadow:?}");
    assert_eq!(shadowed.session().generated(), bare.session().generated());
    assert_eq!(shadowed.session().stats().nodes, bare.session().stats().nodes);
    assert_eq!(shadowed.engine().0.widths, bare.engine().0.widths);
    assert_eq!(bare.session().stats().shadow, Default::default());
}

// A chain that the text's end cuts was not rejected there.
#[test]
fn a_round_that_is_cut_is_no_rejection() {
    let config = Config::new(Algorithm::Chain).shadow(true).budget(9);
    for stop in 0..VOCAB {
        let mut decoder = Decoder::new((Target::new(99), Guesser::new(5, 100)), &config).unwrap();
        decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(60).stop_tokens(&[stop]));
        assert_eq!(decoder.session().stats().shadow.rejections, 0);
    }
}

// Every draft was rejected for hours, and nothing said so.
#[test]
fn rounds_in_a_row_that_accept_nothing_are_counted() {
    let tree = Config::new(Algorithm::Tree).budget(1);
    let mut decoder = Decoder::new((Target::new(300), Guesser::new(3, 0)), &tree).unwrap();
    decoder.start(&Request::new(&PROMPT).max_new_tokens(100)).unwrap();
    decoder.step().unwrap();
    let mut rounds = 0;
    while decoder.session().generated().len() < 99 {
        decoder.step().unwrap();
        rounds += 1;
        // No draft, no rejection.
        if rounds % 5 == 0 && decoder.session().generated().len() < 98 {
            let before = decoder.session().stats().zero_run;
            decoder.step_plain().unwrap();
            assert_eq!(decoder.session().stats().zero_run, before);
        }
        assert_eq!(decoder.session().stats().zero_run, rounds);
    }
    let good = run(&tree, 3, 100, 100);
    assert!(good.session().stats().zero_run <= 1);
}

#[test]
fn every_stage_of_a_round_takes_time() {
    let decoder = run(&Config::new(Algorithm::Tree).budget(64), 6, 50, 200);
    let stats = decoder.session().stats();
    for &stage in Stage::ALL {
        assert!(!stats.time(stage).is_zero(), "{stage}");
    }
}

#[test]
fn figures_begin_anew_with_every_request() {
    let config = Config::new(Algorithm::Tree).budget(9).trace(true);
    let mut decoder = run(&config, 4, 50, 60);
    decoder.start(&Request::new(&PROMPT)).unwrap();
    let stats = decoder.session().stats();
    assert_eq!((stats.rounds, stats.tokens, stats.nodes, stats.tau()), (0, 0, 0, 0.0));
    assert!(stats.acceptance().all(|counted| counted == (0, 0)));
    assert_eq!(decoder.session().trace(), []);
    assert_eq!(decoder.session().last_round(), None);
}

#[test]
fn times_that_are_too_long_to_add_up_do_no_harm() {
    let plan = Plan::resolve(&Config::default(), &Capabilities::new(9, 9), 3).unwrap();
    let mut session = Session::new(plan);
    for _ in 0..2 {
        session.add_time(Stage::Observe, std::time::Duration::MAX);
    }
    assert_eq!(session.stats().time(Stage::Observe), std::time::Duration::MAX);
}
