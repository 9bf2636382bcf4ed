//! Tree-based speculative decoding for any inference engine.
#![cfg_attr(not(feature = "candle"), forbid(unsafe_code))]
#![deny(unsafe_code, missing_docs, missing_debug_implementations, unreachable_pub)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "candle")]
#[cfg_attr(docsrs, doc(cfg(feature = "candle")))]
#[allow(unsafe_code)]
pub mod candle;

pub mod top_k;
