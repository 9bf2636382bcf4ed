//! Tests of the core through its public interface. One binary, a module per
//! concept.
//!
//! * [`toy`]: a target with a real row cache and drafters, all deterministic;
//! * [`naive`]: an obviously right twin of every clever function.
//!
//! Tests that keep a fault from coming back, seen in this or in other systems,
//! say in a comment what it looked like.

mod naive;
#[path = "../common/tree.rs"]
mod random;
mod toy;

mod bad_input;
mod engines;
#[cfg(feature = "tracing")]
mod events;
mod faults;
mod goldens;
mod lossless;
mod mask;
mod plan;
mod session;
mod stats;
mod termination;
mod tree;
mod walk;
