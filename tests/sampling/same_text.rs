//! One seed, one text, whatever drafts it.

use ddtree::{Algorithm, Config, Request, Sampling};

use crate::toy::{Hands, decode, engine};

fn configs() -> Vec<Config> {
    let mut configs = vec![Config::new(Algorithm::Chain)];
    configs.extend([4, 16, 64].map(|budget| Config::new(Algorithm::Tree).budget(budget)));
    let uncoupled: Vec<_> = configs.iter().map(|config| config.clone().coupled(false)).collect();
    configs.extend(uncoupled);
    configs.push(Config::new(Algorithm::Tree).budget(16).spine(true).top_k(4));
    configs.push(Config::new(Algorithm::Tree).budget(16).trace(true));
    configs
}

fn samplings() -> Vec<Sampling> {
    let new = |temperature| Sampling::new().temperature(temperature);
    vec![
        new(0.0),
        new(0.3),
        new(1.0),
        new(1.3).top_k(20),
        new(1.0).top_p(0.9),
        new(0.8).min_p(0.1).top_p(0.95),
        new(0.9).repetition_penalty(1.2).penalty_window(16),
        new(0.7).frequency_penalty(0.3).logit_bias(&[(3, 2.0), (5, f32::NEG_INFINITY)]),
    ]
}

#[test]
fn a_seed_gives_the_same_text_with_every_algorithm() {
    for (i, sampling) in samplings().into_iter().enumerate() {
        for seed in 0..3 {
            let sampling = sampling.clone().seed(seed);
            let request = Request::new(&[1, seed as u32]).max_new_tokens(40).sampling(sampling);
            // More than one chunk of noise in every other case.
            let engine = |hands| engine([24, 300][i % 2], hands);
            let ar = Config::new(Algorithm::Autoregressive);
            let expected = decode(engine(Hands::Logits), &ar, &request, None).tokens;
            for config in configs() {
                let found = decode(engine(Hands::Wanted), &config, &request, None).tokens;
                assert_eq!(found, expected, "{config:?} {request:?}");
            }
        }
    }
}

#[test]
fn seeds_differ() {
    let text = |seed| {
        let sampling = Sampling::new().temperature(1.0).seed(seed);
        let request = Request::new(&[1]).max_new_tokens(20).sampling(sampling);
        decode(engine(24, Hands::Logits), &Config::default(), &request, None).tokens
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
    assert_ne!(text(1), text(1 << 40));
}

#[test]
fn coupled_drafts_are_accepted_more() {
    let tau = |config: Config| {
        let (mut tokens, mut rounds) = (0, 0);
        for seed in 0..20 {
            let sampling = Sampling::new().temperature(1.0).seed(seed);
            let request = Request::new(&[1]).max_new_tokens(100).sampling(sampling);
            let stats = decode(engine(24, Hands::Wanted), &config, &request, None).stats;
            tokens += stats.tokens;
            rounds += stats.rounds;
        }
        tokens as f64 / rounds as f64
    };
    for config in [Config::new(Algorithm::Chain), Config::new(Algorithm::Tree).budget(8)] {
        let (plain, coupled) = (tau(config.clone().coupled(false)), tau(config));
        assert!(coupled > plain * 1.1, "{coupled:.2} against {plain:.2}");
    }
}

/// Only rows that the text reaches are picked from.
#[test]
fn rows_off_the_path_are_not_asked_for() {
    let request = Request::new(&[1]).max_new_tokens(60).sampling(Sampling::new().temperature(0.5));
    let mut decoder =
        ddtree::Decoder::new(engine(24, Hands::Wanted), &Config::new(Algorithm::Tree)).unwrap();
    decoder.start(&request).unwrap();
    while decoder.step().unwrap().is_some() {}
    let rows = decoder.engine().0.rows_handed;
    let stats = decoder.session().stats();
    // One for the prefill; cutting at the token limit can leave some unused.
    assert!((60..=60 + 5).contains(&rows), "{rows} rows for 60 tokens");
    assert!(stats.nodes + stats.rounds > 5 * rows as u64);
}
