//! One seed, one text on the tiny pair, with 20 prompts and 5 seeds each.
//!
//! Texts are short here and each is compared with one of the eight ways to draft, in turn. All of
//! it, with longer texts:
//!
//! ```sh
//! cargo run --release --example bench_decode -- --prompts tests/sampling/prompts.txt --temperature 1 \
//!     --seeds 5 --uncoupled --repeat 1 --max-new-tokens 32
//! ```

use std::{ops::ControlFlow, path::Path};

use candle_core::{DType, Device};
use ddtree::{
    Algorithm, Config, Decoder, DraftTree, NoDrafter, Request, Sampling,
    candle::{CandleTarget, DecoderModel, dflash::DFlash},
    conformance,
};
use tokenizers::Tokenizer;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-qwen3")
}

fn prompts() -> Vec<Vec<u32>> {
    let tokenizer = Tokenizer::from_file(folder().join("target/tokenizer.json")).unwrap();
    let lines = include_str!("prompts.txt").lines();
    lines.map(|line| tokenizer.encode(line, false).unwrap().get_ids().to_vec()).collect()
}

fn pair() -> (DecoderModel, DFlash) {
    let target = DecoderModel::load(folder().join("target"), DType::F32, &Device::Cpu).unwrap();
    let drafter = DFlash::load(folder().join("drafter"), &target).unwrap();
    (target, drafter)
}

/// Ways to sample that real requests use.
fn sampling(seed: u64) -> Sampling {
    let sampling = Sampling::new().seed(seed);
    match seed % 5 {
        0 => sampling.temperature(1.0),
        1 => sampling.temperature(0.6).top_k(20).top_p(0.95),
        2 => sampling.temperature(1.3).min_p(0.05),
        3 => sampling.temperature(0.8).repetition_penalty(1.2),
        _ => sampling.temperature(0.3).presence_penalty(0.5),
    }
}

#[test]
fn a_seed_gives_the_same_text_with_every_algorithm() {
    let (model, drafter) = pair();
    let taps = drafter.config().target_layer_ids().to_vec();
    let plain = CandleTarget::new(model, 128, &[]).unwrap();
    let mut ar = Decoder::autoregressive(plain).unwrap();

    let mut configs = vec![Config::new(Algorithm::Chain)];
    configs.extend([4, 16, 64].map(|budget| Config::new(Algorithm::Tree).budget(budget)));
    let uncoupled: Vec<_> = configs.iter().map(|config| config.clone().coupled(false)).collect();
    configs.extend(uncoupled);
    let mut decoders: Vec<_> = configs
        .iter()
        .map(|config| {
            let (model, drafter) = pair();
            let target = CandleTarget::new(model, 128, &taps).unwrap();
            Decoder::new((target, drafter), config).unwrap()
        })
        .collect();

    let prompts = prompts();
    assert_eq!(prompts.len(), 20);
    let go_on = |_: &[u32]| ControlFlow::Continue(());
    for (case, (prompt, seed)) in
        prompts.iter().flat_map(|prompt| (0..5).map(move |seed| (prompt, seed))).enumerate()
    {
        let request = Request::new(prompt).max_new_tokens(7).stop_tokens(&[0]);
        let request = request.sampling(sampling(seed));
        let expected = ar.generate(&request, go_on).unwrap().tokens;
        // 5 and 8 have no common factor: every seed meets every way to draft.
        let way = case % configs.len();
        let found = decoders[way].generate(&request, go_on).unwrap().tokens;
        assert_eq!(found, expected, "{:?} {:?}", configs[way], request);
    }
}

#[test]
fn its_picks_conform() {
    let (model, _) = pair();
    let mut target = CandleTarget::new(model, 64, &[]).unwrap();
    let tree = DraftTree::from_parents(&[3, 10, 90, 40, 2_000], &[-1, 0, 0, 1, 3]).unwrap();
    for seed in 0..5 {
        conformance::check_picks(&mut target, &[17, 300, 9], &tree, &sampling(seed)).unwrap();
    }
    conformance::check_picks(&mut target, &[17], &tree, &Sampling::new()).unwrap();
    // A decoder takes the target back as it was left.
    let mut decoder =
        Decoder::new((target, NoDrafter), &Config::new(Algorithm::Autoregressive)).unwrap();
    let request = Request::new(&[17, 300]).max_new_tokens(2);
    assert_eq!(decoder.generate(&request, |_| ControlFlow::Continue(())).unwrap().tokens.len(), 2);
}
