//! The DFlash drafter (v1 checkpoints): a whole block of tokens from one forward pass.
//!
//! A drafter has no embedding and no output projection of its own and reads hidden states of its
//! target, so it is loaded for one:
//!
//! ```no_run
//! use candle_core::{DType, Device};
//! use ddtree::candle::{CandleTarget, DecoderModel, dflash::DFlash};
//!
//! let model = DecoderModel::load("Qwen3-4B", DType::F32, &Device::Cpu)?;
//! let drafter = DFlash::load("Qwen3-4B-DFlash-b16", &model)?;
//! let target = CandleTarget::new(model, 4_096, drafter.config().target_layer_ids())?;
//! # Ok::<(), ddtree::candle::Error>(())
//! ```
//!
//! Relatives of the format (DFlash2, Domino, DSpark, causal heads, vocabularies of their own) share
//! most tensor names with it and run as DFlash v1 without complaint, only badly. [`DFlashConfig`]
//! tells them apart.

mod config;
mod drafter;
mod model;

pub use config::{BlockAttention, DFlashConfig};
pub use model::{DFlash, SharedWeights};
