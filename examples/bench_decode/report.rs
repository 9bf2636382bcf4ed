//! Figures for people and for programs.

use std::fmt;

use ddtree::Stage;
use serde_json::{Value, json};

use crate::measure::{AR, Arm, CHAIN, Explained, Measured, Totals};

/// What was measured, apart from the arms.
#[derive(Debug)]
pub struct Setting<'a> {
    pub target: &'a str,
    pub device: &'a str,
    pub max_new_tokens: usize,
    pub temperature: f32,
    pub seeds: usize,
}

/// The figures of all arms.
#[derive(Debug)]
pub struct Report<'a> {
    setting: &'a Setting<'a>,
    measured: &'a Measured,
    difference: Option<Explained>,
    rows: Vec<Row>,
}

/// The figures of one arm.
#[derive(Debug)]
struct Row {
    name: String,
    tokens_per_second: Spread,
    vs_ar: Spread,
    vs_chain: Spread,
    /// Of all repeats together.
    totals: Totals,
}

/// The middle of several runs, and how far they lie apart.
#[derive(Clone, Copy, Debug)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl<'a> Report<'a> {
    pub fn new(
        setting: &'a Setting<'a>,
        measured: &'a Measured,
        difference: Option<Explained>,
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
            Row {
                name: what.name(),
                tokens_per_second: spread(arm, None),
                vs_ar: spread(arm, Some(AR)),
                vs_chain: spread(arm, Some(CHAIN)),
                totals,
            }
        };
        let rows = measured.arms.iter().enumerate().map(row).collect();
        Self { setting, measured, difference, rows }
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let arm = |row: &Row| {
            let mut ms_per_round = serde_json::Map::new();
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
                "rounds": row.totals.rounds,
                "tokens": row.totals.tokens,
                "ms_per_round": ms_per_round,
            })
        };
        let difference = self.difference.as_ref().map(|explained| {
            let name = |arm: usize| &self.rows[arm].name;
            json!({
                "texts": self.measured.different,
                "prompt": explained.difference.prompt,
                "arms": explained.difference.arms.map(name),
                "token": explained.token,
                "top_2_gap": explained.gap,
            })
        });
        json!({
            "target": self.setting.target,
            "device": self.setting.device,
            "prompts": self.measured.prompts() / self.setting.seeds,
            "seeds": self.setting.seeds,
            "temperature": self.setting.temperature,
            "max_new_tokens": self.setting.max_new_tokens,
            "repeats": self.measured.totals.len(),
            "texts_equal": self.difference.is_none(),
            "first_difference": difference,
            "arms": self.rows.iter().map(arm).collect::<Vec<_>>(),
        })
    }
}

/// The stages of a round.
const STAGES: [Stage; 6] =
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

    fn stage_ms(&self, stage: Stage) -> f64 {
        let time = self.totals.stages[stage as usize];
        time.as_secs_f64() * 1e3 / self.rounds()
    }
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        Self {
            median: (values[low] + values[high]) / 2.0,
            min: values[0],
            max: values[values.len() - 1],
        }
    }

    fn json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }

    fn show(self, digits: usize) -> String {
        let Self { median, min, max } = self;
        format!("{median:.digits$} ({min:.digits$}..{max:.digits$})")
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { target, device, max_new_tokens, temperature, seeds } = self.setting;
        let (prompts, repeats) = (self.measured.prompts() / seeds, self.measured.totals.len());
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
                format!("{:.2}", row.tau()),
                format!("{:.1}", row.nodes_per_round()),
            ]
        };
        table(f, &head, self.rows.iter().map(speed).collect())?;

        let mut head = vec!["ms/round", "total"];
        head.extend(STAGES.map(Stage::name));
        let stages = |row: &Row| {
            let mut cells = vec![row.name.clone(), format!("{:.3}", row.ms_per_round())];
            cells.extend(STAGES.map(|stage| format!("{:.3}", row.stage_ms(stage))));
            cells
        };
        table(f, &head, self.rows.iter().map(stages).collect())?;

        match &self.difference {
            None => writeln!(f, "All texts are equal."),
            Some(explained) => {
                let [one, other] = explained.difference.arms.map(|arm| &self.rows[arm].name);
                writeln!(
                    f,
                    "{} texts differ. First: prompt {}, {one} and {other}, from token {} on, where \
                     the target's two greatest logits are {:.6} apart.",
                    self.measured.different,
                    explained.difference.prompt + 1,
                    explained.token + 1,
                    explained.gap
                )
            }
        }
    }
}

/// A table with a line for the head; numbers are to the right.
fn table(f: &mut fmt::Formatter<'_>, head: &[&str], rows: Vec<Vec<String>>) -> fmt::Result {
    let mut lines = vec![head.iter().map(|&cell| cell.to_owned()).collect::<Vec<_>>()];
    lines.extend(rows);
    let widths: Vec<usize> = (0..head.len())
        .map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0))
        .collect();
    for line in lines {
        let mut text = format!("{:<width$}", line[0], width = widths[0]);
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            text += &format!("  {cell:>width$}");
        }
        writeln!(f, "{}", text.trim_end())?;
    }
    writeln!(f)
}
