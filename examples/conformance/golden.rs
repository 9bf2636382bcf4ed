//! The shapes of golden files.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use ddtree::{Algorithm, DraftTree};
use serde::Deserialize;
use serde_json::Value;

/// What a file holds.
#[derive(Debug)]
pub enum Golden {
    /// Trees to build.
    Builds(Vec<Build>),
    /// Texts to generate.
    Decodes { settings: Settings, cases: Vec<Decode> },
}

/// A tree to build: lists per depth in, a tree out.
#[derive(Debug, Deserialize)]
pub struct Build {
    pub kind: Option<String>,
    pub budget: usize,
    pub topk_tokens: Vec<Vec<u32>>,
    pub topk_logprobs: Vec<Vec<f32>>,
    #[serde(flatten)]
    pub tree: Tree,
    /// A row of `0` and `1` per slot; left out where the tree is large.
    pub visibility: Option<Vec<String>>,
}

/// A reference tree. `tokens` and `depths` leave the root out, `parents` does not.
#[derive(Debug, Deserialize)]
pub struct Tree {
    pub tokens: Vec<u32>,
    pub depths: Vec<u32>,
    pub parents: Vec<i32>,
}

/// What holds for all texts of a file.
#[derive(Debug, Deserialize)]
pub struct Settings {
    pub block_size: usize,
    pub stop_token: u32,
    pub max_new_tokens: usize,
}

/// A prompt and what the reference made of it.
#[derive(Debug)]
pub struct Decode {
    pub prompt: Option<String>,
    pub prompt_ids: Vec<u32>,
    /// One for every way of decoding.
    pub runs: Vec<Run>,
}

/// One way of decoding and its result.
#[derive(Debug)]
pub struct Run {
    pub algorithm: Algorithm,
    pub budget: usize,
    /// The tokens after the prompt, up to a stop token or the limit.
    pub output: Vec<u32>,
    /// Whether the output is that of another run, and may go on after this one's rounds.
    pub output_is_longer: bool,
    /// Accepted nodes + 1 of every round, also past a stop token and the limit.
    pub acceptance_lengths: Vec<usize>,
    /// Every round's tree, where it was kept.
    pub rounds: Vec<Round>,
}

/// One round of the reference.
#[derive(Debug, Deserialize)]
pub struct Round {
    #[serde(flatten)]
    pub tree: Tree,
    /// Slots accepted, root first.
    pub accepted: Vec<usize>,
}

/// A text as it is written: the drafted runs are either with their outputs in `chain` and `trees`, or
/// without in `rounds`.
#[derive(Deserialize)]
struct RawDecode {
    prompt: Option<String>,
    prompt_ids: Vec<u32>,
    autoregressive: Vec<u32>,
    chain: Option<RawRun>,
    #[serde(default)]
    trees: BTreeMap<usize, RawRun>,
    #[serde(default)]
    rounds: BTreeMap<String, Vec<Round>>,
}

#[derive(Deserialize)]
struct RawRun {
    output: Vec<u32>,
    acceptance_lengths: Vec<usize>,
    #[serde(default)]
    rounds: Vec<Round>,
}

impl Golden {
    /// Reads a file. A file of another shape is an error, and so is one without cases.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)?;
        let mut file: Value = serde_json::from_str(&text)?;
        let cases = match file.get_mut("cases").map(Value::take) {
            Some(Value::Array(cases)) if !cases.is_empty() => cases,
            Some(Value::Array(_)) => bail!("the file has no cases"),
            _ => bail!("unknown shape: found no list `cases`"),
        };
        let has = |key: &str| cases[0].get(key).is_some();
        if has("topk_tokens") {
            return Ok(Self::Builds(parse(cases, Build::check)?));
        }
        if has("autoregressive") {
            let settings = Settings::deserialize(file)?;
            let cases = parse(cases, RawDecode::check)?;
            let cases = cases.into_iter().map(RawDecode::runs).collect::<Result<_>>()?;
            return Ok(Self::Decodes { settings, cases });
        }
        bail!("unknown shape: the first case has neither `topk_tokens` nor `autoregressive`")
    }
}

fn parse<T: for<'a> Deserialize<'a>>(
    cases: Vec<Value>,
    check: impl Fn(&T) -> Result<()>,
) -> Result<Vec<T>> {
    let one = |(index, case)| {
        let case = T::deserialize(case).map_err(anyhow::Error::from);
        let case = case.and_then(|case| check(&case).map(|()| case));
        case.with_context(|| format!("case {}", index + 1))
    };
    cases.into_iter().enumerate().map(one).collect()
}

impl Build {
    fn check(&self) -> Result<()> {
        let rows = (self.topk_tokens.len(), self.topk_logprobs.len());
        ensure!(rows.0 == rows.1, "topk_tokens has {} depths, topk_logprobs {}", rows.0, rows.1);
        self.tree.to_draft(0).map(|_| ())
    }
}

impl Tree {
    /// The tree below a root of this token.
    pub fn to_draft(&self, root: u32) -> Result<DraftTree> {
        let tokens = [&[root], &self.tokens[..]].concat();
        let tree = DraftTree::from_parents(&tokens, &self.parents)?;
        ensure!(tree.depths()[1..] == self.depths, "depths that do not follow from parents");
        Ok(tree)
    }
}

impl RawDecode {
    fn check(&self) -> Result<()> {
        ensure!(!self.prompt_ids.is_empty(), "prompt_ids is empty");
        let runs = self.trees.values().chain(&self.chain);
        for run in runs.clone().filter(|run| !run.rounds.is_empty()) {
            let (rounds, lengths) = (run.rounds.len(), run.acceptance_lengths.len());
            ensure!(rounds == lengths, "{rounds} rounds, but {lengths} acceptance lengths");
        }
        for round in runs.flat_map(|run| &run.rounds).chain(self.rounds.values().flatten()) {
            let slots = round.tree.to_draft(0)?.len();
            let within = round.accepted.iter().all(|&slot| slot < slots);
            ensure!(
                within && round.accepted.first() == Some(&0),
                "accepted: no path from the root"
            );
        }
        Ok(())
    }

    fn runs(self) -> Result<Decode> {
        let drafted = |algorithm, budget, run: RawRun| Run {
            algorithm,
            budget,
            output: run.output,
            output_is_longer: false,
            acceptance_lengths: run.acceptance_lengths,
            rounds: run.rounds,
        };
        let plain = RawRun {
            acceptance_lengths: vec![1; self.autoregressive.len().saturating_sub(1)],
            output: self.autoregressive.clone(),
            rounds: Vec::new(),
        };
        let mut runs = vec![drafted(Algorithm::Autoregressive, 0, plain)];
        runs.extend(self.chain.map(|run| drafted(Algorithm::Chain, 0, run)));
        runs.extend(
            self.trees.into_iter().map(|(budget, run)| drafted(Algorithm::Tree, budget, run)),
        );
        for (name, rounds) in self.rounds {
            let (algorithm, budget) = match name.as_str() {
                "chain" => (Algorithm::Chain, 0),
                budget => (
                    Algorithm::Tree,
                    budget.parse().with_context(|| format!("rounds: `{budget}`"))?,
                ),
            };
            let run = RawRun {
                output: self.autoregressive.clone(),
                acceptance_lengths: rounds.iter().map(|round| round.accepted.len()).collect(),
                rounds,
            };
            runs.push(Run { output_is_longer: true, ..drafted(algorithm, budget, run) });
        }
        Ok(Decode { prompt: self.prompt, prompt_ids: self.prompt_ids, runs })
    }
}
