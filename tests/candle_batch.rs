//! A batch on the candle backend is its sequences, one by one: the same picks and texts. Caches and
//! features differ by the rounding of products over another number of rows, and by no more.
#![cfg(feature = "candle")]

use candle_core::{DType, Device, Tensor};
use ddtree::{
    Algorithm, Capabilities, Config, DraftTree, Need, Picks, Plan, Prefill, Request, Round,
    Session, Verifier,
    candle::{BatchEntry, CandleTarget, DecoderModel, verify_batch},
    tree::SharedBudget,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const TAPS: [usize; 2] = [0, 1];

/// The second has recurrent layers.
const MODELS: [&str; 2] = ["tiny-qwen3", "tiny-qwen3_5"];

fn model(name: &str) -> DecoderModel {
    let folder = format!("{}/examples/models/{name}/target", env!("CARGO_MANIFEST_DIR"));
    DecoderModel::load(folder, DType::F32, &Device::Cpu).unwrap()
}

fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims());
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (found, expected) in values(found).into_iter().zip(values(expected)) {
        assert!((found - expected).abs() <= 2e-5 * expected.abs().max(1.0), "{found} {expected}");
    }
}

fn target(model: &DecoderModel, prompt: &[u32]) -> CandleTarget {
    let mut target = CandleTarget::new(model.clone(), 128, &TAPS).unwrap();
    target.prefill(&Prefill::new(0, prompt), &mut Picks::new(&mut Vec::new())).unwrap();
    target
}

fn random_tree(rng: &mut StdRng, vocab_size: u32) -> DraftTree {
    let mut tree = DraftTree::new(rng.random_range(0..vocab_size));
    for _ in 0..rng.random_range(0..20) {
        let parent = rng.random_range(0..tree.len());
        let _ = tree.push(parent, rng.random_range(0..vocab_size), 0.0);
    }
    tree
}

#[test]
fn a_batch_equals_its_sequences() {
    for name in MODELS {
        check_batches(&model(name));
    }
}

fn check_batches(model: &DecoderModel) {
    let vocab_size = model.config().vocab_size as u32;
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        let count = rng.random_range(1..5);
        let mut together = Vec::new();
        let mut alone = Vec::new();
        for _ in 0..count {
            let prompt: Vec<u32> =
                (0..rng.random_range(1..30)).map(|_| rng.random_range(0..vocab_size)).collect();
            together.push(target(model, &prompt));
            alone.push(target(model, &prompt));
        }
        for _ in 0..3 {
            let trees: Vec<DraftTree> =
                (0..count).map(|_| random_tree(&mut rng, vocab_size)).collect();
            let masks: Vec<_> = trees
                .iter()
                .map(|tree| {
                    let mut mask = ddtree::AncestorMask::new();
                    mask.build(tree);
                    (!tree.is_chain()).then_some(mask)
                })
                .collect();
            let mut picks = vec![Vec::new(); count];
            let mut batch: Vec<BatchEntry<'_>> = Vec::new();
            for (((target, tree), mask), picks) in
                together.iter_mut().zip(&trees).zip(&masks).zip(&mut picks)
            {
                let round = Round::new(target.cache().len(), tree, mask.as_ref());
                batch.push(BatchEntry { target, round, picks: Picks::new(picks) });
            }
            verify_batch(&mut batch).unwrap();
            for (index, tree) in trees.iter().enumerate() {
                let target = &mut alone[index];
                let (mut expected, start) = (Vec::new(), target.cache().len());
                let round = Round::new(start, tree, masks[index].as_ref());
                target.verify(&round, &mut Picks::new(&mut expected)).unwrap();
                assert_eq!(picks[index], expected);

                // Commits the deepest path.
                let mut walked = vec![u32::MAX; tree.len()];
                let last = (0..tree.len()).max_by_key(|&slot| tree.depths()[slot]).unwrap();
                for slot in tree.ancestors(last).filter(|&slot| slot > 0) {
                    walked[tree.parents()[slot] as usize] = tree.tokens()[slot];
                }
                let (mut outcome, mut plan) =
                    (ddtree::Acceptance::new(), ddtree::CommitPlan::new());
                ddtree::walk(tree, &walked, &mut outcome).unwrap();
                plan.set(start, &outcome);
                let expected = target.commit(&plan).unwrap();
                let found = together[index].commit(&plan).unwrap();
                assert_close(found.hidden().unwrap(), expected.hidden().unwrap());
                assert_eq!(together[index].cache().len(), alone[index].cache().len());
                for layer in 0..together[index].cache().num_layers() {
                    let (found, expected) = (together[index].cache(), alone[index].cache());
                    assert_close(&found.keys(layer).unwrap(), &expected.keys(layer).unwrap());
                    assert_close(&found.values(layer).unwrap(), &expected.values(layer).unwrap());
                }
            }
        }
    }
}

/// Decodes all prompts at once, with trees under a shared budget, and returns their texts.
fn decode_together(model: &DecoderModel, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
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
        for (session, _) in &mut sequences {
            if session.need() == Need::Proposal {
                let (request, proposal) = session.proposal().unwrap();
                for _ in 0..request.horizon() {
                    // The token that comes is among these now and then.
                    let first = rng.random_range(0..capabilities.vocab_size as u32 - 4);
                    let tokens = [first, first + 1, first + 2, first + 3];
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
    let texts = decode_together(model, &prompts, 24);
    for (prompt, text) in prompts.iter().zip(texts) {
        let target = CandleTarget::new(model.clone(), 128, &[]).unwrap();
        let mut decoder = ddtree::Decoder::autoregressive(target).unwrap();
        let request = Request::new(prompt).max_new_tokens(24);
        let plain = decoder.generate(&request, |_| std::ops::ControlFlow::Continue(())).unwrap();
        assert_eq!(text, plain.tokens);
    }
}

#[test]
fn a_batch_that_cannot_run_changes_nothing() {
    verify_batch(&mut []).unwrap();
    let (model, other) = (model(MODELS[0]), model(MODELS[0]));
    let tree = DraftTree::new(7);
    let mut first = target(&model, &[1, 2, 3]);
    let mut second = target(&other, &[4, 5]);
    let run = |start: usize, first: &mut CandleTarget, second: &mut CandleTarget| {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let result = verify_batch(&mut [
            BatchEntry {
                target: first,
                round: Round::new(3, &tree, None),
                picks: Picks::new(&mut a),
            },
            BatchEntry {
                target: second,
                round: Round::new(start, &tree, None),
                picks: Picks::new(&mut b),
            },
        ]);
        (result, a.len(), b.len())
    };
    let (result, a, b) = run(2, &mut first, &mut second);
    assert!(result.unwrap_err().to_string().contains("one model for a batch"));
    assert_eq!((a, b), (0, 0));
    let mut second = target(&model, &[4, 5]);
    assert!(run(1, &mut first, &mut second).0.is_err());
    // Nothing to commit, and the rows are as they were.
    let mut plan = ddtree::CommitPlan::new();
    let mut outcome = ddtree::Acceptance::new();
    ddtree::walk(&tree, &[0], &mut outcome).unwrap();
    plan.set(3, &outcome);
    assert!(first.commit(&plan).is_err());
    assert_eq!((first.cache().len(), second.cache().len()), (3, 2));
    let (result, a, b) = run(2, &mut first, &mut second);
    result.unwrap();
    assert_eq!((a, b), (1, 1));
    first.commit(&plan).unwrap();
}
