use std::time::Duration;

use crate::{Algorithm, Reason};

/// A step of a round, or of the way there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Stage {
    /// The target forwards the prompt.
    Prefill,
    /// The drafter takes note of what was committed.
    Observe,
    /// The drafter drafts.
    Propose,
    /// Tree and mask are built.
    Build,
    /// The target verifies.
    Verify,
    /// Picks become a path and a commit plan.
    Walk,
    /// The target's caches are brought up to date.
    Commit,
}

impl Stage {
    /// All stages, in the order of a round.
    pub const ALL: &'static [Self] = &[
        Self::Prefill,
        Self::Observe,
        Self::Propose,
        Self::Build,
        Self::Verify,
        Self::Walk,
        Self::Commit,
    ];

    /// Short name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Observe => "observe",
            Self::Propose => "propose",
            Self::Build => "build",
            Self::Verify => "verify",
            Self::Walk => "walk",
            Self::Commit => "commit",
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Figures of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RoundStats {
    /// What the round did; `Chain` for a tree that came out as one path.
    pub algorithm: Algorithm,
    /// Why that is not what was asked for.
    pub reason: Option<Reason>,
    /// Nodes verified, not counting the root.
    pub nodes: usize,
    /// Tokens emitted: accepted nodes and the bonus, cut at a stop token and at
    /// the token limit. The round's acceptance length.
    pub tokens: usize,
}

/// What the tree would have bought in [shadow](crate::Config::shadow) mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ShadowStats {
    /// Rounds in which the chain was rejected before its end.
    pub rejections: u64,
    /// Rounds of these in which the tree held the path so far and the target's
    /// pick.
    pub caught: u64,
}

/// Figures of a run: of all rounds since the session started.
///
/// ```
/// # use ddtree::RunStats;
/// # let stats = RunStats::default();
/// println!("tau {:.2} in {} rounds", stats.tau(), stats.rounds);
/// for (depth, (accepted, drafted)) in stats.acceptance().enumerate() {
///     println!("depth {}: {accepted} of {drafted} rounds", depth + 1);
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default))]
#[non_exhaustive]
pub struct RunStats {
    /// Rounds, that is verifications that were committed.
    pub rounds: u64,
    /// Tokens emitted by rounds. The token that the prefill gives is not one.
    pub tokens: u64,
    /// Nodes verified, not counting roots. Slots verified are `nodes + rounds`.
    pub nodes: u64,
    /// Shadow mode's figures.
    pub shadow: ShadowStats,
    /// Rounds in a row, up to the last one, that drafted and had nothing
    /// accepted. Above a few dozen something is broken: acceptance does not
    /// collapse on its own. With the `tracing` feature, there is a warning at 32.
    pub zero_run: u64,
    #[cfg_attr(feature = "serde", serde(with = "by_name::algorithm"))]
    rounds_by_algorithm: [u64; Algorithm::ALL.len()],
    #[cfg_attr(feature = "serde", serde(with = "by_name::reason"))]
    reasons: [u64; Reason::ALL.len()],
    #[cfg_attr(feature = "serde", serde(with = "by_name::stage"))]
    stages: [Duration; Stage::ALL.len()],
    // Index 0 is depth 1.
    drafted: Vec<u64>,
    accepted: Vec<u64>,
}

impl RunStats {
    /// Mean acceptance length: tokens emitted per round, 1 without a draft; 0
    /// before the first round.
    pub fn tau(&self) -> f64 {
        if self.rounds == 0 { 0.0 } else { self.tokens as f64 / self.rounds as f64 }
    }

    /// For every depth from 1 on: rounds that accepted a node of that depth,
    /// and rounds whose tree had one.
    pub fn acceptance(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.accepted.iter().copied().zip(self.drafted.iter().copied())
    }

    /// Rounds that ran as `algorithm`.
    pub fn rounds_as(&self, algorithm: Algorithm) -> u64 {
        self.rounds_by_algorithm[algorithm as usize]
    }

    /// Rounds that were not what was asked for, by reason; none that are zero.
    pub fn reasons(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        let all = Reason::ALL.iter().copied().zip(self.reasons);
        all.filter(|&(_, rounds)| rounds > 0)
    }

    /// Time spent in a stage, from the session's request for it to the answer:
    /// in an engine that does other work in between, that work counts too.
    pub fn time(&self, stage: Stage) -> Duration {
        self.stages[stage as usize]
    }

    /// Clears everything and makes room for `horizon` depths.
    pub(crate) fn reset(&mut self, horizon: usize) {
        let (mut drafted, mut accepted) =
            (std::mem::take(&mut self.drafted), std::mem::take(&mut self.accepted));
        for depths in [&mut drafted, &mut accepted] {
            depths.clear();
            depths.resize(horizon, 0);
        }
        *self = Self { drafted, accepted, ..Self::default() };
    }

    pub(crate) fn add_time(&mut self, stage: Stage, time: Duration) {
        let stage = &mut self.stages[stage as usize];
        *stage = stage.saturating_add(time);
    }

    pub(crate) fn add_round(&mut self, round: &RoundStats, depth: usize) {
        self.rounds += 1;
        self.tokens += round.tokens as u64;
        self.nodes += round.nodes as u64;
        self.rounds_by_algorithm[round.algorithm as usize] += 1;
        if let Some(reason) = round.reason {
            self.reasons[reason as usize] += 1;
        }
        let accepted = round.tokens - 1;
        self.drafted[..depth].iter_mut().for_each(|rounds| *rounds += 1);
        self.accepted[..accepted].iter_mut().for_each(|rounds| *rounds += 1);
        if accepted > 0 {
            self.zero_run = 0;
        } else if round.nodes > 0 {
            self.zero_run += 1;
        }
    }
}

/// Figures as maps: what is added to an enum does not move the others.
#[cfg(feature = "serde")]
mod by_name {
    use std::{collections::BTreeMap, time::Duration};

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::{Algorithm, Reason, Stage};

    macro_rules! by_name {
        ($module:ident, $key:ty, $value:ty) => {
            pub(super) mod $module {
                use super::*;

                const COUNT: usize = <$key>::ALL.len();

                pub(in super::super) fn serialize<S: Serializer>(
                    values: &[$value; COUNT],
                    to: S,
                ) -> Result<S::Ok, S::Error> {
                    to.collect_map(<$key>::ALL.iter().map(|key| key.name()).zip(values))
                }

                pub(in super::super) fn deserialize<'a, D: Deserializer<'a>>(
                    from: D,
                ) -> Result<[$value; COUNT], D::Error> {
                    let mut values = [<$value>::default(); COUNT];
                    for (name, value) in BTreeMap::<String, $value>::deserialize(from)? {
                        let index = <$key>::ALL.iter().position(|key| key.name() == name);
                        let unknown = || D::Error::custom(format!("{name} is not known"));
                        values[index.ok_or_else(unknown)?] = value;
                    }
                    Ok(values)
                }
            }
        };
    }

    by_name!(algorithm, Algorithm, u64);
    by_name!(reason, Reason, u64);
    by_name!(stage, Stage, Duration);
}

/// Everything about one round, kept if [`Config::trace`](crate::Config::trace)
/// is on.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RoundTrace {
    /// Position of the root.
    pub start: usize,
    /// The round's figures.
    pub stats: RoundStats,
    /// Token of every slot, root first.
    pub tokens: Vec<u32>,
    /// Parent slot of every slot, -1 for the root.
    pub parents: Vec<i32>,
    /// Depth of every slot.
    pub depths: Vec<u32>,
    /// Path log-probability of every slot under the drafter.
    pub scores: Vec<f64>,
    /// The target's pick at every slot; [`Picks::SKIPPED`](crate::Picks::SKIPPED) at one where every
    /// token is forbidden, at one off the path whose logits are no numbers, and below a stop token
    /// where a constraint holds.
    pub picks: Vec<u32>,
    /// Slots that the picks lead through, root first: the whole walk, also
    /// where a stop token or the token limit cut what was committed.
    pub path: Vec<u32>,
}
