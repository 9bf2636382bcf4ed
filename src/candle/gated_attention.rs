//! The gated attention layer of the Qwen3.5 family.

use candle_core::{DType, Tensor};
use candle_nn::{Linear, Module, RmsNorm};

use super::attention::{Segment, attend_segments};
use super::layers::{linear, project_residual, zero_centred_norm};
use super::rope::Rotation;
use super::self_attention::Heads;
use super::{Result, Weights};

/// Rotary grouped-query self-attention whose output is multiplied by the sigmoid of a gate.
#[derive(Debug, Clone)]
pub(crate) struct GatedAttention {
    /// Queries of all heads, then the gates of all heads, keys, values.
    input: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    o: Linear,
    heads: Heads,
}

impl GatedAttention {
    pub(crate) fn load(
        weights: &mut Weights,
        prefix: &str,
        heads: Heads,
        bias: bool,
        eps: f64,
    ) -> Result<Self> {
        let Heads { hidden_size, num_heads, num_kv_heads, head_dim } = heads;
        let name = |module: &str| format!("{prefix}.{module}");
        let mut stack = |suffix: &str, columns: Option<usize>| -> Result<Tensor> {
            let take = |weights: &mut Weights, module: &str, rows: usize| {
                let shape: Vec<usize> = std::iter::once(rows).chain(columns).collect();
                weights.take(&format!("{}.{suffix}", name(module)), &shape)
            };
            // The checkpoint interleaves query and gate by head.
            let q = take(weights, "q_proj", 2 * num_heads * head_dim)?;
            let mut by_head = vec![num_heads, 2, head_dim];
            by_head.extend(columns);
            let q = q.reshape(by_head)?.transpose(0, 1)?.contiguous()?.flatten(0, 2)?;
            let k = take(weights, "k_proj", num_kv_heads * head_dim)?;
            let v = take(weights, "v_proj", num_kv_heads * head_dim)?;
            Ok(Tensor::cat(&[q, k, v], 0)?)
        };
        let weight = stack("weight", Some(hidden_size))?;
        let input_bias = if bias { Some(stack("bias", None)?) } else { None };
        Ok(Self {
            input: Linear::new(weight, input_bias),
            o: linear(weights, &name("o_proj"), (num_heads * head_dim, hidden_size), bias)?,
            q_norm: zero_centred_norm(weights, &name("q_norm"), head_dim, eps)?,
            k_norm: zero_centred_norm(weights, &name("k_norm"), head_dim, eps)?,
            heads,
        })
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
        let projected = self.input.forward(x)?;
        let heads = projected.reshape((n, 2 * (num_heads + num_kv_heads), head_dim))?;
        let gate = projected.narrow(1, num_heads * head_dim, num_heads * head_dim)?;
        let heads = heads.transpose(0, 1)?.contiguous()?;
        let q = heads.narrow(0, 0, num_heads)?;
        let k = heads.narrow(0, 2 * num_heads, num_kv_heads)?;
        let v = heads.narrow(0, 2 * num_heads + num_kv_heads, num_kv_heads)?;
        let normed = |norm: &RmsNorm, heads: Tensor| -> Result<Tensor> {
            Ok(norm.forward(&heads.to_dtype(DType::F32)?)?.to_dtype(x.dtype())?)
        };
        let (q, k) = (normed(&self.q_norm, q)?, normed(&self.k_norm, k)?);
        let (q, k) = (rotation.apply(&q)?, rotation.apply(&k)?);
        let mixed = attend_segments(&q, &k, &v, segments, layer)?;
        let gated = (mixed * candle_nn::ops::sigmoid(&gate.contiguous()?)?)?;
        project_residual(&self.o, &gated)
    }
}
