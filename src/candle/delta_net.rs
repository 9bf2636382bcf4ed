//! The gated delta net layer of the Qwen3.5 family.

use candle_core::{DType, Tensor};
use candle_nn::{Linear, Module};

use super::config::DeltaNetConfig;
use super::delta_rule::Rows;
use super::layers::{fused_linear, linear, project_residual};
use super::state_cache::{LayerPass, StateCache};
use super::{Error, Result, Weights};

/// Added to the squared length of queries and keys before they are divided by it.
const UNIT_EPS: f32 = 1e-6;

/// Projections, a causal depthwise convolution, the gated delta rule, and a gated norm.
///
/// Between the two projections everything is f32 whatever the type of the model: rounding the write
/// strength, the decay or a norm would make the committed state depend on how it was reached.
#[derive(Debug, Clone)]
pub(crate) struct GatedDeltaNet {
    shape: DeltaNetConfig,
    /// q, k, v, z, b and a as one product.
    input: Linear,
    output: Linear,
    /// `[kernel, channels]`, the current input's row last.
    conv: Vec<f32>,
    /// `-exp(A_log)`, one per value head.
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    norm_eps: f32,
}

impl GatedDeltaNet {
    pub(crate) fn load(
        weights: &mut Weights,
        prefix: &str,
        shape: DeltaNetConfig,
        hidden_size: usize,
        norm_eps: f64,
    ) -> Result<Self> {
        let name = |module: &str| format!("{prefix}.{module}");
        let (channels, heads) = (shape.channels(), shape.value_heads);
        let stack = [
            (&*name("in_proj_qkv"), channels),
            (&*name("in_proj_z"), shape.value_size()),
            (&*name("in_proj_b"), heads),
            (&*name("in_proj_a"), heads),
        ];
        let input = fused_linear(weights, &stack, hidden_size, false)?;
        let output = linear(weights, &name("out_proj"), (shape.value_size(), hidden_size), false)?;
        let conv_shape = [channels, 1, shape.conv_kernel];
        let conv = weights.take_as(&name("conv1d.weight"), &conv_shape, DType::F32)?;
        let mut vector = |module: &str, len| -> Result<Vec<f32>> {
            Ok(weights.take_as(&name(module), &[len], DType::F32)?.to_vec1()?)
        };
        Ok(Self {
            rate: vector("A_log", heads)?.into_iter().map(|a| -a.exp()).collect(),
            dt_bias: vector("dt_bias", heads)?,
            norm: vector("norm.weight", shape.value_dim)?,
            norm_eps: norm_eps as f32,
            conv: conv.squeeze(1)?.t()?.flatten_all()?.to_vec1()?,
            shape,
            input,
            output,
        })
    }

    /// Mixes the new rows `x` (`[n, hidden_size]`) of sequences, given by their numbers of rows and
    /// their states, as the passes that the states have begun say. Gives `[n, hidden_size]` in the type
    /// of the residual stream.
    pub(crate) fn forward<'a>(
        &self,
        x: &Tensor,
        sequences: impl Iterator<Item = (usize, Option<&'a mut StateCache>)>,
        layer: usize,
    ) -> Result<Tensor> {
        let n = x.dim(0)?;
        // One copy to the host, whatever the device.
        let projected = self.input.forward(x)?.to_dtype(DType::F32)?;
        let projected: Vec<f32> = projected.flatten_all()?.to_vec1()?;
        let mut rest = projected.as_slice();
        let mut output = Vec::with_capacity(n * self.shape.value_size());
        for (rows, states) in sequences {
            let states = states
                .ok_or_else(|| Error::argument("cache", "no states", "a cache of this decoder"))?;
            let (lines, after) = rest.split_at(rows * (projected.len() / n));
            output.append(&mut self.mix(lines, states.layer(layer)));
            rest = after;
        }
        let output = Tensor::from_vec(output, (n, self.shape.value_size()), x.device())?;
        project_residual(&self.output, &output)
    }

    /// What lies between the two projections, for the rows of one sequence.
    fn mix(&self, projected: &[f32], mut pass: LayerPass<'_>) -> Vec<f32> {
        let shape = &self.shape;
        let widths = [shape.channels(), shape.value_size(), shape.value_heads, shape.value_heads];
        let lines = projected.chunks_exact(widths.iter().sum());
        let mut parts = widths.map(|width| Vec::with_capacity(lines.len() * width));
        for mut line in lines {
            for (part, width) in parts.iter_mut().zip(widths) {
                let (values, rest) = line.split_at(width);
                part.extend_from_slice(values);
                line = rest;
            }
        }
        let [inputs, gate, b, a] = parts;
        let mixed = self.convolve(&inputs, &pass);
        let mut output = pass.run(&self.rows(&mixed, &b, &a));
        pass.keep_inputs(inputs);
        self.normalise(&mut output, &gate);
        output
    }

    /// The convolution over every row's ancestors, and its activation.
    fn convolve(&self, inputs: &[f32], pass: &LayerPass<'_>) -> Vec<f32> {
        let channels = self.shape.channels();
        let mut mixed = vec![0.0; inputs.len()];
        for (row, out) in mixed.chunks_exact_mut(channels).enumerate() {
            for (distance, weights) in self.conv.chunks_exact(channels).rev().enumerate() {
                let input = pass.input(inputs, row, distance);
                for ((out, weight), input) in out.iter_mut().zip(weights).zip(input) {
                    *out += weight * input;
                }
            }
            out.iter_mut().for_each(|x| *x = silu(*x));
        }
        mixed
    }

    /// Splits convolved rows into what the recurrence reads.
    fn rows(&self, mixed: &[f32], b: &[f32], a: &[f32]) -> Rows {
        let shape = &self.shape;
        let key_size = shape.key_heads * shape.key_dim;
        let mut rows = Rows::default();
        for line in mixed.chunks_exact(shape.channels()) {
            rows.q.extend_from_slice(&line[..key_size]);
            rows.k.extend_from_slice(&line[key_size..2 * key_size]);
            rows.v.extend_from_slice(&line[2 * key_size..]);
        }
        let query_scale = (shape.key_dim as f32).powf(-0.5);
        for (vectors, scale) in [(&mut rows.q, query_scale), (&mut rows.k, 1.0)] {
            for vector in vectors.chunks_exact_mut(shape.key_dim) {
                let squares: f32 = vector.iter().map(|x| x * x).sum();
                let factor = scale / (squares + UNIT_EPS).sqrt();
                vector.iter_mut().for_each(|x| *x *= factor);
            }
        }
        rows.beta = b.iter().map(|&b| sigmoid(b)).collect();
        let per_head = self.rate.iter().zip(&self.dt_bias).cycle();
        rows.decay = a
            .iter()
            .zip(per_head)
            .map(|(a, (rate, bias))| (rate * softplus(a + bias)).exp())
            .collect();
        rows
    }

    /// Normalises every head's output and multiplies it by its gate.
    fn normalise(&self, output: &mut [f32], gate: &[f32]) {
        let len = self.shape.value_dim;
        for (head, gate) in output.chunks_exact_mut(len).zip(gate.chunks_exact(len)) {
            let squares: f32 = head.iter().map(|x| x * x).sum();
            let factor = 1.0 / (squares / len as f32 + self.norm_eps).sqrt();
            for ((x, weight), gate) in head.iter_mut().zip(&self.norm).zip(gate) {
                *x *= factor * weight * silu(*gate);
            }
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + exp(x))` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
