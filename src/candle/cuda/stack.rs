//! Decoder layers on the GPU, with the cache and the scratch memory of one sequence: what target and drafter share.

use candle_core::DType;
use cudarc::driver::sys::CUdeviceptr;

use super::attention::{Attention, Cached};
use super::device::{Buffer, Gpu, Pinned};
use super::kernels::{Heads, Inputs, Kernels, Path, RopeStore};
use super::products::{Product, Sums};
use super::weights::Loader;
use crate::candle::{DecoderConfig, Error, Result};

#[derive(Debug)]
struct Layer {
    input_norm: Buffer,
    qkv: Buffer,
    qkv_bias: Option<Buffer>,
    qk_norm: Option<(Buffer, Buffer)>,
    o: Buffer,
    post_norm: Buffer,
    gate_up: Buffer,
    down: Buffer,
}

/// A stack of layers, up to and including the final norm.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) gpu: Gpu,
    pub(super) kernels: Kernels,
    attention: Attention,
    pub(super) heads: Heads,
    pub(super) hidden: usize,
    intermediate: usize,
    pub(super) eps: f32,
    layers: Vec<Layer>,
    norm: Buffer,
    rope: Buffer,
    /// Planes of `cache_rows` rows: the keys and then the values of each layer.
    cache: Buffer,
    cache_rows: usize,
    scratch: Scratch,
}

/// What makes keys and values of all layers, layer by layer.
#[derive(Debug)]
pub(super) struct KeyValues {
    pub(super) weight: Buffer,
    bias: Option<Buffer>,
    norm: Option<Buffer>,
    /// Elements of a row.
    pub(super) width: usize,
}

/// Memory of a pass; sized for the widest.
#[derive(Debug)]
struct Scratch {
    residual: Buffer,
    normed: Buffer,
    qkv: Buffer,
    mixed: Buffer,
    gate_up: Buffer,
    activated: Buffer,
}

/// Which layers' outputs are wanted, side by side in rows of `layers.len() * hidden` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct TapInto<'a> {
    pub(super) layers: &'a [usize],
    pub(super) rows: &'a Buffer,
}

impl Stack {
    /// Takes the layers of `config` with room for `cache_rows` cache rows and passes of `max_width` rows.
    pub(super) fn load(
        loader: &mut Loader<'_>,
        config: &DecoderConfig,
        kernels: Kernels,
        cache_rows: usize,
        max_width: usize,
        positions: usize,
    ) -> Result<Self> {
        let gpu = loader.gpu.clone();
        check(config)?;
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let heads =
            Heads { query: config.num_heads, kv: config.num_kv_heads, size: config.head_dim };
        let (q, kv) = (heads.q_size(), heads.kv_size());
        let mut layers = Vec::with_capacity(config.num_layers());
        for index in 0..config.num_layers() {
            let name = |part: &str| format!("layers.{index}.{part}");
            let (q_name, k_name, v_name) =
                (name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj"));
            let qkv = [(&*q_name, q), (&*k_name, kv), (&*v_name, kv)];
            let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
            layers.push(Layer {
                input_norm: loader.norm(&name("input_layernorm"), hidden)?,
                qkv: loader.matrix(&qkv, hidden)?,
                qkv_bias: if config.qkv_bias { Some(loader.bias(&qkv)?) } else { None },
                qk_norm: if config.qk_norm {
                    let q_norm = loader.norm(&name("self_attn.q_norm"), heads.size)?;
                    Some((q_norm, loader.norm(&name("self_attn.k_norm"), heads.size)?))
                } else {
                    None
                },
                o: loader.matrix(&[(&name("self_attn.o_proj"), hidden)], q)?,
                post_norm: loader.norm(&name("post_attention_layernorm"), hidden)?,
                gate_up: loader.interleaved([&*gate, &*up], intermediate, hidden)?,
                down: loader.matrix(&[(&name("mlp.down_proj"), hidden)], intermediate)?,
            });
        }
        let norm = loader.norm("norm", hidden)?;
        let rope: Vec<f32> = config
            .rope
            .angles(0..positions as u32)?
            .into_iter()
            .flat_map(|(cos, sin)| [cos, sin])
            .collect();
        let element = kernels.dtype.size_in_bytes();
        let scratch = Scratch {
            residual: gpu.allocate(4 * max_width * hidden)?,
            normed: gpu.allocate(element * max_width * hidden)?,
            qkv: gpu.allocate(element * max_width * (q + 2 * kv))?,
            mixed: gpu.allocate(element * max_width * q)?,
            gate_up: gpu.allocate(element * max_width * 2 * intermediate)?,
            activated: gpu.allocate(element * max_width * intermediate)?,
        };
        Ok(Self {
            rope: gpu.upload(&rope)?,
            cache: gpu.allocate(element * 2 * layers.len() * cache_rows * kv)?,
            cache_rows,
            attention: Attention::new(&gpu, kernels.dtype, heads, max_width)?,
            gpu,
            kernels,
            heads,
            hidden,
            intermediate,
            eps: config.rms_norm_eps as f32,
            layers,
            norm,
            scratch,
        })
    }

    pub(super) fn dtype(&self) -> DType {
        self.kernels.dtype
    }

    /// The normed output of the last pass, `[rows, hidden]`.
    pub(super) fn output(&self) -> CUdeviceptr {
        self.scratch.normed.pointer()
    }

    /// How a layer treats queries and keys.
    fn rope_store(&self, layer: usize) -> RopeStore<'_> {
        let plane = self.row_bytes() * self.cache_rows;
        let Layer { qkv_bias, qk_norm, .. } = &self.layers[layer];
        RopeStore {
            bias: qkv_bias.as_ref().map(Buffer::pointer),
            norms: qk_norm.as_ref().map(|(q, k)| (q.pointer(), k.pointer())),
            eps: self.eps,
            rope: &self.rope,
            keys: self.cache.at(2 * layer * plane),
            values: self.cache.at((2 * layer + 1) * plane),
            layers: 1,
            layer_stride: 2 * self.heads.kv_size() * self.cache_rows,
        }
    }

    /// What makes keys and values of all layers at once.
    pub(super) fn key_values(&self) -> Result<KeyValues> {
        let (gpu, heads, layers) = (&self.gpu, self.heads, self.layers.len());
        let element = self.dtype().size_in_bytes();
        let stack = |part: &dyn Fn(&Layer) -> Option<(CUdeviceptr, usize)>| {
            let parts: Option<Vec<_>> = self.layers.iter().map(part).collect();
            let Some(parts) = parts else { return Ok(None) };
            let all = gpu.allocate(parts.iter().map(|(_, bytes)| bytes).sum())?;
            let mut at = 0;
            for (from, bytes) in parts {
                gpu.copy(from, &all, at, bytes)?;
                at += bytes;
            }
            Ok::<_, Error>(Some(all))
        };
        let row = self.hidden * element;
        let (skipped, bytes) = (heads.q_size() * row, 2 * heads.kv_size() * row);
        let weight = stack(&|layer| Some((layer.qkv.at(skipped), bytes)))?;
        let bias = stack(&|layer| {
            let bias = layer.qkv_bias.as_ref()?;
            Some((bias.at(heads.q_size() * element), 2 * heads.kv_size() * element))
        })?;
        let norm = stack(&|layer| layer.qk_norm.as_ref().map(|(_, k)| (k.pointer(), k.bytes())))?;
        let weight = weight.expect("every layer has a weight");
        Ok(KeyValues { weight, bias, norm, width: layers * 2 * heads.kv_size() })
    }

    /// Asks for the keys and values of rows that others attend to but that do not attend themselves: `x` is `[rows,
    /// hidden]`, `kv` memory for `[rows, of.width]`.
    pub(super) fn write_context(
        &self,
        of: &KeyValues,
        inputs: &Inputs,
        x: CUdeviceptr,
        kv: &Buffer,
    ) -> Result<()> {
        let (sums, shape) = self.context_product(of, inputs.rows, kv);
        self.gpu.product(x, &of.weight, sums, shape)?;
        let how = RopeStore {
            bias: of.bias.as_ref().map(Buffer::pointer),
            norms: of.norm.as_ref().map(|k| (k.pointer(), k.pointer())),
            layers: self.layers.len(),
            ..self.rope_store(0)
        };
        let heads = Heads { query: 0, ..self.heads };
        self.kernels.rope_store(&self.gpu, inputs, kv.pointer(), heads, &how)
    }

    /// The product of `write_context`.
    pub(super) fn context_product<'a>(
        &self,
        of: &KeyValues,
        rows: usize,
        kv: &'a Buffer,
    ) -> (Sums<'a>, Product) {
        let sums = Sums::Elements(kv);
        let (inputs, outputs, dtype, output) = (self.hidden, of.width, self.dtype(), sums.output());
        (sums, Product { rows, inputs, outputs, dtype, output, weights: 1 })
    }

    fn row_bytes(&self) -> usize {
        self.heads.kv_size() * self.dtype().size_in_bytes()
    }

    /// Asks for a pass over `inputs`.
    pub(super) fn forward(
        &self,
        inputs: &Inputs,
        table: &Buffer,
        taps: Option<TapInto<'_>>,
    ) -> Result<()> {
        let (gpu, kernels, scratch) = (&self.gpu, &self.kernels, &self.scratch);
        let (rows, hidden, eps) = (inputs.rows, self.hidden, self.eps);
        let norm = |index: usize| {
            self.layers.get(index).map_or(&self.norm, |layer: &Layer| &layer.input_norm)
        };
        let first = (norm(0), eps);
        kernels.embed_norm(
            gpu,
            inputs,
            table,
            &scratch.residual,
            first,
            &scratch.normed,
            hidden,
        )?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.product(rows, Weight::Qkv(layer))?;
            let how = self.rope_store(index);
            kernels.rope_store(gpu, inputs, scratch.qkv.pointer(), self.heads, &how)?;
            let cached = Cached { keys: how.keys, values: how.values, rows: self.cache_rows };
            self.attention.run(gpu, inputs, &scratch.qkv, cached, &scratch.mixed)?;
            self.product(rows, Weight::O(layer))?;
            let (residual, normed) = (&scratch.residual, &scratch.normed);
            kernels.norm(gpu, rows, residual, (&layer.post_norm, eps), normed, None, hidden)?;
            self.product(rows, Weight::GateUp(layer))?;
            self.product(rows, Weight::Down(layer))?;
            let tap = taps.and_then(|taps| {
                let at = taps.layers.iter().position(|&tap| tap == index)?;
                let offset = at * hidden * self.dtype().size_in_bytes();
                Some((taps.rows.at(offset), taps.layers.len() * hidden))
            });
            let next = (norm(index + 1), eps);
            kernels.norm(gpu, rows, residual, next, normed, tap, hidden)?;
        }
        Ok(())
    }

    /// Asks for the products of a pass and nothing else, to measure what the rest costs.
    pub(super) fn products(&self, rows: usize) -> Result<()> {
        for layer in &self.layers {
            for weight in
                [Weight::Qkv(layer), Weight::O(layer), Weight::GateUp(layer), Weight::Down(layer)]
            {
                self.product(rows, weight)?;
            }
        }
        Ok(())
    }

    /// Finds out how the products of a pass of `rows` rows may be done. Their shapes, for `settle`.
    pub(super) fn plan(&self, rows: usize) -> Result<Vec<Product>> {
        let mut shapes = Vec::new();
        let Some(layer) = self.layers.first() else { return Ok(shapes) };
        let each =
            |weight: fn(&Layer) -> &Buffer| self.layers.iter().map(weight).collect::<Vec<_>>();
        for (weight, weights) in [
            (Weight::Qkv(layer), each(|layer| &layer.qkv)),
            (Weight::O(layer), each(|layer| &layer.o)),
            (Weight::GateUp(layer), each(|layer| &layer.gate_up)),
            (Weight::Down(layer), each(|layer| &layer.down)),
        ] {
            let (x, _, sums, shape) = self.operands(rows, weight);
            self.gpu.plan_product(x, &weights, sums, shape, &|| self.last_norm(rows))?;
            shapes.push(shape);
        }
        Ok(shapes)
    }

    fn product(&self, rows: usize, weight: Weight<'_>) -> Result<()> {
        let (x, w, sums, shape) = self.operands(rows, weight);
        self.gpu.product(x, w, sums, shape)
    }

    /// Asks for the norm that ends a pass.
    pub(super) fn last_norm(&self, rows: usize) -> Result<()> {
        let Scratch { residual, normed, .. } = &self.scratch;
        let norm = (&self.norm, self.eps);
        self.kernels.norm(&self.gpu, rows, residual, norm, normed, None, self.hidden)
    }

    fn operands<'a>(
        &'a self,
        rows: usize,
        weight: Weight<'a>,
    ) -> (CUdeviceptr, &'a Buffer, Sums<'a>, Product) {
        let s = &self.scratch;
        let dtype = self.dtype();
        let (hidden, intermediate, q) = (self.hidden, self.intermediate, self.heads.q_size());
        let (x, w, sums, inputs, outputs) = match weight {
            Weight::Qkv(layer) => {
                let outputs = q + 2 * self.heads.kv_size();
                (&s.normed, &layer.qkv, Sums::Elements(&s.qkv), hidden, outputs)
            }
            Weight::O(layer) => (&s.mixed, &layer.o, Sums::Added(&s.residual), q, hidden),
            Weight::GateUp(layer) => {
                let (y, gate_up) = (&s.activated, &s.gate_up);
                let sums = Sums::Gated { y, gate_up, kernels: &self.kernels };
                (&s.normed, &layer.gate_up, sums, hidden, 2 * intermediate)
            }
            Weight::Down(layer) => {
                (&s.activated, &layer.down, Sums::Added(&s.residual), intermediate, hidden)
            }
        };
        let (output, weights) = (sums.output(), self.layers.len());
        (x.pointer(), w, sums, Product { rows, inputs, outputs, dtype, output, weights })
    }

    /// Makes the rows of `slots` of the pass that began at cache row `start` the rows from `start` on.
    pub(super) fn compact(&self, start: usize, path: &Path) -> Result<()> {
        let shape = (2 * self.layers.len(), self.cache_rows, self.row_bytes());
        self.kernels.compact(&self.gpu, &self.cache, shape, start, path)
    }

    /// Bytes of the weights of all layers, which every pass has to read.
    pub(super) fn weight_bytes(&self) -> usize {
        let matrices = |layer: &Layer| {
            layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes()
        };
        self.layers.iter().map(matrices).sum()
    }

    /// Bytes of one row of the cache in all layers.
    pub(super) fn cache_row_bytes(&self) -> usize {
        2 * self.layers.len() * self.row_bytes()
    }
}

enum Weight<'a> {
    Qkv(&'a Layer),
    O(&'a Layer),
    GateUp(&'a Layer),
    Down(&'a Layer),
}

/// Refuses what the kernels do not do.
fn check(config: &DecoderConfig) -> Result<()> {
    if config.hybrid.is_some() {
        let found = format!("{:?}", config.architecture);
        return Err(Error::config("architectures", found, "Llama, Qwen2 or Qwen3 on a GPU"));
    }
    Kernels::check_row("hidden_size", config.hidden_size)?;
    if !config.intermediate_size.is_multiple_of(8) {
        let accepted = "a multiple of 8 on a GPU";
        return Err(Error::config("intermediate_size", config.intermediate_size, accepted));
    }
    if config.rope.rotary_dim != config.head_dim {
        let accepted = format!("{} on a GPU, the whole head", config.head_dim);
        return Err(Error::config("rotary dimensions", config.rope.rotary_dim, accepted));
    }
    if config.o_bias || config.mlp_bias {
        return Err(Error::config("attention_bias, mlp_bias", true, "false on a GPU"));
    }
    if let Some(window) = config.layer_windows.iter().flatten().next() {
        return Err(Error::config("sliding_window", window, "full attention on a GPU"));
    }
    Ok(())
}

/// What the host tells a pass: one block of memory, so that one copy brings it over.
///
/// As words of 4 bytes: the prefix, a word unused, a token per row, a position per row, and then the mask.
#[derive(Debug)]
pub(super) struct PassInput {
    host: Pinned<u32>,
    device: Buffer,
    /// Whether the stream may still read the host's side.
    in_flight: bool,
}

impl PassInput {
    pub(super) fn new(gpu: &Gpu, max_width: usize) -> Result<Self> {
        let words = Self::words(max_width);
        Ok(Self { host: gpu.pinned(words)?, device: gpu.allocate(4 * words)?, in_flight: false })
    }

    /// Where a pass of `width` rows reads.
    pub(super) fn inputs(&self, width: usize) -> Inputs {
        Inputs {
            prefix: self.device.at(0),
            tokens: self.device.at(8),
            positions: self.device.at(8 + 4 * width),
            mask: self.device.at(8 + 8 * width),
            mask_words: width.div_ceil(64),
            rows: width,
        }
    }

    /// Words of a pass of `width` rows.
    fn words(width: usize) -> usize {
        2 + 2 * width + 2 * width * width.div_ceil(64)
    }

    /// Writes a pass of `width` rows at cache row `prefix`; `rows` gives token and position of the real ones, and
    /// `sees(row, words)` the mask of a real row, in words that are zero before.
    ///
    /// Rows that fill up the width hold the token of the first row at its position, and see themselves: their results
    /// are finite if that row's are, and nobody reads them.
    pub(super) fn write(
        &mut self,
        gpu: &Gpu,
        width: usize,
        prefix: usize,
        rows: impl ExactSizeIterator<Item = (u32, u32)>,
        mut sees: impl FnMut(usize, &mut [u64]),
    ) -> Result<()> {
        if self.in_flight {
            gpu.synchronize()?;
        }
        self.in_flight = true;
        let real = rows.len();
        let host = &mut self.host.as_mut_slice()[..Self::words(width)];
        host.fill(0);
        let (head, rest) = host.split_at_mut(2);
        head[0] = prefix as u32;
        let (tokens, rest) = rest.split_at_mut(width);
        let (positions, mask) = rest.split_at_mut(width);
        for (row, (token, position)) in rows.enumerate() {
            tokens[row] = token;
            positions[row] = position;
        }
        let (token, position) = (tokens[0], positions[0]);
        tokens[real..].fill(token);
        positions[real..].fill(position);
        let mut words = [0u64; 4];
        let words = &mut words[..width.div_ceil(64)];
        for (row, out) in mask.chunks_exact_mut(2 * words.len()).enumerate() {
            words.fill(0);
            if row < real {
                sees(row, words);
            }
            words[row / 64] |= 1 << (row % 64);
            for (out, word) in out.chunks_exact_mut(2).zip(&*words) {
                out[0] = *word as u32;
                out[1] = (*word >> 32) as u32;
            }
        }
        Ok(())
    }

    /// Asks for the copy to the GPU.
    pub(super) fn send(&self, gpu: &Gpu, width: usize) -> Result<()> {
        gpu.copy_in(&self.host, &self.device, 4 * Self::words(width))
    }

    /// Notes that the stream has been waited for.
    pub(super) fn landed(&mut self) {
        self.in_flight = false;
    }
}

/// The width that a pass of `rows` rows is filled up to: each has a graph of its own. Products run in tiles of 8 rows
/// and more, so that filling up to the next multiple costs nothing.
pub(super) fn padded(rows: usize) -> usize {
    if rows <= 1 { 1 } else { rows.next_multiple_of(8) }
}

/// As [`padded`], where any number of rows may come, as from prompts: there are few such widths, since what is done for
/// the first time is planned first. None is above `widest`, the width of the most rows that come.
pub(super) fn padded_to_few(rows: usize, widest: usize) -> usize {
    const WIDTHS: [usize; 7] = [1, 8, 24, 40, 72, 136, 256];
    WIDTHS.into_iter().find(|&width| width >= rows).map_or(widest, |width| width.min(widest))
}
