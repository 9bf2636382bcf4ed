//! The decoder behind [`Verifier`].

use candle_core::{CpuStorage, D, DType, Storage, Tensor};

use super::{DecoderModel, Error, Forward, KvCache, Output, Result, StateMethod, Want};
use crate::{
    Capabilities, CommitPlan, PickRule, Picks, Prefill, Recurrence, Round, Verifier,
    top_k::LogitsError,
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

    /// Runs `tokens` one after another in the rows from `start` on.
    fn append(&mut self, start: usize, tokens: &[u32], want: Want<'_>) -> Result<Output> {
        self.positions.clear();
        self.positions.extend(start as u32..(start + tokens.len()) as u32);
        let (positions, taps) = (&self.positions, &self.taps);
        let pass = Forward { tokens, positions, start, mask: None, tree: None, want, taps };
        self.model.forward(&mut self.cache, &pass)
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
            let last = row + chunk.len() == start + tokens.len();
            let want = if last { Want::Last } else { Want::Nothing };
            let output = self.append(row, chunk, want)?;
            hidden.extend(output.taps);
            logits = output.logits;
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
        let pass = pass_of(round, &self.cache, &mut self.positions, &self.taps)?;
        let output = self.model.forward(&mut self.cache, &pass)?;
        self.verified = Some(picked(output, round, picks)?);
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Taps> {
        check_start(plan.start(), &self.cache)?;
        // Taken out: if rows have begun to move, the round has to be verified again.
        let verified = self
            .verified
            .take()
            .ok_or_else(|| Error::argument("plan", "no verification", "a commit after verify"))?;
        if let Some(slot) = plan.path().iter().find(|&&slot| slot as usize >= verified.slots) {
            let accepted = format!("slots below {}", verified.slots);
            return Err(Error::argument("plan", slot, accepted));
        }
        let taps = verified.taps.select(plan.path())?;
        self.cache.commit(plan.start(), plan.path())?;
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
    // Of all, before anything can fail.
    batch.iter_mut().for_each(|entry| entry.target.verified = None);
    let mut passes = Vec::with_capacity(batch.len());
    for BatchEntry { target, round, .. } in &mut *batch {
        let CandleTarget { model: own, cache, taps, positions, .. } = &mut **target;
        if !own.shares_weights_with(&model) {
            return Err(Error::argument("target", "another model", "one model for a batch"));
        }
        let pass = pass_of(round, cache, positions, taps)?;
        passes.push((cache, pass));
    }
    let outputs = model.forward_batch(&mut passes)?;
    let mut verified = Vec::with_capacity(batch.len());
    for (entry, output) in batch.iter_mut().zip(outputs) {
        verified.push(picked(output, &entry.round, &mut entry.picks)?);
    }
    for (entry, verified) in batch.iter_mut().zip(verified) {
        entry.target.verified = Some(verified);
    }
    Ok(())
}

/// The pass that verifies `round` after the committed rows of `cache`; its positions go into
/// `positions`.
fn pass_of<'a>(
    round: &'a Round<'_>,
    cache: &KvCache,
    positions: &'a mut Vec<u32>,
    taps: &'a [usize],
) -> Result<Forward<'a>> {
    check_start(round.start(), cache)?;
    let tree = round.tree();
    positions.clear();
    positions.resize(tree.len(), 0);
    round.positions_into(positions)?;
    Ok(Forward {
        tokens: tree.tokens(),
        positions,
        start: round.start(),
        mask: round.mask(),
        tree: Some(tree),
        want: Want::All,
        taps,
    })
}

/// Adds the picks of all slots of `round` and keeps what its commit needs.
fn picked(output: Output, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<Verified> {
    let logits = output.logits.ok_or_else(|| Error::argument("tree", "no slot", "a root"))?;
    pick(&logits, picks)?;
    Ok(Verified { slots: round.tree().len(), taps: Taps::new(output.taps) })
}

fn check_start(start: usize, cache: &KvCache) -> Result<()> {
    if start == cache.len() {
        return Ok(());
    }
    Err(Error::argument("start", start, format!("the committed length {}", cache.len())))
}

/// Adds the pick of every row of `logits` (`[rows, vocab_size]`, f32).
///
/// # Errors
/// [`Error::NonFiniteLogits`] for a row that the text reaches and that holds NaN or +inf, or nothing
/// but -inf, wherever and however it is picked from; otherwise as [`Picks::push_logits`].
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
                pick_row(row, picks)?;
            }
            return Ok(());
        }
    }
    pick_on_device(&logits, picks)
}

/// As [`pick`] where the host cannot read the logits. The device picks greedily; for anything else,
/// rows that the text reaches come to the host.
fn pick_on_device(logits: &Tensor, picks: &mut Picks<'_>) -> Result<()> {
    if picks.rule() > PickRule::Argmax {
        for row in 0..logits.dim(0)? {
            if picks.wanted() {
                pick_row(&row_alone(logits, row)?.to_vec1()?, picks)?;
            } else {
                picks.skip();
            }
        }
        return Ok(());
    }
    let vocab_size = logits.dim(D::Minus1)?;
    for (row, id) in argmax_on_device(logits)?.into_iter().enumerate() {
        if (id as usize) < vocab_size {
            picks.push(id);
        } else if picks.wanted() {
            return Err(Error::NonFiniteLogits { row });
        } else {
            picks.skip();
        }
    }
    Ok(())
}

/// Adds the pick of the next row, and says of all rows that are no logits the same.
pub(super) fn pick_row(logits: &[f32], picks: &mut Picks<'_>) -> Result<()> {
    use LogitsError::{NotANumber, PositiveInfinity};
    let row = picks.ids().len();
    picks.push_logits(logits).map_err(|error| match error {
        crate::Error::Logits { source: NotANumber { .. } | PositiveInfinity { .. }, .. } => {
            Error::NonFiniteLogits { row }
        }
        // Bias and constraint can forbid all tokens of a good row.
        crate::Error::NoToken { .. } if logits.iter().all(|&logit| logit == f32::NEG_INFINITY) => {
            Error::NonFiniteLogits { row }
        }
        other => other.into(),
    })
}

/// A row of a matrix in storage of its own: candle copies all of a view's storage to the host.
fn row_alone(matrix: &Tensor, row: usize) -> Result<Tensor> {
    Ok(matrix.get(row)?.force_contiguous()?)
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
    use crate::{Algorithm, Config, Plan, Request, Sampling, Session};

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
        let good = logits.narrow(0, 0, 4).unwrap();
        let mut ids = Vec::new();
        pick(&good, &mut Picks::new(&mut ids)).unwrap();
        assert_eq!(ids, [1, 1, 0, 3]);
        pick_on_device(&good, &mut Picks::new(&mut ids)).unwrap();
        assert_eq!(ids, [1, 1, 0, 3]);
    }

    /// Picks the first token of a text from `row`, on the host and as for a device.
    fn pick_first(row: [f32; 4], sampling: Sampling) -> [Result<u32>; 2] {
        let plan = Config::new(Algorithm::Autoregressive);
        let plan = Plan::resolve(&plan, &Capabilities::new(4, 16), 0).unwrap();
        let logits = Tensor::new(&[row], &Device::Cpu).unwrap();
        [pick, pick_on_device].map(|pick| {
            let mut session = Session::new(plan.clone());
            session.start(&Request::new(&[1]).sampling(sampling.clone())).unwrap();
            let (_, mut picks) = session.prefill().unwrap();
            pick(&logits, &mut picks).map(|()| picks.ids()[0])
        })
    }

    #[test]
    fn one_fault_is_one_error_however_rows_are_picked_from() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let edited = Sampling::new().logit_bias(&[(2, 0.5)]);
        let settings = [Sampling::new(), Sampling::new().temperature(0.7), edited];
        for sampling in settings {
            for row in [[1.0, nan, 2.0, 0.0], [nan; 4], [1.0, inf, 2.0, 0.0], [-inf; 4]] {
                for picked in pick_first(row, sampling.clone()) {
                    let refused = matches!(picked, Err(Error::NonFiniteLogits { row: 0 }));
                    assert!(refused, "{row:?}, {sampling:?}: {picked:?}");
                }
            }
            let found = pick_first([-inf, -inf, 3.0, -inf], sampling);
            assert!(found.into_iter().all(|picked| picked.unwrap() == 2));
        }
        // Nothing is wrong with these logits.
        let forbidden = Sampling::new().logit_bias(&[(0, -inf), (1, -inf), (2, -inf), (3, -inf)]);
        for picked in pick_first([1.0, 2.0, 3.0, 4.0], forbidden) {
            assert!(matches!(picked, Err(Error::Core(crate::Error::NoToken { .. }))), "{picked:?}");
        }
    }

    #[test]
    fn a_row_alone_has_storage_of_its_own() {
        let logits = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let row = row_alone(&logits, 1).unwrap();
        let (storage, _) = row.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else { panic!("{storage:?}") };
        assert_eq!(values, &[4.0, 5.0, 6.0, 7.0]);
    }
}
