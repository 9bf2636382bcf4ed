//! Requests one after another, and what a host may do between rounds.

use ddtree::{
    Algorithm, Config, Decoder, Error, Finish, Need, Picks, Plan, Prefill, Reason, Request,
    Session, Verifier,
};

use crate::toy::{Guesser, Target, Text, VOCAB, decode, plain};

const PROMPT: [u32; 3] = [2, 7, 1];

fn tree() -> Config {
    Config::new(Algorithm::Tree).budget(16)
}

fn toys(config: &Config) -> Decoder<(Target, Guesser)> {
    Decoder::new((Target::new(200), Guesser::new(5, 70)), config).unwrap()
}

fn all() -> [Config; 3] {
    [Config::new(Algorithm::Autoregressive), Config::new(Algorithm::Chain), tree()]
}

// The second request ran into the drafter's state of the first.
#[test]
fn requests_in_a_row_equal_fresh_ones() {
    for config in all() {
        let mut decoder = toys(&config);
        for prompt in [&[1, 2, 3][..], &[1, 2, 3], &[9], &[5, 5, 5, 5, 5, 5], &[0]] {
            let mut fresh = toys(&config);
            let request = Request::new(prompt).max_new_tokens(30);
            assert_eq!(decode(&mut decoder, &request), decode(&mut fresh, &request));
            assert_eq!(decoder.session().stats().rounds, fresh.session().stats().rounds);
            assert_eq!(decoder.session().stats().nodes, fresh.session().stats().nodes);
            assert_eq!(decoder.engine().1.features(), fresh.engine().1.features());
        }
    }
}

#[test]
fn a_request_that_is_refused_leaves_the_one_in_progress() {
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(30)).unwrap();
    let mut text = decoder.step().unwrap().unwrap().to_vec();
    assert!(decoder.start(&Request::new(&[])).is_err());
    assert!(decoder.start(&Request::new(&[VOCAB])).is_err());
    while let Some(tokens) = decoder.step().unwrap() {
        text.extend_from_slice(tokens);
    }
    assert_eq!(text, plain(&PROMPT, 30, &[], usize::MAX).0);
}

// A prefix cache hit left holes in the drafter's context, and acceptance fell.
#[test]
fn a_cached_prefix_is_not_forwarded_again_and_the_text_is_the_same() {
    for config in all() {
        for kept in 0..20 {
            let mut decoder = toys(&config);
            let (first, _) = decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(20));
            // A second turn: the text so far, and more.
            let prompt = [&PROMPT[..], &first, &[4, 4, 2]].concat();
            let request = Request::new(&prompt).max_new_tokens(30);
            let held = decoder.session().committed_len();
            let kept = kept.min(held);
            let ended = decode(&mut decoder, &request.clone().cached_prefix(kept));
            assert_eq!(ended, plain(&prompt, 30, &[], usize::MAX));
            let (target, guesser) = decoder.into_engine();
            target.assert_plain(&[&prompt[..], &ended.0].concat());
            if config == Config::new(Algorithm::Autoregressive) {
                continue;
            }
            // The drafter's context has no holes: before rows are reused, it is
            // shown what it has not seen of them.
            assert_eq!(guesser.context().start, 0);
        }
    }
}

#[test]
fn a_drafter_that_holds_the_cached_prefix_drafts_as_well_as_ever() {
    let mut decoder = toys(&tree());
    decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(20));
    let prompt = [&PROMPT[..], &decoder.session().generated()[..4], &[4]].concat();
    let request = Request::new(&prompt).max_new_tokens(60);
    decode(&mut decoder, &request.clone().cached_prefix(prompt.len() - 1));
    let cached = decoder.session().stats().tau();
    let mut fresh = toys(&tree());
    decode(&mut fresh, &request);
    assert_eq!(cached, fresh.session().stats().tau());
    assert!(cached > 1.5);
}

// The rows of another text were taken for those of the prompt, without an error.
#[test]
fn a_cached_prefix_that_is_not_held_is_refused() {
    let mut decoder = toys(&tree());
    decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(20));
    let text = decoder.session().tokens().to_vec();
    let held = decoder.session().committed_len();
    assert_eq!(held, text.len() - 1);
    let reusable = |prompt: &[u32]| decoder.session().reusable_prefix(prompt);
    assert_eq!(reusable(&[]), 0);
    assert_eq!(reusable(&text[..5]), 4);
    assert_eq!(reusable(&text), held);
    assert_eq!(reusable(&[&text[..], &[1, 2]].concat()), held);
    let mut other = text[..10].to_vec();
    other[6] = (other[6] + 1) % VOCAB;
    assert_eq!(reusable(&other), 6);

    let before = decoder.session().tokens().to_vec();
    let error = decoder.start(&Request::new(&other).cached_prefix(7)).unwrap_err();
    assert!(matches!(error, Error::Setting { field: "cached_prefix", .. }), "{error}");
    assert!(error.to_string().contains("at most 6"), "{error}");
    assert_eq!(decoder.session().tokens(), before);
    let ended = decode(&mut decoder, &Request::new(&other).max_new_tokens(9).cached_prefix(6));
    assert_eq!(ended, plain(&other, 9, &[], usize::MAX));

    // What the host put there, it knows.
    let mut elsewhere = Target::new(200);
    let mut ids = Vec::new();
    elsewhere.prefill(&Prefill::new(0, &text), &mut Picks::new(&mut ids)).unwrap();
    decoder.engine_mut().0 = elsewhere;
    let prompt = [&text[..], &[3]].concat();
    let request = Request::new(&prompt).max_new_tokens(9).cached_prefix(text.len());
    assert_eq!(decode(&mut decoder, &request), plain(&prompt, 9, &[], usize::MAX));
}

// A thinking budget was lost on the speculative path.
#[test]
fn a_host_can_cut_a_round_and_insert_tokens() {
    let insert = [VOCAB - 1, 0, 3];
    for config in all() {
        for cut in 1..5 {
            let (mut target, horizon) = (Target::new(200), 5);
            let plan = Plan::resolve(&config, &target.capabilities(), horizon).unwrap();
            let mut session = Session::new(plan);
            session.start(&Request::new(&PROMPT).max_new_tokens(60)).unwrap();
            let mut inserted = false;
            let mut text = PROMPT.to_vec();
            while session.need() != Need::Nothing {
                match session.need() {
                    Need::Prefill => {
                        let (prefill, mut picks) = session.prefill().unwrap();
                        target.prefill(&prefill, &mut picks).unwrap();
                        session.prefilled().unwrap();
                        text.extend_from_slice(session.new_tokens());
                    }
                    Need::Proposal => {
                        // The truth, so that there is something to cut.
                        let (request, proposal) = session.proposal().unwrap();
                        let mut truth = Text::new(&text);
                        for _ in 0..request.horizon() {
                            let next = truth.next();
                            truth.push(next);
                            let other = (next + 1) % VOCAB;
                            let entries = request.top_k().min(2);
                            let tokens = &[next, other][..entries];
                            proposal.push(tokens, &[-0.2, -1.9][..entries]).unwrap();
                        }
                        session.proposed().unwrap();
                    }
                    Need::Verification => {
                        let (round, mut picks) = session.verification().unwrap();
                        target.verify(&round, &mut picks).unwrap();
                        session.verified().unwrap();
                    }
                    _ => {
                        if !inserted {
                            let found = session.outcome().unwrap().tokens().len();
                            session.truncate_outcome(cut).unwrap();
                            let outcome = session.outcome().unwrap();
                            assert_eq!(outcome.tokens().len(), found.min(cut));
                        }
                        target.commit(session.commit().unwrap()).unwrap();
                        session.committed().unwrap();
                        text.extend_from_slice(session.new_tokens());
                        target.assert_plain(&text);
                        if !inserted {
                            inserted = true;
                            session.append(&insert).unwrap();
                            assert!(session.new_tokens().is_empty());
                            text.extend_from_slice(&insert);
                        }
                    }
                }
            }
            // After the inserted tokens the target goes on as if they were its own.
            let emitted = text.len() - PROMPT.len();
            assert_eq!(emitted, 60);
            assert_eq!(session.tokens(), text);
            let at = text.windows(3).position(|window| window == insert).unwrap() + 3;
            assert_eq!(text[at..], plain(&text[..at], text.len() - at, &[], usize::MAX).0);
            target.assert_plain(&text);
        }
    }
}

#[test]
fn tokens_can_be_appended_after_any_step_of_a_decoder() {
    // To the last token wanted, and to the last row of the cache, where no
    // draft is asked for.
    for config in all() {
        for (limit, max_len) in [(12, 200), (usize::MAX, 14)] {
            for steps in 1..12 {
                let engine = (Target::new(max_len), Guesser::new(5, 70));
                let mut decoder = Decoder::new(engine, &config).unwrap();
                decoder.start(&Request::new(&PROMPT).max_new_tokens(limit)).unwrap();
                for _ in 0..steps {
                    decoder.step().unwrap();
                }
                let before = decoder.session().tokens().to_vec();
                let finished = decoder.session().finish().is_some();
                let appended = decoder.append(&[5]);
                if finished {
                    assert!(matches!(appended, Err(Error::OutOfTurn { .. })));
                    continue;
                }
                let room = max_len - before.len();
                if room > 0 {
                    appended.unwrap();
                } else {
                    let error = appended.unwrap_err();
                    assert!(matches!(error, Error::Setting { field: "tokens", .. }), "{error}");
                    assert_eq!(decoder.session().tokens(), before);
                }
                while decoder.step().unwrap().is_some() {}
                let text = decoder.session().tokens().to_vec();
                let at = before.len() + usize::from(room > 0);
                let left = text.len() - at;
                assert_eq!(text[at..], plain(&text[..at], left, &[], usize::MAX).0);
                assert_eq!(text.len(), PROMPT.len().saturating_add(limit).min(max_len + 1));
            }
        }
    }
}

// Where the limits leave a round without a draft, a host that looks between two
// steps finds no other place to append.
#[test]
fn tokens_can_be_appended_before_a_round_that_the_limits_leave_without_a_draft() {
    for config in all() {
        for (limit, max_len) in [(2, 200), (usize::MAX, PROMPT.len() + 2)] {
            let engine = (Target::new(max_len), Guesser::new(5, 70));
            let mut decoder = Decoder::new(engine, &config).unwrap();
            decoder.start(&Request::new(&PROMPT).max_new_tokens(limit)).unwrap();
            decoder.step().unwrap();
            if limit == 2 {
                assert_eq!(decoder.session().need(), Need::Verification);
            }
            decoder.append(&[5]).unwrap();
            assert_eq!(decoder.session().generated()[1..], [5]);
            while decoder.step().unwrap().is_some() {}
            assert!(decoder.session().finish().is_some());
        }
        // The last row is the root's, so nothing can be drafted either.
        let engine = (Target::new(PROMPT.len() + 1), Guesser::new(5, 70));
        let mut decoder = Decoder::new(engine, &config).unwrap();
        decoder.start(&Request::new(&PROMPT)).unwrap();
        decoder.step().unwrap();
        assert_eq!(decoder.session().need(), Need::Verification);
        let error = decoder.append(&[5]).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "tokens", .. }), "{error}");
    }
}

#[test]
fn appended_tokens_count_as_generated_and_end_the_text_at_the_limit() {
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(4)).unwrap();
    decoder.step().unwrap();
    decoder.append(&[1, 2, 3]).unwrap();
    assert_eq!(decoder.session().finish(), Some(Finish::TokenLimit));
    assert_eq!(decoder.session().generated()[1..], [1, 2, 3]);
    assert!(decoder.step().unwrap().is_none());
    let error = decoder.append(&[1]).unwrap_err();
    assert!(matches!(error, Error::OutOfTurn { call: "append", needs: Need::Nothing }), "{error}");
}

#[test]
fn tokens_appended_before_the_prefill_join_the_prompt() {
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(12)).unwrap();
    decoder.append(&[8, 8]).unwrap();
    while decoder.step().unwrap().is_some() {}
    let prompt = [&PROMPT[..], &[8, 8]].concat();
    assert_eq!(decoder.session().generated()[2..], plain(&prompt, 10, &[], usize::MAX).0);
}

#[test]
fn appended_stop_tokens_do_not_stop_the_text() {
    let first = plain(&PROMPT, 1, &[], 99).0[0];
    let (stop, text) = (0..VOCAB)
        .map(|stop| (stop, plain(&[&PROMPT[..], &[first, stop]].concat(), 5, &[], 99).0))
        .find(|(stop, text)| *stop != first && !text.contains(stop))
        .unwrap();
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(7).stop_tokens(&[stop])).unwrap();
    decoder.step().unwrap();
    decoder.append(&[stop]).unwrap();
    while decoder.step().unwrap().is_some() {}
    assert_eq!(decoder.session().generated()[2..], text);
}

// The verification that could not run emitted something other than the bonus.
#[test]
fn a_round_without_a_draft_commits_the_root_and_emits_the_bonus() {
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(10)).unwrap();
    decoder.step().unwrap();
    for _ in 0..9 {
        assert_eq!(decoder.step_plain().unwrap().unwrap().len(), 1);
    }
    let reasons: Vec<_> = decoder.session().stats().reasons().collect();
    assert_eq!(reasons, [(Reason::LastToken, 1), (Reason::Skipped, 8)]);
    assert_eq!(decoder.session().generated(), plain(&PROMPT, 10, &[], usize::MAX).0);
}

#[test]
fn calls_out_of_turn_name_the_call_and_what_is_needed() {
    let plan = Plan::resolve(&tree(), &Target::new(50).capabilities(), 3).unwrap();
    let mut session = Session::new(plan);
    let out_of_turn = |error: Error, call, needs| {
        assert_eq!(error, Error::OutOfTurn { call, needs });
        assert!(error.to_string().starts_with(call));
    };
    out_of_turn(session.prefill().unwrap_err(), "prefill", Need::Nothing);
    out_of_turn(session.append(&[1]).unwrap_err(), "append", Need::Nothing);
    session.start(&Request::new(&[1])).unwrap();
    out_of_turn(session.proposal().unwrap_err(), "proposal", Need::Prefill);
    out_of_turn(session.verified().unwrap_err(), "verified", Need::Prefill);
    session.prefill().unwrap().1.push(2);
    session.prefilled().unwrap();
    out_of_turn(session.prefilled().unwrap_err(), "prefilled", Need::Proposal);
    out_of_turn(session.verification().unwrap_err(), "verification", Need::Proposal);
    session.proposal().unwrap().1.push(&[3], &[-0.1]).unwrap();
    session.proposed().unwrap();
    out_of_turn(session.skip_proposal().unwrap_err(), "skip_proposal", Need::Verification);
    out_of_turn(session.append(&[1]).unwrap_err(), "append", Need::Verification);
    out_of_turn(session.outcome().unwrap_err(), "outcome", Need::Verification);
    session.verification().unwrap().1.extend(&[3, 4]);
    session.verified().unwrap();
    out_of_turn(session.verified().unwrap_err(), "verified", Need::Commit);
    out_of_turn(session.append(&[1]).unwrap_err(), "append", Need::Commit);
    session.committed().unwrap();
    out_of_turn(session.truncate_outcome(1).unwrap_err(), "truncate_outcome", Need::Proposal);
    out_of_turn(session.committed().unwrap_err(), "committed", Need::Proposal);
    out_of_turn(session.commit().unwrap_err(), "commit", Need::Proposal);
    session.stop();
    assert_eq!(session.finish(), Some(Finish::Stopped));
    out_of_turn(session.proposed().unwrap_err(), "proposed", Need::Nothing);
}

#[test]
fn nothing_started_needs_nothing() {
    let mut decoder = toys(&tree());
    assert!(decoder.step().unwrap().is_none());
    assert_eq!(decoder.session().need(), Need::Nothing);
    assert_eq!(decoder.session().finish(), None);
}

#[test]
fn committed_tokens_are_those_with_rows() {
    let mut decoder = toys(&tree());
    decoder.start(&Request::new(&PROMPT).max_new_tokens(9)).unwrap();
    decoder.step().unwrap();
    let session = decoder.session();
    assert_eq!(session.committed_len(), 3);
    assert_eq!(session.committed_tokens(1..3).unwrap().tokens(), &PROMPT[1..]);
    for range in [2..4, 4..4, 1..1] {
        let error = session.committed_tokens(range).unwrap_err();
        assert!(matches!(error, Error::Setting { field: "range", .. }), "{error}");
    }
}
