//! Every slot of a tree against its path run alone, every commit against plain decoding.

use ddtree::candle::{DecoderModel, Forward, KvCache, StateMethod, Want};
use ddtree::{AncestorMask, DraftTree};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::common::{METHODS, Shape, cache_difference, random_model, relative_difference, values};

/// Differences in f32 come from the order of sums only.
const TOLERANCE: f32 = 1e-4;

/// A random hybrid model with a prompt and a tree behind it.
struct Case {
    model: DecoderModel,
    prompt: Vec<u32>,
    tree: DraftTree,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shape = Shape {
            layers: rng.random_range(2..=5),
            hidden: 8 * rng.random_range(1..=3),
            key_heads: rng.random_range(1..=2),
            group: rng.random_range(1..=3),
            key_dim: rng.random_range(1..=9),
            value_dim: rng.random_range(1..=9),
            conv_kernel: rng.random_range(1..=5),
            vocab: 40,
        };
        // Shorter and longer than the convolution's window.
        let prompt = (0..rng.random_range(1..=9)).map(|_| rng.random_range(0..40)).collect();
        let mut tree = DraftTree::new(rng.random_range(0..40));
        for _ in 0..rng.random_range(2..=12) {
            let parent = rng.random_range(0..tree.len());
            // Refused if the token is a sibling's already; the tree is smaller then.
            let _ = tree.push(parent, rng.random_range(0..40), 0.0);
        }
        Self { model: random_model(shape, seed), prompt, tree }
    }

    /// A cache with the prompt committed.
    fn cache(&self, method: StateMethod) -> KvCache {
        let mut cache = self.model.new_cache(64).unwrap();
        cache.set_state_method(method);
        run(&self.model, &mut cache, &self.prompt);
        cache
    }

    /// Verifies the tree while recurrent layers follow `followed`; gives a row of logits per slot.
    fn verify(&self, cache: &mut KvCache, followed: &DraftTree) -> Vec<Vec<f32>> {
        let mut mask = AncestorMask::new();
        mask.build(&self.tree);
        let start = cache.len();
        let positions: Vec<u32> =
            self.tree.depths().iter().map(|depth| start as u32 + depth).collect();
        let pass = Forward {
            tokens: self.tree.tokens(),
            positions: &positions,
            start,
            mask: Some(&mask),
            tree: Some(followed),
            want: Want::All,
            taps: &[],
        };
        let logits = self.model.forward(cache, &pass).unwrap().logits.unwrap();
        logits.to_vec2().unwrap()
    }

    /// Slots from the root to `slot`.
    fn path(&self, slot: usize) -> Vec<u32> {
        let mut path = vec![slot as u32];
        while let Ok(parent) = usize::try_from(self.tree.parents()[path[0] as usize]) {
            path.insert(0, parent as u32);
        }
        path
    }

    fn tokens(&self, path: &[u32]) -> Vec<u32> {
        path.iter().map(|&slot| self.tree.tokens()[slot as usize]).collect()
    }

    /// Plain decoding: one token per pass, each committed before the next. Gives the last logits.
    fn decode(&self, cache: &mut KvCache, tokens: &[u32]) -> Vec<f32> {
        let mut logits = Vec::new();
        for &token in tokens {
            let root = DraftTree::new(token);
            let pass = Forward {
                tokens: &[token],
                positions: &[cache.len() as u32],
                start: cache.len(),
                mask: None,
                tree: Some(&root),
                want: Want::Last,
                taps: &[],
            };
            logits = values(&self.model.forward(cache, &pass).unwrap().logits.unwrap());
            cache.commit(cache.len(), &[0]).unwrap();
        }
        logits
    }

    /// The greatest relative difference between the logits of a slot and those of its path alone.
    fn worst_slot(&self, method: StateMethod, logits: &[Vec<f32>]) -> f32 {
        let alone = |slot: usize| {
            let mut cache = self.cache(method);
            self.decode(&mut cache, &self.tokens(&self.path(slot)))
        };
        let differences = logits.iter().enumerate().map(|(s, l)| relative_difference(l, &alone(s)));
        differences.fold(0.0, f32::max)
    }
}

/// Runs and commits tokens one after another in one pass.
fn run(model: &DecoderModel, cache: &mut KvCache, tokens: &[u32]) {
    let start = cache.len();
    let positions: Vec<u32> = (start as u32..(start + tokens.len()) as u32).collect();
    let pass = Forward {
        tokens,
        positions: &positions,
        start,
        mask: None,
        tree: None,
        want: Want::Nothing,
        taps: &[],
    };
    model.forward(cache, &pass).unwrap();
    cache.extend(tokens.len()).unwrap();
}

#[test]
fn every_slot_equals_its_path_run_alone() {
    for seed in 0..24 {
        let case = Case::random(seed);
        let mut logits = Vec::new();
        for method in METHODS {
            let found = case.verify(&mut case.cache(method), &case.tree);
            let worst = case.worst_slot(method, &found);
            assert!(worst < TOLERANCE, "seed {seed}, {method:?}: {worst}");
            logits.push(found.concat());
        }
        let between = relative_difference(&logits[0], &logits[1]);
        assert!(between < TOLERANCE, "seed {seed}: {between} between the methods");
    }
}

#[test]
fn a_commit_leaves_what_plain_decoding_leaves() {
    for seed in 100..124 {
        let case = Case::random(seed);
        for method in METHODS {
            for slot in 0..case.tree.len() {
                let path = case.path(slot);
                let mut cache = case.cache(method);
                case.verify(&mut cache, &case.tree);
                let start = cache.len();
                cache.commit(start, &path).unwrap();

                let tokens = case.tokens(&path);
                let mut plain = case.cache(method);
                case.decode(&mut plain, &tokens);
                let difference = cache_difference(&cache, &plain);
                assert!(difference < TOLERANCE, "seed {seed}, {method:?}, {slot}: {difference}");

                let mut recomputed = case.model.new_cache(64).unwrap();
                run(&case.model, &mut recomputed, &[&case.prompt[..], &tokens].concat());
                let difference = cache_difference(&cache, &recomputed);
                assert!(difference < TOLERANCE, "seed {seed}, {method:?}, {slot}: {difference}");
            }
        }
    }
}

/// What engines do that ignore the parents: recurrent layers run in slot order, so that a sibling's
/// state leaks into the next slot. The oracle has to notice, or it proves nothing.
#[test]
fn the_oracle_catches_states_that_leak_between_siblings() {
    let mut caught = 0;
    let mut branching = 0;
    for seed in 0..24 {
        let case = Case::random(seed);
        let parents: Vec<i32> = (-1..case.tree.len() as i32 - 1).collect();
        let slot_order = DraftTree::from_parents(case.tree.tokens(), &parents).unwrap();
        for method in METHODS {
            let leaking = case.verify(&mut case.cache(method), &slot_order);
            let worst = case.worst_slot(method, &leaking);
            if case.tree.is_chain() {
                assert!(worst < TOLERANCE, "seed {seed}: nothing can leak on a chain");
            } else {
                branching += 1;
                caught += usize::from(worst > 100.0 * TOLERANCE);
            }
        }
    }
    assert!(branching > 30 && caught == branching, "{caught} of {branching}");
}
