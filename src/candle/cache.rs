//! Key/value rows of a decoder, kept as one buffer per layer that is written and compacted in place.

use candle_core::{DType, Device, Tensor};

use super::config::DeltaNetConfig;
use super::state_cache::{State, StateCache};
use super::{Error, Result, StateMethod};

/// Rows that a cache holds at first, before it doubles.
const INITIAL_ROWS: usize = 256;

/// What one sequence has accumulated: the keys and values of every attention layer,
/// `[kv_heads, capacity, head_dim]` each, and the states of recurrent layers. Both move together.
///
/// Rows `0..len()` are committed: row `r` belongs to the token at position `r`. A forward pass
/// writes its rows behind them without moving `len`, so an abandoned or failed pass leaves the
/// committed rows as they were; [`commit`](Self::commit) then keeps the accepted rows.
///
/// Capacity doubles up to the limit given at creation; no step copies rows otherwise. The heads
/// come first so that `keys[.., ..rows, ..]` is a plain view for a batched product.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    states: Option<StateCache>,
    len: usize,
    /// Where the rows end that passes wrote: committed ones, and those of the last pass.
    written: usize,
    max_len: usize,
}

#[derive(Debug)]
struct LayerCache {
    keys: Tensor,
    values: Tensor,
}

impl KvCache {
    pub(crate) fn new(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        max_len: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let shape = (kv_heads, INITIAL_ROWS.min(max_len), head_dim);
        let layers = (0..layers)
            .map(|_| {
                Ok(LayerCache {
                    keys: Tensor::zeros(shape, dtype, device)?,
                    values: Tensor::zeros(shape, dtype, device)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, states: None, len: 0, written: 0, max_len })
    }

    /// The same cache with states beside the rows.
    pub(crate) fn with_states(mut self, states: StateCache) -> Self {
        self.states = Some(states);
        self
    }

    pub(crate) fn delta_net(&self) -> Option<&DeltaNetConfig> {
        self.states.as_ref().map(StateCache::shape)
    }

    pub(crate) fn states_mut(&mut self) -> Option<&mut StateCache> {
        self.states.as_mut()
    }

    /// Committed rows, equal to the position of the next token.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no row is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The most rows that the cache can ever hold.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// How many layers have rows here: those with attention.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes held by rows, states and what a tree in progress keeps.
    pub fn memory_usage(&self) -> usize {
        let (committed, kept) = self.state_memory();
        let rows: usize = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.keys, &layer.values])
            .map(|t| t.elem_count() * t.dtype().size_in_bytes())
            .sum();
        rows + committed + kept
    }

    /// Bytes of the committed states of recurrent layers, and bytes that they keep of the slots of
    /// the last tree.
    pub fn state_memory(&self) -> (usize, usize) {
        self.states.as_ref().map_or((0, 0), StateCache::memory_usage)
    }

    /// How many layers have states here: the recurrent ones.
    pub fn num_recurrent_layers(&self) -> usize {
        self.states.as_ref().map_or(0, StateCache::num_layers)
    }

    /// What recurrent layers keep of a tree; a pass in progress is dropped. No effect without such
    /// layers.
    pub fn set_state_method(&mut self, method: StateMethod) {
        if let Some(states) = &mut self.states {
            states.set_method(method);
        }
    }

    /// A copy of the committed state of a recurrent layer (counted among those only),
    /// `[value_heads, key_dim, value_dim]`, f32 on the CPU.
    ///
    /// # Errors
    /// `layer` is out of range.
    pub fn recurrent_state(&self, layer: usize) -> Result<Tensor> {
        let (shape, state) = self.recurrent_layer(layer)?;
        let dims = (shape.value_heads, shape.key_dim, shape.value_dim);
        Ok(Tensor::from_slice(&state.recurrent, dims, &Device::Cpu)?)
    }

    /// A copy of the last inputs of the convolution of a recurrent layer (counted among those only),
    /// oldest first, `[kernel - 1, channels]`, f32 on the CPU; zero where there was none yet.
    ///
    /// # Errors
    /// `layer` is out of range.
    pub fn conv_window(&self, layer: usize) -> Result<Tensor> {
        let (shape, state) = self.recurrent_layer(layer)?;
        let dims = (shape.conv_kernel - 1, shape.channels());
        Ok(Tensor::from_slice(&state.window, dims, &Device::Cpu)?)
    }

    fn recurrent_layer(&self, layer: usize) -> Result<(&DeltaNetConfig, &State)> {
        let found = self.states.as_ref().and_then(|s| Some((s.shape(), s.committed(layer)?)));
        found.ok_or_else(|| {
            let accepted = format!("a recurrent layer below {}", self.num_recurrent_layers());
            Error::argument("layer", layer, accepted)
        })
    }

    /// Forgets the rows from `len` on. Costs nothing; the buffers stay.
    ///
    /// # Errors
    /// `len` is larger than [`len()`](Self::len); or there are recurrent layers, whose states of
    /// earlier rows are gone, and `len` is neither that nor 0.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            return Err(Error::argument("len", len, format!("at most {} rows", self.len)));
        }
        if let Some(states) = &mut self.states {
            if len != 0 && len != self.len {
                let accepted = format!("0 or {}, as recurrent states have no history", self.len);
                return Err(Error::argument("len", len, accepted));
            }
            if len == 0 {
                states.clear();
            }
            states.drop_pass();
        }
        (self.len, self.written) = (len, len);
        Ok(())
    }

    /// Commits the next `rows` rows as forward passes without a tree wrote them.
    ///
    /// # Errors
    /// Passes since the last commit have not written that many; or there are recurrent layers and the
    /// last pass did not end at the last of these rows.
    pub fn extend(&mut self, rows: usize) -> Result<()> {
        let written = self.written - self.len;
        if rows > written {
            return Err(Error::argument("rows", rows, format!("at most {written}, as written")));
        }
        let end = self.len + rows;
        if let Some(states) = &mut self.states {
            if !states.runs_to(end) {
                let accepted = "rows up to the end of the last pass without a tree";
                return Err(Error::argument("rows", rows, accepted));
            }
            states.extend();
        }
        self.len = end;
        Ok(())
    }

    /// Keeps the rows `base + slots[i]` as rows `base + i`, and commits `base + slots.len()` rows.
    ///
    /// `slots` are the accepted slots of a verified tree, root first; they rise strictly, so every
    /// row moves towards the front or stays. An identity prefix is not touched.
    ///
    /// # Errors
    /// `base` is not the committed length, `slots` do not rise strictly or are none that the last pass
    /// wrote; or there are recurrent layers and `slots` is no path of the tree that was run last.
    /// No row has moved then. An error from candle while rows move leaves the committed rows
    /// `0..base` intact and the length unmoved.
    pub fn commit(&mut self, base: usize, slots: &[u32]) -> Result<()> {
        if base != self.len {
            return Err(Error::argument(
                "base",
                base,
                format!("the committed length {}", self.len),
            ));
        }
        if slots.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(Error::argument("slots", format!("{slots:?}"), "strictly rising slots"));
        }
        let written = self.written - base;
        if let Some(&last) = slots.last()
            && last as usize >= written
        {
            let accepted = format!("slots below {written} (rows written by a forward pass)");
            return Err(Error::argument("slots", last, accepted));
        }
        if let Some(states) = &mut self.states {
            states.accept(base, slots)?;
        }
        let kept = slots.iter().enumerate().take_while(|&(i, &slot)| i == slot as usize).count();
        if kept < slots.len() {
            let rows: Vec<u32> = slots[kept..].iter().map(|&slot| base as u32 + slot).collect();
            for layer in &self.layers {
                for buffer in [&layer.keys, &layer.values] {
                    let rows = Tensor::new(rows.as_slice(), buffer.device())?;
                    // The gather is a copy, so source and destination rows may overlap.
                    buffer.slice_set(&buffer.index_select(&rows, 1)?, 1, base + kept)?;
                }
            }
        }
        if let Some(states) = &mut self.states {
            states.commit();
        }
        self.len = base + slots.len();
        self.written = self.len;
        Ok(())
    }

    /// A copy of the committed keys of a layer, `[kv_heads, len, head_dim]`, rotated as cached.
    ///
    /// # Errors
    /// `layer` is out of range.
    pub fn keys(&self, layer: usize) -> Result<Tensor> {
        Ok(self.layer(layer)?.keys.narrow(1, 0, self.len)?.force_contiguous()?)
    }

    /// A copy of the committed values of a layer, `[kv_heads, len, head_dim]`.
    ///
    /// # Errors
    /// `layer` is out of range.
    pub fn values(&self, layer: usize) -> Result<Tensor> {
        Ok(self.layer(layer)?.values.narrow(1, 0, self.len)?.force_contiguous()?)
    }

    fn layer(&self, layer: usize) -> Result<&LayerCache> {
        self.layers.get(layer).ok_or_else(|| {
            Error::argument("layer", layer, format!("a layer below {}", self.layers.len()))
        })
    }

    /// Where the rows end that passes wrote.
    pub(crate) fn written(&self) -> usize {
        self.written
    }

    /// Tells that passes wrote the rows up to `end` and none behind them.
    pub(crate) fn set_written(&mut self, end: usize) {
        self.written = end;
    }

    /// Makes room for `rows` rows.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<()> {
        if rows > self.max_len {
            return Err(Error::argument(
                "rows",
                rows,
                format!("at most {} (the cache limit)", self.max_len),
            ));
        }
        let buffers = self.layers.iter_mut().flat_map(|l| [&mut l.keys, &mut l.values]);
        for buffer in buffers {
            let (heads, capacity, dim) = buffer.dims3()?;
            if capacity < rows {
                let shape = (heads, (capacity * 2).max(rows).min(self.max_len), dim);
                let grown = Tensor::zeros(shape, buffer.dtype(), buffer.device())?;
                grown.slice_set(buffer, 1, 0)?;
                *buffer = grown;
            }
        }
        Ok(())
    }

    /// Writes `keys` and `values` (`[kv_heads, n, head_dim]`, contiguous) as rows `start..start + n`
    /// of `layer` and returns views of rows `first..start + n`. Room was made by `reserve`.
    pub(crate) fn write(
        &self,
        layer: usize,
        start: usize,
        first: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let buffers = self.layer(layer)?;
        let rows = start + keys.dim(1)? - first;
        buffers.keys.slice_set(keys, 1, start)?;
        buffers.values.slice_set(values, 1, start)?;
        Ok((buffers.keys.narrow(1, first, rows)?, buffers.values.narrow(1, first, rows)?))
    }
}
