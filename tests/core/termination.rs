//! Where texts end, and what is left when they do.

use std::ops::ControlFlow;

use ddtree::{Algorithm, Config, Decoder, Finish, Reason, Request};

use crate::toy::{Guesser, Target, decode, plain};

const PROMPT: [u32; 3] = [2, 7, 1];

fn configs() -> [Config; 6] {
    [
        Config::new(Algorithm::Autoregressive),
        Config::new(Algorithm::Chain),
        Config::new(Algorithm::Chain).expand_below_stop(false),
        Config::new(Algorithm::Tree).budget(20),
        Config::new(Algorithm::Tree).budget(20).expand_below_stop(false),
        Config::new(Algorithm::Tree).budget(7).spine(true),
    ]
}

fn toys(config: &Config, skill: u64, max_len: usize) -> Decoder<(Target, Guesser)> {
    Decoder::new((Target::new(max_len), Guesser::new(6, skill)), config).unwrap()
}

/// Text, reason to end, rows and counters are those of plain decoding.
fn assert_ends(config: &Config, skill: u64, limit: usize, stops: &[u32], max_len: usize) {
    let mut decoder = toys(config, skill, max_len);
    let request = Request::new(&PROMPT).max_new_tokens(limit).stop_tokens(stops);
    let (text, finish) = decode(&mut decoder, &request);
    let wanted = plain(&PROMPT, limit, stops, max_len);
    assert_eq!((&text, finish), (&wanted.0, wanted.1), "{config:?}, {limit}, {stops:?}, {max_len}");
    decoder.engine().0.assert_plain(&[&PROMPT[..], &text].concat());
    // What lies past the end is counted nowhere.
    let stats = decoder.session().stats();
    assert_eq!(stats.tokens as usize, text.len() - 1);
    let accepted: u64 = stats.acceptance().map(|(accepted, _)| accepted).sum();
    assert_eq!(accepted, stats.tokens - stats.rounds);
    // And the end stays the end.
    assert!(decoder.step().unwrap().is_none());
    assert_eq!(decoder.session().generated(), text);
}

// The end was missed in the middle of an accepted run; the rows of the suffix
// stayed in the cache.
#[test]
fn a_stop_token_ends_the_text_at_every_depth_of_an_accepted_run() {
    let (text, _) = plain(&PROMPT, 40, &[], usize::MAX);
    for config in configs() {
        for stop in 0..text.len() {
            // The first occurrence stops, which is at this depth or before.
            assert_ends(&config, 100, 60, &[text[stop]], 200);
            assert_ends(&config, 60, 60, &[text[stop], text[stop / 2]], 200);
        }
    }
}

#[test]
fn a_stop_token_in_the_middle_of_a_round_cuts_its_commit() {
    let (text, _) = plain(&PROMPT, 40, &[], usize::MAX);
    let mut cuts = 0;
    for &stop in &text {
        let config = Config::new(Algorithm::Tree).budget(20).trace(true);
        let mut decoder = toys(&config, 100, 200);
        let request = Request::new(&PROMPT).max_new_tokens(60).stop_tokens(&[stop]);
        decode(&mut decoder, &request);
        if let Some(round) = decoder.session().trace().last() {
            cuts += usize::from(round.path.len() > round.stats.tokens);
        }
    }
    assert!(cuts > 5, "{cuts}: the walk goes on behind the stop token, the commit does not");
}

#[test]
fn a_stop_token_as_the_first_token_ends_before_any_round() {
    let first = plain(&PROMPT, 1, &[], usize::MAX).0[0];
    for config in configs() {
        let mut decoder = toys(&config, 50, 200);
        let request = Request::new(&PROMPT).stop_tokens(&[first]);
        assert_eq!(decode(&mut decoder, &request), (vec![first], Finish::StopToken));
        assert_eq!(decoder.session().stats().rounds, 0);
        assert!(decoder.engine().0.widths.is_empty());
    }
}

#[test]
fn a_prompt_that_ends_in_a_stop_token_is_continued() {
    for config in configs() {
        assert_ends(&config, 70, 10, &PROMPT[2..], 200);
    }
}

#[test]
fn any_limit_is_kept_exactly() {
    for config in configs() {
        for skill in [50, 100] {
            for limit in 1..30 {
                assert_ends(&config, skill, limit, &[], 200);
            }
        }
    }
}

#[test]
fn no_tokens_wanted_is_a_complete_text_that_forwards_nothing() {
    for config in configs() {
        let mut decoder = toys(&config, 50, 200);
        let request = Request::new(&PROMPT).max_new_tokens(0);
        assert_eq!(decode(&mut decoder, &request), (vec![], Finish::TokenLimit));
        let (target, guesser) = decoder.into_engine();
        assert_eq!(target.committed_rows(), []);
        assert_eq!(guesser.log.len(), 0);
    }
}

#[test]
fn any_cache_size_is_used_to_the_last_row_and_never_beyond() {
    for config in configs() {
        for skill in [50, 100] {
            for max_len in PROMPT.len()..40 {
                assert_ends(&config, skill, usize::MAX, &[], max_len);
            }
        }
    }
}

#[test]
fn a_prompt_that_fills_the_cache_gives_one_token() {
    let mut decoder = toys(&configs()[3], 50, PROMPT.len());
    let (text, finish) = decode(&mut decoder, &Request::new(&PROMPT));
    assert_eq!((text.len(), finish), (1, Finish::CacheFull));
}

#[test]
fn a_stop_token_comes_before_limits_and_the_limit_before_the_cache() {
    let (text, _) = plain(&PROMPT, 12, &[], usize::MAX);
    let first = |token: &u32| text.iter().position(|other| other == token).unwrap();
    // A token that has not come before, so that all three ends coincide.
    let end = (4..12).find(|&at| first(&text[at]) == at).unwrap();
    for config in configs() {
        let full = PROMPT.len() + end;
        for (stops, limit, finish) in [
            (&text[end..=end], end + 1, Finish::StopToken),
            (&[], end + 1, Finish::TokenLimit),
            (&[], end + 2, Finish::CacheFull),
        ] {
            let mut decoder = toys(&config, 100, full);
            let request = Request::new(&PROMPT).max_new_tokens(limit).stop_tokens(stops);
            assert_eq!(decode(&mut decoder, &request), (text[..=end].to_vec(), finish));
        }
    }
}

#[test]
fn a_caller_can_stop_at_any_step_and_go_on_with_another_request() {
    for config in configs() {
        for steps in 1..6 {
            let mut decoder = toys(&config, 80, 200);
            let mut seen = Vec::new();
            let mut left = steps;
            let generated = decoder
                .generate(&Request::new(&PROMPT).max_new_tokens(60), |tokens| {
                    seen.extend_from_slice(tokens);
                    left -= 1;
                    if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })
                .unwrap();
            assert_eq!(generated.finish, Finish::Stopped);
            assert_eq!(generated.tokens, seen);
            assert_eq!(seen, plain(&PROMPT, seen.len(), &[], usize::MAX).0);
            decoder.engine().0.assert_plain(&[&PROMPT[..], &seen].concat());
            let again = decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(20));
            assert_eq!(again, plain(&PROMPT, 20, &[], usize::MAX));
        }
    }
}

#[test]
fn nothing_is_drafted_deeper_than_tokens_are_wanted() {
    let config = Config::new(Algorithm::Tree).budget(20).trace(true);
    for limit in 2..20 {
        let mut decoder = toys(&config, 70, 200);
        decode(&mut decoder, &Request::new(&PROMPT).max_new_tokens(limit));
        let mut left = limit - 1;
        for round in decoder.session().trace() {
            assert!(*round.depths.iter().max().unwrap() < left as u32);
            if left == 1 {
                assert_eq!(round.stats.reason, Some(Reason::LastToken));
            }
            left -= round.stats.tokens;
        }
        assert_eq!(left, 0);
    }
}

#[test]
fn nothing_is_drafted_below_a_stop_token_if_so_asked() {
    let stops = [0, 4, 8, 12];
    for config in [
        Config::new(Algorithm::Tree).budget(30),
        Config::new(Algorithm::Tree).budget(30).spine(true),
        Config::new(Algorithm::Chain),
    ] {
        let below = |expand: bool| {
            let config = config.clone().expand_below_stop(expand).trace(true);
            let mut found = 0;
            for first in 0..13 {
                let mut decoder = toys(&config, 70, 200);
                let prompt = [first, 1, 2];
                let request = Request::new(&prompt).max_new_tokens(40).stop_tokens(&stops);
                let ended = decode(&mut decoder, &request);
                assert_eq!(ended, plain(&prompt, 40, &stops, usize::MAX));
                for round in decoder.session().trace() {
                    let parents = round.parents[1..].iter().filter(|&&parent| parent > 0);
                    found += parents
                        .filter(|&&parent| stops.contains(&round.tokens[parent as usize]))
                        .count();
                }
            }
            found
        };
        assert!(below(true) > 0);
        assert_eq!(below(false), 0, "{config:?}");
    }
}
