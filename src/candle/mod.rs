//! The candle backend: a complete decoder and drafter behind the crate's traits.

mod attention;
mod cache;
mod config;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
mod decoder;
mod delta_net;
mod delta_rule;
pub mod dflash;
mod error;
mod gated_attention;
mod gguf;
mod gguf_header;
mod layers;
mod rope;
mod state_cache;
mod target;
mod weights;

pub use cache::KvCache;
pub use config::{Architecture, DecoderConfig, DeltaNetConfig, Hybrid};
pub use decoder::{DecoderModel, Forward, Output, Want};
pub use error::{Error, Result};
pub use gguf::{Gguf, Rounding};
pub use layers::{Embedding, LmHead};
pub use rope::{RopeConfig, RopeScaling};
pub use state_cache::StateMethod;
pub use target::{BatchEntry, CandleTarget, Taps, verify_batch};
pub use weights::Weights;
