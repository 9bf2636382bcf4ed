//! The committed drafter with its target, against traces of the published reference implementation.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use ddtree::{
    Algorithm, Config, Decoder, Request,
    candle::{CandleTarget, DecoderModel, Forward, Want, dflash::DFlash},
};
use serde::Deserialize;

use crate::fixture::rows;

#[derive(Deserialize)]
struct Goldens {
    block_size: usize,
    max_new_tokens: usize,
    stop_token: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    autoregressive: Vec<u32>,
    chain: Chain,
    trees: std::collections::BTreeMap<String, Trees>,
}

#[derive(Deserialize)]
struct Chain {
    acceptance_lengths: Vec<usize>,
}

#[derive(Deserialize)]
struct Trees {
    acceptance_lengths: Vec<usize>,
    rounds: Vec<Round>,
}

#[derive(Deserialize)]
struct Round {
    tokens: Vec<u32>,
    depths: Vec<usize>,
    parents: Vec<i32>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).into()
}

fn goldens() -> Goldens {
    let text =
        std::fs::read_to_string(root().join("tests/goldens/decode-tiny-qwen3.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn pair() -> (DecoderModel, DFlash) {
    let models = root().join("examples/models/tiny-qwen3");
    let target = DecoderModel::load(models.join("target"), DType::F32, &Device::Cpu).unwrap();
    let drafter = DFlash::load(models.join("drafter"), &target).unwrap();
    (target, drafter)
}

/// Taps of every token of `text`.
fn taps(target: &DecoderModel, drafter: &DFlash, text: &[u32]) -> Tensor {
    let positions: Vec<u32> = (0..text.len() as u32).collect();
    let pass = Forward {
        tokens: text,
        positions: &positions,
        start: 0,
        mask: None,
        tree: None,
        want: Want::Nothing,
        taps: drafter.config().target_layer_ids(),
    };
    let mut cache = target.new_cache(text.len()).unwrap();
    target.forward(&mut cache, &pass).unwrap().taps.unwrap()
}

/// The ids of the 64 greatest logits, greatest first.
fn ranked(row: &[f32]) -> Vec<u32> {
    let order = |&a: &u32, &b: &u32| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b));
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.select_nth_unstable_by(64, order);
    ids.truncate(64);
    ids.sort_by(order);
    ids
}

/// Decodes along the reference's text with the reference's acceptance lengths and hands every
/// round's logits to `round`, which returns the round's acceptance length.
///
/// `room` is how many positions the reference reserves for new tokens. Where less is left than a
/// block, it drafts a shorter one and takes the slots' predictions one position late, so the replay
/// ends there.
fn replay(
    target: &DecoderModel,
    drafter: &mut DFlash,
    case: &Case,
    room: usize,
    mut round: impl FnMut(usize, &[u32], &[Vec<f32>]) -> Option<usize>,
) {
    let prompt = case.prompt_ids.len();
    let text = [&case.prompt_ids[..], &case.autoregressive].concat();
    let taps = taps(target, drafter, &text);
    drafter.truncate(0).unwrap();
    let block_size = drafter.config().block_size();
    let (mut observed, mut position) = (0, prompt);
    for index in 0.. {
        // The root has no taps yet: the context ends before it.
        drafter.observe(observed, &taps.narrow(0, observed, position - observed).unwrap()).unwrap();
        observed = position;
        if prompt + room - position < block_size {
            break;
        }
        let logits = drafter.logits(text[position], position, block_size - 1).unwrap();
        let Some(length) = round(index, &text[position + 1..], &rows(&logits)) else {
            break;
        };
        position += length;
        if position >= text.len() {
            break;
        }
    }
}

#[test]
fn chains_are_accepted_as_far_as_the_references() {
    let goldens = goldens();
    let (target, mut drafter) = pair();
    assert_eq!(drafter.config().block_size(), goldens.block_size);
    let mut rounds = 0;
    for case in &goldens.cases {
        let lengths = &case.chain.acceptance_lengths;
        let room = goldens.max_new_tokens + goldens.block_size;
        replay(&target, &mut drafter, case, room, |index, next, logits| {
            let matches =
                logits.iter().zip(next).take_while(|(row, next)| ranked(row)[0] == **next);
            let length = 1 + matches.count();
            if length > next.len() {
                // The reference's last round may go on beyond the text.
                assert!(lengths[index] >= length && index + 1 == lengths.len());
                return None;
            }
            assert_eq!(length, lengths[index], "round {index}");
            rounds += 1;
            Some(length)
        });
    }
    assert!(rounds > 300, "{rounds}");
}

/// Of every node of every tree of the reference, the children are the best tokens of the next
/// depth, best first.
#[test]
fn trees_list_the_references_tokens() {
    let goldens = goldens();
    let (target, mut drafter) = pair();
    let (mut nodes, mut swapped) = (0, 0);
    for case in &goldens.cases {
        for (budget, trees) in &case.trees {
            let room = goldens.max_new_tokens + 1 + budget.parse::<usize>().unwrap();
            replay(&target, &mut drafter, case, room, |index, _, logits| {
                let round = trees.rounds.get(index)?;
                let ranked: Vec<_> = logits.iter().map(|row| ranked(row)).collect();
                let mut children = vec![0; round.parents.len()];
                for ((&token, &depth), &parent) in
                    round.tokens.iter().zip(&round.depths).zip(&round.parents[1..])
                {
                    let rank = children[parent as usize];
                    children[parent as usize] += 1;
                    let (row, found) = (&logits[depth - 1], ranked[depth - 1][rank]);
                    nodes += 1;
                    if found != token {
                        let gap = (row[found as usize] - row[token as usize]).abs();
                        assert!(
                            gap < 1e-4,
                            "round {index}: {found} instead of {token}, {gap} apart"
                        );
                        swapped += 1;
                    }
                }
                trees.acceptance_lengths.get(index).copied()
            });
        }
    }
    assert!(nodes > 10_000, "{nodes}");
    assert!(swapped * 1000 < nodes, "{swapped} of {nodes} near-ties in another order");
}

/// One decoder for several prompts, so that every text but the first follows a reset.
#[test]
fn the_decoding_loop_gives_the_references_text_and_acceptance() {
    let goldens = goldens();
    let taps = pair().1.config().target_layer_ids().to_vec();
    let engine = || {
        let (model, drafter) = pair();
        (CandleTarget::new(model, 512, &taps).unwrap(), drafter)
    };
    let chain = Config::new(Algorithm::Chain);
    let tree = Config::new(Algorithm::Tree).budget(16);
    for (budget, config) in [(None, chain), (Some("16"), tree)] {
        let mut decoder = Decoder::new(engine(), &config).unwrap();
        let mut rounds = 0;
        for case in &goldens.cases[..4] {
            let request = Request::new(&case.prompt_ids)
                .max_new_tokens(goldens.max_new_tokens)
                .stop_tokens(&[goldens.stop_token]);
            decoder.start(&request).unwrap();
            let (mut text, mut lengths) = (Vec::new(), Vec::new());
            while let Some(tokens) = decoder.step().unwrap() {
                text.extend_from_slice(tokens);
                lengths.push(tokens.len());
            }
            assert_eq!(text, case.autoregressive);
            let expected = match budget {
                None => &case.chain.acceptance_lengths,
                Some(budget) => &case.trees[budget].acceptance_lengths,
            };
            // The first step is the prompt's. Near the token limit the loop drafts no further than
            // the limit, which the reference does not do.
            let mut emitted = 1;
            for (&length, &expected) in lengths[1..].iter().zip(expected) {
                if emitted + goldens.block_size > goldens.max_new_tokens {
                    break;
                }
                emitted += length;
                // A stop token ends the text; the reference counts what follows it.
                assert!(length == expected || emitted == text.len() && length < expected);
                rounds += 1;
            }
        }
        assert!(rounds > 80, "{rounds}");
    }
}
