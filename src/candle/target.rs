//! The decoder behind [`Verifier`].

use candle_core::{CpuStorage, D, DType, Storage, Tensor};

use super::{DecoderModel, Error, Forward, KvCache, Result, StateMethod, Want};
use crate::{
    AncestorMask, Capabilities, CommitPlan, DraftTree, PickRule, Picks, Prefill, Recurrence, Round,
    Verifier,
};

/// Attention scores of one prefill pass at most, over all heads; bounds its memory (64 MiB in f32)
/// whatever the prompt's length.
const PREFILL_SCORES: usize = 1 << 24;

/// A [`DecoderModel`] with the cache of one sequence, as the target of a speculative round.
///
/// Greedy picks are made on the device: the greatest f32 logit, of equal ones the lowest id. One
/// verification then costs one synchronisation with the host, which fetches the picks. Sampling is
/// done on the host, which fetches the logits of the slots that the text reaches, one by one.
#[derive(Debug)]
pub struct CandleTarget {
    model: DecoderModel,
    cache: KvCache,
    taps: Vec<usize>,
    verified: Option<Verified>,
    positions: Vec<u32>,
}

/// What the last verification left beyond the committed rows.
#[derive(Debug)]
struct Verified {
    slots: usize,
    taps: Taps,
}

/// Hidden states of the target that a drafter reads, one row per committed token.
#[derive(Debug, Clone)]
pub struct Taps {
    hidden: Option<Tensor>,
}

impl Taps {
    /// Rows of tapped layers, `[rows, taps * hidden_size]`, layers side by side in the order they
    /// were asked for; `None` if no layer is tapped.
    pub fn new(hidden: Option<Tensor>) -> Self {
        Self { hidden }
    }

    /// The rows, `[rows, taps * hidden_size]`; `None` if no layer is tapped.
    pub fn hidden(&self) -> Option<&Tensor> {
        self.hidden.as_ref()
    }

    /// The rows of `slots`, in that order.
    fn select(&self, slots: &[u32]) -> Result<Self> {
        let gather = |rows: &Tensor| rows.index_select(&Tensor::new(slots, rows.device())?, 0);
        Ok(Self { hidden: self.hidden.as_ref().map(gather).transpose()? })
    }
}

impl CandleTarget {
    /// A target with an empty cache of at most `max_len` rows that captures the outputs of the
    /// layers `taps` (0-based, in this order) for its drafter; an empty list captures nothing.
    ///
    /// # Errors
    /// `max_len` is 0 or more than the model's positions, a tap names no layer, or an error from
    /// candle.
    pub fn new(model: DecoderModel, max_len: usize, taps: &[usize]) -> Result<Self> {
        let layers = model.config().num_layers();
        if let Some(tap) = taps.iter().find(|&&tap| tap >= layers) {
            return Err(Error::argument("taps", tap, format!("layers below {layers}")));
        }
        let cache = model.new_cache(max_len)?;
        let taps = taps.to_vec();
        Ok(Self { model, cache, taps, verified: None, positions: Vec::new() })
    }

    /// The model.
    pub fn model(&self) -> &DecoderModel {
        &self.model
    }

    /// The cache of the sequence.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// What recurrent layers keep of a tree. Both ways are exact; see [`StateMethod`] and the table in
    /// `docs/hybrid.md`. No effect on models without such layers.
    pub fn state_method(mut self, method: StateMethod) -> Self {
        self.cache.set_state_method(method);
        self
    }

    /// Runs `tokens` at the positions in `self.positions`.
    fn forward(
        &mut self,
        start: usize,
        tokens: &[u32],
        mask: Option<&AncestorMask>,
        tree: Option<&DraftTree>,
        want: Want<'_>,
    ) -> Result<(Option<Tensor>, Taps)> {
        let (positions, taps) = (&self.positions, &self.taps);
        let pass = Forward { tokens, positions, start, mask, tree, want, taps };
        let output = self.model.forward(&mut self.cache, &pass)?;
        Ok((output.logits, Taps::new(output.taps)))
    }
}

impl Verifier for CandleTarget {
    type Features = Taps;
    type Error = Error;

    fn capabilities(&self) -> Capabilities {
        let config = self.model.config();
        let mut capabilities = Capabilities::new(config.vocab_size, self.cache.max_len());
        if config.hybrid.is_some() {
            capabilities.recurrence = Recurrence::ExactTrees;
        }
        capabilities
    }

    fn reset(&mut self, keep: usize) -> Result<()> {
        self.verified = None;
        self.cache.truncate(keep)
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<Taps> {
        self.verified = None;
        let (start, tokens) = (prefill.start(), prefill.tokens());
        check_start(start, &self.cache)?;
        let scores_per_row = self.model.config().num_heads * (start + tokens.len());
        let rows = (PREFILL_SCORES / scores_per_row.max(1)).clamp(16, 512);
        let mut hidden = Vec::new();
        let mut logits = None;
        let mut row = start;
        for chunk in tokens.chunks(rows) {
            self.positions.clear();
            self.positions.extend(row as u32..(row + chunk.len()) as u32);
            let last = row + chunk.len() == start + tokens.len();
            let want = if last { Want::Last } else { Want::Nothing };
            let (chunk_logits, taps) = self.forward(row, chunk, None, None, want)?;
            hidden.extend(taps.hidden);
            logits = chunk_logits;
            row += chunk.len();
        }
        let logits = logits
            .ok_or_else(|| Error::argument("tokens", "none", "at least one token to prefill"))?;
        let hidden = if hidden.is_empty() { None } else { Some(Tensor::cat(&hidden, 0)?) };
        pick(&logits, picks)?;
        self.cache.extend(tokens.len())?;
        Ok(Taps::new(hidden))
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<()> {
        self.verified = None;
        check_start(round.start(), &self.cache)?;
        let tree = round.tree();
        self.positions.clear();
        self.positions.resize(tree.len(), 0);
        round.positions_into(&mut self.positions)?;
        let (logits, taps) =
            self.forward(round.start(), tree.tokens(), round.mask(), Some(tree), Want::All)?;
        let logits = logits.ok_or_else(|| Error::argument("tree", "no slot", "a root"))?;
        pick(&logits, picks)?;
        self.verified = Some(Verified { slots: tree.len(), taps });
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Taps> {
        check_start(plan.start(), &self.cache)?;
        // Taken out: if rows have begun to move, the round has to be verified again.
        let verified = self
            .verified
            .take()
            .ok_or_else(|| Error::argument("plan", "no verification", "a commit after verify"))?;
        if let Some(slot) = plan.slots().iter().find(|&&slot| slot as usize >= verified.slots) {
            let accepted = format!("slots below {}", verified.slots);
            return Err(Error::argument("plan", slot, accepted));
        }
        let taps = verified.taps.select(plan.slots())?;
        self.cache.commit(plan.start(), plan.slots())?;
        Ok(taps)
    }
}

/// One sequence of a batch to [verify](verify_batch).
#[derive(Debug)]
pub struct BatchEntry<'a> {
    /// The sequence's target; all of a batch share one model.
    pub target: &'a mut CandleTarget,
    /// What to verify, as for [`Verifier::verify`].
    pub round: Round<'a>,
    /// Where its picks go.
    pub picks: Picks<'a>,
}

/// Verifies one round of each of several sequences in one pass: the products with the weights run over
/// the rows of all of them, attention and recurrence sequence by sequence. On the CPU in f32, picks,
/// caches and features are those of [`Verifier::verify`] on each, bit for bit, at the price that
/// [`DecoderModel::forward_batch`] names. Commits follow one by one, as after
/// [`verify`](Verifier::verify).
///
/// Targets are of one model if they were made from clones of it.
///
/// # Errors
/// Targets of different models; otherwise as [`Verifier::verify`] of any of them. Committed rows are as
/// they were, and no round of the batch counts as verified.
pub fn verify_batch(batch: &mut [BatchEntry<'_>]) -> Result<()> {
    let Some(first) = batch.first() else { return Ok(()) };
    let model = first.target.model.clone();
    let mut passes = Vec::with_capacity(batch.len());
    for BatchEntry { target, round, .. } in &mut *batch {
        target.verified = None;
        check_start(round.start(), &target.cache)?;
        if !target.model.shares_weights_with(&model) {
            return Err(Error::argument("target", "another model", "one model for a batch"));
        }
        let tree = round.tree();
        target.positions.clear();
        target.positions.resize(tree.len(), 0);
        round.positions_into(&mut target.positions)?;
        let CandleTarget { cache, taps, positions, .. } = &mut **target;
        let pass = Forward {
            tokens: tree.tokens(),
            positions,
            start: round.start(),
            mask: round.mask(),
            tree: Some(tree),
            want: Want::All,
            taps,
        };
        passes.push((cache, pass));
    }
    let outputs = model.forward_batch(&mut passes)?;
    for (entry, output) in batch.iter_mut().zip(&outputs) {
        let logits = output.logits.as_ref();
        pick(
            logits.ok_or_else(|| Error::argument("tree", "no slot", "a root"))?,
            &mut entry.picks,
        )?;
    }
    for (entry, output) in batch.iter_mut().zip(outputs) {
        let slots = entry.round.tree().len();
        entry.target.verified = Some(Verified { slots, taps: Taps::new(output.taps) });
    }
    Ok(())
}

fn check_start(start: usize, cache: &KvCache) -> Result<()> {
    if start == cache.len() {
        return Ok(());
    }
    Err(Error::argument("start", start, format!("the committed length {}", cache.len())))
}

/// Adds the pick of every row of `logits` (`[rows, vocab_size]`, f32). The device picks greedily;
/// for anything else, rows that the text reaches come to the host.
fn pick(logits: &Tensor, picks: &mut Picks<'_>) -> Result<()> {
    let vocab_size = logits.dim(D::Minus1)?;
    let logits = logits.contiguous()?;
    {
        // Where the host can read the logits, it does, without a copy.
        let (storage, layout) = logits.storage_and_layout();
        if let (Storage::Cpu(CpuStorage::F32(all)), Some((first, end))) =
            (&*storage, layout.contiguous_offsets())
        {
            for row in all[first..end].chunks_exact(vocab_size) {
                picks.push_logits(row)?;
            }
            return Ok(());
        }
    }
    if picks.rule() > PickRule::Argmax {
        for row in 0..logits.dim(0)? {
            if picks.wanted() {
                picks.push_logits(&logits.get(row)?.to_vec1()?)?;
            } else {
                picks.skip();
            }
        }
        return Ok(());
    }
    for (row, id) in argmax_on_device(&logits)?.into_iter().enumerate() {
        if id as usize >= vocab_size {
            return Err(Error::NonFiniteLogits { row });
        }
        picks.push(id);
    }
    Ok(())
}

/// The lowest id among the greatest logits of each row, or `vocab_size` for a row with a NaN or
/// +inf, or of nothing but -inf. candle's own `argmax` does not say which of equal values it takes.
fn argmax_on_device(logits: &Tensor) -> Result<Vec<u32>> {
    let (rows, vocab_size) = logits.dims2()?;
    let (shape, device) = ((rows, vocab_size), logits.device());
    let ids = Tensor::arange(0, vocab_size as u32, device)?.broadcast_as(shape)?;
    let none = Tensor::new(vocab_size as u32, device)?;
    let greatest = logits.max_keepdim(D::Minus1)?;
    let lowest = logits
        .broadcast_eq(&greatest)?
        .where_cond(&ids, &none.broadcast_as(shape)?)?
        .min(D::Minus1)?;
    let bad = (logits.ne(logits)?.to_dtype(DType::F32)?.max(D::Minus1)?
        + greatest.squeeze(1)?.abs()?.eq(f32::INFINITY)?.to_dtype(DType::F32)?)?;
    Ok(bad.gt(0f32)?.where_cond(&none.broadcast_as(rows)?, &lowest)?.to_vec1()?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The path for devices whose memory the host cannot read, run on the CPU.
    #[test]
    fn device_picks_equal_host_picks() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let rows = [
            [1.0, 3.0, 3.0, 2.0],
            [-inf, -4.0, -4.0, -5.0],
            [0.0, -0.0, -1.0, 0.0],
            [7.0, 7.0, 7.0, 7.5],
            [-inf; 4],
            [1.0, nan, 2.0, 0.0],
            [nan; 4],
            [1.0, inf, 2.0, inf],
        ];
        let logits = Tensor::new(&rows, &Device::Cpu).unwrap();
        let found = argmax_on_device(&logits).unwrap();
        for (row, found) in rows.iter().zip(found) {
            let mut ids = Vec::new();
            let expected = Picks::new(&mut ids).push_logits(row);
            // 4, the number of columns, stands for a refused row.
            let expected = expected.map_or(4, |()| ids[0]);
            assert_eq!(found, expected, "{row:?}");
        }
        assert!(pick(&logits, &mut Picks::new(&mut Vec::new())).is_err());
        let good = logits.narrow(0, 0, 4).unwrap();
        let mut ids = Vec::new();
        pick(&good, &mut Picks::new(&mut ids)).unwrap();
        assert_eq!(ids, [1, 1, 0, 3]);
    }
}
