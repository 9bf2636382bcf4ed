//! Recurrent (hybrid) targets verify trees exactly.
#![cfg(feature = "candle")]

mod common;
mod golden;
mod loading;
mod oracle;
mod rounds;
