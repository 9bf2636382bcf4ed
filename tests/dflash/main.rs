//! The DFlash drafter on candle: its configuration, its checkpoint, its forward pass.
#![cfg(feature = "candle")]

mod config;
mod drafter;
mod fixture;
mod forward;
mod loading;
mod naive;
mod tiny;
