//! Tree-based speculative decoding for any inference engine.
#![cfg_attr(not(feature = "candle"), forbid(unsafe_code))]
#![deny(unsafe_code, missing_docs, missing_debug_implementations, unreachable_pub)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod commit;
mod config;
mod decode;
mod drafter;
mod error;
mod mask;
mod plan;
mod proposal;
mod session;
mod state;
mod stats;
mod verifier;
mod walk;

pub mod layout;
pub mod top_k;
pub mod tree;

#[cfg(feature = "candle")]
#[cfg_attr(docsrs, doc(cfg(feature = "candle")))]
#[allow(unsafe_code)]
pub mod candle;

pub use algorithm::Algorithm;
pub use commit::CommitPlan;
pub use config::{Config, Request};
pub use decode::{DecodeError, Decoder, Engine, ErrorOf, Generated, Joint};
pub use drafter::{Committed, Drafter, NoDrafter, ProposalRequest};
pub use error::Error;
pub use mask::AncestorMask;
pub use plan::{Plan, Reason};
pub use proposal::Proposal;
pub use session::{Finish, Need, Session};
pub use state::StatePlan;
pub use stats::{RoundStats, RoundTrace, RunStats, ShadowStats, Stage};
pub use top_k::TopK;
pub use tree::{BestFirst, DraftTree, Expand, TreeSettings};
pub use verifier::{
    Attention, Capabilities, MaskForm, Picks, Prefill, Recurrence, Round, Verifier,
};
pub use walk::{Acceptance, walk};
