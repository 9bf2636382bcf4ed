//! Rotary position embedding: frequencies by scaling rule, and rotations of arbitrary positions.

use candle_core::{D, DType, Device, Tensor};

use super::{Error, Result};

/// How positions turn into rotation angles.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How many leading dimensions of a head rotate (even); the rest pass through.
    pub rotary_dim: usize,
    /// What was done to the frequencies to reach longer contexts.
    pub scaling: RopeScaling,
}

/// Frequency scaling of a checkpoint (`rope_scaling` or `rope_parameters` in `config.json`).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Frequencies as trained.
    Default,
    /// `dynamic` (NTK by length): frequencies as trained up to `max_position`, and others for longer
    /// sequences, which are refused.
    Dynamic {
        /// The checkpoint's `max_position_embeddings`.
        max_position: usize,
    },
    /// Every position divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context that the frequencies were trained for.
        original_max_position: usize,
    },
    /// YaRN (arXiv 2309.00071): a ramp over dimensions between interpolated and original
    /// frequencies, and an attention factor that multiplies both cosine and sine.
    Yarn {
        /// The interpolation factor.
        factor: f64,
        /// Rotations above which a dimension keeps its frequency (usually 32).
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated (usually 1).
        beta_slow: f64,
        /// The context that the frequencies were trained for.
        original_max_position: usize,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded outwards to whole dimensions (the usual case).
        truncate: bool,
    },
    /// One divisor per frequency (`rope_freqs.weight` of a GGUF file).
    Divisors(Vec<f32>),
}

impl RopeConfig {
    /// Refuses a drafter whose frequencies change before the `positions` of its target end. Slots of a block that reach
    /// past the target's last position draft what it cannot hold anyway.
    pub(super) fn check_reach(&self, positions: usize) -> Result<()> {
        match self.scaling {
            RopeScaling::Dynamic { max_position } if max_position < positions => {
                let accepted = format!(
                    "at least {positions}, the target's positions, as dynamic scaling changes beyond"
                );
                Err(Error::config("max_position_embeddings", max_position, accepted))
            }
            _ => Ok(()),
        }
    }

    /// The `rotary_dim / 2` angular frequencies, radians per position.
    ///
    /// # Errors
    /// A list of divisors whose length is not `rotary_dim / 2`.
    pub fn inv_freq(&self) -> Result<Vec<f32>> {
        let dim = self.rotary_dim as f64;
        let base: Vec<f64> =
            (0..self.rotary_dim).step_by(2).map(|i| self.theta.powf(-(i as f64) / dim)).collect();
        let scaled: Vec<f64> = match &self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => base,
            RopeScaling::Linear { factor } => base.iter().map(|f| f / factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => {
                let original = *original_max_position as f64;
                let blend = |freq: f64| {
                    let rotations = original * freq / std::f64::consts::TAU;
                    let keep = ((rotations - low_freq_factor)
                        / (high_freq_factor - low_freq_factor))
                        .clamp(0.0, 1.0);
                    keep * freq + (1.0 - keep) * freq / factor
                };
                base.into_iter().map(blend).collect()
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position,
                truncate,
                ..
            } => {
                let original = *original_max_position as f64;
                // The (fractional) dimension that makes `rotations` turns over the trained context.
                let dimension = |rotations: f64| {
                    dim * (original / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                base.iter()
                    .enumerate()
                    .map(|(i, freq)| {
                        let interpolate = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        interpolate * freq / factor + (1.0 - interpolate) * freq
                    })
                    .collect()
            }
            RopeScaling::Divisors(divisors) => {
                if divisors.len() != base.len() {
                    return Err(Error::config(
                        "rope frequency divisors",
                        divisors.len(),
                        format!("{} values", base.len()),
                    ));
                }
                base.iter().zip(divisors).map(|(f, &d)| f / f64::from(d)).collect()
            }
        };
        Ok(scaled.into_iter().map(|f| f as f32).collect())
    }

    /// Cosine and sine of every frequency at each of `positions`, position by position.
    pub(crate) fn angles(&self, positions: impl Iterator<Item = u32>) -> Result<Vec<(f32, f32)>> {
        let (inv_freq, factor) = (self.inv_freq()?, self.attention_factor());
        let mut angles = Vec::with_capacity(positions.size_hint().0 * inv_freq.len());
        for position in positions {
            for freq in &inv_freq {
                // The f32 product is what the models were trained with.
                let (sin, cos) = f64::from(position as f32 * freq).sin_cos();
                angles.push(((cos * factor) as f32, (sin * factor) as f32));
            }
        }
        Ok(angles)
    }

    fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// The attention factor that YaRN derives from the interpolation factor; `weight` is usually 1.
pub(crate) fn yarn_attention_factor(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// How many positions YaRN reaches from a trained context of `original`.
pub(crate) fn yarn_reach(original: usize, factor: f64) -> usize {
    (original as f64 * factor) as u32 as usize
}

/// Makes the rotations of passes.
///
/// There is no table of them: up to the positions that some checkpoints declare, it would take longer
/// to fill, and more memory, than the rest of loading.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    config: RopeConfig,
    positions: usize,
    dtype: DType,
    device: Device,
}

impl Rope {
    /// Rotations, in `dtype`, of positions below `positions`.
    pub(crate) fn new(
        config: &RopeConfig,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        config.inv_freq()?;
        Ok(Self { config: config.clone(), positions, dtype, device: device.clone() })
    }

    /// What every position has to be below.
    pub(crate) fn positions(&self) -> usize {
        self.positions
    }

    /// The rotation of each of `positions` (checked by the caller). Angles and their functions are
    /// computed in f32 and wider, and only then cast: in bf16, position 257 would become 256.
    pub(crate) fn at(&self, positions: &[u32]) -> Result<Rotation> {
        let angles = self.config.angles(positions.iter().copied())?;
        let shape = (positions.len(), self.config.rotary_dim / 2);
        let tensor = |part: fn(&(f32, f32)) -> f32| -> Result<Tensor> {
            let values: Vec<f32> = angles.iter().map(part).collect();
            Ok(Tensor::from_vec(values, shape, &self.device)?.to_dtype(self.dtype)?)
        };
        Ok(Rotation {
            cos: tensor(|angle| angle.0)?,
            sin: tensor(|angle| angle.1)?,
            rotary_dim: self.config.rotary_dim,
        })
    }
}

/// The rotation of one batch of rows, shared by all layers.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    cos: Tensor,
    sin: Tensor,
    rotary_dim: usize,
}

impl Rotation {
    /// Rotates `x` (`[heads, rows, head_dim]`, contiguous), pairing dimension `i` with
    /// `i + rotary_dim / 2` ("rotate half", the NeoX layout).
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let head_dim = x.dim(D::Minus1)?;
        if head_dim == self.rotary_dim {
            let rotated = candle_nn::rotary_emb::rope(&x.unsqueeze(0)?, &self.cos, &self.sin)?;
            return Ok(rotated.squeeze(0)?);
        }
        let turning = x.narrow(D::Minus1, 0, self.rotary_dim)?.contiguous()?;
        let passing = x.narrow(D::Minus1, self.rotary_dim, head_dim - self.rotary_dim)?;
        let turned = candle_nn::rotary_emb::rope(&turning.unsqueeze(0)?, &self.cos, &self.sin)?;
        Ok(Tensor::cat(&[&turned.squeeze(0)?, &passing.contiguous()?], D::Minus1)?)
    }
}
