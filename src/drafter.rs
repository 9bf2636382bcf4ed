use std::convert::Infallible;

use crate::{NoiseKey, Proposal};

/// Tokens that have been committed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed<'a> {
    pub(crate) start: usize,
    pub(crate) tokens: &'a [u32],
}

impl<'a> Committed<'a> {
    /// `tokens` at the positions from `start` on.
    pub fn new(start: usize, tokens: &'a [u32]) -> Self {
        Self { start, tokens }
    }

    /// Position of the first token.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The tokens, at least one.
    pub fn tokens(&self) -> &'a [u32] {
        self.tokens
    }
}

/// What is to be drafted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProposalRequest {
    pub(crate) root: u32,
    pub(crate) position: usize,
    pub(crate) horizon: usize,
    pub(crate) top_k: usize,
    pub(crate) noise: Option<NoiseKey>,
}

impl ProposalRequest {
    /// A request for `horizon` depths of `top_k` entries after the token `root`
    /// at `position`.
    pub fn new(root: u32, position: usize, horizon: usize, top_k: usize) -> Self {
        Self { root, position, horizon, top_k, noise: None }
    }

    /// The last sampled token. It has not been observed: it is not committed.
    pub fn root(&self) -> u32 {
        self.root
    }

    /// Position of the root; depth `d` drafts for position `position() + d`.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Depths wanted, at least one; at most [`Drafter::horizon`].
    pub fn horizon(&self) -> usize {
        self.horizon
    }

    /// Entries per depth wanted, at least one. Fewer are fine, for instance
    /// when the vocabulary has fewer.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// What the request's picks are drawn with, if drafts are to be
    /// [coupled](crate::Config::coupled) to it; depth `d` drafts for the noise's
    /// `position + d - 1`. The session couples what a drafter proposes, so that
    /// it can ignore this. One that has all its scores at hand may do better: it
    /// ranks tokens by `log q + 0.7 T g`, normalised as log-probabilities are,
    /// with the temperature `T` and the [noise](crate::sample::gumbel) `g` of
    /// position and token, and says so with [`Proposal::set_coupled`].
    pub fn noise(&self) -> Option<NoiseKey> {
        self.noise
    }
}

/// A drafter: guesses what the target will say.
///
/// `F` is the features that the target hands over for committed rows
/// ([`Verifier::Features`](crate::Verifier::Features)). A drafter that needs
/// none is generic over `F` and goes with every verifier. One that needs a
/// certain type cannot be paired with a verifier of another, which is a compile
/// error.
///
/// ```compile_fail,E0277
/// # use std::convert::Infallible;
/// # use ddtree::{Committed, Config, Decoder, Drafter, Proposal, ProposalRequest, Verifier};
/// struct ReadsHiddenStates;
///
/// impl Drafter<Vec<f32>> for ReadsHiddenStates {
///     // ...
/// #     type Error = Infallible;
/// #     fn horizon(&self) -> usize { 3 }
/// #     fn reset(&mut self, _: usize) -> Result<(), Infallible> { Ok(()) }
/// #     fn observe(&mut self, _: &Committed<'_>, _: &Vec<f32>) -> Result<(), Infallible> { Ok(()) }
/// #     fn propose(&mut self, _: &ProposalRequest, _: &mut Proposal) -> Result<(), Infallible> { Ok(()) }
/// }
///
/// fn pair<V: Verifier<Features = ()>>(without_features: V) {
///     // error: `ReadsHiddenStates` is not a `Drafter<()>`
///     let _ = Decoder::new((without_features, ReadsHiddenStates), &Config::default());
/// }
/// ```
///
/// Whatever a drafter proposes, the text is the target's; a bad drafter costs
/// time. Ids have to be below the target's vocabulary size: a round with another
/// one fails with [`Error::Token`](crate::Error::Token), and would again, unless it
/// is taken [without a draft](crate::Decoder::step_plain).
///
/// # Contract
///
/// Committed tokens are observed in order, each once, without gaps, except that
/// the first observation after a reset may start at a position above the rows
/// kept: what was before it was committed in an earlier session. An error from
/// [`observe`](Self::observe) leaves the drafter as it was, and the same
/// observation may come again.
///
/// ```
/// use std::convert::Infallible;
/// use ddtree::{Committed, Drafter, Proposal, ProposalRequest};
///
/// /// Guesses that every token is followed by its successor, modulo 100.
/// struct Successor;
///
/// impl<F> Drafter<F> for Successor {
///     type Error = Infallible;
///
///     fn horizon(&self) -> usize {
///         3
///     }
///
///     fn reset(&mut self, _keep: usize) -> Result<(), Infallible> {
///         Ok(())
///     }
///
///     fn observe(&mut self, _: &Committed<'_>, _: &F) -> Result<(), Infallible> {
///         Ok(())
///     }
///
///     fn propose(
///         &mut self,
///         request: &ProposalRequest,
///         proposal: &mut Proposal,
///     ) -> Result<(), Infallible> {
///         for depth in 1..=request.horizon() as u32 {
///             let token = (request.root() + depth) % 100;
///             proposal.push(&[token], &[-0.1]).expect("one token, and a log-probability");
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Drafter<F> {
    /// What can go wrong in the drafter.
    type Error: std::error::Error + 'static;

    /// Depths that one proposal can have: block size - 1 for a block drafter.
    fn horizon(&self) -> usize;

    /// Forgets all but what was observed of the first `keep` positions; if
    /// that cannot be kept, forgets everything. Comes before the first
    /// observation or proposal of a request, and not before one is needed; a
    /// failure is one of [`Stage::Observe`](crate::Stage::Observe).
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the drafter.
    fn reset(&mut self, keep: usize) -> Result<(), Self::Error>;

    /// Takes note of committed tokens and the target's features of their rows.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the drafter; nothing is observed then.
    fn observe(&mut self, committed: &Committed<'_>, features: &F) -> Result<(), Self::Error>;

    /// Adds the drafted depths to an empty proposal, from depth 1 on.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the drafter.
    fn propose(
        &mut self,
        request: &ProposalRequest,
        proposal: &mut Proposal,
    ) -> Result<(), Self::Error>;
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<F, D: Drafter<F> + ?Sized> Drafter<F> for $pointer {
            type Error = D::Error;

            fn horizon(&self) -> usize {
                (**self).horizon()
            }

            fn reset(&mut self, keep: usize) -> Result<(), Self::Error> {
                (**self).reset(keep)
            }

            fn observe(
                &mut self,
                committed: &Committed<'_>,
                features: &F,
            ) -> Result<(), Self::Error> {
                (**self).observe(committed, features)
            }

            fn propose(
                &mut self,
                request: &ProposalRequest,
                proposal: &mut Proposal,
            ) -> Result<(), Self::Error> {
                (**self).propose(request, proposal)
            }
        }
    )*};
}

forward!(&mut D, Box<D>);

/// No drafter: proposes nothing, for decoding without a draft.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDrafter;

impl<F> Drafter<F> for NoDrafter {
    type Error = Infallible;

    fn horizon(&self) -> usize {
        0
    }

    fn reset(&mut self, _keep: usize) -> Result<(), Infallible> {
        Ok(())
    }

    fn observe(&mut self, _: &Committed<'_>, _: &F) -> Result<(), Infallible> {
        Ok(())
    }

    fn propose(&mut self, _: &ProposalRequest, _: &mut Proposal) -> Result<(), Infallible> {
        Ok(())
    }
}
