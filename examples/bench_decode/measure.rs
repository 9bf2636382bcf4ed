//! One text at a time, timed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ddtree::{
    Algorithm, Config, Decoder, Drafter, NoDrafter, Request, Sampling, Stage,
    candle::{CandleTarget, Forward, Taps, Want, dflash::DFlash},
    top_k,
};

use crate::common::models::Models;

/// What is compared.
#[derive(Clone, Copy, Debug)]
pub struct Arm {
    pub algorithm: Algorithm,
    /// Nodes, of a tree.
    pub budget: usize,
    /// Whether drafts use the noise of the draws.
    pub coupled: bool,
}

impl Arm {
    /// Without a draft, with chains, and with trees of these budgets; the drafting ones once more
    /// without coupling if asked for. [`AR`] and [`CHAIN`] are indices.
    pub fn all(budgets: &[usize], uncoupled: bool) -> Vec<Self> {
        let arm = |algorithm, budget| Self { algorithm, budget, coupled: true };
        let mut arms = vec![arm(Algorithm::Autoregressive, 0), arm(Algorithm::Chain, 0)];
        arms.extend(budgets.iter().map(|&budget| arm(Algorithm::Tree, budget)));
        if uncoupled {
            let drafting = arms[CHAIN..].to_vec();
            arms.extend(drafting.into_iter().map(|arm| Self { coupled: false, ..arm }));
        }
        arms
    }

    pub fn name(&self) -> String {
        let name = match self.algorithm {
            Algorithm::Tree => format!("tree {}", self.budget),
            other => other.to_string(),
        };
        if self.coupled { name } else { name + " uncoupled" }
    }
}

/// The arm without a draft.
pub const AR: usize = 0;
/// The arm with chains.
pub const CHAIN: usize = 1;

/// One text.
#[derive(Debug)]
pub struct Sample {
    tokens: Vec<u32>,
    totals: Totals,
}

/// Sums over texts.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Everything but the prefill.
    pub time: Duration,
    /// In the order of [`Stage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
    pub rounds: u64,
    /// Tokens of rounds; the first token of a text comes from the prompt.
    pub tokens: u64,
    pub nodes: u64,
}

impl Totals {
    pub fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.stages.iter_mut().zip(other.stages).for_each(|(sum, time)| *sum += time);
        self.rounds += other.rounds;
        self.tokens += other.tokens;
        self.nodes += other.nodes;
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }
}

/// The models, ready to run any arm.
pub struct Bench {
    models: Models,
    drafter: DFlash,
    /// Without taps, which cost a little: plain decoding has no use for them.
    plain: CandleTarget,
    tapped: CandleTarget,
    max_new_tokens: usize,
    sampling: Sampling,
}

impl Bench {
    pub fn new(mut models: Models, max_new_tokens: usize, sampling: Sampling) -> Result<Self> {
        let (plain, tapped) = (models.target(false)?, models.target(true)?);
        let drafter = models.drafter.take().context("no drafter")?;
        Ok(Self { models, drafter, plain, tapped, max_new_tokens, sampling })
    }

    pub fn name(&self) -> &str {
        &self.models.name
    }

    /// Generates a text.
    pub fn run(&mut self, arm: Arm, prompt: &[u32], seed: u64) -> Result<Sample> {
        let config = Config::new(arm.algorithm).budget(arm.budget).coupled(arm.coupled);
        let request = Request::new(prompt)
            .max_new_tokens(self.max_new_tokens)
            .stop_tokens(self.models.stop_tokens())
            .sampling(self.sampling.clone().seed(seed));
        if arm.algorithm.needs_drafter() {
            time(&mut self.tapped, &mut self.drafter, &config, &request)
        } else {
            time(&mut self.plain, NoDrafter, &config, &request)
        }
    }

    /// The target's two greatest logits where two texts part.
    pub fn explain(&self, difference: &Difference, prompts: &[Vec<u32>]) -> Result<Explained> {
        let tokens = [&prompts[difference.prompt], &difference.common[..]].concat();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut cache = self.models.model.new_cache(tokens.len())?;
        let pass = Forward {
            tokens: &tokens,
            positions: &positions,
            start: 0,
            mask: None,
            tree: None,
            want: Want::Last,
            taps: &[],
        };
        let logits = self.models.model.forward(&mut cache, &pass)?.logits.context("no logits")?;
        let row: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let mut best = Vec::new();
        top_k::TopK::new().top_k_log_probs(&row, 2, &mut Vec::new(), &mut best)?;
        let gap = best.first().zip(best.get(1)).map_or(0.0, |(first, second)| first - second);
        let token = difference.common.len();
        Ok(Explained { difference: difference.clone(), token, gap })
    }
}

fn time<D: Drafter<Taps, Error: Send + Sync>>(
    target: &mut CandleTarget,
    drafter: D,
    config: &Config,
    request: &Request,
) -> Result<Sample> {
    let mut decoder = Decoder::new((target, drafter), config)?;
    let since = Instant::now();
    decoder.start(request)?;
    while decoder.step()?.is_some() {}
    let wall = since.elapsed();
    let session = decoder.session();
    let stats = session.stats();
    let totals = Totals {
        time: wall.saturating_sub(stats.time(Stage::Prefill)),
        stages: Stage::ALL.map(|stage| stats.time(stage)),
        rounds: stats.rounds,
        tokens: stats.tokens,
        nodes: stats.nodes,
    };
    Ok(Sample { tokens: session.generated().to_vec(), totals })
}

/// Everything measured.
#[derive(Debug)]
pub struct Measured {
    pub arms: Vec<Arm>,
    /// By repeat, then by arm: all prompts together.
    pub totals: Vec<Vec<Totals>>,
    /// Texts that are not the prompt's first one.
    pub different: usize,
    pub difference: Option<Difference>,
    /// By prompt: the first text and the arm that it is from.
    texts: Vec<Option<(usize, Vec<u32>)>>,
}

/// Where two texts of one prompt part.
#[derive(Clone, Debug)]
pub struct Difference {
    pub prompt: usize,
    /// Indices of the arms.
    pub arms: [usize; 2],
    /// The tokens before.
    common: Vec<u32>,
}

/// A difference and how it may come about.
#[derive(Clone, Debug)]
pub struct Explained {
    pub difference: Difference,
    /// Index of the first token that differs.
    pub token: usize,
    /// By how much the target's best logit there exceeds the second, in a plain pass.
    pub gap: f32,
}

impl Measured {
    pub fn new(arms: Vec<Arm>, repeats: usize, prompts: usize) -> Self {
        let totals = vec![vec![Totals::default(); arms.len()]; repeats];
        Self { arms, totals, different: 0, difference: None, texts: vec![None; prompts] }
    }

    pub fn prompts(&self) -> usize {
        self.texts.len()
    }

    pub fn add(&mut self, repeat: usize, prompt: usize, arm: usize, sample: Sample) {
        self.totals[repeat][arm].add(&sample.totals);
        let Some((first, text)) = &self.texts[prompt] else {
            self.texts[prompt] = Some((arm, sample.tokens));
            return;
        };
        if *text != sample.tokens {
            let common = text.iter().zip(&sample.tokens).take_while(|(a, b)| a == b);
            let common = common.map(|(&token, _)| token).collect();
            self.difference.get_or_insert(Difference { prompt, arms: [*first, arm], common });
            self.different += 1;
        }
    }
}
