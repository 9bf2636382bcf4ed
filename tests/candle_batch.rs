//! A batch on the candle backend is its sequences, one by one, bit for bit: picks, logits, features and
//! caches in f32.
#![cfg(feature = "candle")]

#[path = "common/tree.rs"]
mod tree;

use std::process::Command;

use candle_core::{DType, Device, Tensor};
use ddtree::{
    Acceptance, Algorithm, AncestorMask, Capabilities, CommitPlan, Config, DraftTree, Need, Picks,
    Plan, Prefill, Request, Round, Session, Verifier,
    candle::{BatchEntry, CandleTarget, DecoderModel, Forward, KvCache, Want, verify_batch},
    tree::SharedBudget,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tree::random_tree;

const TAPS: [usize; 2] = [0, 5];

/// The second has recurrent layers.
const MODELS: [&str; 2] = ["tiny-qwen3", "tiny-qwen3_5"];

/// Slots of a round: one, few, as many as a row of registers, more than the tiles of a product.
const WIDTHS: [usize; 4] = [1, 7, 16, 65];

fn model(name: &str) -> DecoderModel {
    let folder = format!("{}/examples/models/{name}/target", env!("CARGO_MANIFEST_DIR"));
    DecoderModel::load(folder, DType::F32, &Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims());
    assert!(bits(found) == bits(expected), "bits differ");
}

#[track_caller]
fn assert_same_rows(found: &KvCache, expected: &KvCache) {
    assert_eq!(found.len(), expected.len());
    for layer in 0..found.num_layers() {
        assert_same(&found.keys(layer).unwrap(), &expected.keys(layer).unwrap());
        assert_same(&found.values(layer).unwrap(), &expected.values(layer).unwrap());
    }
}

fn target(model: &DecoderModel, prompt: &[u32]) -> CandleTarget {
    let mut target = CandleTarget::new(model.clone(), 192, &TAPS).unwrap();
    target.prefill(&Prefill::new(0, prompt), &mut Picks::new(&mut Vec::new())).unwrap();
    target
}

fn mask_of(tree: &DraftTree) -> Option<AncestorMask> {
    let mut mask = AncestorMask::new();
    mask.build(tree);
    (!tree.is_chain()).then_some(mask)
}

/// Accepts the path to the deepest slot.
fn plan_of(tree: &DraftTree, start: usize) -> CommitPlan {
    let last = (0..tree.len()).max_by_key(|&slot| tree.depths()[slot]).unwrap();
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    outcome.set(tree, last, 0).unwrap();
    plan.set(start, &outcome);
    plan
}

/// Verifies `trees` as one batch; the last may name a wrong `start`.
fn verify(
    targets: &mut [CandleTarget],
    trees: &[DraftTree],
    wrong: Option<usize>,
) -> Result<Vec<Vec<u32>>, ddtree::candle::Error> {
    let masks: Vec<_> = trees.iter().map(mask_of).collect();
    let mut picks = vec![Vec::new(); trees.len()];
    let mut batch: Vec<BatchEntry<'_>> = Vec::new();
    for (((target, tree), mask), picks) in targets.iter_mut().zip(trees).zip(&masks).zip(&mut picks)
    {
        let round = Round::new(target.cache().len(), tree, mask.as_ref());
        batch.push(BatchEntry { target, round, picks: Picks::new(picks) });
    }
    if let (Some(start), Some(last)) = (wrong, batch.last_mut()) {
        last.round = Round::new(start, &trees[trees.len() - 1], masks[trees.len() - 1].as_ref());
    }
    verify_batch(&mut batch)?;
    Ok(picks)
}

#[test]
fn a_batch_equals_its_sequences() {
    for (seed, name) in MODELS.into_iter().enumerate() {
        let model = model(name);
        let vocab_size = model.config().vocab_size as u32;
        let mut rng = StdRng::seed_from_u64(seed as u64);
        let prompts = [3, 40, 1, 17]
            .map(|len| -> Vec<u32> { (0..len).map(|_| rng.random_range(0..vocab_size)).collect() });
        let mut together = prompts.each_ref().map(|prompt| target(&model, prompt));
        let mut alone = prompts.each_ref().map(|prompt| target(&model, prompt));
        for round in 0..4 {
            // Every sequence is of every width once.
            let trees: Vec<DraftTree> = (0..WIDTHS.len())
                .map(|index| random_tree(&mut rng, WIDTHS[(index + round) % 4], vocab_size))
                .collect();
            if round == 1 {
                // A sequence that cannot run: nothing is verified, and the others lose nothing.
                assert!(verify(&mut together, &trees, Some(0)).is_err());
                let plan = plan_of(&trees[0], together[0].cache().len());
                assert!(together[0].commit(&plan).is_err());
            }
            let picks = verify(&mut together, &trees, None).unwrap();
            for (index, tree) in trees.iter().enumerate() {
                let (together, alone) = (&mut together[index], &mut alone[index]);
                let (mut expected, start, mask) = (Vec::new(), alone.cache().len(), mask_of(tree));
                let round = Round::new(start, tree, mask.as_ref());
                alone.verify(&round, &mut Picks::new(&mut expected)).unwrap();
                assert_eq!(picks[index], expected);
                let plan = plan_of(tree, start);
                let expected = alone.commit(&plan).unwrap();
                let found = together.commit(&plan).unwrap();
                assert_same(found.hidden().unwrap(), expected.hidden().unwrap());
                assert_same_rows(together.cache(), alone.cache());
            }
        }
    }
}

/// The rows whose logits are wanted may be one, or none; and not every sequence has a tree.
#[test]
fn logits_of_a_batch_are_those_of_its_sequences() {
    let wants = [Want::All, Want::Last, Want::Rows(&[4, 2, 2]), Want::Nothing, Want::Rows(&[3])];
    for name in MODELS {
        let model = model(name);
        let tokens: Vec<u32> = (100..109).collect();
        let mut caches: Vec<KvCache> = Vec::new();
        caches.resize_with(2 * wants.len(), || model.new_cache(64).unwrap());
        let (together, alone) = caches.split_at_mut(wants.len());
        for pass in 0..2 {
            let start = 9 * pass;
            let positions: Vec<u32> = (start as u32..).take(9).collect();
            let passes = wants.map(|want| {
                let (tokens, positions, taps) = (&tokens, &positions, &TAPS);
                Forward { tokens, positions, start, mask: None, tree: None, want, taps }
            });
            let mut batch: Vec<_> = together.iter_mut().zip(passes).collect();
            let outputs = model.forward_batch(&mut batch).unwrap();
            for ((cache, pass), found) in alone.iter_mut().zip(passes).zip(outputs) {
                let expected = model.forward(cache, &pass).unwrap();
                assert_same(&found.taps.unwrap(), &expected.taps.unwrap());
                assert_eq!(found.logits.is_some(), expected.logits.is_some());
                if let (Some(found), Some(expected)) = (found.logits, expected.logits) {
                    assert_same(&found, &expected);
                }
                cache.extend(9).unwrap();
            }
            for (found, expected) in together.iter_mut().zip(&*alone) {
                found.extend(9).unwrap();
                assert_same_rows(found, expected);
            }
        }
    }
}

/// Prints a hash of the logits of a tree, for the test below.
#[test]
#[ignore = "asserts nothing: the test below runs it"]
fn hash_of_a_pass() {
    let model = model(MODELS[0]);
    let mut hash = 0u64;
    for width in WIDTHS {
        let tree = random_tree(&mut StdRng::seed_from_u64(5), width, 4096);
        let (mask, positions) = (mask_of(&tree), tree.depths());
        let (mask, want) = (mask.as_ref(), Want::All);
        let (tokens, tree) = (tree.tokens(), Some(&tree));
        let pass = Forward { tokens, positions, start: 0, mask, tree, want, taps: &[] };
        let output = model.forward(&mut model.new_cache(128).unwrap(), &pass).unwrap();
        for bits in bits(&output.logits.unwrap()) {
            hash = hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(bits);
        }
    }
    println!("hash {hash:x}");
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let hashes = ["1", "2", "5"].map(|threads| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "hash_of_a_pass", "--include-ignored", "--nocapture"])
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|line| line.contains("hash ")).unwrap().to_owned()
    });
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

/// Decodes all prompts at once, with trees under a shared budget, and returns their texts.
///
/// `texts` are what comes: most of the drafts have the right token among others.
fn decode_together(
    model: &DecoderModel,
    prompts: &[Vec<u32>],
    texts: &[Vec<u32>],
    count: usize,
) -> Vec<Vec<u32>> {
    let capabilities = Capabilities::new(model.config().vocab_size, 128);
    let config = Config::new(Algorithm::Tree).budget(12).top_k(4);
    let plan = Plan::resolve(&config, &capabilities, 4).unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    let mut sequences: Vec<(Session, CandleTarget)> = Vec::new();
    for prompt in prompts {
        let mut session = Session::new(plan.clone());
        session.start(&Request::new(prompt).max_new_tokens(count)).unwrap();
        let mut target = CandleTarget::new(model.clone(), 128, &[]).unwrap();
        let (prefill, mut picks) = session.prefill().unwrap();
        target.prefill(&prefill, &mut picks).unwrap();
        session.prefilled().unwrap();
        sequences.push((session, target));
    }
    let mut shared = SharedBudget::new();
    while sequences.iter().any(|(session, _)| session.need() != Need::Nothing) {
        for ((session, _), text) in sequences.iter_mut().zip(texts) {
            if session.need() == Need::Proposal {
                let generated = session.generated().len();
                let (request, proposal) = session.proposal().unwrap();
                for depth in 0..request.horizon() {
                    let first = rng.random_range(0..capabilities.vocab_size as u32 - 4);
                    let mut tokens = [first, first + 1, first + 2, first + 3];
                    if let Some(&right) = text.get(generated + depth)
                        && !tokens.contains(&right)
                        && rng.random_bool(0.8)
                    {
                        tokens[rng.random_range(0..3)] = right;
                    }
                    proposal.push(&tokens, &[-0.5, -1.5, -2.0, -3.0]).unwrap();
                }
                session.proposed().unwrap();
            }
        }
        let nodes = shared.split(16, &sequences, |(session, _)| session.tree().ok());
        for ((session, _), &nodes) in sequences.iter_mut().zip(nodes) {
            if session.need() == Need::Verification {
                session.truncate_tree(nodes).unwrap();
            }
        }
        let mut batch = Vec::new();
        for (session, target) in &mut sequences {
            if session.need() == Need::Verification {
                let (round, picks) = session.verification().unwrap();
                batch.push(BatchEntry { target, round, picks });
            }
        }
        verify_batch(&mut batch).unwrap();
        drop(batch);
        for (session, target) in &mut sequences {
            if session.need() == Need::Verification {
                session.verified().unwrap();
                target.commit(session.commit().unwrap()).unwrap();
                session.committed().unwrap();
            }
        }
    }
    let stats = || sequences.iter().map(|(session, _)| session.stats());
    let (tokens, rounds) = stats().fold((0, 0), |(t, r), s| (t + s.tokens, r + s.rounds));
    assert!(tokens * 10 > rounds * 13, "hardly a draft was accepted: {tokens} in {rounds} rounds");
    sequences.iter().map(|(session, _)| session.generated().to_vec()).collect()
}

#[test]
fn texts_of_a_batch_are_those_of_plain_decoding() {
    for name in MODELS {
        check_texts(&model(name));
    }
}

fn check_texts(model: &DecoderModel) {
    let prompts = [vec![5, 9, 300], vec![17], (20..60).collect(), vec![1, 2, 3, 4, 5]];
    let plain = prompts.each_ref().map(|prompt| {
        let target = CandleTarget::new(model.clone(), 128, &[]).unwrap();
        let mut decoder = ddtree::Decoder::autoregressive(target).unwrap();
        let request = Request::new(prompt).max_new_tokens(16);
        let plain = decoder.generate(&request, |_| std::ops::ControlFlow::Continue(())).unwrap();
        plain.tokens.to_vec()
    });
    assert_eq!(decode_together(model, &prompts, &plain, 16), plain);
}

#[test]
fn a_batch_that_cannot_run_changes_nothing() {
    verify_batch(&mut []).unwrap();
    let (model, other) = (model(MODELS[0]), model(MODELS[0]));
    let tree = DraftTree::new(7);
    let mut first = target(&model, &[1, 2, 3]);
    let mut second = target(&other, &[4, 5]);
    let run = |entries: [(&mut CandleTarget, usize); 2]| {
        let mut ids = [Vec::new(), Vec::new()];
        let mut batch: Vec<_> = entries
            .into_iter()
            .zip(&mut ids)
            .map(|((target, start), ids)| {
                let round = Round::new(start, &tree, None);
                BatchEntry { target, round, picks: Picks::new(ids) }
            })
            .collect();
        let result = verify_batch(&mut batch);
        (result, ids[0].len(), ids[1].len())
    };
    let (result, a, b) = run([(&mut first, 3), (&mut second, 2)]);
    assert!(result.unwrap_err().to_string().contains("one model for a batch"));
    assert_eq!((a, b), (0, 0));
    let (mut plan, mut outcome) = (CommitPlan::new(), Acceptance::new());
    outcome.set(&tree, 0, 0).unwrap();
    plan.set(3, &outcome);
    let mut second = target(&model, &[4, 5]);
    for fails_first in [false, true] {
        run([(&mut first, 3), (&mut second, 2)]).0.unwrap();
        let mut entries = [(&mut first, 3), (&mut second, 1)];
        if fails_first {
            entries.reverse();
        }
        assert!(run(entries).0.is_err());
        // Nothing to commit, and the rows are as they were.
        assert!(first.commit(&plan).is_err(), "failing first: {fails_first}");
        assert_eq!((first.cache().len(), second.cache().len()), (3, 2));
    }
    let (result, a, b) = run([(&mut first, 3), (&mut second, 2)]);
    result.unwrap();
    assert_eq!((a, b), (1, 1));
    first.commit(&plan).unwrap();
}
