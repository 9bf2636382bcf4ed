use super::{Sampling, noise::Noise};
use crate::Proposal;

/// Share of the noise that counts.
///
/// A drafter is less certain than the target: its distribution is flatter, being a mixture over
/// what it does not know. In units of its own log-probabilities the target's noise is therefore
/// smaller. On the tiny pair, values from 0.65 to 0.8 give the greatest acceptance at all
/// temperatures from 0.3 to 1.3, for chains and trees.
const SHARE: f64 = 0.7;

/// What noise is multiplied with in drafts for a request with this temperature.
pub(crate) fn coupled_scale(temperature: f32) -> f64 {
    SHARE * f64::from(temperature)
}

/// Ranks drafted tokens with the noise that the target will draw with.
#[derive(Debug, Default)]
pub(crate) struct Coupling {
    entries: Vec<(f64, u32)>,
}

impl Coupling {
    /// Replaces the log-probabilities of a proposal by those of being drawn, given the noise, best
    /// first.
    ///
    /// A token's new log-probability is that of a softmax over `log q + SHARE T g`. It is what
    /// follows if the target's logits are the drafter's plus an error with a Gumbel distribution,
    /// which the noise `T g` of the draw comes on top of. Being normalised, scores of different
    /// depths compare, and with the temperature they go back to the drafter's own. `root` is the
    /// position of the root.
    pub(crate) fn apply(&mut self, proposal: &mut Proposal, sampling: &Sampling, root: usize) {
        let scale = coupled_scale(sampling.temperature);
        let mut position = root;
        proposal.rewrite(|tokens, log_probs| {
            position += 1;
            let noise = Noise::new(sampling.seed, position);
            self.entries.clear();
            self.entries.extend(tokens.iter().zip(log_probs.iter()).map(|(&token, &log_prob)| {
                (f64::from(log_prob) + scale * noise.gumbel(token), token)
            }));
            self.entries.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let best = self.entries.first().map_or(f64::NEG_INFINITY, |entry| entry.0);
            if best == f64::NEG_INFINITY {
                return;
            }
            let sum: f64 = self.entries.iter().map(|entry| (entry.0 - best).exp()).sum();
            let normaliser = best + sum.ln();
            for (i, &(score, token)) in self.entries.iter().enumerate() {
                tokens[i] = token;
                log_probs[i] = (score - normaliser).min(0.0) as f32;
            }
        });
    }

    pub(crate) fn memory_usage(&self) -> usize {
        self.entries.capacity() * size_of::<(f64, u32)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal() -> Proposal {
        let mut proposal = Proposal::new();
        proposal.push(&[7, 3, 5], &[-0.5, -1.2, -4.0]).unwrap();
        proposal.push(&[], &[]).unwrap();
        proposal.push(&[1, 2], &[f32::NEG_INFINITY; 2]).unwrap();
        proposal.push(&[9, 4], &[-0.1, f32::NEG_INFINITY]).unwrap();
        proposal
    }

    fn coupled(sampling: Sampling) -> Proposal {
        let mut proposal = proposal();
        Coupling::default().apply(&mut proposal, &sampling, 40);
        proposal
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn entries_become_log_probabilities_in_order() {
        for seed in 0..100 {
            let found = coupled(Sampling::new().temperature(1.0).seed(seed));
            // `push` accepts what is in order.
            let mut copy = Proposal::new();
            for depth in 1..=4 {
                let (tokens, log_probs) = found.depth(depth);
                copy.push(tokens, log_probs).unwrap();
                let sum: f32 = log_probs.iter().map(|p| p.exp()).sum();
                assert!(depth == 2 || depth == 3 || (sum - 1.0).abs() < 1e-6);
            }
            assert_eq!(found.depth(3), proposal().depth(3));
            assert_eq!(found.depth(4), (&[9, 4][..], &[0.0, f32::NEG_INFINITY][..]));
        }
    }

    #[test]
    fn the_noise_is_that_of_the_drafted_position() {
        let sampling = Sampling::new().temperature(1.0).seed(5);
        let scores = [(7, -0.5), (3, -1.2), (5, -4.0)]
            .map(|(token, q)| (q + SHARE * crate::sample::gumbel(5, 41, token), token));
        let best = scores.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        assert_eq!(coupled(sampling).depth(1).0[0], best.1);
    }

    #[test]
    fn cold_drafts_are_the_drafters_own() {
        let found = coupled(Sampling::new().temperature(1e-6).seed(5));
        assert_eq!(found.depth(1).0, proposal().depth(1).0);
    }
}
