use crate::{Error, top_k::TopK};

/// Log-probabilities may exceed zero by rounding, not by more than this.
const POSITIVE_TOLERANCE: f32 = 1e-3;

/// What a drafter proposes: for every depth, its best tokens and their
/// log-probabilities.
///
/// Depth `d` (1-based, the root is depth 0) is drafted for position
/// `root position + d`. Within a depth, entries are ordered from the best on
/// (log-probability descending; equal ones by token id ascending if the result
/// is to be the same on every engine) and tokens are distinct. Log-probabilities
/// are normalised over the **full** vocabulary, not over the entries kept: a
/// path's score is their sum. An entry of `-inf` can never be drafted.
///
/// Depths may have different numbers of entries. A depth without entries ends
/// the horizon. A proposal reuses its memory after [`clear`](Self::clear).
///
/// ```
/// use ddtree::Proposal;
///
/// let mut proposal = Proposal::new();
/// proposal.push(&[7, 3], &[-0.1, -2.5])?; // depth 1
/// proposal.push(&[4, 9], &[-0.7, -0.9])?; // depth 2
/// assert_eq!(proposal.horizon(), 2);
/// assert_eq!(proposal.depth(2), (&[4, 9][..], &[-0.7, -0.9][..]));
/// assert!(proposal.push(&[1], &[f32::NAN]).is_err());
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    ends: Vec<usize>,
    coupled: bool,
}

impl Proposal {
    /// A proposal without depths.
    pub fn new() -> Self {
        Self::default()
    }

    /// Drops all depths and keeps the memory; the proposal is no longer coupled.
    pub fn clear(&mut self) {
        self.coupled = false;
        self.tokens.clear();
        self.log_probs.clear();
        self.ends.clear();
    }

    /// Number of depths drafted, up to the first that has no entries.
    pub fn horizon(&self) -> usize {
        (1..=self.ends.len()).take_while(|&d| !self.depth(d).0.is_empty()).count()
    }

    /// Says whether the entries are ranked with the [noise](crate::ProposalRequest::noise) of the
    /// request's picks; a session does it where they are not.
    pub fn set_coupled(&mut self, coupled: bool) {
        self.coupled = coupled;
    }

    /// Whether the drafter said so.
    pub(crate) fn is_coupled(&self) -> bool {
        self.coupled
    }

    /// Whether nothing was drafted.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens and log-probabilities of a depth (1-based), best first; empty
    /// beyond what was pushed.
    #[inline]
    pub fn depth(&self, depth: usize) -> (&[u32], &[f32]) {
        let Some(&end) = depth.checked_sub(1).and_then(|d| self.ends.get(d)) else {
            return (&[], &[]);
        };
        let start = if depth == 1 { 0 } else { self.ends[depth - 2] };
        (&self.tokens[start..end], &self.log_probs[start..end])
    }

    /// One entry of a depth (1-based), by rank from 0.
    #[inline]
    pub(crate) fn entry(&self, depth: usize, rank: usize) -> Option<(u32, f32)> {
        let end = *self.ends.get(depth - 1)?;
        let start = if depth == 1 { 0 } else { self.ends[depth - 2] };
        let index = start + rank;
        (index < end).then(|| (self.tokens[index], self.log_probs[index]))
    }

    /// Appends one depth.
    ///
    /// # Errors
    ///
    /// If the slices differ in length, or an entry is NaN, above 0.001 (logits
    /// instead of log-probabilities, most likely), out of order, or a duplicate
    /// of an earlier token of the depth. The proposal is unchanged then.
    pub fn push(&mut self, tokens: &[u32], log_probs: &[f32]) -> Result<(), Error> {
        if tokens.len() != log_probs.len() {
            return Err(Error::Length {
                field: "log_probs",
                found: log_probs.len(),
                accepted: tokens.len(),
            });
        }
        let depth = self.ends.len() + 1;
        check(depth, tokens, log_probs)?;
        self.tokens.extend_from_slice(tokens);
        self.log_probs.extend_from_slice(log_probs);
        self.ends.push(self.tokens.len());
        Ok(())
    }

    /// Appends one depth from a full row of logits: the `k` best tokens (fewer
    /// if the row is shorter), ties by lowest id, normalised over the row.
    ///
    /// # Errors
    ///
    /// If the row is empty or holds NaN or +inf.
    ///
    /// # Complexity
    ///
    /// Two passes over the row; see [`TopK`].
    pub fn push_logits(
        &mut self,
        logits: &[f32],
        k: usize,
        scratch: &mut TopK,
    ) -> Result<(), Error> {
        scratch
            .top_k_log_probs(logits, k, &mut self.tokens, &mut self.log_probs)
            .map_err(|source| Error::Logits { row: self.ends.len(), source })?;
        self.ends.push(self.tokens.len());
        Ok(())
    }

    /// Lets `edit` change the entries of every depth, from depth 1 on. They have to stay what
    /// [`push`](Self::push) accepts.
    pub(crate) fn rewrite(&mut self, mut edit: impl FnMut(&mut [u32], &mut [f32])) {
        let mut start = 0;
        for &end in &self.ends {
            edit(&mut self.tokens[start..end], &mut self.log_probs[start..end]);
            start = end;
        }
    }

    /// Drops the depths beyond `horizon`.
    pub fn truncate(&mut self, horizon: usize) {
        if horizon < self.ends.len() {
            self.ends.truncate(horizon);
            let end = self.ends.last().copied().unwrap_or(0);
            self.tokens.truncate(end);
            self.log_probs.truncate(end);
        }
    }

    /// Finds a token that is not below `vocab_size`.
    pub(crate) fn check_vocabulary(&self, vocab_size: usize) -> Result<(), Error> {
        match self.tokens.iter().position(|&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(index) => Err(Error::Token {
                field: "proposal.tokens",
                index,
                found: self.tokens[index],
                vocab_size,
            }),
        }
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        self.tokens.capacity() * 4
            + self.log_probs.capacity() * 4
            + self.ends.capacity() * size_of::<usize>()
    }
}

fn check(depth: usize, tokens: &[u32], log_probs: &[f32]) -> Result<(), Error> {
    let fault = |rank, found, accepted| Err(Error::Proposal { depth, rank, found, accepted });
    // Of earlier tokens, by their last bits: only where one's is set has the token itself to be looked for.
    let mut seen = [0u64; 16];
    for (rank, (token, &log_prob)) in tokens.iter().zip(log_probs).enumerate() {
        if log_prob.is_nan() || log_prob > POSITIVE_TOLERANCE {
            return fault(
                rank,
                format!("log-probability {log_prob}"),
                "log-probabilities, at most 0.001, normalised over the full vocabulary",
            );
        }
        if rank > 0 && log_prob > log_probs[rank - 1] {
            return fault(
                rank,
                format!("log-probability {log_prob} after {}", log_probs[rank - 1]),
                "log-probabilities in descending order",
            );
        }
        let (word, bit) = (*token as usize / 64 % seen.len(), 1 << (token % 64));
        if seen[word] & bit != 0 && tokens[..rank].contains(token) {
            return fault(rank, format!("token {token} a second time"), "distinct tokens");
        }
        seen[word] |= bit;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn rejected(tokens: &[u32], log_probs: &[f32]) -> Error {
        let mut proposal = Proposal::new();
        proposal.push(&[1], &[-1.0]).unwrap();
        let before = proposal.clone();
        let error = proposal.push(tokens, log_probs).unwrap_err();
        assert_eq!(proposal, before, "a refused depth leaves the proposal as it was");
        error
    }

    #[test]
    fn refuses_entries_that_cannot_rank() {
        let at = |error| match error {
            Error::Proposal { depth, rank, .. } => (depth, rank),
            other => panic!("{other}"),
        };
        assert_eq!(at(rejected(&[1, 2], &[-1.0, f32::NAN])), (2, 1));
        assert_eq!(at(rejected(&[1, 2], &[f32::INFINITY, -1.0])), (2, 0));
        assert_eq!(at(rejected(&[1, 2], &[3.5, -1.0])), (2, 0));
        assert_eq!(at(rejected(&[1, 2, 3], &[-1.0, -3.0, -2.0])), (2, 2));
        assert_eq!(at(rejected(&[1, 2, 1], &[-1.0, -2.0, -3.0])), (2, 2));
        assert!(matches!(rejected(&[1, 2], &[-1.0]), Error::Length { found: 1, accepted: 2, .. }));
    }

    #[test]
    fn tells_tokens_with_the_same_last_bits_apart() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut refused = 0;
        for _ in 0..500 {
            let mut token = || rng.random_range(0..8) * 1024 + rng.random_range(0..3) * 64;
            let tokens: [u32; 8] = std::array::from_fn(|_| token());
            let second = (1..8).find(|&rank| tokens[..rank].contains(&tokens[rank]));
            match Proposal::new().push(&tokens, &[-1.0; 8]) {
                Ok(()) => assert_eq!(second, None, "{tokens:?}"),
                Err(Error::Proposal { rank, .. }) => assert_eq!(second, Some(rank), "{tokens:?}"),
                Err(other) => panic!("{other}"),
            }
            refused += usize::from(second.is_some());
        }
        assert!((100..450).contains(&refused), "{refused} of 500");
    }

    #[test]
    fn an_empty_depth_ends_the_horizon() {
        let mut proposal = Proposal::new();
        assert_eq!((proposal.horizon(), proposal.is_empty()), (0, true));
        proposal.push(&[5], &[-0.5]).unwrap();
        proposal.push(&[], &[]).unwrap();
        proposal.push(&[6], &[-0.5]).unwrap();
        assert_eq!(proposal.horizon(), 1);
        assert_eq!(proposal.depth(0), (&[][..], &[][..]));
        assert_eq!(proposal.depth(3).0, [6]);
        assert_eq!(proposal.depth(4).0, [0; 0]);
        proposal.truncate(1);
        assert_eq!(proposal.depth(3).0, [0; 0]);
    }

    #[test]
    fn logits_are_normalised_over_the_whole_row() {
        let mut proposal = Proposal::new();
        proposal.push_logits(&[0.0, 0.0, 0.0, 0.0], 2, &mut TopK::new()).unwrap();
        let (tokens, log_probs) = proposal.depth(1);
        assert_eq!(tokens, [0, 1]);
        assert!(log_probs.iter().all(|p| (p - 0.25f32.ln()).abs() < 1e-6));
        let error = proposal.push_logits(&[0.0, f32::NAN], 2, &mut TopK::new()).unwrap_err();
        assert!(matches!(error, Error::Logits { row: 1, .. }), "{error}");
    }
}
