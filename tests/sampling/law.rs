//! Chi-square tests of the law of whole texts.
//!
//! # Power
//!
//! A test of [`TEXTS`] texts at level 1e-6 finds, with probability 0.999, any law whose chi-square
//! distance from the target's, the sum over texts of `(found - p)^2 / p`, is at least what
//! [`detectable`] computes: 0.0077 for 64 texts, as if the probability of each were off by 9 %.
//! Seeds are fixed, so an outcome does not change from run to run.

use std::collections::BTreeMap;

use ddtree::{Algorithm, Config, Request, Sampling};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::toy::{Hands, Language, Marginals, engine, softmax};

const VOCAB: u32 = 4;
const LENGTH: usize = 3;
const TEXTS: usize = 20_000;
const PROMPT: [u32; 2] = [2, 0];

/// Standard normal quantiles of 1 - 1e-6 and 0.999.
const LEVEL: f64 = 4.753;
const POWER: f64 = 3.090;

/// The value that chi-square exceeds with probability 1e-6 (Wilson and Hilferty, 1931).
fn critical(degrees: f64) -> f64 {
    let c = 2.0 / (9.0 * degrees);
    degrees * (1.0 - c + LEVEL * c.sqrt()).powi(3)
}

/// The chi-square distance that is found with probability 0.999: noncentral chi-square is close to
/// normal, with mean `d + x` and variance `2 (d + 2 x)`.
fn detectable(degrees: f64, texts: usize) -> f64 {
    let mut x = 0.0;
    while degrees + x - POWER * (2.0 * (degrees + 2.0 * x)).sqrt() < critical(degrees) {
        x += 0.1;
    }
    x / texts as f64
}

/// Chi-square of counts against probabilities, and its degrees of freedom. Texts expected less than
/// ten times count as one.
fn chi_square(counts: &BTreeMap<Vec<u32>, usize>, law: &BTreeMap<Vec<u32>, f64>) -> (f64, f64) {
    let total: usize = counts.values().sum();
    for text in counts.keys() {
        assert!(law.get(text).is_some_and(|&p| p > 0.0), "{text:?} is impossible");
    }
    let mut cells = vec![(0.0, 0.0)];
    for (text, p) in law {
        let expected = p * total as f64;
        let found = counts.get(text).copied().unwrap_or(0) as f64;
        if expected < 10.0 {
            cells[0] = (cells[0].0 + found, cells[0].1 + expected);
        } else {
            cells.push((found, expected));
        }
    }
    cells.retain(|cell| cell.1 > 0.0);
    let statistic = cells.iter().map(|(found, expected)| (found - expected).powi(2) / expected);
    (statistic.sum(), cells.len() as f64 - 1.0)
}

/// The probability of every text, from the definition.
fn law(language: Language, settings: &Settings) -> BTreeMap<Vec<u32>, f64> {
    let mut law = BTreeMap::from([(Vec::new(), 1.0)]);
    for _ in 0..LENGTH {
        let mut longer = BTreeMap::new();
        for (text, p) in law {
            let path = [&PROMPT[..], &text].concat();
            for (token, q) in settings.probabilities(language.row_after(&path), &path) {
                longer.insert([&text[..], &[token]].concat(), p * q);
            }
        }
        law = longer;
    }
    law
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition: f32,
    presence: f32,
}

impl Settings {
    const PLAIN: Self = Self {
        temperature: 1.0,
        top_k: VOCAB as usize,
        top_p: 1.0,
        min_p: 0.0,
        repetition: 1.0,
        presence: 0.0,
    };

    fn sampling(&self) -> Sampling {
        Sampling::new()
            .temperature(self.temperature)
            .top_k(self.top_k)
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition_penalty(self.repetition)
            .presence_penalty(self.presence)
    }

    fn probabilities(&self, mut row: Vec<f32>, path: &[u32]) -> Vec<(u32, f64)> {
        for token in 0..VOCAB {
            if path.contains(&token) {
                let logit = &mut row[token as usize];
                *logit *= if *logit > 0.0 { 1.0 / self.repetition } else { self.repetition };
                *logit -= self.presence;
            }
            row[token as usize] /= self.temperature;
        }
        let mut kept: Vec<(u32, f64)> = (0..VOCAB).zip(softmax(&row)).collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1));
        let normalised = |kept: &mut Vec<(u32, f64)>| {
            let sum: f64 = kept.iter().map(|entry| entry.1).sum();
            kept.iter_mut().for_each(|entry| entry.1 /= sum);
        };
        kept.truncate(self.top_k);
        normalised(&mut kept);
        let mut sum = 0.0;
        let full = kept.iter().position(|entry| {
            sum += entry.1;
            sum >= f64::from(self.top_p)
        });
        kept.truncate(full.map_or(kept.len(), |last| last + 1));
        let floor = kept[0].1 * f64::from(self.min_p);
        kept.retain(|entry| entry.1 >= floor);
        normalised(&mut kept);
        kept
    }
}

/// Texts of one engine, with the seeds from 0 on.
fn sample(config: &Config, settings: &Settings) -> BTreeMap<Vec<u32>, usize> {
    let mut decoder = ddtree::Decoder::new(engine(VOCAB, Hands::Logits), config).unwrap();
    let mut counts = BTreeMap::new();
    for seed in 0..TEXTS as u64 {
        let sampling = settings.sampling().seed(seed);
        let request = Request::new(&PROMPT).max_new_tokens(LENGTH).sampling(sampling);
        let text = decoder.generate(&request, |_| std::ops::ControlFlow::Continue(())).unwrap();
        *counts.entry(text.tokens.to_vec()).or_insert(0) += 1;
    }
    counts
}

fn configs() -> [Config; 4] {
    let chain = Config::new(Algorithm::Chain);
    let tree = Config::new(Algorithm::Tree).budget(6);
    [chain.clone(), chain.coupled(false), tree.clone(), tree.coupled(false)]
}

fn assert_law(config: &Config, settings: &Settings) {
    let (statistic, degrees) =
        chi_square(&sample(config, settings), &law(Language::new(VOCAB), settings));
    let limit = critical(degrees);
    assert!(statistic < limit, "{statistic:.0} over {limit:.0}: {config:?} {settings:?}");
    assert!(degrees > 10.0, "the test has something to look at: {degrees}");
}

#[test]
fn the_stated_power() {
    let distance = detectable(63.0, TEXTS);
    assert!((0.0075..0.0077).contains(&distance), "{distance}");
}

#[test]
fn texts_follow_the_targets_law() {
    assert_law(&Config::new(Algorithm::Autoregressive), &Settings::PLAIN);
    for config in configs() {
        assert_law(&config, &Settings::PLAIN);
    }
}

#[test]
fn truncated_and_penalised_texts_follow_their_law() {
    let plain = Settings::PLAIN;
    let all = [
        Settings { temperature: 1.6, top_k: 3, ..plain },
        Settings { temperature: 1.3, top_p: 0.85, ..plain },
        Settings { min_p: 0.08, ..plain },
        Settings { top_k: 3, top_p: 0.9, min_p: 0.05, temperature: 1.5, ..plain },
        Settings { repetition: 1.7, presence: 0.8, ..plain },
    ];
    for (i, settings) in all.iter().enumerate() {
        // Each with a coupled and an uncoupled one, chains and trees in turn.
        for config in [&configs()[i % 2 * 2], &configs()[(i + 1) % 2 * 2 + 1]] {
            assert_law(config, settings);
        }
    }
}

/// The acceptance test of speculative sampling on a tree of the drafter's best tokens: each child
/// of the node reached is accepted with probability min(1, p / q), the bonus comes from the
/// residual max(0, p - q).
fn biased_text(
    rng: &mut StdRng,
    target: Language,
    drafter: &Marginals,
    children: usize,
) -> Vec<u32> {
    let draw = |rng: &mut StdRng, weights: &[f64]| {
        let mut x = rng.random::<f64>() * weights.iter().sum::<f64>();
        weights.iter().position(|w| {
            x -= w;
            x < 0.0
        })
    };
    let mut path = PROMPT.to_vec();
    let end = PROMPT.len() + LENGTH;
    while path.len() < end {
        let (before, root) = (path[path.len() - 2], path[path.len() - 1]);
        let mut drafted = drafter.after(before, root, 2).into_iter();
        loop {
            let p = softmax(&target.row_after(&path));
            let Some(q) = drafted.next() else {
                path.push(draw(rng, &p).unwrap() as u32);
                break;
            };
            let mut order: Vec<usize> = (0..VOCAB as usize).collect();
            order.sort_by(|&a, &b| q[b].total_cmp(&q[a]));
            let accepted =
                order[..children].iter().find(|&&t| rng.random::<f64>() < p[t] / q[t]).copied();
            if let Some(token) = accepted {
                path.push(token as u32);
                continue;
            }
            // Without a child nothing has been refused.
            let refused = if children == 0 { 0.0 } else { 1.0 };
            let rest = |(p, q): (&f64, &f64)| (p - refused * q).max(0.0);
            let residual: Vec<f64> = p.iter().zip(&q).map(rest).collect();
            path.push(draw(rng, &residual).unwrap() as u32);
            break;
        }
    }
    path[PROMPT.len()..end].to_vec()
}

#[test]
fn the_test_rejects_the_ratio_test_on_trees() {
    let (target, drafter) = engine(VOCAB, Hands::Logits);
    let law = law(target.language, &Settings::PLAIN);
    for children in [1, 2] {
        let mut rng = StdRng::seed_from_u64(3);
        let mut counts = BTreeMap::new();
        for _ in 0..TEXTS {
            let text = biased_text(&mut rng, target.language, &drafter, children);
            *counts.entry(text).or_insert(0) += 1;
        }
        let (statistic, degrees) = chi_square(&counts, &law);
        assert!(statistic > 10.0 * critical(degrees), "{statistic:.0} of {:.0}", critical(degrees));
    }
}

/// The same loop without children, so that every token is drawn from the target, is not rejected: what
/// the test above finds is the acceptance rule, not the way the texts are made.
#[test]
fn the_test_passes_draws_from_the_target() {
    let (target, drafter) = engine(VOCAB, Hands::Logits);
    let law = law(target.language, &Settings::PLAIN);
    let mut rng = StdRng::seed_from_u64(3);
    let mut counts = BTreeMap::new();
    for _ in 0..TEXTS {
        let text = biased_text(&mut rng, target.language, &drafter, 0);
        *counts.entry(text).or_insert(0) += 1;
    }
    let (statistic, degrees) = chi_square(&counts, &law);
    assert!(statistic < critical(degrees));
}
