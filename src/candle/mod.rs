//! The candle backend: a complete decoder and drafter behind the crate's traits.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use ddtree::candle::candle_core::{DType, Device};
//! use ddtree::candle::{CandleTarget, DecoderModel, dflash::DFlash};
//! use ddtree::{Config, Decoder, Request};
//!
//! let model = DecoderModel::load("Qwen3-4B", DType::F32, &Device::Cpu)?;
//! let drafter = DFlash::load("Qwen3-4B-DFlash-b16", &model)?;
//! let stop_tokens = model.config().eos_token_ids.clone();
//! let target = CandleTarget::new(model, 4_096, drafter.config().target_layer_ids())?;
//! let mut decoder = Decoder::new((target, drafter), &Config::default().budget(16))?;
//!
//! let prompt = [785, 3974, 13876, 38835]; // from the model's tokenizer
//! let request = Request::new(&prompt).max_new_tokens(128).stop_tokens(&stop_tokens);
//! let text = decoder.generate(&request, |tokens| {
//!     println!("{tokens:?}"); // those of one round
//!     ControlFlow::Continue(())
//! })?;
//! println!("{} tokens, {:.2} a round", text.tokens.len(), text.stats.tau());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Checkpoints are folders of Hugging Face or GGUF files; tokenizers are not part of this crate.
//! `examples/generate.rs` is a program around this.
//!
//! `DType`, `Device` and `Tensor` in this API are those of candle 0.11.1, to the patch, as its patch
//! releases change what they depend on. Take them from the re-exported [`candle_core`], or depend on
//! `candle-core = "=0.11.1"`: the types of another version are other types.

mod attention;
mod cache;
mod config;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
#[allow(unsafe_code)]
pub mod cuda;
mod decoder;
mod delta_net;
mod delta_rule;
pub mod dflash;
mod error;
mod fields;
mod gated_attention;
mod gguf;
mod gguf_header;
mod layers;
mod rope;
mod rope_fields;
mod self_attention;
mod state_cache;
mod target;
mod weights;

/// The version of candle that this module's `DType`, `Device` and `Tensor` come from.
pub use candle_core;

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
