//! Fuzzing without tools: replays the corpus of every target, then changes its inputs at random, the
//! same way every time. `DDTREE_FUZZ_ROUNDS` sets how many changed inputs each target gets.
//!
//! `cargo fuzz` runs the same targets with coverage: see `Cargo.toml` in this folder. An input that
//! it finds goes into `corpus/<target>`, where it stays.

mod targets;

use std::{fs, panic, path::PathBuf};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use targets::{CORE, Target};

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzz/corpus")).join(name);
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "no corpus for {name}");
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

fn run(name: &str, target: Target, input: &[u8]) {
    if panic::catch_unwind(|| target(input)).is_err() {
        let bytes: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        panic!("{name} fails on {bytes}");
    }
}

fn fuzz(targets: &[(&str, Target)], rounds: usize) {
    let rounds = match std::env::var("DDTREE_FUZZ_ROUNDS") {
        Ok(rounds) => rounds.parse().unwrap(),
        Err(_) => rounds,
    };
    for &(name, target) in targets {
        let corpus = corpus(name);
        corpus.iter().for_each(|input| run(name, target, input));
        run(name, target, &[]);
        let mut rng = StdRng::seed_from_u64(7);
        for _ in 0..rounds {
            let mut input = corpus.choose(&mut rng).unwrap().clone();
            for _ in 0..rng.random_range(1..8) {
                change(&mut input, &corpus, &mut rng);
            }
            run(name, target, &input);
        }
    }
}

fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut StdRng) {
    let at = rng.random_range(0..=input.len());
    let end = (at + rng.random_range(0..9)).min(input.len());
    match rng.random_range(0..6) {
        0 if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
        1 if at < input.len() => input[at] = *[0, 1, 127, 128, 254, 255].choose(rng).unwrap(),
        2 => input.insert(at, rng.random()),
        3 => drop(input.drain(at..end)),
        4 => input.truncate(at),
        // The rest of another input.
        _ => {
            let other = corpus.choose(rng).unwrap();
            input.truncate(at);
            input.extend_from_slice(&other[rng.random_range(0..=other.len())..]);
        }
    }
}

#[test]
fn core() {
    fuzz(&CORE, 3_000);
}

#[cfg(feature = "candle")]
#[test]
fn configurations_and_checkpoints() {
    fuzz(&targets::CANDLE, 500);
}

/// Changes of files that load find more than changes of files that do not.
#[cfg(feature = "candle")]
#[test]
fn well_formed_models_of_the_corpus_load() {
    use candle_core::{DType, Device};
    use ddtree::candle::{DecoderModel, Gguf, Rounding};

    for name in ["llama-f32", "qwen2-f16", "qwen3-version-2", "version-1", "q8-0", "aligned-to-8"] {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzz/corpus/gguf");
        let mut gguf = Gguf::open(format!("{corpus}/{name}")).unwrap();
        let config = gguf.config().unwrap();
        let weights = gguf.into_weights(DType::F32, &Device::Cpu, Rounding::None).unwrap();
        DecoderModel::new(config, weights).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
