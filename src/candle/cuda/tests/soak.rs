//! Rounds of random trees and random accepted paths, for as long as is asked for.

use std::time::{Duration, Instant};

use candle_core::DType;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::{CudaDFlash, CudaOptions, CudaTaps, CudaTarget, Gpu};
use super::{distance, gpu, pair, random_parents};
use crate::{
    Acceptance, AncestorMask, CommitPlan, Committed, DraftTree, Drafter, Picks, Prefill, Proposal,
    ProposalRequest, Round, Verifier, walk,
};

/// Rounds after which everything has been allocated.
const SETTLED: usize = 200;

/// Tokens of a text at most: a new one is begun when one has 400, and a path has fewer than 100.
const LONGEST: usize = 500;

/// One sequence on a pair of models.
struct Sequence {
    target: CudaTarget,
    drafter: CudaDFlash,
    text: Vec<u32>,
    ids: Vec<u32>,
}

impl Sequence {
    fn new(gpu: &Gpu, dtype: DType) -> Self {
        let (target, drafter) = pair(gpu, dtype);
        Self { target, drafter, text: Vec::new(), ids: Vec::new() }
    }

    fn begin(&mut self, text: &[u32]) {
        self.text = text.to_vec();
        self.target.reset(0).unwrap();
        Drafter::<CudaTaps>::reset(&mut self.drafter, 0).unwrap();
        let picks = &mut Picks::new(&mut self.ids);
        let taps = self.target.prefill(&Prefill::new(0, text), picks).unwrap();
        self.drafter.observe(&Committed::new(0, text), &taps).unwrap();
    }

    /// Captures the graphs of all widths.
    fn warm_up(&mut self) {
        self.begin(&[5; LONGEST]);
        for slots in 1..=CudaOptions::default().max_slots {
            self.begin(&vec![5; slots]);
        }
        self.draft(5);
    }

    /// The log-probabilities of a draft.
    fn draft(&mut self, root: u32) -> Vec<f32> {
        let mut proposal = Proposal::new();
        let depths = Drafter::<CudaTaps>::horizon(&self.drafter);
        let request = ProposalRequest::new(root, self.text.len(), depths, 64);
        self.drafter.propose(&request, &mut proposal).unwrap();
        (1..=depths).flat_map(|depth| proposal.depth(depth).1.to_vec()).collect()
    }
}

/// Bytes that the process holds of the machine's memory, where the system tells.
fn resident() -> Option<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(4096 * pages.split(' ').nth(1)?.parse::<usize>().ok()?)
}

/// What comparisons found.
struct Compared {
    limit: f64,
    times: usize,
    greatest: f64,
}

impl Compared {
    fn new(limit: f64) -> Self {
        Self { limit, times: 0, greatest: 0.0 }
    }

    #[track_caller]
    fn add(&mut self, found: &[f32], expected: &[f32], round: usize) {
        let distance = distance(found, expected);
        assert!(distance < self.limit, "round {round}: {distance}");
        self.times += 1;
        self.greatest = self.greatest.max(distance);
    }
}

/// `DDTREE_SOAK_SECONDS` says for how long, 2 seconds unless set. Memory is watched if the seconds are set: what is free on
/// the GPU depends on the tests and processes beside this one.
#[test]
fn rounds_equal_plain_decoding_and_memory_stays() {
    let Some(gpu) = gpu() else { return };
    let seconds = std::env::var("DDTREE_SOAK_SECONDS").ok().and_then(|s| s.parse().ok());
    soak(&gpu, DType::F32, 1e-4, seconds.unwrap_or(2), seconds.is_some());
}

/// The types that most kernels are for: a row that is seen and should not be, or the reverse, changes logits by more than
/// rounding does.
#[test]
fn rounds_in_16_bits_are_near_plain_decoding() {
    let Some(gpu) = gpu() else { return };
    for (dtype, limit) in [(DType::BF16, 4e-2), (DType::F16, 5e-3)] {
        soak(&gpu, dtype, limit, 2, false);
    }
}

/// Runs rounds for some seconds. Every 16th round's logits and every 64th draft are held against models that forward the
/// accepted text anew.
fn soak(gpu: &Gpu, dtype: DType, limit: f64, seconds: u64, watch_memory: bool) {
    let (mut soaked, mut fresh) = (Sequence::new(gpu, dtype), Sequence::new(gpu, dtype));
    soaked.warm_up();
    fresh.warm_up();
    let mut rng = StdRng::seed_from_u64(5);
    let (mut outcome, mut plan, mut mask) =
        (Acceptance::new(), CommitPlan::new(), AncestorMask::new());
    let (mut rounds, mut tokens) = (0usize, 0usize);
    let (mut logits, mut drafts) = (Compared::new(limit), Compared::new(limit));
    let mut settled = None;
    let since = Instant::now();
    let end = since + Duration::from_secs(seconds);
    while Instant::now() < end || rounds <= SETTLED {
        if soaked.text.len() < 2 || soaked.text.len() > 400 || rounds == 0 {
            let len = rng.random_range(1..200);
            let text: Vec<u32> = (0..len).map(|_| rng.random_range(0..4096)).collect();
            soaked.begin(&text);
        }
        let slots = rng.random_range(1..100);
        let parents = random_parents(&mut rng, slots);
        // Tokens that differ between siblings.
        let first = rng.random_range(0..4000u32);
        let tree_tokens: Vec<u32> = (0..slots as u32).map(|slot| (first + slot) % 4096).collect();
        let tree = DraftTree::from_parents(&tree_tokens, &parents).unwrap();
        mask.build(&tree);
        let round = Round::new(soaked.text.len(), &tree, Some(&mask));
        soaked.target.verify(&round, &mut Picks::new(&mut soaked.ids)).unwrap();
        let slot = rng.random_range(0..slots);
        let mut path: Vec<usize> = tree.ancestors(slot).collect();
        path.reverse();
        let accepted: Vec<u32> = path.iter().map(|&slot| tree_tokens[slot]).collect();
        if rounds % 16 == 0 {
            let found = soaked.target.logits(slot).unwrap();
            let whole = [&soaked.text[..], &accepted].concat();
            fresh.begin(&whole);
            let last = (whole.len() - 1) % CudaOptions::default().max_slots;
            logits.add(&found, &fresh.target.logits(last).unwrap(), rounds);
        }
        // Picks that accept the path.
        let mut picks = vec![4095u32; slots];
        path.windows(2).for_each(|edge| picks[edge[0]] = tree_tokens[edge[1]]);
        let root = (first + 2000) % 4096;
        picks[slot] = root;
        walk(&tree, &picks, &mut outcome).unwrap();
        assert_eq!(outcome.path().len(), path.len());
        plan.set(soaked.text.len(), &outcome);
        let taps = soaked.target.commit(&plan).unwrap();
        let start = soaked.text.len();
        soaked.drafter.observe(&Committed::new(start, &accepted), &taps).unwrap();
        soaked.text.extend(&accepted);
        let found = soaked.draft(root);
        if rounds % 64 == 0 {
            fresh.begin(&soaked.text);
            drafts.add(&found, &fresh.draft(root), rounds);
        }
        rounds += 1;
        tokens += accepted.len();
        if rounds == SETTLED {
            settled = Some((gpu.memory().unwrap().0, resident()));
        }
    }
    let (free, held) = settled.expect("as many rounds were run");
    let (free_now, held_now) = (gpu.memory().unwrap().0, resident());
    eprintln!(
        "{dtype:?}: {rounds} rounds that accepted {tokens} tokens in {:.0} s; recomputed: {} rows of logits, greatest distance \
         {:.1e}, and {} drafts, {:.1e}; free on the GPU after {SETTLED} rounds: {free}, at the end: {free_now}; held on \
         the host: {held:?}, {held_now:?}",
        since.elapsed().as_secs_f64(),
        logits.times,
        logits.greatest,
        drafts.times,
        drafts.greatest,
    );
    if watch_memory {
        assert_eq!(free_now, free, "free memory on the GPU");
        if let (Some(held), Some(held_now)) = (held, held_now) {
            assert!(held_now < held + (32 << 20), "memory of the host: {held}, then {held_now}");
        }
    }
}
