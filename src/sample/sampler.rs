use super::{Constraint, PickRule, Sampling, TokenPath, noise};
use crate::{
    DraftTree, Error, NoiseKey,
    sample::noise::{ChunkNoise, Noise},
    top_k::{self, LogitsError, TopK},
};

/// Margin for the rounding of logarithms where a bound on noise stands for the noise.
const SLACK: f64 = 1e-9;

/// First guess at how many tokens top-p keeps.
const TOP_P_GUESS: usize = 64;

/// Turns rows of logits into picks, for one sequence.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    settings: Sampling,
    constraint: Option<Box<dyn Constraint>>,
    vocab_size: usize,
    prompt_len: usize,
    /// The slot that the picks of the round lead to and at which every token is forbidden.
    pub(crate) dead_end: Option<usize>,
    // Tokens of a path at most.
    longest: usize,

    // The tokens of the sequence, `history` of them, then those from the root to some slot.
    path: Vec<u32>,
    history: usize,
    row: Vec<f32>,
    // One per token while a row is penalised, all zero otherwise.
    counts: Vec<u32>,
    maxima: Vec<f32>,
    open: Vec<(f64, ChunkNoise)>,
    top_k: TopK,
    tokens: Vec<u32>,
    values: Vec<f32>,
}

/// The last token kept by truncation, in the order of [`top_k`].
#[derive(Clone, Copy, Debug)]
struct Cut {
    value: f32,
    token: u32,
}

impl Cut {
    /// Keeps every token that has any probability.
    const NONE: Self = Self { value: f32::MIN, token: u32::MAX };

    #[inline]
    fn keeps(self, value: f32, token: u32) -> bool {
        value > self.value || (value == self.value && token <= self.token)
    }
}

impl Sampler {
    /// Begins a sequence whose paths have at most `longest` tokens.
    pub(crate) fn start(
        &mut self,
        settings: &Sampling,
        vocab_size: usize,
        prompt_len: usize,
        longest: usize,
    ) {
        self.settings.clone_from(settings);
        self.vocab_size = vocab_size;
        self.prompt_len = prompt_len;
        self.dead_end = None;
        self.path.clear();
        self.history = 0;
        self.longest = longest;
        self.reserve();
        if !self.settings.is_greedy() {
            self.open.clear();
            self.open.reserve(vocab_size.div_ceil(noise::CHUNK));
        }
    }

    pub(crate) fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.constraint = constraint;
        self.reserve();
    }

    /// Makes room for what picks edit, if they do.
    fn reserve(&mut self) {
        if self.edits() {
            self.path.reserve(self.longest.saturating_sub(self.path.len()));
            self.row.reserve(self.vocab_size.saturating_sub(self.row.len()));
        }
    }

    /// Lets the next path be that of another sequence.
    pub(crate) fn forget(&mut self, prompt_len: usize) {
        self.prompt_len = prompt_len;
        self.history = 0;
    }

    /// Whether logits change before the temperature.
    fn edits(&self) -> bool {
        self.settings.edits() || self.is_constrained()
    }

    pub(crate) fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    pub(crate) fn settings(&self) -> &Sampling {
        &self.settings
    }

    /// What draws depend on if the first is for the token at `position`; `None` if picks are greedy.
    pub(crate) fn noise(&self, position: usize) -> Option<NoiseKey> {
        let Sampling { seed, temperature, .. } = self.settings;
        (!self.settings.is_greedy()).then_some(NoiseKey { seed, temperature, position })
    }

    pub(crate) fn rule(&self) -> PickRule {
        if self.is_constrained() { PickRule::Pipeline } else { self.settings.rule() }
    }

    /// Whether the constraint lets `token` follow the path to `parent`, a slot of `tree`, whose
    /// root is the last of `tokens`.
    pub(crate) fn allows(
        &mut self,
        tokens: &[u32],
        tree: &DraftTree,
        parent: usize,
        token: u32,
    ) -> bool {
        if self.constraint.is_none() {
            return true;
        }
        self.set_path(tokens, Some((tree, parent)));
        let path = TokenPath::new(&self.path, self.prompt_len);
        self.constraint.as_mut().is_none_or(|constraint| constraint.allows(path, token))
    }

    /// Picks the token after the path to a slot of a tree whose root is the last of `tokens`, or
    /// after `tokens`.
    ///
    /// # Errors
    ///
    /// If the row is of the wrong length or holds NaN or +inf, or no token is left.
    pub(crate) fn pick(
        &mut self,
        logits: &[f32],
        tokens: &[u32],
        node: Option<(&DraftTree, usize)>,
    ) -> Result<u32, Error> {
        let slot = node.map_or(0, |(_, slot)| slot);
        let depth = node.map_or(0, |(tree, slot)| tree.depths()[slot] as usize);
        if logits.len() != self.vocab_size && self.rule() != PickRule::Argmax {
            let (found, accepted) = (logits.len(), self.vocab_size);
            return Err(Error::Length { field: "logits", found, accepted });
        }
        let mut row = std::mem::take(&mut self.row);
        let edits = self.edits();
        if edits {
            self.set_path(tokens, node);
            row.clear();
            row.extend_from_slice(logits);
            self.edit(&mut row);
        }
        let noise = Noise::new(self.settings.seed, tokens.len() + depth);
        let picked = self.choose(if edits { &row } else { logits }, noise);
        self.row = row;
        match picked {
            Ok(Some(token)) => Ok(token),
            Ok(None) => Err(Error::NoToken { slot }),
            Err(source) => Err(Error::Logits { row: slot, source }),
        }
    }

    /// Makes `path` lead from the first token to a slot. `tokens` only ever grows within a request.
    fn set_path(&mut self, tokens: &[u32], node: Option<(&DraftTree, usize)>) {
        // What lies beyond the tokens seen last time may be a drafted path.
        let kept = self.history.min(tokens.len());
        self.path.truncate(kept);
        self.path.extend_from_slice(&tokens[kept..]);
        self.history = tokens.len();
        if let Some((tree, slot)) = node {
            let nodes = tree.ancestors(slot).filter(|&slot| slot > 0);
            self.path.extend(nodes.map(|slot| tree.tokens()[slot]));
            self.path[tokens.len()..].reverse();
        }
    }

    /// Bias, penalties and constraint, in this order.
    fn edit(&mut self, row: &mut [f32]) {
        for &(token, bias) in &self.settings.logit_bias {
            row[token as usize] += bias;
        }
        if self.settings.penalizes() {
            self.penalize(row);
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.constrain(TokenPath::new(&self.path, self.prompt_len), row);
        }
    }

    fn penalize(&mut self, row: &mut [f32]) {
        let settings = &self.settings;
        let first = if settings.penalize_prompt { 0 } else { self.prompt_len };
        let counted = &self.path[first..];
        let window = settings.penalty_window.unwrap_or(usize::MAX).min(counted.len());
        let counted = &counted[counted.len() - window..];
        self.counts.resize(row.len(), 0);
        for &token in counted {
            self.counts[token as usize] += 1;
        }
        for &token in counted {
            let count = std::mem::take(&mut self.counts[token as usize]);
            if count == 0 {
                continue;
            }
            let logit = &mut row[token as usize];
            if *logit > 0.0 {
                *logit /= settings.repetition_penalty;
            } else {
                *logit *= settings.repetition_penalty;
            }
            *logit -= count as f32 * settings.frequency_penalty + settings.presence_penalty;
        }
    }

    /// Picks from a row that needs no more edits; `None` if it is -inf throughout.
    fn choose(&mut self, row: &[f32], noise: Noise) -> Result<Option<u32>, LogitsError> {
        if self.settings.is_greedy() {
            let (token, max) = top_k::argmax(row)?;
            return Ok((max > f32::NEG_INFINITY).then_some(token));
        }
        let max = top_k::chunk_maxima(row, &mut self.maxima)?;
        if max == f32::NEG_INFINITY {
            return Ok(None);
        }
        let cut = self.truncate(row, max)?;
        Ok(self.race(row, cut, noise))
    }

    /// Where top-k, top-p and min-p cut a row off.
    fn truncate(&mut self, row: &[f32], max: f32) -> Result<Cut, LogitsError> {
        let settings = &self.settings;
        let mut cut = Cut::NONE;
        if settings.top_k.is_some() || settings.top_p < 1.0 {
            let scale = 1.0 / settings.temperature;
            let weight = |value: f32| f64::from(top_k::exp((value - max) * scale));
            let wanted = settings.top_k.unwrap_or(TOP_P_GUESS).min(row.len());
            let mut k = wanted;
            loop {
                self.tokens.clear();
                self.values.clear();
                self.top_k.select(row, k, &mut self.tokens, &mut self.values)?;
                let mut kept = k;
                if settings.top_p < 1.0 {
                    let total = match settings.top_k {
                        Some(_) => self.values.iter().map(|&value| weight(value)).sum(),
                        None => top_k::sum_exp(row, max, scale),
                    };
                    let enough = f64::from(settings.top_p) * total;
                    let mut sum = 0.0;
                    let crossing = self.values.iter().position(|&value| {
                        sum += weight(value);
                        sum >= enough
                    });
                    match crossing {
                        Some(last) => kept = last + 1,
                        None if settings.top_k.is_none() && k < row.len() => {
                            k = (8 * k).min(row.len());
                            continue;
                        }
                        None => {}
                    }
                }
                cut = Cut { value: self.values[kept - 1], token: self.tokens[kept - 1] };
                break;
            }
        }
        if settings.min_p > 0.0 {
            let below = f64::from(settings.temperature) * noise::ln(f64::from(settings.min_p));
            let floor = f64::from(max) + below;
            let rounded = floor as f32;
            let floor = if f64::from(rounded) < floor { rounded.next_up() } else { rounded };
            if floor > cut.value {
                cut = Cut { value: floor, token: u32::MAX };
            }
        }
        if cut.value < Cut::NONE.value { Ok(Cut::NONE) } else { Ok(cut) }
    }

    /// The token with the greatest sum of `logit / temperature` and noise among those kept.
    ///
    /// Noise is drawn chunk by chunk first. Only chunks whose bound reaches the best sum so far are
    /// looked into, the most promising one first.
    fn race(&mut self, row: &[f32], cut: Cut, noise: Noise) -> Option<u32> {
        let temperature = f64::from(self.settings.temperature);
        let scaled = |value: f32| f64::from(value) / temperature;
        self.open.clear();
        let mut first = 0;
        for (chunk, &max) in self.maxima.iter().enumerate() {
            if max >= cut.value {
                let draw = noise.chunk(chunk as u32);
                let bound = scaled(max) + (draw.bound() + SLACK);
                if self.open.get(first).is_none_or(|&(best, _)| bound > best) {
                    first = self.open.len();
                }
                self.open.push((bound, draw));
            }
        }
        if !self.open.is_empty() {
            self.open.swap(0, first);
        }
        let mut best: Option<(f64, u32)> = None;
        for (bound, draw) in &self.open {
            if best.is_some_and(|(best, _)| *bound < best) {
                continue;
            }
            let start = draw.chunk() as usize * noise::CHUNK;
            let most = draw.bound() + SLACK;
            for (token, &value) in (start as u32..).zip(row[start..].iter().take(noise::CHUNK)) {
                if !cut.keeps(value, token)
                    || best.is_some_and(|(best, _)| scaled(value) + most < best)
                {
                    continue;
                }
                let sum = scaled(value) + noise.in_chunk(draw, token);
                if best.is_none_or(|(best, lowest)| sum > best || (sum == best && token < lowest)) {
                    best = Some((sum, token));
                }
            }
        }
        best.map(|(_, token)| token)
    }

    pub(crate) fn memory_usage(&self) -> usize {
        4 * (self.path.capacity()
            + self.row.capacity()
            + self.counts.capacity()
            + self.maxima.capacity()
            + self.tokens.capacity()
            + self.values.capacity())
            + self.open.capacity() * size_of::<(f64, ChunkNoise)>()
            + self.top_k.memory_usage()
    }
}
