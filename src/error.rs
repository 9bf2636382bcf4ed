use std::fmt;

/// What the core refuses, and why.
///
/// Every variant names the field at fault, what was found there and what is
/// accepted. None of them leaves the object that returned it half changed: a
/// [`Session`](crate::Session) stays at its last committed token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting, a request or a capability has a value outside its range.
    #[error("{field}: found {found}, accepted: {accepted}")]
    Setting {
        /// Name of the field as it is written in the code.
        field: &'static str,
        /// The value found, as text.
        found: String,
        /// The values accepted, as text.
        accepted: String,
    },
    /// A proposal holds an entry that cannot rank candidates.
    #[error("proposal at depth {depth}, rank {rank}: found {found}, accepted: {accepted}")]
    Proposal {
        /// Depth of the entry; the first drafted position is depth 1.
        depth: usize,
        /// Rank of the entry within its depth; the best is rank 0.
        rank: usize,
        /// The value found, as text.
        found: String,
        /// The values accepted, as text.
        accepted: &'static str,
    },
    /// Parent links or tokens do not describe a tree.
    #[error("draft tree at slot {slot}: found {found}, accepted: {accepted}")]
    Tree {
        /// Slot at fault; the root is slot 0.
        slot: usize,
        /// The value found, as text.
        found: String,
        /// The values accepted, as text.
        accepted: &'static str,
    },
    /// Two arrays that belong together differ in length.
    #[error("{field}: found {found} entries, accepted: exactly {accepted}")]
    Length {
        /// Name of the array.
        field: &'static str,
        /// Its length.
        found: usize,
        /// The length it must have.
        accepted: usize,
    },
    /// A buffer that the caller supplied is too small to be written to.
    #[error("{field}: found room for {found} elements, accepted: at least {needed}")]
    BufferTooSmall {
        /// Name of the buffer.
        field: &'static str,
        /// Its length in elements.
        found: usize,
        /// The number of elements needed.
        needed: usize,
    },
    /// A token id lies outside the verifier's vocabulary.
    #[error("{field}[{index}]: found token {found}, accepted: ids below {vocab_size}")]
    Token {
        /// Name of the array that holds the token.
        field: &'static str,
        /// Index within the array.
        index: usize,
        /// The token id found.
        found: u32,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A row of logits cannot be turned into a pick or into log-probabilities.
    #[error("logits of row {row} are refused")]
    Logits {
        /// Index of the row: the slot of a round, or the depth - 1 of a proposal.
        row: usize,
        /// What is wrong with the row.
        source: crate::top_k::LogitsError,
    },
    /// Every token is forbidden at a slot that the text reaches, by logits of -inf, bias or constraint.
    #[error("no token is left at slot {slot}: logits, bias and constraint must leave at least one")]
    NoToken {
        /// The slot; 0 also for the token after a prefill.
        slot: usize,
    },
    /// What was asked for cannot be done by this verifier or drafter.
    #[error("{asked} was asked for, but {found}; {remedy}")]
    Unsupported {
        /// What was asked for.
        asked: String,
        /// What the verifier or drafter offers.
        found: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A call came at a point of the round where it has no meaning.
    #[error("{call} was called while the session needs {needs}")]
    OutOfTurn {
        /// The call.
        call: &'static str,
        /// What the session needs next.
        needs: crate::Need,
    },
}

impl Error {
    pub(crate) fn setting(
        field: &'static str,
        found: impl fmt::Display,
        accepted: impl fmt::Display,
    ) -> Self {
        Self::Setting { field, found: found.to_string(), accepted: accepted.to_string() }
    }
}
