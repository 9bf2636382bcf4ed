//! What the examples share: one concept per file.

pub mod device;
pub mod models;
pub mod text;

#[cfg(feature = "hub")]
mod hub;
