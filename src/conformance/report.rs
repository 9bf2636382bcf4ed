use std::fmt;

use super::Check;

/// What a run of the kit found: one outcome per check, in order.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a report says whether checks failed"]
pub struct Report {
    pub(super) outcomes: Vec<Outcome>,
}

/// The outcome of one check.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// What was checked.
    pub check: Check,
    /// What came out.
    pub verdict: Verdict,
    /// Picks and feature rows compared.
    pub comparisons: usize,
    /// Picks that differ where the logits handed over tie within the
    /// [tolerance](super::Kit::lead_tolerance): floating point, not a fault.
    pub near_ties: usize,
}

/// What came out of a check.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// As it should be.
    Passed,
    /// Not checked, and why.
    Skipped(&'static str),
    /// Not as it should be.
    Failed(Finding),
}

/// A difference, and where.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Finding {
    /// The engine failed.
    Engine {
        /// The call that failed.
        call: &'static str,
        /// The engine's error, as text.
        error: String,
    },
    /// An error was injected and the call succeeded.
    NoError {
        /// The call.
        call: &'static str,
    },
    /// Not one pick per slot, or one outside the vocabulary.
    Picks {
        /// The call that gave them.
        call: &'static str,
        /// The picks found.
        found: Vec<u32>,
        /// How many there should be.
        accepted: usize,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A pick is another one than expected.
    Pick {
        /// What was done, with all tokens and parents: enough to do it again.
        experiment: String,
        /// The slot, within what was verified last.
        slot: usize,
        /// The pick expected.
        expected: u32,
        /// The pick found.
        found: u32,
        /// By how much the best logit expected leads the second one, if logits
        /// were handed over.
        expected_lead: Option<f32>,
        /// The same of the logits found.
        found_lead: Option<f32>,
    },
    /// A feature is another one than expected.
    Feature {
        /// What was done.
        experiment: String,
        /// The row, within those handed over.
        row: usize,
        /// The column.
        column: usize,
        /// The value expected.
        expected: f32,
        /// The value found.
        found: f32,
    },
    /// Something has another size, or an entry of an array another value, than
    /// expected.
    Value {
        /// What and where.
        place: String,
        /// As text.
        expected: String,
        /// As text.
        found: String,
    },
}

/// A check of [arrays](super::arrays) that failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{check}: {finding}. Usual cause: {}", check.cause())]
#[non_exhaustive]
pub struct Failure {
    /// What was checked.
    pub check: Check,
    /// What differs, and where.
    pub finding: Finding,
}

impl Report {
    /// Whether no check failed, and any could be made.
    pub fn passed(&self) -> bool {
        self.first_failure().is_none() && self.checked()
    }

    fn checked(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.verdict == Verdict::Passed)
    }

    /// The first check that failed: the one that names the fault.
    pub fn first_failure(&self) -> Option<(Check, &Finding)> {
        self.outcomes.iter().find_map(|outcome| match &outcome.verdict {
            Verdict::Failed(finding) => Some((outcome.check, finding)),
            _ => None,
        })
    }

    /// The outcomes of all checks, in order.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// The outcome of one check; `None` for those of arrays.
    pub fn outcome(&self, check: Check) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| outcome.check == check)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for outcome in &self.outcomes {
            writeln!(f, "{outcome}")?;
        }
        match self.first_failure() {
            None if !self.checked() => f.write_str("nothing could be checked"),
            None => f.write_str("no check failed"),
            Some((check, _)) => {
                write!(f, "first failure: {check}. Usual cause: {}", check.cause())
            }
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<31}", self.check)?;
        match &self.verdict {
            Verdict::Passed => {
                write!(f, "passed   {} comparisons", self.comparisons)?;
                if self.near_ties > 0 {
                    write!(f, ", {} near-ties", self.near_ties)?;
                }
                Ok(())
            }
            Verdict::Skipped(why) => write!(f, "skipped  {why}"),
            Verdict::Failed(finding) => write!(f, "FAILED   {finding}"),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine { call, error } => write!(f, "{call} failed: {error}"),
            Self::NoError { call } => write!(f, "{call} succeeded although an error was injected"),
            Self::Picks { call, found, accepted, vocab_size } => {
                write!(f, "{call} gave picks {found:?}, accepted: {accepted} below {vocab_size}")
            }
            Self::Pick { experiment, slot, expected, found, expected_lead, found_lead } => {
                write!(f, "{experiment}: slot {slot} picks {found}")?;
                lead(f, *found_lead)?;
                write!(f, ", expected {expected}")?;
                lead(f, *expected_lead)
            }
            Self::Feature { experiment, row, column, expected, found } => {
                write!(f, "{experiment}: feature row {row}, column {column} is {found}, ")?;
                write!(f, "expected {expected}")
            }
            Self::Value { place, expected, found } => {
                write!(f, "{place}: found {found}, expected {expected}")
            }
        }
    }
}

fn lead(f: &mut fmt::Formatter<'_>, lead: Option<f32>) -> fmt::Result {
    lead.map_or(Ok(()), |lead| write!(f, " (leads by {lead})"))
}
