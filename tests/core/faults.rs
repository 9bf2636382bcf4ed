//! A call that fails loses its round and nothing else.

use ddtree::{
    Algorithm, Config, DecodeError, Decoder, Drafter, Need, Plan, Request, Session, Stage, Verifier,
};

use crate::toy::{Both, CALLS, Call, Fault, Guesser, Target, VOCAB, decode, plain};

const PROMPT: [u32; 3] = [2, 7, 1];
const LIMIT: usize = 40;

fn configs() -> [Config; 5] {
    [
        Config::new(Algorithm::Autoregressive),
        Config::new(Algorithm::Chain),
        Config::new(Algorithm::Chain).shadow(true).budget(9),
        Config::new(Algorithm::Tree).budget(9),
        Config::new(Algorithm::Tree).budget(9).spine(true),
    ]
}

type Toys = Decoder<(Target, Guesser)>;

fn toys(config: &Config, fail: Option<(Call, usize)>) -> Toys {
    let (mut target, mut guesser) = (Target::new(120), Guesser::new(4, 55));
    target.faults.nth = fail;
    guesser.faults.nth = fail;
    Decoder::new((target, guesser), config).unwrap()
}

fn calls(decoder: &Toys, call: Call) -> usize {
    let (target, guesser) = decoder.engine();
    target.faults.count(call) + guesser.faults.count(call)
}

fn assert_complete(decoder: &Toys, streamed: &[u32], what: &str) {
    let (wanted, _) = plain(&PROMPT, LIMIT, &[], usize::MAX);
    assert_eq!(streamed, wanted, "{what}");
    assert_eq!(decoder.session().generated(), wanted, "{what}");
    decoder.engine().0.assert_plain(&[&PROMPT[..], streamed].concat());
}

/// The call and the stage that an error names.
fn named(error: &DecodeError<Fault, Fault>) -> (Call, Stage) {
    match error {
        DecodeError::Verifier { stage, source } => (source.0, *stage),
        DecodeError::Drafter { stage, source } => (source.0, *stage),
        other => panic!("{other}"),
    }
}

// A failed verification left a changed cache behind.
#[test]
fn any_call_of_any_round_may_fail_once() {
    for config in configs() {
        let mut clean = toys(&config, None);
        clean.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        while clean.step().unwrap().is_some() {}
        for call in CALLS {
            for nth in 0..calls(&clean, call) {
                for recover_plainly in [false, true] {
                    let what = format!("{call:?} {nth} of {config:?}, plain {recover_plainly}");
                    let mut decoder = toys(&config, Some((call, nth)));
                    decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
                    let mut streamed = Vec::new();
                    let mut failures = 0;
                    loop {
                        let before = decoder.session().tokens().to_vec();
                        let plainly = recover_plainly && failures == 1;
                        let step = if plainly { decoder.step_plain() } else { decoder.step() };
                        match step {
                            Ok(Some(tokens)) => streamed.extend_from_slice(tokens),
                            Ok(None) => break,
                            Err(error) => {
                                let stage = match call {
                                    Call::Reset | Call::Prefill => Stage::Prefill,
                                    Call::Verify => Stage::Verify,
                                    Call::Commit => Stage::Commit,
                                    Call::DrafterReset | Call::Observe => Stage::Observe,
                                    Call::Propose => Stage::Propose,
                                };
                                assert_eq!(named(&error), (call, stage), "{what}");
                                assert_eq!(decoder.session().tokens(), before, "{what}");
                                assert_eq!(decoder.session().finish(), None, "{what}");
                                failures += 1;
                            }
                        }
                    }
                    assert_eq!(failures, 1, "{what}");
                    assert_complete(&decoder, &streamed, &what);
                }
            }
        }
    }
}

#[test]
fn statistics_count_rounds_that_were_committed_only() {
    let config = Config::new(Algorithm::Tree).budget(9).trace(true);
    let mut clean = toys(&config, None);
    let mut failed = toys(&config, Some((Call::Commit, 2)));
    for decoder in [&mut clean, &mut failed] {
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        while !matches!(decoder.step(), Ok(None)) {}
    }
    assert_eq!(clean.session().trace(), failed.session().trace());
    assert_eq!(clean.session().stats().rounds, failed.session().stats().rounds);
    assert_eq!(clean.session().stats().tokens, failed.session().stats().tokens);
}

#[test]
fn a_drafter_that_always_fails_leaves_plain_steps() {
    for call in [Call::DrafterReset, Call::Observe, Call::Propose] {
        let mut decoder = toys(&Config::new(Algorithm::Tree).budget(9), None);
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        // It fails from here on.
        let (target, mut guesser) = decoder.into_engine();
        guesser.faults.always = Some(call);
        let mut decoder =
            Decoder::new((target, guesser), &Config::new(Algorithm::Tree).budget(9)).unwrap();
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        let mut streamed = Vec::new();
        let mut done = false;
        while !done {
            let step = match decoder.step() {
                Ok(tokens) => tokens.map(<[u32]>::to_vec),
                Err(error) => {
                    assert_eq!(named(&error).0, call);
                    decoder.step_plain().unwrap().map(<[u32]>::to_vec)
                }
            };
            done = step.is_none();
            streamed.extend(step.unwrap_or_default());
        }
        assert_complete(&decoder, &streamed, &format!("{call:?}"));
        let stats = decoder.session().stats();
        assert_eq!(stats.rounds_as(Algorithm::Autoregressive), stats.rounds);
    }
}

// One whose reset failed kept texts from being decoded that never ask it.
#[test]
fn a_drafter_that_is_not_needed_is_not_reset() {
    for algorithm in [Algorithm::Autoregressive, Algorithm::Tree] {
        let mut decoder = toys(&Config::new(algorithm).budget(9), None);
        decoder.engine_mut().1.faults.always = Some(Call::DrafterReset);
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        let mut streamed = Vec::new();
        let plainly = algorithm.needs_drafter();
        while let Some(tokens) =
            if plainly { decoder.step_plain() } else { decoder.step() }.unwrap()
        {
            streamed.extend_from_slice(tokens);
        }
        assert_complete(&decoder, &streamed, &format!("{algorithm}"));
        assert_eq!(calls(&decoder, Call::DrafterReset), 0);
    }
}

/// A drafter that could not be reset for one request keeps nothing of the one before.
#[test]
fn a_drafter_that_missed_a_request_begins_after_the_prefix_of_the_next() {
    let mut decoder = toys(&Config::new(Algorithm::Tree).budget(9), None);
    decode(&mut decoder, &Request::new(&[5, 5, 5, 5]).max_new_tokens(LIMIT));
    decoder.engine_mut().1.faults.always = Some(Call::DrafterReset);
    decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
    while decoder.step_plain().unwrap().is_some() {}
    let prompt = [&PROMPT[..], &decoder.session().generated()[..5]].concat();
    decoder.start(&Request::new(&prompt).max_new_tokens(LIMIT).cached_prefix(6)).unwrap();
    decoder.engine_mut().1.faults.always = None;
    while decoder.step().unwrap().is_some() {}
    assert_eq!(decoder.engine().1.context().start, 6);
    assert_eq!(decoder.session().generated(), plain(&prompt, LIMIT, &[], usize::MAX).0);
}

// The rows were there twice when the prefill was done again.
#[test]
fn rows_of_a_prefill_whose_pick_failed_are_dropped() {
    for append in [false, true] {
        let fault = Some((Call::Prefill, usize::from(append)));
        let mut decoder = toys(&Config::new(Algorithm::Tree).budget(9), fault);
        decoder.engine_mut().0.hasty = true;
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        let mut prompt = PROMPT.to_vec();
        if append {
            prompt.extend_from_slice(decoder.step().unwrap().unwrap());
            decoder.append(&[7]).unwrap();
            prompt.push(7);
        }
        assert_eq!(named(&decoder.step().unwrap_err()), (Call::Prefill, Stage::Prefill));
        while decoder.step().unwrap().is_some() {}
        let expected = plain(&prompt, LIMIT + PROMPT.len() - prompt.len(), &[], usize::MAX).0;
        assert_eq!(decoder.session().tokens(), [&prompt[..], &expected].concat());
        decoder.engine().0.assert_plain(decoder.session().tokens());
    }
}

#[test]
fn a_drafter_catches_up_after_plain_steps() {
    let mut decoder = toys(&Config::new(Algorithm::Tree).budget(9), None);
    decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
    let mut streamed = Vec::new();
    for _ in 0..10 {
        streamed.extend_from_slice(decoder.step_plain().unwrap().unwrap());
    }
    assert_eq!(calls(&decoder, Call::Observe), 0);
    while let Some(tokens) = decoder.step().unwrap() {
        streamed.extend_from_slice(tokens);
    }
    assert_complete(&decoder, &streamed, "after ten plain steps");
    assert!(decoder.session().stats().rounds_as(Algorithm::Tree) > 0);
}

#[test]
fn a_request_that_failed_can_be_dropped_for_another() {
    for call in CALLS {
        let mut decoder = toys(&Config::new(Algorithm::Tree).budget(9), Some((call, 0)));
        decoder.start(&Request::new(&[5, 5, 5, 5]).max_new_tokens(LIMIT)).unwrap();
        let failed = loop {
            match decoder.step() {
                Ok(Some(_)) => {}
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        assert!(failed);
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        let mut streamed = Vec::new();
        while let Some(tokens) = decoder.step().unwrap() {
            streamed.extend_from_slice(tokens);
        }
        assert_complete(&decoder, &streamed, &format!("after {call:?}"));
    }
}

/// Drives a session by hand and abandons it just before its n-th step, where
/// the models have done their part already. Returns whether there were so many.
fn abandoned_before(config: &Config, nth: usize) -> bool {
    let mut models = Both { target: Target::new(120), guesser: Guesser::new(4, 55) };
    let plan = Plan::resolve(config, &models.capabilities(), 4).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
    let mut streamed = Vec::new();
    let mut observed = 0;
    // Of every committed row.
    let mut features = Vec::new();
    for step in 0.. {
        let need = session.need();
        match need {
            Need::Prefill => {
                let (prefill, mut picks) = session.prefill().unwrap();
                features.extend(models.target.prefill(&prefill, &mut picks).unwrap());
            }
            Need::Proposal => {
                if observed < session.committed_len() {
                    let unseen = observed..session.committed_len();
                    let committed = session.committed_tokens(unseen.clone()).unwrap();
                    models.guesser.observe(&committed, &features[unseen].to_vec()).unwrap();
                    observed = session.committed_len();
                }
                let (request, proposal) = session.proposal().unwrap();
                models.guesser.propose(&request, proposal).unwrap();
            }
            Need::Verification => {
                let (round, mut picks) = session.verification().unwrap();
                models.target.verify(&round, &mut picks).unwrap();
            }
            Need::Commit => {}
            _ => {
                assert_eq!(streamed, plain(&PROMPT, LIMIT, &[], usize::MAX).0);
                models.target.assert_plain(&[&PROMPT[..], &streamed].concat());
                return step > nth;
            }
        }
        if step == nth && need != Need::Prefill {
            let before = session.tokens().to_vec();
            session.abandon();
            assert_eq!(session.tokens(), before);
            let again = session.need();
            assert!(matches!(again, Need::Proposal | Need::Verification), "{again}");
            assert!(again != need || need != Need::Commit);
            continue;
        }
        match need {
            Need::Prefill => session.prefilled().unwrap(),
            Need::Proposal => session.proposed().unwrap(),
            Need::Verification => session.verified().unwrap(),
            _ => {
                let rows = models.target.commit(session.commit().unwrap()).unwrap();
                features.extend(rows);
                session.committed().unwrap();
            }
        }
        if matches!(need, Need::Prefill | Need::Commit) {
            streamed.extend_from_slice(session.new_tokens());
        }
    }
    unreachable!()
}

#[test]
fn a_session_can_be_abandoned_between_any_two_steps() {
    for config in configs() {
        let mut nth = 0;
        while abandoned_before(&config, nth) {
            nth += 1;
        }
        assert!(nth > 20, "{nth}");
    }
}

#[test]
fn a_session_dropped_within_a_round_leaves_models_that_start_anew() {
    let config = Config::new(Algorithm::Tree).budget(9);
    for steps in 1..6 {
        let mut decoder = toys(&config, None);
        decoder.start(&Request::new(&[9, 9]).max_new_tokens(LIMIT)).unwrap();
        for _ in 0..steps {
            decoder.step().unwrap();
        }
        let (mut target, guesser) = decoder.into_engine();
        {
            // Verified, and never committed.
            let plan = Plan::resolve(&config, &target.capabilities(), 4).unwrap();
            let mut session = Session::new(plan);
            session.start(&Request::new(&[1]).max_new_tokens(9)).unwrap();
            target.reset(0).unwrap();
            let (prefill, mut picks) = session.prefill().unwrap();
            target.prefill(&prefill, &mut picks).unwrap();
            session.prefilled().unwrap();
            session.skip_proposal().unwrap();
            let (round, mut picks) = session.verification().unwrap();
            target.verify(&round, &mut picks).unwrap();
        }
        let mut decoder = Decoder::new((target, guesser), &config).unwrap();
        decoder.start(&Request::new(&PROMPT).max_new_tokens(LIMIT)).unwrap();
        let mut streamed = Vec::new();
        while let Some(tokens) = decoder.step().unwrap() {
            streamed.extend_from_slice(tokens);
        }
        assert_complete(&decoder, &streamed, "after a dropped session");
    }
}

// Picks of the round before were taken for those of this one.
#[test]
fn results_of_an_earlier_step_are_never_taken_for_the_next() {
    let plan =
        Plan::resolve(&Config::new(Algorithm::Chain), &Target::new(50).capabilities(), 2).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1, 2])).unwrap();
    assert!(session.prefilled().is_err());
    session.prefill().unwrap().1.push(3);
    session.prefilled().unwrap();
    session.proposal().unwrap().1.push(&[4], &[-0.1]).unwrap();
    session.proposed().unwrap();
    session.verification().unwrap().1.extend(&[VOCAB - 1, 5]);
    session.abandon();
    // The draft is gone, too.
    session.proposed().unwrap();
    assert_eq!(session.verification().unwrap().0.tree().nodes(), 0);
    assert!(session.verified().is_err());
    session.verification().unwrap().1.push(6);
    session.verified().unwrap();
    session.committed().unwrap();
    session.skip_proposal().unwrap();
    assert!(session.verified().is_err(), "the pick was that of the round before");
}
