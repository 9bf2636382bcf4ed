//! The pieces a decoder layer is made of.

use candle_core::{D, DType, Tensor};
use candle_nn::{Linear, Module, RmsNorm};

use super::{Error, Result, Weights};

/// The type of the residual stream of a model that computes in `dtype`.
///
/// `f16` models keep it in f32, and the two projections that write into it as well: outlier channels
/// of real checkpoints exceed the 65,504 that f16 can hold.
pub(crate) fn residual_dtype(dtype: DType) -> DType {
    if dtype == DType::F16 { DType::F32 } else { dtype }
}

/// Takes the projection `{name}.weight` (`[outputs, inputs]`) and, if the model has it, `{name}.bias`.
pub(crate) fn linear(
    weights: &mut Weights,
    name: &str,
    (inputs, outputs): (usize, usize),
    bias: bool,
) -> Result<Linear> {
    fused_linear(weights, &[(name, outputs)], inputs, bias)
}

/// Takes several projections of the same input as one, stacked in order.
pub(crate) fn fused_linear(
    weights: &mut Weights,
    parts: &[(&str, usize)],
    inputs: usize,
    bias: bool,
) -> Result<Linear> {
    let mut stack = Vec::with_capacity(parts.len());
    let mut biases = Vec::with_capacity(parts.len());
    for &(name, outputs) in parts {
        stack.push(weights.take(&format!("{name}.weight"), &[outputs, inputs])?);
        if bias {
            biases.push(weights.take(&format!("{name}.bias"), &[outputs])?);
        }
    }
    let bias = if bias { Some(Tensor::cat(&biases, 0)?) } else { None };
    Ok(Linear::new(Tensor::cat(&stack, 0)?, bias))
}

/// Takes the norm `{name}.weight` over `size` channels, to be applied to values of type `dtype`.
pub(crate) fn rms_norm(
    weights: &mut Weights,
    name: &str,
    size: usize,
    eps: f64,
    dtype: DType,
) -> Result<RmsNorm> {
    Ok(RmsNorm::new(weights.take_as(&format!("{name}.weight"), &[size], dtype)?, eps))
}

/// Takes the norm `{name}.weight` over `size` channels that multiplies by 1 + weight. It applies to
/// f32: in bf16 the sum would lose most of the weight.
pub(crate) fn zero_centred_norm(
    weights: &mut Weights,
    name: &str,
    size: usize,
    eps: f64,
) -> Result<RmsNorm> {
    let weight = weights.take_as(&format!("{name}.weight"), &[size], DType::F32)?;
    Ok(RmsNorm::new((weight + 1.0)?, eps))
}

/// Applies a projection that writes into the residual stream, in the stream's type.
pub(crate) fn project_residual(linear: &Linear, x: &Tensor) -> Result<Tensor> {
    let dtype = residual_dtype(linear.weight().dtype());
    if dtype == linear.weight().dtype() {
        return Ok(linear.forward(&x.to_dtype(dtype)?)?);
    }
    let bias = linear.bias().map(|bias| bias.to_dtype(dtype)).transpose()?;
    Ok(Linear::new(linear.weight().to_dtype(dtype)?, bias).forward(&x.to_dtype(dtype)?)?)
}

/// The input embedding, shared by cheap clones.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Tensor,
}

impl Embedding {
    pub(crate) fn new(table: Tensor) -> Self {
        Self { table }
    }

    /// Rows of the table, `[vocab_size, hidden_size]`.
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// The embeddings of `tokens`, `[tokens.len(), hidden_size]`.
    ///
    /// # Errors
    /// No token, or an id outside the table.
    pub fn forward(&self, tokens: &[u32]) -> Result<Tensor> {
        let vocab_size = self.table.dim(0)?;
        if tokens.is_empty() {
            return Err(Error::argument("tokens", "none", "at least one token"));
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(Error::argument("tokens", token, format!("ids below {vocab_size}")));
        }
        let ids = Tensor::new(tokens, self.table.device())?;
        Ok(self.table.index_select(&ids, 0)?)
    }
}

/// The output projection, shared by cheap clones.
#[derive(Debug, Clone)]
pub struct LmHead {
    weight: Tensor,
}

impl LmHead {
    pub(crate) fn new(weight: Tensor) -> Self {
        Self { weight }
    }

    /// The projection, `[vocab_size, hidden_size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// f32 logits `[rows, vocab_size]` of final hidden states `[rows, hidden_size]`.
    ///
    /// On the CPU the product itself is f32: candle widens bf16 operands there anyway, and rounding
    /// the result would only make ties of near-ties.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let dtype = if hidden.device().is_cpu() { DType::F32 } else { self.weight.dtype() };
        let weight = self.weight.to_dtype(dtype)?;
        Ok(hidden.to_dtype(dtype)?.matmul(&weight.t()?)?.to_dtype(DType::F32)?)
    }
}

/// Gated feed-forward layer: `down(silu(gate(x)) * up(x))`, gate and up as one product.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    pub(crate) fn load(
        weights: &mut Weights,
        prefix: &str,
        hidden_size: usize,
        intermediate_size: usize,
        bias: bool,
    ) -> Result<Self> {
        let (gate, up) = (format!("{prefix}.gate_proj"), format!("{prefix}.up_proj"));
        let parts = [(gate.as_str(), intermediate_size), (up.as_str(), intermediate_size)];
        Ok(Self {
            gate_up: fused_linear(weights, &parts, hidden_size, bias)?,
            down: linear(
                weights,
                &format!("{prefix}.down_proj"),
                (intermediate_size, hidden_size),
                bias,
            )?,
        })
    }

    /// `[rows, hidden_size]` to the same shape, in the type of the residual stream.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate_up = self.gate_up.forward(x)?;
        let gate_up = gate_up.to_dtype(residual_dtype(x.dtype()))?;
        let width = gate_up.dim(D::Minus1)? / 2;
        let gate = gate_up.narrow(D::Minus1, 0, width)?.silu()?;
        let up = gate_up.narrow(D::Minus1, width, width)?;
        project_residual(&self.down, &(gate * up)?)
    }
}
