//! What whole texts took, for people and for programs.

use std::fmt;

use ddtree::Stage;
use serde_json::{Map, Value, json};

use crate::{
    figures::{Spread, table},
    measure::{AR, Arm, CHAIN, Difference, Job, Measured, Totals},
};

/// What was measured, apart from the job.
#[derive(Debug)]
pub struct Setting<'a> {
    pub target: &'a str,
    pub device: &'a str,
    pub temperature: f32,
    pub seeds: usize,
}

/// The figures of all arms.
#[derive(Debug)]
pub struct Report<'a> {
    setting: &'a Setting<'a>,
    job: &'a Job,
    /// Texts that are not the ones without a draft.
    different: usize,
    differences: Vec<Difference>,
    /// Prompts that have a reference, and how many of their texts equal it.
    references: (usize, usize),
    rows: Vec<Row>,
}

/// The figures of one arm.
#[derive(Debug)]
struct Row {
    name: String,
    tokens_per_second: Spread,
    vs_ar: Spread,
    vs_chain: Spread,
    outside: Spread,
    /// Of all repeats together.
    totals: Totals,
}

impl<'a> Report<'a> {
    pub fn new(
        setting: &'a Setting<'a>,
        job: &'a Job,
        measured: &Measured,
        differences: Vec<Difference>,
    ) -> Self {
        let speed = |repeat: &Vec<Totals>, arm: usize| repeat[arm].tokens_per_second();
        // Ratios are taken within a repeat, where the machine was in one state.
        let spread = |arm: usize, base: Option<usize>| {
            let one = |repeat| speed(repeat, arm) / base.map_or(1.0, |base| speed(repeat, base));
            Spread::of(measured.totals.iter().map(one).collect())
        };
        let row = |(arm, what): (usize, &Arm)| {
            let mut totals = Totals::default();
            measured.totals.iter().for_each(|repeat| totals.add(&repeat[arm]));
            let outside = measured.totals.iter().map(|repeat| repeat[arm].outside());
            Row {
                name: what.name(),
                tokens_per_second: spread(arm, None),
                vs_ar: spread(arm, Some(AR)),
                vs_chain: spread(arm, Some(CHAIN)),
                outside: Spread::of(outside.collect()),
                totals,
            }
        };
        let rows = job.arms.iter().enumerate().map(row).collect();
        let references = measured.references(&job.prompts);
        Self { setting, job, different: measured.different(), differences, references, rows }
    }

    fn prompts(&self) -> usize {
        self.job.prompts.len() / self.setting.seeds
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let arm = |row: &Row| {
            let mut ms_per_round = Map::new();
            ms_per_round.insert("total".to_owned(), row.ms_per_round().into());
            for stage in STAGES {
                ms_per_round.insert(stage.name().to_owned(), row.stage_ms(stage).into());
            }
            json!({
                "name": row.name,
                "tokens_per_second": row.tokens_per_second.json(),
                "vs_ar": row.vs_ar.json(),
                "vs_chain": row.vs_chain.json(),
                "tau": row.tau(),
                "nodes_per_round": row.nodes_per_round(),
                "accepted_by_depth": row.totals.acceptance.iter().map(|depth| depth.0).collect::<Vec<_>>(),
                "drafted_by_depth": row.totals.acceptance.iter().map(|depth| depth.1).collect::<Vec<_>>(),
                "rounds": row.totals.rounds,
                "tokens": row.totals.tokens,
                "ms_per_round": ms_per_round,
                "percent_outside_models": row.outside.json(),
            })
        };
        let difference = |difference: &Difference| {
            json!({
                "prompt": difference.prompt % self.prompts(),
                "seed": self.job.seed_of(difference.prompt),
                "arm": self.rows[difference.arm].name,
                "token": difference.token,
                "top_2_gap": difference.gap,
            })
        };
        json!({
            "target": self.setting.target,
            "device": self.setting.device,
            "prompts": self.prompts(),
            "seeds": self.setting.seeds,
            "temperature": self.setting.temperature,
            "max_new_tokens": self.job.max_new_tokens,
            "repeats": self.job.repeats,
            "texts_equal": self.different == 0,
            "texts_different": self.different,
            "differences": self.differences.iter().map(difference).collect::<Vec<_>>(),
            "references": { "prompts": self.references.0, "equal": self.references.1 },
            "arms": self.rows.iter().map(arm).collect::<Vec<_>>(),
        })
    }
}

/// The stages of a round.
pub const STAGES: [Stage; 6] =
    [Stage::Observe, Stage::Propose, Stage::Build, Stage::Verify, Stage::Walk, Stage::Commit];

impl Row {
    fn rounds(&self) -> f64 {
        self.totals.rounds.max(1) as f64
    }

    fn tau(&self) -> f64 {
        self.totals.tokens as f64 / self.rounds()
    }

    fn nodes_per_round(&self) -> f64 {
        self.totals.nodes as f64 / self.rounds()
    }

    fn ms_per_round(&self) -> f64 {
        self.totals.time.as_secs_f64() * 1e3 / self.rounds()
    }

    /// The name, and for every depth the percentage of the rounds with a draft there that accepted one.
    fn acceptance(&self, depths: usize) -> Vec<String> {
        let mut cells = vec![self.name.clone()];
        cells.extend(self.totals.acceptance.iter().map(|&(accepted, drafted)| match drafted {
            0 => String::new(),
            _ => format!("{:.1}", 100.0 * accepted as f64 / drafted as f64),
        }));
        cells.resize(depths + 1, String::new());
        cells
    }

    fn stage_ms(&self, stage: Stage) -> f64 {
        let time = self.totals.stages[stage as usize];
        time.as_secs_f64() * 1e3 / self.rounds()
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { target, device, temperature, seeds } = self.setting;
        let (prompts, Job { max_new_tokens, repeats, .. }) = (self.prompts(), self.job);
        writeln!(
            f,
            "{target} ({device}), temperature {temperature}: {prompts} prompts with {seeds} seeds, \
             {max_new_tokens} tokens each at most, {repeats} runs; median (min..max)\n"
        )?;

        let head = ["", "tokens/s", "x ar", "x chain", "tau", "nodes/round"];
        let speed = |row: &Row| {
            vec![
                row.name.clone(),
                row.tokens_per_second.show(1),
                row.vs_ar.show(2),
                row.vs_chain.show(2),
                format!("{:.3}", row.tau()),
                format!("{:.1}", row.nodes_per_round()),
            ]
        };
        table(f, &head, self.rows.iter().map(speed).collect())?;

        let mut head = vec!["ms/round", "total"];
        head.extend(STAGES.map(Stage::name));
        head.push("outside the models");
        let stages = |row: &Row| {
            let mut cells = vec![row.name.clone(), format!("{:.3}", row.ms_per_round())];
            cells.extend(STAGES.map(|stage| format!("{:.3}", row.stage_ms(stage))));
            cells.push(format!("{} %", row.outside.show(1)));
            cells
        };
        table(f, &head, self.rows.iter().map(stages).collect())?;

        let depths = self.rows.iter().map(|row| row.totals.acceptance.len()).max().unwrap_or(0);
        if depths > 0 {
            let names: Vec<String> = (1..=depths).map(|depth| depth.to_string()).collect();
            let mut head = vec!["% accepted at depth"];
            head.extend(names.iter().map(String::as_str));
            let drafting = self.rows.iter().filter(|row| !row.totals.acceptance.is_empty());
            table(f, &head, drafting.map(|row| row.acceptance(depths)).collect())?;
        }

        let (references, equal) = self.references;
        if references > 0 {
            writeln!(f, "{equal} of {references} texts without a draft equal the file's.")?;
        }
        let Some(first) = self.differences.first() else {
            return writeln!(f, "All texts are equal.");
        };
        let gaps = self.differences.iter().map(|difference| f64::from(difference.gap));
        let gaps = Spread::of(gaps.collect());
        writeln!(
            f,
            "{} texts differ from those without a draft, first that of prompt {} (seed {}) with {} from \
             token {} on.\nWhere a prompt's texts part, the two greatest logits are apart by {}.",
            self.different,
            first.prompt % self.prompts() + 1,
            self.job.seed_of(first.prompt),
            self.rows[first.arm].name,
            first.token + 1,
            gaps.show(6)
        )
    }
}
