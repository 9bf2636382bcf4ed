//! From logits to picks: greedy or sampled, and the same tokens whatever the algorithm.
//!
//! * [`Sampling`]: what a request asks for, and the order in which it is applied.
//! * [`Constraint`]: a grammar or another rule of the caller's, asked about each slot's own path.
//! * [`Picker`]: from logits to picks without a session.
//! * [`PickRule`]: what a verifier has to be able to do to pick on its device.
//! * [`gumbel`]: the noise, for kernels and their tests.
//!
//! # Why sampling on a tree is exact
//!
//! The target draws one token at each slot, from its own distribution given the path to that slot,
//! and the walk follows the draws while they name a child. Each token of the text is thus a draw
//! from the target's distribution given the text before it, whatever was drafted. No probability of
//! the drafter enters. (The acceptance test of speculative sampling, `min(1, p / q)`, is exact only
//! for drafts drawn from q. A tree of the drafter's best tokens is not; applied to one, that test
//! distorts the output.)
//!
//! # Noise
//!
//! A draw is the token with the greatest sum of `logit / temperature` and Gumbel noise, the noise
//! being a function of the seed, the absolute position of the token and its id. So the draw for one
//! position after one path is always the same, and a seed gives the same text without a draft, with
//! a chain and with any tree, as far as the verifier's logits are the same. See [`gumbel`] for the
//! definition.

mod constraint;
mod couple;
mod noise;
mod picker;
mod sampler;
mod settings;

pub use constraint::{Constraint, TokenPath};
pub use noise::gumbel;
pub use picker::Picker;
pub use settings::{PickRule, Sampling};

pub(crate) use couple::Coupling;
#[cfg(feature = "cuda")]
pub(crate) use couple::coupled_scale;
pub(crate) use sampler::Sampler;
