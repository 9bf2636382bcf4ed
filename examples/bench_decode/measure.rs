//! Whole texts, timed.

use std::time::{Duration, Instant};

use anyhow::Result;
use ddtree::{Algorithm, Config, Decoder, Engine, ErrorOf, Request, Sampling, Stage};

use crate::prompts::Prompt;

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

    pub fn config(&self) -> Config {
        Config::new(self.algorithm).budget(self.budget).coupled(self.coupled)
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

/// Indices of `arms` arms in the order of a turn: from one turn to the next it alternates.
pub fn order(arms: usize, turn: usize) -> impl Iterator<Item = usize> {
    (0..arms).map(move |at| if turn.is_multiple_of(2) { at } else { arms - 1 - at })
}

/// A target and its drafter, wherever they run.
pub trait Pair {
    /// Generates a text, with the drafter if `drafting`.
    fn run(&mut self, config: &Config, request: &Request, drafting: bool) -> Result<Sample>;

    /// By how much the target's best logit exceeds the second after `tokens`, in a plain pass.
    fn gap(&mut self, tokens: &[u32]) -> Result<f32>;
}

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
    /// By depth from 1 on: rounds that accepted a node there, and rounds that drafted one.
    pub acceptance: Vec<(u64, u64)>,
}

impl Totals {
    pub fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.stages.iter_mut().zip(other.stages).for_each(|(sum, time)| *sum += time);
        self.rounds += other.rounds;
        self.tokens += other.tokens;
        self.nodes += other.nodes;
        let depths = self.acceptance.len().max(other.acceptance.len());
        self.acceptance.resize(depths, (0, 0));
        for (sum, (accepted, drafted)) in self.acceptance.iter_mut().zip(&other.acceptance) {
            *sum = (sum.0 + accepted, sum.1 + drafted);
        }
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }

    /// Percentage of the time in which the host waits for neither model.
    pub fn outside(&self) -> f64 {
        let models = [Stage::Verify, Stage::Propose].map(|stage| self.stages[stage as usize]);
        let models: Duration = models.iter().sum();
        100.0 * (1.0 - models.as_secs_f64() / self.time.as_secs_f64())
    }
}

/// Generates a text.
pub fn time<E: Engine>(engine: E, config: &Config, request: &Request) -> Result<Sample>
where
    ErrorOf<E>: Send + Sync,
{
    let mut decoder = Decoder::new(engine, config)?;
    let since = Instant::now();
    decoder.start(request)?;
    while decoder.step()?.is_some() {}
    let wall = since.elapsed();
    let session = decoder.session();
    let stats = session.stats();
    let totals = Totals {
        time: wall.saturating_sub(stats.time(Stage::Prefill)),
        stages: std::array::from_fn(|index| stats.time(Stage::ALL[index])),
        rounds: stats.rounds,
        tokens: stats.tokens,
        nodes: stats.nodes,
        acceptance: stats.acceptance().collect(),
    };
    Ok(Sample { tokens: session.generated().to_vec(), totals })
}

/// What every text is generated with.
#[derive(Debug)]
pub struct Job {
    /// A prompt that comes with several seeds is there as often.
    pub prompts: Vec<Prompt>,
    pub arms: Vec<Arm>,
    pub max_new_tokens: usize,
    pub stop_tokens: Vec<u32>,
    pub sampling: Sampling,
    /// The seed of the first prompt; the next one's is one more.
    pub seed: u64,
    pub repeats: usize,
    /// How many of the prompts all arms run through once before anything is measured.
    pub warm_up: usize,
}

impl Job {
    /// Texts that are measured.
    pub fn texts(&self) -> usize {
        self.repeats * self.prompts.len() * self.arms.len()
    }

    /// Generates all texts; `progress` is called after each one that is measured.
    pub fn run(&self, pair: &mut dyn Pair, progress: impl Fn()) -> Result<Measured> {
        let (prompts, arms) = (self.prompts.len(), self.arms.len());
        for prompt in 0..self.warm_up.min(prompts) {
            for arm in 0..arms {
                self.text(pair, prompt, arm)?;
            }
        }
        let mut measured = Measured {
            totals: vec![vec![Totals::default(); arms]; self.repeats],
            texts: vec![vec![Vec::new(); arms]; prompts],
        };
        for repeat in 0..self.repeats {
            for prompt in 0..prompts {
                for arm in order(arms, repeat + prompt) {
                    let sample = self.text(pair, prompt, arm)?;
                    measured.totals[repeat][arm].add(&sample.totals);
                    measured.texts[prompt][arm].push(sample.tokens);
                    progress();
                }
            }
        }
        Ok(measured)
    }

    pub fn seed_of(&self, prompt: usize) -> u64 {
        self.seed.wrapping_add(prompt as u64)
    }

    fn text(&self, pair: &mut dyn Pair, prompt: usize, arm: usize) -> Result<Sample> {
        let (arm, seed) = (&self.arms[arm], self.seed_of(prompt));
        let request = Request::new(&self.prompts[prompt].ids)
            .max_new_tokens(self.max_new_tokens)
            .stop_tokens(&self.stop_tokens)
            .sampling(self.sampling.clone().seed(seed));
        pair.run(&arm.config(), &request, arm.algorithm.needs_drafter())
    }
}

/// Everything measured.
#[derive(Debug)]
pub struct Measured {
    /// By repeat, then by arm: all prompts together.
    pub totals: Vec<Vec<Totals>>,
    /// By prompt and arm: the texts of all repeats.
    texts: Vec<Vec<Vec<Vec<u32>>>>,
}

/// Where a text parts from the one without a draft.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    pub prompt: usize,
    pub arm: usize,
    /// Index of the first token that differs.
    pub token: usize,
    /// By how much the target's best logit there exceeds the second, in a plain pass.
    pub gap: f32,
}

impl Measured {
    /// How many texts are not the prompt's first one without a draft.
    pub fn different(&self) -> usize {
        let differ = |arms: &Vec<Vec<Vec<u32>>>| {
            arms.iter().flatten().filter(|text| **text != arms[AR][0]).count()
        };
        self.texts.iter().map(differ).sum()
    }

    /// Where they part, for each prompt and arm the first one.
    pub fn differences(&self, pair: &mut dyn Pair, prompts: &[Prompt]) -> Result<Vec<Difference>> {
        let mut all = Vec::new();
        for (prompt, arms) in self.texts.iter().enumerate() {
            let base = &arms[AR][0];
            for (arm, texts) in arms.iter().enumerate() {
                let Some(text) = texts.iter().find(|text| *text != base) else { continue };
                let token = base.iter().zip(text).take_while(|(a, b)| a == b).count();
                let tokens = [&prompts[prompt].ids, &base[..token]].concat();
                all.push(Difference { prompt, arm, token, gap: pair.gap(&tokens)? });
            }
        }
        Ok(all)
    }

    /// How many prompts have a reference, and how many of these the text without a draft is the same for, as far
    /// as both go.
    pub fn references(&self, prompts: &[Prompt]) -> (usize, usize) {
        let pairs = self.texts.iter().zip(prompts);
        let same = pairs.filter_map(|(arms, prompt)| {
            let (text, expected) = (&arms[AR][0], prompt.expected.as_ref()?);
            let len = text.len().min(expected.len());
            Some(text[..len] == expected[..len])
        });
        same.fold((0, 0), |(all, equal), same| (all + 1, equal + usize::from(same)))
    }
}
