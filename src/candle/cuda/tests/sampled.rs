//! Sampled picks and texts against the host's.

use std::ops::ControlFlow::Continue;
use std::path::Path as FilePath;

use candle_core::{DType, Device};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::draw::{Couple, Draw};
use super::super::kernels::{Argmax, Inputs, TopK};
use super::{TINY, assert_near, gpu, microseconds, pair, random, rows, tiny};
use crate::candle::{CandleTarget, DecoderModel};
use crate::sample::Sampler;
use crate::{
    Algorithm, Config, Decoder, DraftTree, NoDrafter, NoiseKey, Request, Sampling, Verifier,
};

/// Picks of rows at positions, on the GPU and on the host; `None` where there is none.
struct Both {
    device: Vec<Option<u32>>,
    host: Vec<Option<u32>>,
}

fn picks(rows: &[Vec<f32>], positions: &[u32], temperature: f32, seed: u64) -> Option<Both> {
    let gpu = gpu()?;
    let size = rows[0].len();
    let mut draw = Draw::new(&gpu, rows.len(), size).unwrap();
    let picks = gpu.pinned(rows.len()).unwrap();
    let logits = gpu.upload(&rows.concat()).unwrap();
    let positions_buffer = gpu.upload(positions).unwrap();
    let inputs = Inputs {
        prefix: 0,
        tokens: 0,
        positions: positions_buffer.pointer(),
        mask: 0,
        mask_words: 1,
        rows: rows.len(),
    };
    draw.set(&NoiseKey { seed, temperature, position: 0 });
    // Twice: what the kernel keeps between launches has to be as it was.
    for _ in 0..2 {
        draw.run(&gpu, &inputs, &logits, &picks).unwrap();
    }
    gpu.synchronize().unwrap();
    let mut sampler = Sampler::default();
    sampler.start(&Sampling::new().temperature(temperature).seed(seed), size, 1, 1);
    let host = rows.iter().zip(positions).map(|(row, &position)| {
        let tokens = vec![0; position as usize + 1];
        sampler.pick(row, &tokens, None).ok()
    });
    let device = picks.as_slice().iter().map(|&packed| Argmax::token(packed)).collect();
    Some(Both { device, host: host.collect() })
}

#[test]
fn draws_equal_the_hosts() {
    let mut rng = StdRng::seed_from_u64(31);
    for size in [1, 2, 255, 256, 257, 1003, 4096, 16_385, 49_152, 151_936] {
        let rows = rows(&mut rng, size);
        for temperature in [1e-6, 0.05, 0.7, 1.0, 4.0, 1e6] {
            let seed = rng.random();
            let positions: Vec<u32> = rows.iter().map(|_| rng.random_range(0..40_960)).collect();
            let Some(both) = picks(&rows, &positions, temperature, seed) else { return };
            assert_eq!(both.device, both.host, "{size} at {temperature}, seed {seed:#x}");
            assert!(both.host.iter().all(Option::is_some));
        }
    }
}

#[test]
fn many_draws_of_near_equal_tokens_equal_the_hosts() {
    let mut rng = StdRng::seed_from_u64(32);
    // Differences of logits far below those of the noise, and equal ones: the noise decides, to its last bit where
    // logits are great.
    let size = 5000;
    for scale in [0.0f32, 1e-7, 1e-3, 1.0, 1e6] {
        let rows: Vec<Vec<f32>> = (0..64)
            .map(|_| (0..size).map(|_| scale * rng.random_range(-4i32..4) as f32).collect())
            .collect();
        let positions: Vec<u32> = (0..64).collect();
        for seed in 0..4 {
            let Some(both) = picks(&rows, &positions, 0.9, seed) else { return };
            assert_eq!(both.device, both.host, "scale {scale}, seed {seed}");
        }
    }
}

#[test]
fn rows_that_went_wrong_give_no_draw() {
    let size = 3000;
    let mut all = vec![vec![f32::NEG_INFINITY; size]];
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut row = vec![0.5; size];
        row[1234] = bad;
        all.push(row);
    }
    // One token is left.
    let mut one = vec![f32::NEG_INFINITY; size];
    one[2999] = f32::MIN;
    all.push(one);
    let Some(both) = picks(&all, &[0, 1, 2, 3, 4], 1.0, 7) else { return };
    assert_eq!(both.device, [None, None, None, None, Some(2999)]);
    assert_eq!(both.device, both.host);
}

#[test]
fn coupled_lists_are_those_of_noisy_scores() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(33);
    for (size, k) in [(1, 1), (100, 64), (257, 5), (4096, 64), (49_152, 64), (151_936, 64)] {
        let rows = rows(&mut rng, size);
        for temperature in [1e-6f32, 0.7, 1.3] {
            let (seed, root) = (rng.random(), rng.random_range(0..40_000u32));
            let mut couple = Couple::new(&gpu, size).unwrap();
            let top_k = TopK::new(&gpu, rows.len(), size, k).unwrap();
            let logits = gpu.upload(&rows.concat()).unwrap();
            let root_buffer = gpu.upload(&[root]).unwrap();
            couple.set(&NoiseKey { seed, temperature, position: 0 });
            couple.run(&gpu, root_buffer.pointer(), logits.pointer(), rows.len()).unwrap();
            top_k.summarize(&gpu, logits.pointer(), 0..rows.len()).unwrap();
            top_k.select(&gpu, logits.pointer(), 0..rows.len(), k).unwrap();
            gpu.synchronize().unwrap();
            let scale = f64::from(crate::sample::coupled_scale(temperature) as f32);
            for (depth, row) in rows.iter().enumerate() {
                let position = root as usize + 1 + depth;
                let noisy: Vec<f32> = (0..size as u32)
                    .zip(row)
                    .map(|(token, &logit)| {
                        let noise = crate::sample::gumbel(seed, position, token);
                        (f64::from(logit) + scale * noise) as f32
                    })
                    .collect();
                let (mut tokens, mut expected) = (Vec::new(), Vec::new());
                let mut host = crate::TopK::new();
                host.top_k_log_probs(&noisy, k, &mut tokens, &mut expected).unwrap();
                let what = format!("{size} at {temperature}, row {depth}");
                let (ids, log_probs) = top_k.row(depth, k);
                assert_eq!(ids, tokens, "{what}");
                for (&found, expected) in log_probs.iter().zip(expected) {
                    assert_near(found, expected, &what);
                }
            }
        }
    }
}

#[test]
fn sampled_texts_are_the_cpus_whatever_the_algorithm() {
    let Some(gpu) = gpu() else { return };
    let (mut target, mut drafter) = pair(&gpu, DType::F32);
    let folder = FilePath::new(TINY);
    let model = DecoderModel::load(folder.join("target"), DType::F32, &Device::Cpu).unwrap();
    let mut on_cpu = CandleTarget::new(model, 512, &[]).unwrap();
    let prompts = [&[590, 27, 357, 323, 491, 222, 20][..], &[5, 1000, 77]];
    for (prompt, temperature, seed) in
        [(prompts[0], 0.7, 1), (prompts[0], 1.0, u64::MAX), (prompts[1], 1.3, 1 << 40)]
    {
        let sampling = Sampling::new().temperature(temperature).seed(seed);
        let request = Request::new(prompt).max_new_tokens(48).sampling(sampling);
        let plain = Config::new(Algorithm::Autoregressive);
        let mut decoder = Decoder::new((&mut on_cpu, NoDrafter), &plain).unwrap();
        let expected = decoder.generate(&request, |_| Continue(())).unwrap().tokens.to_vec();
        let mut decoder = Decoder::new((&mut target, NoDrafter), &plain).unwrap();
        let text = decoder.generate(&request, |_| Continue(())).unwrap();
        assert_eq!(text.tokens, expected, "T {temperature} seed {seed}");
        for coupled in [true, false] {
            for config in [Config::new(Algorithm::Chain)]
                .into_iter()
                .chain([4, 16, 64].map(|budget| Config::new(Algorithm::Tree).budget(budget)))
            {
                let config = config.coupled(coupled);
                let mut decoder = Decoder::new((&mut target, &mut drafter), &config).unwrap();
                let text = decoder.generate(&request, |_| Continue(())).unwrap();
                assert_eq!(text.tokens, expected, "T {temperature} seed {seed} {config:?}");
            }
        }
    }
}

/// Greedy and sampled picks alternate, and settings that the GPU does not honour go through the host.
#[cfg(feature = "conformance")]
#[test]
fn picks_pass_the_conformance_kit() {
    let Some(gpu) = gpu() else { return };
    let (mut target, _) = tiny(&gpu, DType::F32, false);
    assert_eq!(target.capabilities().device_picks, crate::PickRule::Noise);
    let tree = DraftTree::from_parents(&[3, 1, 9, 4, 2, 7, 7], &[-1, 0, 0, 1, 1, 2, 5]).unwrap();
    let warm = || Sampling::new().temperature(0.8).seed(6);
    for sampling in [warm(), Sampling::new(), warm().seed(9), warm().top_k(4), warm().min_p(0.1)] {
        crate::conformance::check_picks(&mut target, &[5, 1, 2], &tree, &sampling).unwrap();
    }
}

#[cfg(feature = "conformance")]
#[test]
fn the_target_passes_the_conformance_kit() {
    let Some(gpu) = gpu() else { return };
    let (mut target, _) = tiny(&gpu, DType::F32, true);
    let report = crate::conformance::Kit::new(&mut target).run();
    assert!(report.passed(), "{report}");
}

/// Microseconds of sampled beside greedy picks, and of the noise of a draft of 15 depths, at the vocabulary of Qwen3.
#[test]
#[ignore = "a measurement"]
fn noise_times() {
    let Some(gpu) = gpu() else { return };
    let size = 151_936;
    let mut rng = StdRng::seed_from_u64(34);
    let values: Vec<f32> = random(&mut rng, 136 * size).iter().map(|x| 8.0 * x).collect();
    let logits = gpu.upload(&values).unwrap();
    let positions = gpu.upload(&[77u32; 136]).unwrap();
    let mut draw = Draw::new(&gpu, 136, size).unwrap();
    let argmax = Argmax::new(&gpu, 136, size).unwrap();
    let picks = gpu.pinned(136).unwrap();
    let mut couple = Couple::new(&gpu, size).unwrap();
    let key = NoiseKey { seed: 5, temperature: 0.8, position: 0 };
    draw.set(&key);
    couple.set(&key);
    eprintln!(" rows  greedy   drawn");
    for rows in [1usize, 16, 72, 136] {
        let inputs = Inputs {
            prefix: 0,
            tokens: 0,
            positions: positions.pointer(),
            mask: 0,
            mask_words: 1,
            rows,
        };
        let greedy = microseconds(&gpu, 20, &|_| argmax.run(&gpu, &logits, rows, &picks));
        let drawn = microseconds(&gpu, 20, &|_| draw.run(&gpu, &inputs, &logits, &picks));
        eprintln!("{rows:>5}  {greedy:>6.2}  {drawn:>6.2}");
    }
    let noise =
        microseconds(&gpu, 20, &|_| couple.run(&gpu, positions.pointer(), logits.pointer(), 15));
    eprintln!("noise of a draft: {noise:.2}");
}
