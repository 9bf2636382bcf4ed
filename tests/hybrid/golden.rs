//! Against the reference implementation.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use ddtree::candle::{CandleTarget, Forward, StateMethod, Want, dflash::DFlash};
use ddtree::{
    Acceptance, Algorithm, AncestorMask, CommitPlan, Config, Decoder, DraftTree, Picks, Prefill,
    Request, Round, Verifier, walk,
};
use serde::Deserialize;

use crate::common::{METHODS, path, relative_difference, tiny, values};

/// What the issue asks for.
const TOLERANCE: f32 = 1e-4;

#[test]
fn hidden_states_logits_and_final_states_are_those_of_the_reference() {
    let golden = path("tests/goldens/forward-tiny-qwen3_5.safetensors");
    let golden = candle_core::safetensors::load(golden, &Device::Cpu).unwrap();
    let tokens: Vec<u32> =
        golden["input_ids"].to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect();
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let model = tiny();
    let close = |name: &str, found: &Tensor, expected: &Tensor| {
        assert_eq!(found.dims(), expected.dims(), "{name}");
        let difference = relative_difference(&values(found), &values(expected));
        assert!(difference < TOLERANCE, "{name}: {difference}");
    };
    let hybrid = model.config().hybrid.clone().unwrap();
    let hidden_size = model.config().hidden_size;
    let chain: Vec<i32> = (-1..tokens.len() as i32 - 1).collect();
    let chain = DraftTree::from_parents(&tokens, &chain).unwrap();

    // As a prompt, and as a chain to be verified by either method.
    for method in [None, Some(StateMethod::PerSlot), Some(StateMethod::Factors)] {
        let mut cache = model.new_cache(64).unwrap();
        cache.set_state_method(method.unwrap_or_default());
        let pass = Forward {
            tokens: &tokens,
            positions: &positions,
            start: 0,
            mask: None,
            tree: method.map(|_| &chain),
            want: Want::All,
            taps: &[0, 1, 2, 3, 4, 5],
        };
        let output = model.forward(&mut cache, &pass).unwrap();
        let taps = output.taps.unwrap();
        for layer in 0..5 {
            let tap = taps.narrow(1, layer * hidden_size, hidden_size).unwrap();
            let name = format!("hidden_states.{}", layer + 1);
            close(&name, &tap, &golden[&name]);
        }
        // The reference reports the last one after the final norm.
        let last = values(&taps.narrow(1, 5 * hidden_size, hidden_size).unwrap());
        let weights = path("examples/models/tiny-qwen3_5/target/model.safetensors");
        let weights = candle_core::safetensors::load(weights, &Device::Cpu).unwrap();
        let weight = values(&weights["model.norm.weight"]);
        let normed: Vec<f32> = last
            .chunks(hidden_size)
            .flat_map(|row| {
                let squares: f32 = row.iter().map(|x| x * x).sum();
                let scale = (squares / hidden_size as f32 + 1e-6).sqrt();
                row.iter().zip(&weight).map(move |(x, w)| x / scale * (1.0 + w))
            })
            .collect();
        let difference = relative_difference(&normed, &values(&golden["hidden_states.6"]));
        assert!(difference < TOLERANCE, "hidden_states.6: {difference}");
        close("logits", &output.logits.unwrap(), &golden["logits"]);

        let slots: Vec<u32> = (0..tokens.len() as u32).collect();
        match method {
            Some(_) => cache.commit(0, &slots).unwrap(),
            None => cache.extend(tokens.len()).unwrap(),
        }
        for (index, layer) in hybrid.linear_layers.iter().enumerate() {
            let state = cache.recurrent_state(index).unwrap();
            let name = format!("layers.{layer}.recurrent_states");
            close(&name, &state, &golden[&name]);
            // The reference keeps as many inputs as the kernel is wide, the oldest of them unread.
            let name = format!("layers.{layer}.conv_states");
            let expected = golden[&name].narrow(1, 1, 3).unwrap().t().unwrap();
            close(&name, &cache.conv_window(index).unwrap(), &expected);
        }
    }
}

#[derive(Deserialize)]
struct Golden {
    block_size: usize,
    stop_token: u32,
    max_new_tokens: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    autoregressive: Vec<u32>,
    rounds: HashMap<String, Vec<GoldenRound>>,
}

#[derive(Deserialize)]
struct GoldenRound {
    tokens: Vec<u32>,
    depths: Vec<u32>,
    parents: Vec<i32>,
    accepted: Vec<u32>,
}

fn golden() -> Golden {
    let golden = std::fs::read(path("tests/goldens/decode-tiny-qwen3_5.json")).unwrap();
    serde_json::from_slice(&golden).unwrap()
}

#[test]
fn rounds_of_the_reference_are_accepted_slot_by_slot() {
    let golden = golden();
    let model = tiny();
    for method in METHODS {
        let mut target = CandleTarget::new(model.clone(), 256, &[]).unwrap().state_method(method);
        for (number, case) in golden.cases.iter().enumerate() {
            for (kind, rounds) in &case.rounds {
                let where_ = format!("case {number}, {kind}, {method:?}");
                let tokens = follow(&mut target, &case.prompt_ids, rounds, &where_);
                assert!(tokens.len() >= case.autoregressive.len(), "{where_}");
                let end = tokens.iter().position(|&token| token == golden.stop_token);
                let end = end.map_or(golden.max_new_tokens, |stop| stop + 1);
                let tokens = &tokens[..end.min(golden.max_new_tokens)];
                assert_eq!(tokens, case.autoregressive, "{where_}");
            }
            let plain = plain(&mut target, &case.prompt_ids, case.autoregressive.len());
            assert_eq!(plain, case.autoregressive, "case {number}, {method:?}");
        }
    }
}

/// The drafter of the pair reads the hybrid target's taps: what it drafts is what the reference
/// drafted, round by round.
#[test]
fn the_drafter_of_the_pair_draws_the_trees_of_the_reference() {
    let golden = golden();
    let model = tiny();
    let drafter = DFlash::load(path("examples/models/tiny-qwen3_5/drafter"), &model).unwrap();
    assert_eq!(drafter.config().block_size(), golden.block_size);
    let taps = drafter.config().target_layer_ids().to_vec();
    let mut pair = (CandleTarget::new(model, 256, &taps).unwrap(), drafter);
    for (number, case) in golden.cases.iter().enumerate() {
        for (kind, expected) in &case.rounds {
            let config = match kind.parse() {
                Ok(budget) => Config::new(Algorithm::Tree).budget(budget),
                Err(_) => Config::new(Algorithm::Chain),
            };
            let engine = (&mut pair.0, &mut pair.1);
            let mut decoder = Decoder::new(engine, &config.trace(true)).unwrap();
            // Past the end of the reference, whose blocks do not shrink towards it.
            let tokens = golden.max_new_tokens + golden.block_size;
            decoder.start(&Request::new(&case.prompt_ids).max_new_tokens(tokens)).unwrap();
            while decoder.session().trace().len() < expected.len() {
                decoder.step().unwrap().unwrap();
            }
            for (round, (found, expected)) in
                decoder.session().trace().iter().zip(expected).enumerate()
            {
                let where_ = format!("case {number}, {kind}, round {round}");
                assert_eq!(found.tokens[1..], expected.tokens, "{where_}");
                assert_eq!(found.parents, expected.parents, "{where_}");
                assert_eq!(found.path, expected.accepted, "{where_}");
            }
            let text = decoder.session().generated();
            assert!(text.starts_with(&case.autoregressive), "case {number}, {kind}");
        }
    }
}

/// Verifies the recorded trees one after another and gives the tokens emitted.
fn follow(
    target: &mut CandleTarget,
    prompt: &[u32],
    rounds: &[GoldenRound],
    where_: &str,
) -> Vec<u32> {
    let mut picks = Vec::new();
    target.reset(0).unwrap();
    target.prefill(&Prefill::new(0, prompt), &mut Picks::new(&mut picks)).unwrap();
    let mut emitted = picks.clone();
    let mut start = prompt.len();
    let (mut mask, mut outcome, mut plan) =
        (AncestorMask::new(), Acceptance::new(), CommitPlan::new());
    for (number, round) in rounds.iter().enumerate() {
        let root = *emitted.last().unwrap();
        let tokens: Vec<u32> = std::iter::once(root).chain(round.tokens.iter().copied()).collect();
        let tree = DraftTree::from_parents(&tokens, &round.parents).unwrap();
        assert_eq!(tree.depths()[1..], round.depths);
        mask.build(&tree);
        let mask = (!tree.is_chain()).then_some(&mask);
        let mut picked = Picks::new(&mut picks);
        target.verify(&Round::new(start, &tree, mask), &mut picked).unwrap();
        walk(&tree, &picks, &mut outcome).unwrap();
        assert_eq!(outcome.path(), round.accepted, "{where_}, round {number}");
        plan.set(start, &outcome);
        target.commit(&plan).unwrap();
        start = plan.new_len();
        emitted.extend_from_slice(outcome.tokens());
    }
    emitted
}

/// Decodes without a draft.
fn plain(target: &mut CandleTarget, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut decoder = Decoder::autoregressive(target).unwrap();
    let request = Request::new(prompt).max_new_tokens(tokens);
    decoder.start(&request).unwrap();
    while decoder.step().unwrap().is_some() {}
    decoder.session().generated().to_vec()
}
