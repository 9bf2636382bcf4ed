//! The tests of what the examples write texts with: `cargo test` builds examples, and does not test them.
#![cfg(feature = "candle")]

#[path = "../examples/common"]
#[allow(dead_code, reason = "the rest is the examples'")]
mod common {
    pub mod stream;
    pub mod text;
}
