//! The state plan against a naive twin, and recurrent targets that are built on it.

#[path = "common/tree.rs"]
mod tree;

use std::convert::Infallible;

use ddtree::{
    Algorithm, Capabilities, CommitPlan, Committed, Config, Decoder, DraftTree, Drafter, Error,
    Picks, Prefill, Proposal, ProposalRequest, Recurrence, Request, Round, StatePlan, Verifier,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tree::random_tree;

/// Slots from the root to `slot`, by following parents.
fn naive_path(tree: &DraftTree, slot: usize) -> Vec<i32> {
    let mut path = vec![slot as i32];
    while path[0] != 0 {
        path.insert(0, tree.parents()[path[0] as usize]);
    }
    path
}

/// The inputs before and at the end of a path, oldest first, as many as `len`.
fn naive_window(path: &[i32], len: usize) -> Vec<i32> {
    let before = (1..=len as i32).rev().map(|back| -back);
    let all: Vec<i32> = before.chain(path.iter().copied()).collect();
    all[all.len() - len..].to_vec()
}

#[test]
fn plans_equal_those_of_a_naive_twin() {
    let mut rng = StdRng::seed_from_u64(1);
    for window_len in 0..5 {
        let mut plan = StatePlan::new(window_len);
        assert_eq!(plan.window_len(), window_len);
        for nodes in [0, 1, 2, 5, 30, 100] {
            let tree = random_tree(&mut rng, nodes + 1, 200);
            plan.set(&tree);
            assert_eq!(plan.slots(), nodes + 1);
            assert_eq!(plan.parents(), tree.parents());

            let groups: Vec<Vec<u32>> = plan.groups().map(<[u32]>::to_vec).collect();
            let deepest = tree.depths().iter().max().unwrap();
            let naive = (0..=*deepest).map(|depth| {
                let slots = 0..tree.len() as u32;
                slots.filter(|&slot| tree.depths()[slot as usize] == depth).collect::<Vec<_>>()
            });
            assert_eq!(groups, naive.collect::<Vec<_>>());

            for slot in 0..tree.len() {
                let path = naive_path(&tree, slot);
                let mut before = naive_window(&path[..path.len() - 1], window_len);
                before.reverse();
                assert_eq!(plan.ancestors(slot), before);

                let slots: Vec<u32> = path.iter().map(|&slot| slot as u32).collect();
                plan.accept(&slots).unwrap();
                assert_eq!(plan.source(), Some(slot));
                assert_eq!(plan.path(), slots);
                let tokens: Vec<u32> =
                    slots.iter().map(|&slot| tree.tokens()[slot as usize]).collect();
                assert_eq!(plan.replay(), tokens);
                assert_eq!(plan.window(), naive_window(&path, window_len));
                let contiguous = slots.iter().enumerate().all(|(i, &slot)| i == slot as usize);
                assert_eq!(plan.is_prefix(), contiguous);
            }
            assert!(plan.ancestors(tree.len()).is_empty());
            assert!(plan.ancestors(usize::MAX).is_empty());
        }
    }
}

#[test]
fn what_is_no_path_from_the_root_is_refused() {
    let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1]).unwrap();
    let mut plan = StatePlan::new(2);
    assert!(plan.accept(&[0]).is_err());
    plan.set(&tree);
    for path in [&[][..], &[1], &[0, 3], &[0, 2, 3], &[0, 0], &[0, 1, 3, 4], &[0, 2, 1]] {
        plan.accept(&[0, 1]).unwrap();
        assert!(matches!(plan.accept(path), Err(Error::Tree { .. })), "{path:?}");
        assert_eq!((plan.source(), plan.is_prefix()), (None, false), "{path:?}");
        assert!(plan.path().is_empty() && plan.replay().is_empty() && plan.window().is_empty());
    }
    // The outcome of one tree is not that of the next.
    plan.accept(&[0, 1]).unwrap();
    plan.set(&tree);
    assert_eq!(plan.source(), None);
}

const VOCAB: u32 = 16;
const WINDOW: usize = 3;

/// A recurrent model without tensors: a state that every token changes for good, and a pick that
/// depends on it and on the last few tokens.
#[derive(Clone, Debug, PartialEq)]
struct Memory {
    state: u64,
    window: Vec<u32>,
}

impl Memory {
    fn new() -> Self {
        Self { state: 0, window: vec![0; WINDOW] }
    }

    fn next(state: u64, token: u32) -> u64 {
        (state ^ u64::from(token))
            .wrapping_add(1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    }

    /// `before` is the window of a token, oldest first.
    fn pick(state: u64, before: impl Iterator<Item = u32>) -> u32 {
        let mixed = before.fold(state, |mixed, token| Self::next(mixed, token + 1));
        (mixed % u64::from(VOCAB)) as u32
    }

    fn push(&mut self, token: u32) -> u32 {
        self.state = Self::next(self.state, token);
        let pick = Self::pick(self.state, self.window.iter().copied());
        self.window.remove(0);
        self.window.push(token);
        pick
    }
}

/// A target over that model.
struct Target {
    recurrence: Recurrence,
    committed: Memory,
    len: usize,
    plan: StatePlan,
    states: Vec<u64>,
    slots: Vec<u32>,
}

impl Target {
    fn new(recurrence: Recurrence) -> Self {
        let (committed, plan) = (Memory::new(), StatePlan::new(WINDOW));
        Self { recurrence, committed, len: 0, plan, states: Vec::new(), slots: Vec::new() }
    }

    /// A token of the round, or of the window before it.
    fn input(&self, index: i32) -> u32 {
        match usize::try_from(index) {
            Ok(slot) => self.slots[slot],
            Err(_) => self.committed.window[(WINDOW as i32 + index) as usize],
        }
    }
}

impl Verifier for Target {
    type Features = ();
    type Error = Error;

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(VOCAB as usize, 1_000);
        capabilities.recurrence = self.recurrence;
        capabilities
    }

    fn reset(&mut self, keep: usize) -> Result<(), Error> {
        assert_eq!(keep, 0);
        (self.committed, self.len) = (Memory::new(), 0);
        Ok(())
    }

    fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
        let pick = prefill.tokens().iter().map(|&token| self.committed.push(token)).last();
        self.len += prefill.tokens().len();
        picks.extend(pick.as_slice());
        Ok(())
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
        assert_eq!(round.start(), self.len);
        self.plan.set(round.tree());
        self.slots = round.tree().tokens().to_vec();
        if self.recurrence == Recurrence::Sequential {
            // In slot order over a copy: right for chains only.
            let mut memory = self.committed.clone();
            for &token in round.tree().tokens() {
                picks.push(memory.push(token));
            }
            return Ok(());
        }
        self.states.clear();
        self.states.resize(round.tree().len(), 0);
        for group in self.plan.groups() {
            for &slot in group {
                let before = match usize::try_from(self.plan.parents()[slot as usize]) {
                    Ok(parent) => self.states[parent],
                    Err(_) => self.committed.state,
                };
                self.states[slot as usize] = Memory::next(before, self.slots[slot as usize]);
            }
        }
        for slot in 0..round.tree().len() {
            let ancestors = self.plan.ancestors(slot).iter().rev();
            let before = ancestors.map(|&ancestor| self.input(ancestor));
            picks.push(Memory::pick(self.states[slot], before));
        }
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<(), Error> {
        self.plan.accept(plan.path())?;
        if self.recurrence == Recurrence::Sequential {
            for &token in self.plan.replay() {
                self.committed.push(token);
            }
        } else if let Some(source) = self.plan.source() {
            let window = self.plan.window().iter().map(|&input| self.input(input)).collect();
            self.committed = Memory { state: self.states[source], window };
        }
        self.len = plan.new_len();
        Ok(())
    }
}

/// Knows the model, and is wrong about it from time to time.
struct Oracle {
    memory: Memory,
    rng: StdRng,
}

impl<F> Drafter<F> for Oracle {
    type Error = Infallible;

    fn horizon(&self) -> usize {
        5
    }

    fn reset(&mut self, _keep: usize) -> Result<(), Infallible> {
        self.memory = Memory::new();
        Ok(())
    }

    fn observe(&mut self, committed: &Committed<'_>, _: &F) -> Result<(), Infallible> {
        for &token in committed.tokens() {
            self.memory.push(token);
        }
        Ok(())
    }

    fn propose(
        &mut self,
        request: &ProposalRequest,
        proposal: &mut Proposal,
    ) -> Result<(), Infallible> {
        let mut memory = self.memory.clone();
        let mut token = request.root();
        for _ in 0..request.horizon() {
            token = memory.push(token);
            // The right token at a random rank among two wrong ones, or not at all.
            let mut ranked = vec![(token + 1) % VOCAB, (token + 2) % VOCAB];
            match self.rng.random_range(0..5) {
                rank @ 0..=2 => ranked.insert(rank, token),
                _ => ranked.insert(0, token),
            }
            ranked.truncate(request.top_k());
            proposal.push(&ranked, &[-0.7, -1.2, -1.6][..ranked.len()]).unwrap();
        }
        Ok(())
    }
}

fn decode(recurrence: Recurrence, config: &Config) -> Result<(Vec<u32>, usize, Memory), Error> {
    let oracle = Oracle { memory: Memory::new(), rng: StdRng::seed_from_u64(3) };
    let mut decoder = Decoder::new((Target::new(recurrence), oracle), config)?;
    decoder.start(&Request::new(&[5, 6, 7]).max_new_tokens(200)).unwrap();
    while decoder.step().unwrap().is_some() {}
    let session = decoder.session();
    let (text, rounds) = (session.generated().to_vec(), session.stats().rounds as usize);
    let (target, _) = decoder.into_engine();
    Ok((text, rounds, target.committed))
}

#[test]
fn exact_targets_give_the_text_of_plain_decoding_whatever_is_drafted() {
    let plain = decode(Recurrence::ExactTrees, &Config::new(Algorithm::Autoregressive)).unwrap();
    assert_eq!(plain.1, 199);
    for algorithm in [Algorithm::Chain, Algorithm::Tree] {
        let drafted = decode(Recurrence::ExactTrees, &Config::new(algorithm).budget(12)).unwrap();
        assert_eq!((&drafted.0, &drafted.2), (&plain.0, &plain.2), "{algorithm}");
        assert!(drafted.1 < 150, "{algorithm}: {} rounds", drafted.1);
    }
}

#[test]
fn sequential_targets_roll_chains_back_exactly_and_refuse_trees() {
    let plain = decode(Recurrence::Sequential, &Config::new(Algorithm::Autoregressive)).unwrap();
    let chain = decode(Recurrence::Sequential, &Config::new(Algorithm::Chain)).unwrap();
    assert_eq!((&chain.0, &chain.2), (&plain.0, &plain.2));
    assert!(chain.1 < 150, "{} rounds", chain.1);

    let tree = Config::new(Algorithm::Tree).budget(12);
    let error = decode(Recurrence::Sequential, &tree).unwrap_err();
    assert!(error.to_string().contains("allow_inexact_recurrent"), "{error}");

    // What the gate protects from: with it open, siblings leak and the text is another.
    let open = decode(Recurrence::Sequential, &tree.allow_inexact_recurrent(true)).unwrap();
    assert_ne!(open.0, plain.0);
}
