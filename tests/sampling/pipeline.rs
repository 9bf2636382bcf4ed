//! The pipeline against an obvious twin, and what its settings do.

use ddtree::{
    Algorithm, Capabilities, Config, Error, Picker, Picks, Plan, Request, Sampling, Session,
    TokenPath, sample::gumbel,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::toy::{Hands, Language, Marginals, Target, decode, engine};

/// Picks the token after a prompt from one row.
fn pick(row: &[f32], prompt: &[u32], sampling: Sampling) -> Result<u32, Error> {
    let capabilities = Capabilities::new(row.len(), 10_000);
    let config = Config::new(Algorithm::Autoregressive);
    let mut session = Session::new(Plan::resolve(&config, &capabilities, 0)?);
    session.start(&Request::new(prompt).sampling(sampling))?;
    let (_, mut picks) = session.prefill()?;
    picks.push_logits(row)?;
    session.prefilled()?;
    Ok(session.generated()[0])
}

#[derive(Clone, Debug, Default)]
struct Settings {
    temperature: f32,
    top_k: Option<usize>,
    top_p: f32,
    min_p: f32,
    penalties: [f32; 3],
    window: Option<usize>,
    bias: Vec<(u32, f32)>,
    seed: u64,
}

impl Settings {
    fn random(rng: &mut StdRng, vocab: u32) -> Self {
        Self {
            temperature: [0.0, 0.2, 0.7, 1.0, 1.7][rng.random_range(0..5)],
            top_k: [None, Some(1), Some(3), Some(40), Some(100_000)][rng.random_range(0..5)],
            top_p: [1.0, 1.0, 0.95, 0.5, 0.01][rng.random_range(0..5)],
            min_p: [0.0, 0.0, 0.05, 0.9, 1.0][rng.random_range(0..5)],
            penalties: [
                [1.0, 1.3, 0.8][rng.random_range(0..3)],
                [0.0, 0.4][rng.random_range(0..2)],
                [0.0, -0.3][rng.random_range(0..2)],
            ],
            window: [None, Some(0), Some(5)][rng.random_range(0..3)],
            bias: (0..rng.random_range(0..3))
                .map(|_| {
                    (rng.random_range(0..vocab), [f32::NEG_INFINITY, 2.5][rng.random_range(0..2)])
                })
                .collect(),
            seed: rng.random(),
        }
    }

    fn sampling(&self) -> Sampling {
        let mut sampling = Sampling::new()
            .temperature(self.temperature)
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition_penalty(self.penalties[0])
            .frequency_penalty(self.penalties[1])
            .presence_penalty(self.penalties[2])
            .logit_bias(&self.bias)
            .seed(self.seed);
        if let Some(k) = self.top_k {
            sampling = sampling.top_k(k);
        }
        if let Some(window) = self.window {
            sampling = sampling.penalty_window(window);
        }
        sampling
    }

    /// The definition, step by step, over whole rows.
    fn naive(&self, row: &[f32], path: &[u32]) -> u32 {
        let mut row = row.to_vec();
        for &(token, bias) in &self.bias {
            row[token as usize] += bias;
        }
        let window = &path[path.len() - self.window.unwrap_or(path.len()).min(path.len())..];
        for (token, logit) in row.iter_mut().enumerate() {
            let count = window.iter().filter(|&&t| t as usize == token).count();
            if count > 0 {
                let [repetition, frequency, presence] = self.penalties;
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                *logit -= count as f32 * frequency + presence;
            }
        }
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
        if self.temperature == 0.0 {
            return order[0];
        }
        order.retain(|&token| row[token as usize] > f32::NEG_INFINITY);
        let scaled = |token: u32| f64::from(row[token as usize]) / f64::from(self.temperature);
        let best = order[0];
        let probability = |token: u32| (scaled(token) - scaled(best)).exp();
        order.truncate(self.top_k.unwrap_or(usize::MAX));
        let total: f64 = order.iter().map(|&token| probability(token)).sum();
        let mut sum = 0.0;
        let crossing = order.iter().position(|&token| {
            sum += probability(token);
            sum >= f64::from(self.top_p) * total
        });
        order.truncate(crossing.map_or(order.len(), |last| last + 1));
        order.retain(|&token| probability(token) >= f64::from(self.min_p));
        let sum = |token: u32| scaled(token) + gumbel(self.seed, path.len(), token);
        order.sort_by(|&a, &b| sum(b).total_cmp(&sum(a)).then(a.cmp(&b)));
        order[0]
    }
}

#[test]
fn picks_are_those_of_the_definition() {
    let mut rng = StdRng::seed_from_u64(11);
    for case in 0..3_000 {
        let vocab = [1, 2, 5, 255, 256, 257, 1_000, 5_000][case % 8];
        // Few distinct values make ties; many stretch the noise.
        let spread = [0.0, 2.0, 12.0][rng.random_range(0..3)];
        let grain = [0.5f32, 1e-4][rng.random_range(0..2)];
        let mut row: Vec<f32> = (0..vocab)
            .map(|_| (rng.random_range(-1.0..1.0f32) * spread / grain).round() * grain + 0.0)
            .collect();
        if case % 5 == 0 {
            row.iter_mut().step_by(3).skip(1).for_each(|logit| *logit = f32::NEG_INFINITY);
        }
        let path: Vec<u32> = (0..9).map(|_| rng.random_range(0..vocab)).collect();
        let settings = Settings::random(&mut rng, vocab);
        if vocab <= 2 && !settings.bias.is_empty() {
            continue;
        }
        let found = pick(&row, &path, settings.sampling()).unwrap();
        assert_eq!(found, settings.naive(&row, &path), "case {case}: {settings:?}");
    }
}

/// One picker for all prefixes of several texts, last ones first.
#[test]
fn a_picker_gives_the_picks_of_a_session() {
    for (seed, sampling) in [
        Sampling::new(),
        Sampling::new().repetition_penalty(1.3).frequency_penalty(0.2).penalize_prompt(false),
        Sampling::new().temperature(0.9).top_p(0.9),
        Sampling::new().temperature(1.2).presence_penalty(0.5).logit_bias(&[(3, 1.0)]),
    ]
    .into_iter()
    .enumerate()
    {
        let sampling = sampling.seed(seed as u64);
        let mut picker = Picker::new(&sampling, 16).unwrap();
        for first in 0..4 {
            let request =
                Request::new(&[first, 2, 5]).max_new_tokens(20).sampling(sampling.clone());
            let config = Config::new(Algorithm::Tree).budget(8);
            let text = decode(engine(16, Hands::Wanted), &config, &request, None).tokens;
            let all = [&[first, 2, 5][..], &text].concat();
            for end in (3..all.len()).rev() {
                let row = Language::new(16).row_after(&all[..end]);
                let picked = picker.pick(&row, TokenPath::new(&all[..end], 3)).unwrap();
                assert_eq!(picked, all[end], "{sampling:?} {end}");
            }
        }
    }
}

#[test]
fn a_picker_refuses_what_a_session_refuses() {
    let sampling = Sampling::new().repetition_penalty(1.3).penalize_prompt(false);
    assert!(Picker::new(&sampling, 0).is_err());
    assert!(Picker::new(&Sampling::new().top_k(0), 3).is_err());
    let mut picker = Picker::new(&sampling, 3).unwrap();
    let path = TokenPath::new(&[1, 2], 5);
    assert_eq!(picker.pick(&[0.0, 2.0, 1.0], path), Ok(1));
    assert!(matches!(picker.pick(&[0.0; 2], path), Err(Error::Length { field: "logits", .. })));
    let outside = picker.pick(&[0.0; 3], TokenPath::new(&[1, 3], 1));
    assert!(matches!(outside, Err(Error::Token { field: "path", index: 1, .. })));
    let nothing = picker.pick(&[f32::NEG_INFINITY; 3], path);
    assert_eq!(nothing, Err(Error::NoToken { slot: 0 }));
    assert_eq!(picker.pick(&[0.0, 2.0, 1.0], TokenPath::new(&[], 0)), Ok(1));
}

#[test]
fn cold_sampling_is_greedy() {
    let mut rng = StdRng::seed_from_u64(5);
    for seed in 0..200 {
        let row: Vec<f32> = (0..500).map(|_| rng.random_range(-8.0..8.0)).collect();
        let greedy = pick(&row, &[1], Sampling::new()).unwrap();
        let cold = Sampling::new().temperature(1e-6).seed(seed);
        assert_eq!(pick(&row, &[1], cold).unwrap(), greedy);
    }
}

#[test]
fn extreme_rows() {
    let warm = || Sampling::new().temperature(1.0).seed(3);
    let big = [f32::MAX, -f32::MAX, 0.0, f32::NEG_INFINITY];
    for sampling in [warm(), warm().temperature(1e-6), warm().top_p(0.1), warm().min_p(1.0)] {
        assert_eq!(pick(&big, &[0], sampling), Ok(0));
    }
    // At a temperature of 1e6 these logits still differ by more than any noise.
    assert_eq!(pick(&big, &[0], warm().temperature(1e6)), Ok(0));
    for (row, at) in [([0.0, f32::NAN], 1), ([f32::INFINITY, 0.0], 0)] {
        let error = pick(&row, &[0], warm()).unwrap_err();
        let Error::Logits { row: 0, source } = error else { panic!("{error}") };
        assert!(source.to_string().contains(&format!("logits[{at}]")), "{source}");
    }
    let nothing = [f32::NEG_INFINITY; 3];
    let error = Picks::new(&mut Vec::new()).push_logits(&nothing).unwrap_err();
    assert!(matches!(error, Error::NoToken { slot: 0 }), "{error}");
    assert_eq!(pick(&nothing, &[0], warm()), Err(Error::NoToken { slot: 0 }));
    let forbid: Vec<_> = (0..3).map(|token| (token, f32::NEG_INFINITY)).collect();
    let error = pick(&[1.0, 2.0, 3.0], &[0], Sampling::new().logit_bias(&forbid)).unwrap_err();
    assert_eq!(error, Error::NoToken { slot: 0 });
}

#[test]
fn a_row_must_have_one_logit_per_token() {
    let config = Config::new(Algorithm::Autoregressive);
    let plan = Plan::resolve(&config, &Capabilities::new(5, 100), 0).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[4]).sampling(Sampling::new().repetition_penalty(2.0))).unwrap();
    let (_, mut picks) = session.prefill().unwrap();
    let error = picks.push_logits(&[1.0; 4]).unwrap_err();
    assert!(matches!(error, Error::Length { field: "logits", found: 4, accepted: 5 }));
}

#[test]
fn settings_are_checked_when_a_request_starts() {
    let mut decoder = ddtree::Decoder::new(engine(8, Hands::Logits), &Config::default()).unwrap();
    let request = |sampling| Request::new(&[1]).max_new_tokens(3).sampling(sampling);
    for wrong in [
        Sampling::new().temperature(-1.0),
        Sampling::new().top_p(0.0),
        Sampling::new().logit_bias(&[(8, 1.0)]),
    ] {
        assert!(decoder.start(&request(wrong)).is_err());
    }
    decoder.start(&request(Sampling::new().temperature(1.0))).unwrap();
}

/// A greedy target that says the same three tokens for ever, the failure that repetition penalties
/// are there for.
#[derive(Clone, Copy)]
struct Loop;

impl Loop {
    fn engine() -> crate::toy::Engine {
        // Two tokens of context over three tokens: soon in a cycle.
        let language = Language { vocab: 40, spread: 4.0, seed: 3 };
        (Target::new(language, Hands::Logits), Marginals::new(language, 5))
    }
}

fn distinct_pairs(text: &[u32]) -> usize {
    text.windows(2).collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn penalties_end_a_loop_and_hold_on_every_path() {
    let request = |sampling| Request::new(&[1, 2]).max_new_tokens(400).sampling(sampling);
    let ar = Config::new(Algorithm::Autoregressive);
    let plain = decode(Loop::engine(), &ar, &request(Sampling::new()), None);
    let late = &plain.tokens[200..];
    assert!(distinct_pairs(late) < 60, "the target loops: {}", distinct_pairs(late));
    let penalties = [
        Sampling::new().repetition_penalty(1.3).penalty_window(30),
        Sampling::new().frequency_penalty(0.2),
        Sampling::new().presence_penalty(1.0).penalty_window(20),
        Sampling::new().repetition_penalty(1.2).penalize_prompt(false).temperature(0.8).seed(4),
    ];
    for sampling in penalties {
        let expected = decode(Loop::engine(), &ar, &request(sampling.clone()), None);
        assert!(distinct_pairs(&expected.tokens[200..]) > 60, "{sampling:?}");
        for config in [Config::new(Algorithm::Chain), Config::new(Algorithm::Tree).budget(20)] {
            let found = decode(Loop::engine(), &config, &request(sampling.clone()), None);
            assert_eq!(found.tokens, expected.tokens, "{sampling:?} {config:?}");
            assert!(found.stats.tau() > 1.05, "drafts are still accepted");
        }
    }
}

/// A drafted token that is the raw argmax but not the processed one is rejected there, and the
/// processed one is the bonus.
#[test]
fn the_walk_follows_processed_picks() {
    let capabilities = Capabilities::new(10, 100);
    let plan = Plan::resolve(&Config::new(Algorithm::Tree).budget(2), &capabilities, 3).unwrap();
    let mut session = Session::new(plan);
    let sampling = Sampling::new().presence_penalty(5.0);
    session.start(&Request::new(&[7]).max_new_tokens(9).sampling(sampling)).unwrap();
    let row = |best: usize, second: usize| {
        let mut row = [0.0; 10];
        (row[best], row[second]) = (9.0, 6.0);
        row
    };
    let (_, mut picks) = session.prefill().unwrap();
    picks.push_logits(&row(7, 3)).unwrap(); // 7 is in the prompt
    session.prefilled().unwrap();
    assert_eq!(session.generated(), [3]);
    let (_, proposal) = session.proposal().unwrap();
    proposal.push(&[4], &[-0.1]).unwrap();
    proposal.push(&[4], &[-0.1]).unwrap();
    session.proposed().unwrap();
    let (round, mut picks) = session.verification().unwrap();
    assert_eq!(round.tree().tokens(), [3, 4, 4]);
    picks.push_logits(&row(4, 5)).unwrap();
    // 4 is an ancestor of this slot, though it is not committed.
    picks.push_logits(&row(4, 5)).unwrap();
    assert!(!picks.wanted());
    picks.push_logits(&row(4, 5)).unwrap();
    session.verified().unwrap();
    assert_eq!(session.outcome().unwrap().tokens(), [4, 5]);
}
