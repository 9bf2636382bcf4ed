//! A target and a drafter that are small, deterministic and unforgiving.
//!
//! The target's next token depends on every token before it and on its
//! position. It is computed from cache rows, in two layers: a row's hidden value
//! depends on the rows it sees, and the pick on the hidden values of the rows
//! seen. A wrong position, mask or row move, a stale row that is read, or one
//! that was computed in another context changes the text.

use std::ops::ControlFlow;

use ddtree::{
    Attention, Capabilities, CommitPlan, Committed, Decoder, Drafter, Engine, Error, Finish,
    MaskForm, Picks, Prefill, Proposal, ProposalRequest, Request, Round, Verifier,
};

pub const VOCAB: u32 = 13;

/// What a failed call leaves behind, and what a fresh cache holds.
const GARBAGE: Row = Row { token: 0xdead, position: 0xdead, hidden: 0xdead };

pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A row of the target's cache, which is also the feature that it hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    pub hidden: u64,
}

impl Row {
    fn key(&self) -> u64 {
        mix(u64::from(self.token) + 1 + (self.position as u64) * 1_000_003)
    }

    fn value(&self) -> u64 {
        mix(self.key() ^ self.hidden)
    }
}

/// The text by definition: what the target says, without any cache.
#[derive(Clone, Debug, Default)]
pub struct Text {
    rows: Vec<Row>,
    keys: u64,
    values: u64,
    /// See [`Target::behind`].
    pub behind: usize,
}

impl Text {
    pub fn new(tokens: &[u32]) -> Self {
        let mut text = Self::default();
        tokens.iter().for_each(|&token| text.push(token));
        text
    }

    pub fn push(&mut self, token: u32) {
        let position = self.rows.len().saturating_sub(self.behind);
        let mut row = Row { token, position, hidden: 0 };
        self.keys = self.keys.wrapping_add(row.key());
        row.hidden = self.keys;
        self.values = self.values.wrapping_add(row.value());
        self.rows.push(row);
    }

    pub fn next(&self) -> u32 {
        (mix(self.values) % u64::from(VOCAB)) as u32
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }
}

/// The tokens that plain decoding emits, and why it ends.
pub fn plain(prompt: &[u32], limit: usize, stops: &[u32], max_len: usize) -> (Vec<u32>, Finish) {
    let mut text = Text::new(prompt);
    let mut emitted = Vec::new();
    loop {
        if emitted.len() == limit {
            return (emitted, Finish::TokenLimit);
        }
        if text.rows.len() > max_len {
            return (emitted, Finish::CacheFull);
        }
        let token = text.next();
        emitted.push(token);
        text.push(token);
        if stops.contains(&token) {
            return (emitted, Finish::StopToken);
        }
    }
}

/// A kind of call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Reset,
    Prefill,
    Verify,
    Commit,
    DrafterReset,
    Observe,
    Propose,
}

pub const CALLS: [Call; 7] = [
    Call::Reset,
    Call::Prefill,
    Call::Verify,
    Call::Commit,
    Call::DrafterReset,
    Call::Observe,
    Call::Propose,
];

#[derive(Debug, thiserror::Error)]
#[error("{0:?} was told to fail")]
pub struct Fault(pub Call);

/// Counts calls and says which of them fail.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    counts: [usize; CALLS.len()],
    /// The n-th call of a kind, from 0.
    pub nth: Option<(Call, usize)>,
    /// Every call of a kind.
    pub always: Option<Call>,
}

impl Faults {
    fn strike(&mut self, call: Call) -> bool {
        let count = self.counts[call as usize];
        self.counts[call as usize] += 1;
        self.nth == Some((call, count)) || self.always == Some(call)
    }

    pub fn count(&self, call: Call) -> usize {
        self.counts[call as usize]
    }
}

#[derive(Clone, Debug)]
pub struct Target {
    capabilities: Capabilities,
    cache: Vec<Row>,
    committed: usize,
    // Slots of the last verification; 0 if there is nothing to commit.
    verified: usize,
    pub faults: Faults,
    /// Slots of every verification.
    pub widths: Vec<usize>,
    /// Whether a verification was given a mask.
    pub masks: Vec<bool>,
    /// By how much positions are behind rows after an image at the start, all of whose rows have
    /// position 0.
    pub behind: usize,
    /// Whether a prefill that fails has committed its rows.
    pub hasty: bool,
}

impl Target {
    pub fn new(max_len: usize) -> Self {
        Self::with(Capabilities::new(VOCAB as usize, max_len))
    }

    pub fn with(capabilities: Capabilities) -> Self {
        Self {
            cache: vec![GARBAGE; capabilities.max_len],
            capabilities,
            committed: 0,
            verified: 0,
            faults: Faults::default(),
            widths: Vec::new(),
            masks: Vec::new(),
            behind: 0,
            hasty: false,
        }
    }

    pub fn causal(max_len: usize) -> Self {
        let mut capabilities = Capabilities::new(VOCAB as usize, max_len);
        capabilities.attention = Attention::Causal;
        Self::with(capabilities)
    }

    pub fn links(max_len: usize) -> Self {
        let mut capabilities = Capabilities::new(VOCAB as usize, max_len);
        capabilities.mask = MaskForm::Links;
        Self::with(capabilities)
    }

    pub fn committed_rows(&self) -> &[Row] {
        &self.cache[..self.committed]
    }

    /// The caches equal those of plain decoding of `tokens`, of which the last
    /// is the root or the end of the text and has no row.
    pub fn assert_plain(&self, tokens: &[u32]) {
        assert_eq!(self.committed, tokens.len() - 1, "all rows but that of the last token");
        assert_eq!(self.committed_rows(), &Text::new(tokens).rows()[..tokens.len() - 1]);
    }

    /// Runs both layers over a window of rows behind the committed ones.
    /// `sees` says which row of the window sees which.
    fn forward(
        &mut self,
        window: impl Iterator<Item = (u32, usize)>,
        sees: impl Fn(usize, usize) -> bool,
    ) -> Vec<u32> {
        let start = self.committed;
        let mut len = 0;
        for (token, position) in window {
            self.cache[start + len] = Row { token, position, hidden: 0 };
            len += 1;
        }
        let layer = |cache: &[Row], query: usize, of: fn(&Row) -> u64| {
            let window = (0..len).filter(|&key| sees(query, key)).map(|key| start + key);
            (0..start).chain(window).map(|row| of(&cache[row])).fold(0, u64::wrapping_add)
        };
        for query in 0..len {
            self.cache[start + query].hidden = layer(&self.cache, query, Row::key);
        }
        (0..len)
            .map(|query| (mix(layer(&self.cache, query, Row::value)) % u64::from(VOCAB)) as u32)
            .collect()
    }

    fn scribble(&mut self) {
        self.verified = 0;
        self.cache[self.committed..].fill(GARBAGE);
    }
}

impl Verifier for Target {
    type Features = Vec<Row>;
    type Error = Fault;

    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn reset(&mut self, keep: usize) -> Result<(), Fault> {
        if self.faults.strike(Call::Reset) {
            return Err(Fault(Call::Reset));
        }
        assert!(keep <= self.committed, "{keep} of {} rows", self.committed);
        self.committed = keep;
        Ok(())
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<Vec<Row>, Fault> {
        let (start, tokens) = (prefill.start(), prefill.tokens());
        assert_eq!(start, self.committed);
        assert!(!tokens.is_empty());
        let behind = self.behind;
        let window = tokens.iter().zip(start..);
        let window = window.map(|(&token, row)| (token, row.saturating_sub(behind)));
        let chosen = self.forward(window, |query, key| key <= query);
        if self.faults.strike(Call::Prefill) {
            picks.push(VOCAB - 1);
            self.scribble();
            self.committed += if self.hasty { tokens.len() } else { 0 };
            return Err(Fault(Call::Prefill));
        }
        picks.push(*chosen.last().unwrap());
        self.committed += tokens.len();
        Ok(self.cache[start..self.committed].to_vec())
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Fault> {
        let tree = round.tree();
        assert_eq!(round.start(), self.committed);
        assert!(tree.len() <= self.capabilities.max_slots);
        assert!(self.committed + tree.len() <= self.capabilities.max_len, "rows for all slots");
        if self.capabilities.attention == Attention::Causal {
            assert!(tree.is_chain());
        }
        let bits = self.capabilities.mask == MaskForm::Bits;
        assert_eq!(round.mask().is_some(), bits && !tree.is_chain());
        self.widths.push(tree.len());
        self.masks.push(round.mask().is_some());

        let positions: Vec<usize> = if self.behind == 0 {
            round.positions().collect()
        } else {
            let root = self.committed.saturating_sub(self.behind);
            tree.depths().iter().map(|&depth| root + depth as usize).collect()
        };
        let window = tree.tokens().iter().copied().zip(positions);
        let chosen = self.forward(window, |query, key| match round.mask() {
            Some(mask) => mask.is_visible(query, key),
            None if tree.is_chain() => key <= query,
            None => tree.ancestors(query).any(|slot| slot == key),
        });
        if self.faults.strike(Call::Verify) {
            picks.extend(&chosen[..chosen.len() / 2]);
            self.scribble();
            return Err(Fault(Call::Verify));
        }
        picks.extend(&chosen);
        self.verified = tree.len();
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Vec<Row>, Fault> {
        assert_eq!(plan.start(), self.committed);
        assert_eq!(plan.path().first(), Some(&0), "the root's row is always committed");
        assert!(plan.path().is_sorted_by(|a, b| a < b));
        assert!(plan.path().iter().all(|&slot| (slot as usize) < self.verified));
        assert_eq!(plan.is_prefix(), plan.moves().next().is_none());
        let features: Vec<Row> =
            plan.path().iter().map(|&slot| self.cache[self.committed + slot as usize]).collect();
        let fails = self.faults.strike(Call::Commit);
        for (from, to) in plan.moves() {
            self.cache[to] = self.cache[from];
            if fails {
                break;
            }
        }
        if fails {
            self.scribble();
            return Err(Fault(Call::Commit));
        }
        self.verified = 0;
        // Rows beyond stay as they are, as in any cache that is not cleared.
        self.committed = plan.new_len();
        Ok(features)
    }
}

/// A drafter that reads the target's features and knows the truth from them,
/// and ranks it first as often as it is told to.
#[derive(Clone, Debug)]
pub struct Guesser {
    horizon: usize,
    /// Of 100 depths, how many have the truth first.
    skill: u64,
    // Its context: features of consecutive positions.
    context: Vec<Row>,
    fresh: bool,
    pub faults: Faults,
    /// Every proposal, with the position of its root.
    pub log: Vec<(usize, Proposal)>,
}

impl Guesser {
    pub fn new(horizon: usize, skill: u64) -> Self {
        Self {
            horizon,
            skill,
            context: Vec::new(),
            fresh: true,
            faults: Faults::default(),
            log: Vec::new(),
        }
    }

    /// Positions of its context.
    pub fn context(&self) -> std::ops::Range<usize> {
        let start = self.context.first().map_or(0, |row| row.position);
        start..start + self.context.len()
    }

    pub fn features(&self) -> &[Row] {
        &self.context
    }

    /// Whether the context has no holes from the start of the text on.
    fn knows_the_text(&self) -> bool {
        self.context().start == 0
    }

    fn list(&self, truth: u32, position: usize, entries: usize) -> (Vec<u32>, Vec<f32>) {
        let dice = mix(position as u64 + 17);
        let rank = if dice % 100 < self.skill { 0 } else { 1 + (dice >> 32) as usize % 4 };
        let mut tokens: Vec<u32> = (1..VOCAB).map(|other| (truth + other) % VOCAB).collect();
        tokens.insert(rank, truth);
        tokens.truncate(entries);
        let best = -0.2 - 0.15 * ((dice >> 16) % 4) as f32;
        let log_probs = (0..tokens.len()).map(|rank| best - 0.8 * rank as f32).collect();
        (tokens, log_probs)
    }
}

impl Drafter<Vec<Row>> for Guesser {
    type Error = Fault;

    fn horizon(&self) -> usize {
        self.horizon
    }

    fn reset(&mut self, keep: usize) -> Result<(), Fault> {
        if self.faults.strike(Call::DrafterReset) {
            return Err(Fault(Call::DrafterReset));
        }
        let context = self.context();
        self.context.truncate(keep.saturating_sub(context.start));
        self.fresh = true;
        Ok(())
    }

    fn observe(&mut self, committed: &Committed<'_>, features: &Vec<Row>) -> Result<(), Fault> {
        if self.faults.strike(Call::Observe) {
            return Err(Fault(Call::Observe));
        }
        let (start, tokens) = (committed.start(), committed.tokens());
        assert!(!tokens.is_empty());
        if start != self.context().end {
            assert!(self.fresh && start > self.context().end, "{start} after {:?}", self.context());
            self.context.clear();
        }
        self.fresh = false;
        assert_eq!(features.len(), tokens.len(), "features of exactly the committed rows");
        for (row, (&token, position)) in features.iter().zip(tokens.iter().zip(start..)) {
            assert_eq!((row.token, row.position), (token, position));
        }
        self.context.extend_from_slice(features);
        if self.knows_the_text() {
            let seen: Vec<u32> = self.context.iter().map(|row| row.token).collect();
            assert_eq!(self.context, Text::new(&seen).rows(), "features of the accepted path");
        }
        Ok(())
    }

    fn propose(&mut self, request: &ProposalRequest, proposal: &mut Proposal) -> Result<(), Fault> {
        assert!(proposal.is_empty());
        assert!(request.horizon() >= 1 && request.horizon() <= self.horizon);
        assert!(request.top_k() >= 1);
        assert_eq!(request.position(), self.context().end, "all that is committed was observed");
        let seen: Vec<u32> = self.context.iter().map(|row| row.token).collect();
        let mut text = Text::new(&seen);
        text.push(request.root());
        for depth in 1..=request.horizon() {
            let truth = if self.knows_the_text() { text.next() } else { request.root() };
            let (tokens, log_probs) = self.list(truth, request.position() + depth, request.top_k());
            proposal.push(&tokens, &log_probs).unwrap();
            text.push(truth);
            if depth == 1 && self.faults.strike(Call::Propose) {
                return Err(Fault(Call::Propose));
            }
        }
        self.log.push((request.position(), proposal.clone()));
        Ok(())
    }
}

/// A drafter of four depths that proposes what a function says.
pub struct By<P>(pub P);

impl<F, P> Drafter<F> for By<P>
where
    P: FnMut(&ProposalRequest, &mut Proposal) -> Result<(), Error>,
{
    type Error = Error;

    fn horizon(&self) -> usize {
        4
    }

    fn reset(&mut self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn observe(&mut self, _: &Committed<'_>, _: &F) -> Result<(), Error> {
        Ok(())
    }

    fn propose(&mut self, request: &ProposalRequest, proposal: &mut Proposal) -> Result<(), Error> {
        (self.0)(request, proposal)
    }
}

/// Verifier and drafter in one object.
#[derive(Clone, Debug)]
pub struct Both {
    pub target: Target,
    pub guesser: Guesser,
}

impl Verifier for Both {
    type Features = Vec<Row>;
    type Error = Fault;

    fn capabilities(&self) -> Capabilities {
        self.target.capabilities()
    }

    fn reset(&mut self, keep: usize) -> Result<(), Fault> {
        self.target.reset(keep)
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<Vec<Row>, Fault> {
        self.target.prefill(prefill, picks)
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Fault> {
        self.target.verify(round, picks)
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Vec<Row>, Fault> {
        self.target.commit(plan)
    }
}

impl Drafter<Vec<Row>> for Both {
    type Error = Fault;

    fn horizon(&self) -> usize {
        self.guesser.horizon
    }

    fn reset(&mut self, keep: usize) -> Result<(), Fault> {
        self.guesser.reset(keep)
    }

    fn observe(&mut self, committed: &Committed<'_>, features: &Vec<Row>) -> Result<(), Fault> {
        self.guesser.observe(committed, features)
    }

    fn propose(&mut self, request: &ProposalRequest, proposal: &mut Proposal) -> Result<(), Fault> {
        self.guesser.propose(request, proposal)
    }
}

/// Decodes a request and returns text and reason to end, after checking that
/// the tokens streamed are the text.
pub fn decode<E: Engine>(decoder: &mut Decoder<E>, request: &Request) -> (Vec<u32>, Finish) {
    let mut streamed = Vec::new();
    let generated = decoder
        .generate(request, |tokens| {
            assert!(!tokens.is_empty());
            streamed.extend_from_slice(tokens);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(streamed, generated.tokens);
    (streamed, generated.finish)
}
