//! The attention layer of plain decoders and of drafters.

use candle_core::Tensor;
use candle_nn::{Linear, Module, RmsNorm};

use super::attention::{Segment, attend_segments};
use super::layers::{fused_linear, linear, project_residual, rms_norm};
use super::rope::Rotation;
use super::{DecoderConfig, KvCache, Result, Weights};

/// Sizes of an attention layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) hidden_size: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Heads {
    pub(crate) fn of(config: &DecoderConfig) -> Self {
        Self {
            hidden_size: config.hidden_size,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        }
    }
}

/// Which parts of an attention layer a family has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionParts {
    pub(crate) qkv_bias: bool,
    pub(crate) o_bias: bool,
    /// Epsilon of the per-head norms of queries and keys, if there are any.
    pub(crate) qk_norm: Option<f64>,
}

impl AttentionParts {
    pub(crate) fn of(config: &DecoderConfig) -> Self {
        Self {
            qkv_bias: config.qkv_bias,
            o_bias: config.o_bias,
            qk_norm: config.qk_norm.then_some(config.rms_norm_eps),
        }
    }
}

/// Rotary grouped-query self-attention over a cache.
#[derive(Debug, Clone)]
pub(crate) struct SelfAttention {
    qkv: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    o: Linear,
    heads: Heads,
}

impl SelfAttention {
    pub(crate) fn load(
        weights: &mut Weights,
        prefix: &str,
        heads: Heads,
        parts: AttentionParts,
    ) -> Result<Self> {
        let Heads { hidden_size, num_heads, num_kv_heads, head_dim } = heads;
        let name = |module: &str| format!("{prefix}.{module}");
        let kv_size = num_kv_heads * head_dim;
        let stack = [
            (&*name("q_proj"), num_heads * head_dim),
            (&*name("k_proj"), kv_size),
            (&*name("v_proj"), kv_size),
        ];
        let qkv = fused_linear(weights, &stack, hidden_size, parts.qkv_bias)?;
        let o =
            linear(weights, &name("o_proj"), (num_heads * head_dim, hidden_size), parts.o_bias)?;
        let dtype = weights.dtype();
        let qk_norm = match parts.qk_norm {
            None => None,
            Some(eps) => Some((
                rms_norm(weights, &name("q_norm"), head_dim, eps, dtype)?,
                rms_norm(weights, &name("k_norm"), head_dim, eps, dtype)?,
            )),
        };
        Ok(Self { qkv, qk_norm, o, heads })
    }

    /// Attends from the new rows `x` (`[n, hidden_size]`) of all segments, writing their keys and values
    /// into the caches. Gives `[n, hidden_size]` in the type of the residual stream.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        segments: &[Segment<'_>],
        layer: usize,
    ) -> Result<Tensor> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let n = x.dim(0)?;
        // Heads first: one copy, after which q, k and v are contiguous views.
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.reshape((n, num_heads + 2 * num_kv_heads, head_dim))?;
        let qkv = qkv.transpose(0, 1)?.contiguous()?;
        let mut q = qkv.narrow(0, 0, num_heads)?;
        let mut k = qkv.narrow(0, num_heads, num_kv_heads)?;
        let v = qkv.narrow(0, num_heads + num_kv_heads, num_kv_heads)?;
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            (q, k) = (q_norm.forward(&q)?, k_norm.forward(&k)?);
        }
        let (q, k) = (rotation.apply(&q)?, rotation.apply(&k)?);
        let mixed = attend_segments(&q, &k, &v, segments, layer)?;
        project_residual(&self.o, &mixed)
    }

    /// Writes the keys and values of rows that are attended to and do not attend themselves (`x` is
    /// `[n, hidden_size]`) into `cache` at `start..start + n`.
    pub(crate) fn write_context(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        cache: &KvCache,
        layer: usize,
        start: usize,
    ) -> Result<()> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let n = x.dim(0)?;
        let (first, outputs) = (num_heads * head_dim, 2 * num_kv_heads * head_dim);
        let bias = self.qkv.bias().map(|bias| bias.narrow(0, first, outputs)).transpose()?;
        let kv = Linear::new(self.qkv.weight().narrow(0, first, outputs)?, bias).forward(x)?;
        let kv = kv.reshape((n, 2 * num_kv_heads, head_dim))?.transpose(0, 1)?.contiguous()?;
        let mut k = kv.narrow(0, 0, num_kv_heads)?;
        if let Some((_, k_norm)) = &self.qk_norm {
            k = k_norm.forward(&k)?;
        }
        let v = kv.narrow(0, num_kv_heads, num_kv_heads)?;
        cache.write(layer, start, start, &rotation.apply(&k)?, &v)?;
        Ok(())
    }
}
