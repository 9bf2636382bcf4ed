//! Sampling: its law, its reproducibility, and what shapes it.

mod constraint;
mod device;
mod exhaustive;
mod law;
mod pipeline;
mod same_text;
#[cfg(feature = "candle")]
mod tiny;
mod toy;
