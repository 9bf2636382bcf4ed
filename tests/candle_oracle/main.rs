//! The candle decoder against independent implementations of the same models, and its loaders
//! against damaged input.
#![cfg(feature = "candle")]

mod cache;
mod config;
mod gguf;
mod loader;
mod logits;
mod naive;
#[path = "../common/tree.rs"]
mod random;
mod rope;
mod support;
mod target;
mod tree;
