//! Rows of logits on the host: the k largest, the normaliser, and log-probabilities.
//!
//! A vocabulary row is long (151,936 logits in the Qwen models) and a proposal has one per depth,
//! so these functions are written to stay near the speed at which a row can be read. They are plain
//! safe Rust in a shape that compilers turn into vector code on every target.
//!
//! # Order
//!
//! All functions share one order: larger values first, and among equal values the lower token id
//! first. `-0.0` and `0.0` are equal. `-inf` is an ordinary value that sorts last; it is how a
//! masked token looks.
//!
//! # Rows that are refused
//!
//! A NaN or a `+inf` anywhere in a row is an error that names the first such entry, also where that
//! entry could not have changed the result: it means that the forward pass that made the row went
//! wrong. An empty row is an error, too.
//!
//! # Method
//!
//! [`TopK`] first takes the maximum of every chunk of the row. The k-th largest chunk maximum is a
//! value that at least k entries reach, so everything below it can be ignored, and only the few
//! chunks that reach it are read again. Entries that pass go to a buffer of `2k` candidates; when
//! it is full, the best k stay and the bar rises to the last of them.
//!
//! [`log_sum_exp`] reduces `exp(x)` to `2^n * exp(r)` with `|r| <= ln(2) / 2` (Cody and Waite,
//! *Software Manual for the Elementary Functions*, 1980) and evaluates `exp(r)` as a polynomial of
//! degree five whose coefficients minimise the largest relative error.

/// Width of the inner loops: a multiple of the vector width of common targets.
const LANES: usize = 16;

/// The longest chunk of the prefilter, and the unit in which rows are summed.
const CHUNK: usize = 256;

/// A row of logits that no function of this module accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogitsError {
    /// The row has no entry.
    #[error("logits: the row is empty, at least one entry is needed")]
    Empty,
    /// The row has more entries than token ids exist.
    #[error("logits: the row has {len} entries, at most {} have a 32-bit token id", u32::MAX)]
    TooLong {
        /// Entries in the row.
        len: usize,
    },
    /// An entry is NaN.
    #[error("logits[{index}] is NaN, every entry must be finite or -inf")]
    NotANumber {
        /// The token id of the first refused entry.
        index: usize,
    },
    /// An entry is `+inf`.
    #[error("logits[{index}] is +inf, every entry must be finite or -inf")]
    PositiveInfinity {
        /// The token id of the first refused entry.
        index: usize,
    },
}

/// Buffers for taking the k largest entries of rows.
///
/// One object serves rows of any length and any k. Its buffers grow to the largest call made and
/// are then reused: repeating a call of the same row length and k allocates nothing.
///
/// # Complexity
///
/// For a row of V logits, every method takes `O(V + k log k)` time whatever the values are: one
/// pass over the row, then a second look at no more than `3k` of its chunks (at most 256 entries
/// each), in which every accepted entry costs `O(1)` amortised. Ties do not change the bound: of
/// equal entries, no more than `2k` are accepted before the bar rises above them. On common rows
/// about k chunks are looked at again.
///
/// Space is `O(V / 16 + k)`, with `V / 256` in place of `V / 16` while `k <= V / 2048`.
///
/// # Examples
///
/// ```
/// use ddtree::top_k::TopK;
///
/// let logits = [0.5, 2.0, f32::NEG_INFINITY, 2.0, 1.0];
/// let (mut tokens, mut values) = (Vec::new(), Vec::new());
/// TopK::new().select(&logits, 3, &mut tokens, &mut values)?;
/// assert_eq!(tokens, [1, 3, 4]);
/// assert_eq!(values, [2.0, 2.0, 1.0]);
/// # Ok::<(), ddtree::top_k::LogitsError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TopK {
    /// The maximum of every chunk, in row order.
    maxima: Vec<f32>,
    /// A copy of `maxima` to be reordered.
    ranked: Vec<f32>,
    /// Entries that may be among the k largest, as [`pack`] makes them.
    candidates: Vec<u64>,
}

impl TopK {
    /// Creates an object that has allocated nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Heap memory held, in bytes.
    #[must_use]
    pub fn memory_usage(&self) -> usize {
        (self.maxima.capacity() + self.ranked.capacity()) * size_of::<f32>()
            + self.candidates.capacity() * size_of::<u64>()
    }

    /// Appends the `min(k, logits.len())` largest entries of a row: their token ids to `tokens`,
    /// their logits to `values`, in the [order](self#order) of this module.
    ///
    /// The row is checked whole even if k is 0.
    ///
    /// # Errors
    ///
    /// If the row is [refused](self#rows-that-are-refused). Nothing is appended then.
    pub fn select(
        &mut self,
        logits: &[f32],
        k: usize,
        tokens: &mut Vec<u32>,
        values: &mut Vec<f32>,
    ) -> Result<(), LogitsError> {
        self.rank(logits, k)?;
        tokens.extend(self.candidates.iter().map(|&c| token(c)));
        values.extend(self.candidates.iter().map(|&c| logits[token(c) as usize]));
        Ok(())
    }

    /// Appends the `min(k, logits.len())` most probable tokens of a row and the natural logarithms
    /// of their probabilities: one depth of a proposal.
    ///
    /// A log-probability is the logit minus [`log_sum_exp`] of the whole row, not of the k entries;
    /// the normaliser is rounded to f32 and subtracted in f32, as the published DDTree
    /// implementation does. None is above zero. In a row that is `-inf` throughout, no token has
    /// any probability: each log-probability is `-inf`.
    ///
    /// # Errors
    ///
    /// If the row is [refused](self#rows-that-are-refused). Nothing is appended then.
    ///
    /// # Examples
    ///
    /// ```
    /// use ddtree::top_k::TopK;
    ///
    /// // Probabilities 1/8, 1/2, 1/8 and 1/4, of which the logits are the logarithms plus 3.
    /// let logits = [0.125f32, 0.5, 0.125, 0.25].map(|p| p.ln() + 3.0);
    /// let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    /// TopK::new().top_k_log_probs(&logits, 2, &mut tokens, &mut log_probs)?;
    /// assert_eq!(tokens, [1, 3]);
    /// assert!((log_probs[0] - 0.5f32.ln()).abs() < 1e-6);
    /// assert!((log_probs[1] - 0.25f32.ln()).abs() < 1e-6);
    /// # Ok::<(), ddtree::top_k::LogitsError>(())
    /// ```
    pub fn top_k_log_probs(
        &mut self,
        logits: &[f32],
        k: usize,
        tokens: &mut Vec<u32>,
        log_probs: &mut Vec<f32>,
    ) -> Result<(), LogitsError> {
        let max = self.rank(logits, k)?;
        let normaliser = log_sum_exp_below(logits, max) as f32;
        tokens.extend(self.candidates.iter().map(|&c| token(c)));
        log_probs.extend(self.candidates.iter().map(|&c| {
            // A row of -inf alone would give -inf - -inf.
            if max == f32::NEG_INFINITY { max } else { logits[token(c) as usize] - normaliser }
        }));
        Ok(())
    }

    /// Leaves the `min(k, logits.len())` best entries in `candidates`, best first, and returns the
    /// row's maximum.
    fn rank(&mut self, logits: &[f32], k: usize) -> Result<f32, LogitsError> {
        check_len(logits)?;
        let k = k.min(logits.len());
        // Short chunks when k is large: several chunks per wanted entry let the prefilter exclude
        // most of the row.
        let chunk_len = (logits.len() / (8 * k.max(1)) / LANES * LANES).clamp(LANES, CHUNK);

        self.candidates.clear();
        self.maxima.clear();
        let mut max = f32::NEG_INFINITY;
        let mut nan = false;
        for chunk in logits.chunks(chunk_len) {
            let scan = scan(chunk);
            nan |= scan.nan;
            max = larger(max, scan.max);
            self.maxima.push(scan.max);
        }
        check_values(logits, max, nan)?;
        if k == 0 {
            return Ok(max);
        }

        // With fewer chunks than k there is no bar to begin with; it rises with the candidates.
        let mut bar = f32::NEG_INFINITY;
        if k <= self.maxima.len() {
            self.ranked.clear();
            self.ranked.extend_from_slice(&self.maxima);
            bar = *self.ranked.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
        }

        let full = logits.len().min(2 * k);
        self.candidates.reserve(full);
        for (chunk, (entries, &chunk_max)) in logits.chunks(chunk_len).zip(&self.maxima).enumerate()
        {
            if chunk_max < bar {
                continue;
            }
            for (i, &value) in entries.iter().enumerate() {
                if value >= bar {
                    if self.candidates.len() == full {
                        // Later entries come after equal ones that are kept, so the bar is the next
                        // larger value.
                        let kth = keep_best(&mut self.candidates, k);
                        bar = logits[token(kth) as usize].next_up();
                        if value < bar {
                            continue;
                        }
                    }
                    self.candidates.push(pack(value, chunk * chunk_len + i));
                }
            }
        }
        if self.candidates.len() > k {
            keep_best(&mut self.candidates, k);
        }
        self.candidates.sort_unstable_by(|a, b| b.cmp(a));
        Ok(max)
    }
}

/// The token id and the logit of the largest entry of a row; of equal ones, the lowest id.
///
/// Takes one pass over the row and no memory.
///
/// # Errors
///
/// If the row is [refused](self#rows-that-are-refused).
///
/// # Examples
///
/// ```
/// use ddtree::top_k::{LogitsError, argmax};
///
/// assert_eq!(argmax(&[-1.0, 3.0, 3.0]), Ok((1, 3.0)));
/// assert_eq!(argmax(&[-1.0, f32::NAN]), Err(LogitsError::NotANumber { index: 1 }));
/// ```
pub fn argmax(logits: &[f32]) -> Result<(u32, f32), LogitsError> {
    check_len(logits)?;
    let mut max = f32::NEG_INFINITY;
    let mut best = 0;
    let mut nan = false;
    for (chunk, entries) in logits.chunks(CHUNK).enumerate() {
        let scan = scan(entries);
        nan |= scan.nan;
        if scan.max > max {
            (max, best) = (scan.max, chunk * CHUNK);
        }
    }
    check_values(logits, max, nan)?;
    // The first chunk to reach the maximum holds its first occurrence.
    while logits[best] != max {
        best += 1;
    }
    Ok((best as u32, logits[best]))
}

/// The natural logarithm of the sum of `exp(x)` over a row, `-inf` if the row is `-inf` throughout.
///
/// The result is never below the row's maximum, and it does not overflow.
///
/// # Accuracy
///
/// The result differs from the exact one by at most `6.5e-7 + 6e-8 * ln(V)` for V logits, which is
/// `1.4e-6` for 151,936. The first part covers the exponentials and their sum, the second the
/// rounding of the differences to the maximum. These errors mostly cancel: a normally distributed
/// row of 151,936 is off by less than `1e-7`. Entries more than 86 below the maximum count as if
/// they were 86 below.
///
/// # Complexity
///
/// Two passes over the row, no memory.
///
/// # Errors
///
/// If the row is [refused](self#rows-that-are-refused).
///
/// # Examples
///
/// ```
/// use ddtree::top_k::log_sum_exp;
///
/// let normaliser = log_sum_exp(&[1000.0, 1000.0, f32::NEG_INFINITY])?;
/// assert!((normaliser - (1000.0 + 2f64.ln())).abs() < 1e-6);
/// # Ok::<(), ddtree::top_k::LogitsError>(())
/// ```
pub fn log_sum_exp(logits: &[f32]) -> Result<f64, LogitsError> {
    check_len(logits)?;
    let mut max = f32::NEG_INFINITY;
    let mut nan = false;
    for chunk in logits.chunks(CHUNK) {
        let scan = scan(chunk);
        nan |= scan.nan;
        max = larger(max, scan.max);
    }
    check_values(logits, max, nan)?;
    Ok(log_sum_exp_below(logits, max))
}

/// Replaces `maxima` by the maximum of every 256 entries, and returns that of the row.
pub(crate) fn chunk_maxima(logits: &[f32], maxima: &mut Vec<f32>) -> Result<f32, LogitsError> {
    check_len(logits)?;
    maxima.clear();
    let mut max = f32::NEG_INFINITY;
    let mut nan = false;
    for chunk in logits.chunks(CHUNK) {
        let scan = scan(chunk);
        nan |= scan.nan;
        max = larger(max, scan.max);
        maxima.push(scan.max);
    }
    check_values(logits, max, nan)?;
    Ok(max)
}

/// [`log_sum_exp`] of a row that has been checked and whose maximum is known.
fn log_sum_exp_below(logits: &[f32], max: f32) -> f64 {
    if max == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    f64::from(max) + sum_exp(logits, max, 1.0).ln()
}

/// The sum of `exp((x - max) * scale)` over a row whose maximum is `max`. The result is the same on
/// every platform.
pub(crate) fn sum_exp(logits: &[f32], max: f32, scale: f32) -> f64 {
    // f32 would lose digits over a whole row: it adds runs of four terms, then four runs; f64 does
    // the rest.
    let mut sum = 0f64;
    for chunk in logits.chunks(CHUNK) {
        let (blocks, rest) = chunk.as_chunks::<LANES>();
        let mut lanes = [0f32; LANES];
        for blocks in blocks.chunks(4) {
            let mut run = [0f32; LANES];
            for block in blocks {
                for (term, &x) in run.iter_mut().zip(block) {
                    *term += exp((x - max) * scale);
                }
            }
            for (lane, term) in lanes.iter_mut().zip(run) {
                *lane += term;
            }
        }
        sum += lanes.into_iter().map(f64::from).sum::<f64>();
        sum += rest.iter().map(|&x| f64::from(exp((x - max) * scale))).sum::<f64>();
    }
    sum
}

/// `exp(x)` for `x <= 0`, with `exp(-86)` for everything below -86.
///
/// `exp(0)` is exactly 1. The relative error is below `2.5e-7`: `1.1e-7` from the polynomial, the
/// rest from rounding. There is no branch and no call, so that loops around it vectorise.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it to a small number rounds that to an integer, found in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    /// `ln(2)` in two parts; the first has so few digits that its product with an exponent is
    /// exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// `exp(r)` is approximated by `1 + r + r^2 * q(r)`; these are the coefficients of q.
    const Q: [f32; 4] = [0.499_992_3, 0.166_671_16, 0.041_890_334, 0.008_312_503];

    let x = larger(x, -86.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let r2 = r * r;
    let q = (Q[3] * r + Q[2]) * r2 + (Q[1] * r + Q[0]);
    let y = q * r2 + (r + 1.0);
    // Adds n to the exponent of y. The shift drops all bits of `rounded` but those of n.
    f32::from_bits(y.to_bits().wrapping_add(rounded.to_bits() << 23))
}

/// What one pass over a chunk finds.
struct Scan {
    /// The maximum, `-inf` at least; meaningless if there is a NaN.
    max: f32,
    /// Whether any entry is NaN.
    nan: bool,
}

#[inline(always)]
fn scan(chunk: &[f32]) -> Scan {
    const HALF: usize = LANES / 2;
    let (blocks, rest) = chunk.as_chunks::<LANES>();
    let mut max = [f32::NEG_INFINITY; LANES];
    // One comparison instruction tells whether either of two numbers is NaN.
    let mut nan = [false; HALF];
    for block in blocks {
        for i in 0..LANES {
            max[i] = larger(max[i], block[i]);
        }
        for i in 0..HALF {
            nan[i] |= block[i].is_nan() | block[i + HALF].is_nan();
        }
    }
    let mut width = HALF;
    while width > 0 {
        for i in 0..width {
            max[i] = larger(max[i], max[i + width]);
        }
        width /= 2;
    }
    Scan {
        max: rest.iter().copied().fold(max[0], larger),
        nan: nan.contains(&true) || rest.iter().any(|x| x.is_nan()),
    }
}

/// The larger of two numbers. Unlike `f32::max` it is one instruction where NaN need not be
/// respected.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

fn check_len(logits: &[f32]) -> Result<(), LogitsError> {
    match u32::try_from(logits.len()) {
        Ok(0) => Err(LogitsError::Empty),
        Ok(_) => Ok(()),
        Err(_) => Err(LogitsError::TooLong { len: logits.len() }),
    }
}

/// Refuses a row in which a scan met a NaN or `+inf`, naming its first such entry.
fn check_values(logits: &[f32], max: f32, nan: bool) -> Result<(), LogitsError> {
    if !nan && max < f32::INFINITY {
        return Ok(());
    }
    match logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
        Some(index) if logits[index].is_nan() => Err(LogitsError::NotANumber { index }),
        Some(index) => Err(LogitsError::PositiveInfinity { index }),
        None => Ok(()),
    }
}

/// An entry as an integer: a greater one is a larger value or, of equal values, a lower index.
fn pack(value: f32, index: usize) -> u64 {
    // The sum turns -0.0 into 0.0 and changes nothing else.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!(index as u32))
}

/// The index of a packed entry.
fn token(packed: u64) -> u32 {
    !(packed as u32)
}

/// Drops all but the k best candidates, and returns the last of those.
fn keep_best(candidates: &mut Vec<u64>, k: usize) -> u64 {
    let kth = *candidates.select_nth_unstable_by(k - 1, |a, b| b.cmp(a)).1;
    candidates.truncate(k);
    kth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn exp_is_exact_at_zero_and_close_below() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        // Every 1009th float of [-86, 0].
        for x in (0..).step_by(1009).map(|i| -f32::from_bits(i)).take_while(|&x| x >= -86.0) {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
        }
    }

    #[test]
    fn exp_stops_falling_at_its_lower_end() {
        let floor = exp(-86.0);
        assert!(floor > 0.0 && floor.is_normal());
        for x in [-86.1, -1e9, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp(x), floor);
        }
    }

    #[test]
    fn packed_entries_order_by_value_then_lower_index() {
        let rising =
            [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::from_bits(1), 0.0, f32::from_bits(1), 1.0];
        for pair in rising.windows(2) {
            assert!(pack(pair[0], 0) < pack(pair[1], u32::MAX as usize - 1));
        }
        assert!(pack(1.0, 3) > pack(1.0, 4));
        assert!(pack(-0.0, 3) > pack(0.0, 4));
        assert!(pack(0.0, 3) > pack(-0.0, 4));
        assert_eq!(token(pack(-2.5, 151_935)), 151_935);
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn a_scan_sees_every_place_of_a_chunk() {
        for len in [1, LANES - 1, LANES, LANES + 1, CHUNK - 1, CHUNK] {
            for at in 0..len {
                let mut chunk = vec![-3.0; len];
                chunk[at] = 2.0;
                let found = scan(&chunk);
                assert_eq!((found.max, found.nan), (2.0, false), "len {len}, at {at}");
                chunk[at] = f32::NAN;
                assert!(scan(&chunk).nan, "len {len}, at {at}");
            }
        }
    }
}
