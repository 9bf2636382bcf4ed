//! What passes and rounds took, for people and for programs.

use std::fmt;

use ddtree::{Stage, candle::cuda::Roofline};
use serde_json::{Map, Value, json};

use super::rounds::{ACCEPTED, RoundTimes};
use crate::{
    figures::{Spread, table},
    measure::{AR, Arm, CHAIN},
    report::STAGES,
};

/// The figures of a shape. Times are milliseconds.
#[derive(Debug)]
pub struct Report {
    pub name: String,
    pub device: String,
    pub context: usize,
    pub repeats: usize,
    pub roofline: Roofline,
    /// In the order of [`Arm::all`].
    pub passes: Vec<Pass>,
    pub depths: usize,
    pub draft: Spread,
    /// In the order of [`Arm::all`].
    pub rounds: Vec<RoundRow>,
}

/// A pass of the target.
#[derive(Debug)]
pub struct Pass {
    pub name: String,
    pub slots: usize,
    /// Its matrix products alone, one after the other.
    pub products: Spread,
    /// As the host sees it.
    pub verify: Spread,
}

/// The rounds of an algorithm.
#[derive(Debug)]
pub struct RoundRow {
    name: String,
    round: Spread,
    /// In the order of [`STAGES`].
    stages: [Spread; STAGES.len()],
    outside: Spread,
}

impl RoundRow {
    pub fn new(arm: &Arm, results: &[RoundTimes]) -> Self {
        let spread =
            |value: &dyn Fn(&RoundTimes) -> f64| Spread::of(results.iter().map(value).collect());
        Self {
            name: arm.name(),
            round: spread(&|times| times.round),
            stages: std::array::from_fn(|stage| spread(&|times| times.stages[stage])),
            outside: spread(&|times| times.outside),
        }
    }
}

impl Report {
    fn floor(&self) -> f64 {
        self.roofline.floor_ms(self.context)
    }

    fn vs_ar(&self, pass: &Pass) -> f64 {
        pass.verify.median / self.passes[AR].verify.median
    }

    fn vs_chain(&self, row: &RoundRow) -> f64 {
        row.round.median / self.rounds[CHAIN].round.median
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let pass = |pass: &Pass| {
            json!({
                "name": pass.name,
                "slots": pass.slots,
                "products_ms": pass.products.json(),
                "verify_ms": pass.verify.json(),
                "verify_over_products": pass.verify.median / pass.products.median,
                "verify_over_ar": self.vs_ar(pass),
            })
        };
        let round = |row: &RoundRow| {
            let mut stages = Map::new();
            for (stage, ms) in STAGES.iter().zip(row.stages) {
                stages.insert(stage.name().to_owned(), ms.json());
            }
            json!({
                "name": row.name,
                "round_ms": row.round.json(),
                "stages_ms": stages,
                "percent_outside_models": row.outside.json(),
                "over_chain": self.vs_chain(row),
            })
        };
        json!({
            "shape": self.name,
            "device": self.device,
            "context": self.context,
            "repeats": self.repeats,
            "roofline": {
                "copy_bytes_per_second": self.roofline.copy_rate,
                "weight_bytes": self.roofline.weight_bytes,
                "cache_row_bytes": self.roofline.cache_row_bytes,
                "floor_ms": self.floor(),
            },
            "passes": self.passes.iter().map(pass).collect::<Vec<_>>(),
            "draft": { "depths": self.depths, "ms": self.draft.json() },
            "accepted_per_round": ACCEPTED,
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Roofline { copy_rate, weight_bytes, .. } = self.roofline;
        writeln!(
            f,
            "{} with random weights ({}), {} rows committed, {} runs; median (min..max)\n\
             A copy moves {:.2} TB/s; a pass reads {:.2} GB of weights, so that it takes {:.3} ms at least.\n",
            self.name,
            self.device,
            self.context,
            self.repeats,
            copy_rate / 1e12,
            weight_bytes as f64 / 1e9,
            self.floor()
        )?;

        let head = ["ms", "slots", "products", "verify", "x products", "x floor", "x ar"];
        let pass = |pass: &Pass| {
            let ratio = |base: f64| format!("{:.3}", pass.verify.median / base);
            vec![
                pass.name.clone(),
                pass.slots.to_string(),
                pass.products.show(3),
                pass.verify.show(3),
                ratio(pass.products.median),
                ratio(self.floor()),
                format!("{:.3}", self.vs_ar(pass)),
            ]
        };
        table(f, &head, self.passes.iter().map(pass).collect())?;
        let of_ar = self.draft.median / self.passes[AR].verify.median;
        writeln!(
            f,
            "A draft of {} depths takes {} ms, {of_ar:.3} of ar.\n",
            self.depths,
            self.draft.show(3)
        )?;

        let mut head = vec!["ms/round", "total"];
        head.extend(STAGES.map(Stage::name));
        head.extend(["outside the models", "x chain"]);
        let round = |row: &RoundRow| {
            let mut cells = vec![row.name.clone(), row.round.show(3)];
            cells.extend(row.stages.map(|ms| format!("{:.3}", ms.median)));
            cells.push(format!("{} %", row.outside.show(2)));
            cells.push(format!("{:.3}", self.vs_chain(row)));
            cells
        };
        writeln!(f, "Rounds that accept {ACCEPTED} nodes:")?;
        table(f, &head, self.rounds.iter().map(round).collect())
    }
}
