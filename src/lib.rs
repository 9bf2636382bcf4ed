//! Tree-based speculative decoding: everything between a drafter and a target.
//!
//! A *drafter* proposes tokens, the *target* model verifies a whole tree of
//! proposals in one forward pass, and this crate decides everything in between.
//! The text is that of the target decoding alone, token for token; there are
//! fewer passes.
//!
//! ```
//! use ddtree::{Acceptance, AncestorMask, BestFirst, CommitPlan, DraftTree, Proposal, TreeSettings, walk};
//!
//! let mut proposal = Proposal::new(); // from the drafter: tokens and log-probabilities per depth
//! proposal.push(&[464, 262], &[-0.3, -1.6])?;
//! proposal.push(&[995, 3797], &[-0.9, -1.1])?;
//!
//! let mut tree = DraftTree::new(11); // the root
//! BestFirst::new().build(&proposal, TreeSettings { budget: 4, ..Default::default() }, &mut tree)?;
//! let mut mask = AncestorMask::new();
//! mask.build(&tree); // hand tree.tokens(), positions and mask to the target ...
//!
//! let picks = [464, 3797, 0, 5, 0]; // ... which picks a token at every slot
//! let mut outcome = Acceptance::new();
//! walk(&tree, &picks, &mut outcome)?;
//! assert_eq!(outcome.tokens(), [464, 3797, 5]);
//!
//! let mut plan = CommitPlan::new();
//! plan.set(100, &outcome); // 100 rows were committed before
//! assert_eq!(plan.path(), [0, 1, 3]); // the KV rows to keep, in this order
//! # Ok::<(), ddtree::Error>(())
//! ```
//!
//! # Should I be using this crate?
//!
//! Yes, if you write or run an inference engine in which a forward pass over a
//! few dozen tokens costs little more than one over a single token (a GPU at
//! small batch sizes), and there is a drafter for your model.
//!
//! No, or not the tree, if the cost of a pass grows with its tokens (a CPU,
//! large batches, mixtures of experts): then [`Algorithm::Chain`] or no draft
//! at all can be faster. [`Config::shadow`] tells what the tree would buy
//! without running it.
//!
//! # Three ways in
//!
//! * **The parts.** [`Proposal`] → [`BestFirst`] → [`DraftTree`] →
//!   [`AncestorMask`] and [`layout`] writers → your kernels → [`walk`] →
//!   [`CommitPlan`]. Slices in, slices out. For engines that have a loop of
//!   their own and want the algorithm right. [`Picker`] samples from your
//!   logits in a way that drafts do not change, if your engine's own sampler does not.
//! * **The session.** [`Session`] is one sequence as a state machine without
//!   I/O: prefill, proposals, limits, stop tokens, statistics, recovery. For
//!   engines with a scheduler, batches or an async runtime.
//! * **The decoder.** [`Decoder`] drives a [`Verifier`] and a [`Drafter`]. With
//!   the `candle` feature, [`candle`] has both for common models.
//!
//! # One round
//!
//! ```text
//! Drafter::propose ─► Proposal (per-depth top-k log-probs) ─► BestFirst ─► DraftTree
//!                                                                            │ tokens, positions, parents, mask
//!                                                    Verifier::verify ◄──────┘
//!                                                            │ picks (one token id per slot)
//!                    walk(DraftTree, picks) ─► Acceptance ─► CommitPlan ─► Verifier::commit ─► features ─► Drafter::observe
//!                                                  └► tokens to the caller
//! ```
//!
//! Nothing flows back within a round.
//!
//! # Words
//!
//! * *root*: the last sampled token. It has no row in the target's KV cache yet,
//!   and is slot 0 of every tree.
//! * *node*: a drafted token. A *budget* counts nodes, not the root.
//! * *slot*: the index of the root or of a node in the tree's arrays. A slot is
//!   neither a *position* (which is the root's position plus the depth) nor,
//!   after a commit, a *KV row*.
//! * *block size*, *horizon*: a drafter of block size b drafts b - 1 depths,
//!   its horizon.
//! * *pick*: the target's own choice after the path to a slot. *Walk*: following
//!   picks from the root while they name a child. *Bonus*: the first pick that
//!   names none, the next root.
//! * *acceptance length* (tau): tokens emitted per round, which is accepted nodes
//!   plus the bonus.
//! * *commit*: making the target's caches equal to what plain decoding of the
//!   accepted path would have left.
//!
//! # Features
//!
//! * `candle` (default): the backend in [`candle`].
//! * `conformance` (default): the checks for engines in [`conformance`]. No
//!   dependencies.
//! * `cuda`: targets and drafters on NVIDIA GPUs; needs nvcc to build.
//! * `serde`: `Serialize` and `Deserialize` for settings, statistics and traces.
//! * `tracing`: an event for every plan and round that is not what was asked
//!   for.
//! * `hub`: for this crate's examples only.
//!
//! Without default features the crate is safe Rust with two small
//! dependencies and no tensor type.
//!
//! # Sources
//!
//! The tree and its order are those of DDTree's published reference
//! implementation, the chain and the drafter those of DFlash. Where this crate
//! differs (ties in top-k lists, impossible tokens, stop tokens), the item's
//! documentation says so.
#![cfg_attr(not(feature = "candle"), forbid(unsafe_code))]
#![deny(unsafe_code, missing_docs, missing_debug_implementations, unreachable_pub)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod capabilities;
mod commit;
mod config;
mod decode;
mod drafter;
mod error;
mod mask;
mod picks;
mod plan;
mod proposal;
mod session;
mod state;
mod stats;
mod verifier;
mod walk;

#[cfg(feature = "conformance")]
#[cfg_attr(docsrs, doc(cfg(feature = "conformance")))]
pub mod conformance;
pub mod layout;
pub mod sample;
pub mod top_k;
pub mod tree;

#[cfg(feature = "candle")]
#[cfg_attr(docsrs, doc(cfg(feature = "candle")))]
pub mod candle;

pub use algorithm::Algorithm;
pub use capabilities::{Attention, Capabilities, MaskForm, Recurrence};
pub use commit::CommitPlan;
pub use config::{Config, Request};
pub use decode::{DecodeError, Decoder, Engine, ErrorOf, Generated, Joint};
pub use drafter::{Committed, Drafter, NoDrafter, ProposalRequest};
pub use error::Error;
pub use mask::AncestorMask;
pub use picks::{NoiseKey, Picks};
pub use plan::{Plan, Reason};
pub use proposal::Proposal;
pub use sample::{Constraint, PickRule, Picker, Sampling, TokenPath};
pub use session::{Finish, Need, Session};
pub use state::StatePlan;
pub use stats::{RoundStats, RoundTrace, RunStats, ShadowStats, Stage};
pub use top_k::TopK;
pub use tree::{BestFirst, DraftTree, Expand, Filter, TreeSettings};
pub use verifier::{Prefill, Round, Verifier};
pub use walk::{Acceptance, walk};

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
