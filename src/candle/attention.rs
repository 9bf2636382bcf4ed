//! Grouped-query attention by matrix products, and the masks it takes.

use candle_core::{D, DType, Device, Tensor};

use super::{KvCache, Result};
use crate::AncestorMask;

/// What the new rows of a pass see in one layer's cache.
#[derive(Debug, Clone)]
pub(crate) struct LayerMask {
    /// The first cache row that any new row sees.
    pub(crate) first: usize,
    /// Added to the scores: `[n, start + n - first]`, 0 or negative infinity, f32; nothing if every new
    /// row sees everything.
    pub(crate) bias: Option<Tensor>,
}

impl LayerMask {
    /// New rows see each other as `ancestors` says, and all earlier ones without it. They lie
    /// at cache rows `start..` with `positions`, after committed rows whose position is
    /// their index. With a window `w`, a row at position `p` sees positions `p - w + 1 ..= p`:
    /// distance counts positions, so a tree's siblings do not push each other out.
    pub(crate) fn new(
        start: usize,
        positions: &[u32],
        ancestors: Option<&AncestorMask>,
        window: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let n = positions.len();
        let oldest = |position: u32| match window {
            Some(window) => (position as usize + 1).saturating_sub(window),
            None => 0,
        };
        let sees = |row: usize, other: usize| match ancestors {
            None => other <= row,
            Some(mask) => mask.is_visible(row, other),
        };
        let first = positions.iter().map(|&p| oldest(p)).min().unwrap_or(0).min(start);
        let (columns, prefix) = (start + n - first, start - first);
        let mut bias = vec![0f32; n * columns];
        let mut masked = false;
        for (row, (line, &position)) in bias.chunks_exact_mut(columns).zip(positions).enumerate() {
            let oldest = oldest(position);
            let hidden = oldest.saturating_sub(first).min(prefix);
            line[..hidden].fill(f32::NEG_INFINITY);
            masked |= hidden > 0;
            for (other, value) in line[prefix..].iter_mut().enumerate() {
                if !sees(row, other) || (positions[other] as usize) < oldest {
                    *value = f32::NEG_INFINITY;
                    masked = true;
                }
            }
        }
        let bias = if masked { Some(Tensor::from_vec(bias, (n, columns), device)?) } else { None };
        Ok(Self { first, bias })
    }
}

/// The new rows of one sequence in a pass over several: how many they are, what they see, and where
/// their keys and values go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment<'a> {
    pub(crate) rows: usize,
    pub(crate) mask: &'a LayerMask,
    pub(crate) cache: &'a KvCache,
    /// The cache row of the first.
    pub(crate) start: usize,
}

/// Writes keys and values (`[kv_heads, n, head_dim]`) of all segments into layer `layer` of their caches,
/// and [attends](attend) from `q` (`[heads, n, head_dim]`) segment by segment. Rows of one segment follow
/// those of the one before. Gives `[n, heads * head_dim]`.
pub(crate) fn attend_segments(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    segments: &[Segment<'_>],
    layer: usize,
) -> Result<Tensor> {
    let scale = (q.dim(D::Minus1)? as f64).powf(-0.5);
    let mut mixed = Vec::with_capacity(segments.len());
    let mut first = 0;
    for segment in segments {
        let Segment { rows, mask, cache, start } = *segment;
        // No copies if there is one segment.
        let part = |heads: &Tensor| heads.narrow(1, first, rows)?.contiguous();
        let (keys, values) = cache.write(layer, start, mask.first, &part(k)?, &part(v)?)?;
        mixed.push(attend(&part(q)?, &keys, &values, mask.bias.as_ref(), scale)?);
        first += rows;
    }
    Ok(Tensor::cat(&mixed, 0)?)
}

/// Scaled dot-product attention of `q` (`[heads, n, head_dim]`, contiguous) over `k` and `v`
/// (`[kv_heads, rows, head_dim]`, each head's rows packed); query head `h` reads key head
/// `h / (heads / kv_heads)`. `bias` (`[n, rows]`, f32) is added to the scores of every head.
/// Gives `[n, heads * head_dim]` in the type of `q`.
///
/// The arithmetic is f32 whatever the type of the inputs. The query heads that share a key head
/// are stacked into the rows of one product, so keys and values are never repeated.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    bias: Option<&Tensor>,
    scale: f64,
) -> Result<Tensor> {
    let (heads, n, head_dim) = q.dims3()?;
    let (kv_heads, rows, _) = k.dims3()?;
    let group = heads / kv_heads;
    let stacked = (q.to_dtype(DType::F32)? * scale)?.reshape((kv_heads, group * n, head_dim))?;
    let mut scores = stacked.matmul(&k.to_dtype(DType::F32)?.t()?)?;
    if let Some(bias) = bias {
        scores = scores.reshape((kv_heads, group, n, rows))?.broadcast_add(bias)?.reshape((
            kv_heads,
            group * n,
            rows,
        ))?;
    }
    let weights = candle_nn::ops::softmax_last_dim(&scores)?;
    let mixed = weights.matmul(&v.to_dtype(DType::F32)?)?;
    let mixed = mixed.reshape((heads, n, head_dim))?.transpose(0, 1)?.contiguous()?;
    Ok(mixed.flatten_from(D::Minus2)?.to_dtype(q.dtype())?)
}
