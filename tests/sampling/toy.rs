//! A target whose next token depends on the last two, and a drafter that knows its marginals.

use std::convert::Infallible;

use ddtree::{
    Capabilities, CommitPlan, Committed, Config, Constraint, Decoder, Drafter, Error, PickRule,
    Picks, Prefill, Proposal, ProposalRequest, Request, Round, RunStats, Verifier,
    sample::gumbel,
    top_k::{self, TopK},
};

/// Logits that depend on the last two tokens, spread over about `spread` on either side of 0.
#[derive(Clone, Copy, Debug)]
pub struct Language {
    pub vocab: u32,
    pub spread: f32,
    pub seed: u64,
}

impl Language {
    pub fn new(vocab: u32) -> Self {
        Self { vocab, spread: 3.0, seed: 1 }
    }

    pub fn row(&self, before: u32, last: u32) -> Vec<f32> {
        let state = (u64::from(before) << 32 | u64::from(last)) ^ self.seed << 17;
        (0..self.vocab).map(|token| self.spread * unit(state, token)).collect()
    }

    pub fn row_after(&self, path: &[u32]) -> Vec<f32> {
        let last = |back: usize| path.len().checked_sub(back).map_or(0, |i| path[i]);
        self.row(last(2), last(1))
    }
}

/// Uniform on -1 to 1, by the finaliser of splitmix64.
fn unit(state: u64, token: u32) -> f32 {
    let mut x = state.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(token) << 40;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ x >> 31) as f32 / u64::MAX as f32 * 2.0 - 1.0
}

pub fn softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = row.iter().map(|&x| f64::from(x - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// How a target hands over its picks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hands {
    /// Rows of logits, all of them.
    Logits,
    /// Rows of logits, where they are wanted.
    Wanted,
    /// Token ids as long as its device can pick them.
    Device(PickRule),
    /// Token ids of the greatest logits, whatever is asked for.
    Ignorant,
    /// No picks.
    Nothing,
}

#[derive(Clone, Debug)]
pub struct Target {
    pub language: Language,
    pub hands: Hands,
    pub committed: Vec<u32>,
    pub rows_handed: usize,
    verified: Vec<u32>,
    start: usize,
}

impl Target {
    pub fn new(language: Language, hands: Hands) -> Self {
        let (committed, verified) = (Vec::new(), Vec::new());
        Self { language, hands, committed, rows_handed: 0, verified, start: 0 }
    }

    fn pick(&mut self, path: &[u32], depth: usize, picks: &mut Picks<'_>) -> Result<(), Error> {
        let row = self.language.row_after(path);
        match self.hands {
            Hands::Wanted if !picks.wanted() => picks.skip(),
            Hands::Device(device) if picks.rule() <= device => {
                let token = match picks.noise() {
                    None => top_k::argmax(&row).unwrap().0,
                    Some(key) => {
                        let sum = |token: u32| {
                            f64::from(row[token as usize]) / f64::from(key.temperature)
                                + gumbel(key.seed, key.position + depth, token)
                        };
                        let better =
                            |best, token| if sum(token) > sum(best) { token } else { best };
                        (0..self.language.vocab).reduce(better).unwrap()
                    }
                };
                picks.push(token);
            }
            Hands::Nothing => picks.skip(),
            Hands::Ignorant => picks.push(top_k::argmax(&row).unwrap().0),
            _ => {
                self.rows_handed += 1;
                picks.push_logits(&row)?;
            }
        }
        Ok(())
    }
}

impl Verifier for Target {
    type Error = Error;
    type Features = ();

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(self.language.vocab as usize, 10_000);
        if let Hands::Device(rule) = self.hands {
            capabilities.device_picks = rule;
        }
        capabilities
    }

    fn reset(&mut self, keep: usize) -> Result<(), Error> {
        // As with recurrent layers, there is no way back to somewhere in between.
        assert!(keep == 0 || keep == self.committed.len(), "{keep} of {}", self.committed.len());
        self.committed.truncate(keep);
        Ok(())
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
        let mut path = self.committed.clone();
        path.extend_from_slice(prefill.tokens());
        self.pick(&path, 0, picks)?;
        self.committed = path;
        Ok(())
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
        assert_eq!(round.start(), self.committed.len());
        let tree = round.tree();
        for slot in 0..tree.len() {
            let mut nodes: Vec<u32> = tree.ancestors(slot).map(|s| tree.tokens()[s]).collect();
            nodes.reverse();
            let path = [&self.committed[..], &nodes].concat();
            self.pick(&path, tree.depths()[slot] as usize, picks)?;
        }
        self.verified = tree.tokens().to_vec();
        self.start = round.start();
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<(), Error> {
        assert_eq!(plan.start(), self.start);
        self.committed.extend(plan.path().iter().map(|&slot| self.verified[slot as usize]));
        Ok(())
    }
}

/// Drafts the marginals of a language, which may be another one than the target's.
#[derive(Clone, Debug)]
pub struct Marginals {
    pub language: Language,
    pub horizon: usize,
    last: u32,
    top_k: TopK,
}

impl Marginals {
    pub fn new(language: Language, horizon: usize) -> Self {
        Self { language, horizon, last: 0, top_k: TopK::new() }
    }

    /// For every depth, the probability of every token.
    pub fn after(&self, before: u32, root: u32, horizon: usize) -> Vec<Vec<f64>> {
        let mut states = vec![((before, root), 1.0)];
        let mut depths = Vec::new();
        for _ in 0..horizon {
            let mut marginal = vec![0.0; self.language.vocab as usize];
            let mut next = std::collections::BTreeMap::new();
            for ((before, last), weight) in states {
                let row = softmax(&self.language.row(before, last));
                for (token, p) in row.into_iter().enumerate() {
                    marginal[token] += weight * p;
                    *next.entry((last, token as u32)).or_insert(0.0) += weight * p;
                }
            }
            states = next.into_iter().collect();
            // Enough for a draft; keeps large vocabularies fast.
            states.sort_by(|a, b| b.1.total_cmp(&a.1));
            states.truncate(12);
            depths.push(marginal);
        }
        depths
    }
}

impl<F> Drafter<F> for Marginals {
    type Error = Infallible;

    fn horizon(&self) -> usize {
        self.horizon
    }

    fn reset(&mut self, _: usize) -> Result<(), Infallible> {
        Ok(())
    }

    fn observe(&mut self, committed: &Committed<'_>, _: &F) -> Result<(), Infallible> {
        self.last = *committed.tokens().last().unwrap();
        Ok(())
    }

    fn propose(&mut self, request: &ProposalRequest, out: &mut Proposal) -> Result<(), Infallible> {
        for marginal in self.after(self.last, request.root(), request.horizon()) {
            let row: Vec<f32> = marginal.iter().map(|p| p.ln() as f32).collect();
            out.push_logits(&row, request.top_k(), &mut self.top_k).unwrap();
        }
        Ok(())
    }
}

pub type Engine = (Target, Marginals);

/// A target and a drafter of another mind: its logits are the target's own plus an error.
pub fn engine(vocab: u32, hands: Hands) -> Engine {
    let language = Language::new(vocab);
    (Target::new(language, hands), Marginals::new(Language { spread: 2.0, ..language }, 4))
}

pub struct Text {
    pub tokens: Vec<u32>,
    pub stats: RunStats,
}

/// Decodes one request; the constraint is made anew each time.
pub fn decode(
    engine: Engine,
    config: &Config,
    request: &Request,
    constraint: Option<Box<dyn Constraint>>,
) -> Text {
    let mut decoder = Decoder::new(engine, config).unwrap();
    decoder.set_constraint(constraint).unwrap();
    let generated = decoder.generate(request, |_| std::ops::ControlFlow::Continue(())).unwrap();
    Text { tokens: generated.tokens.to_vec(), stats: generated.stats.clone() }
}
