//! The kernels and the engine against the host. Without a GPU these tests only say that there is none; with
//! `DDTREE_REQUIRE_GPU` set, that is a failure.

mod products;
mod refusals;
mod rows;
mod sampled;
mod soak;

use std::ops::ControlFlow::Continue;
use std::path::Path as FilePath;
use std::time::Instant;

use candle_core::{DType, Device};
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;

use super::attention::{Attention, Cached};
use super::device::{Buffer, Gpu};
use super::kernels::{Argmax, Heads, Inputs, Kernels, Path, TopK};
use super::stack::{padded, padded_to_few};
use super::{CudaDFlash, CudaOptions, CudaTarget};
use crate::candle::dflash::DFlashConfig;
use crate::candle::{DecoderConfig, Weights};
use crate::{Algorithm, Config, Decoder, NoDrafter, Picks, Prefill, Request, Verifier, top_k};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3");

fn gpu() -> Option<Gpu> {
    match Gpu::new(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var_os("DDTREE_REQUIRE_GPU").is_none() => {
            eprintln!("not run: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// All cases, or the few that `DDTREE_FEW_CASES` asks for: under compute-sanitizer, a launch takes thousands of times as
/// long.
fn cases<'a, T>(all: &'a [T], few: &'a [T]) -> &'a [T] {
    if std::env::var_os("DDTREE_FEW_CASES").is_some() { few } else { all }
}

/// The GPU with the kernels that it gets, and with those that others get.
fn gpu_as_others() -> Vec<Gpu> {
    let Some(gpu) = gpu() else { return Vec::new() };
    let capability = |major| Gpu::open(0, Some((major, 0))).unwrap();
    if gpu.has_clusters() {
        vec![gpu, capability(10), capability(8)]
    } else {
        vec![gpu, capability(8)]
    }
}

/// `values` on the GPU in a type, and as that type holds them.
fn upload(gpu: &Gpu, dtype: DType, values: &[f32]) -> (Buffer, Vec<f32>) {
    match dtype {
        DType::BF16 => {
            let rounded: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            (gpu.upload(&rounded).unwrap(), rounded.iter().map(|x| x.to_f32()).collect())
        }
        DType::F16 => {
            let rounded: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
            (gpu.upload(&rounded).unwrap(), rounded.iter().map(|x| x.to_f32()).collect())
        }
        _ => (gpu.upload(values).unwrap(), values.to_vec()),
    }
}

fn download(gpu: &Gpu, dtype: DType, buffer: &Buffer, len: usize) -> Vec<f32> {
    match dtype {
        DType::BF16 => {
            let mut out = vec![bf16::ZERO; len];
            gpu.download(buffer, 0, &mut out).unwrap();
            out.iter().map(|x| x.to_f32()).collect()
        }
        DType::F16 => {
            let mut out = vec![f16::ZERO; len];
            gpu.download(buffer, 0, &mut out).unwrap();
            out.iter().map(|x| x.to_f32()).collect()
        }
        _ => {
            let mut out = vec![0.0; len];
            gpu.download(buffer, 0, &mut out).unwrap();
            out
        }
    }
}

fn random(rng: &mut StdRng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(-1.0f32..1.0) + rng.random_range(-1.0f32..1.0)).collect()
}

/// How far `found` is from `expected`, relative to the latter's size. NaN is as far as can be.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 =
        found.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
    let distance = (error / size.max(1e-30)).sqrt();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// Rows of logits of the kinds that break careless kernels.
fn rows(rng: &mut StdRng, size: usize) -> Vec<Vec<f32>> {
    let plain: Vec<f32> = random(rng, size).iter().map(|x| 8.0 * x).collect();
    let ties = (0..size).map(|_| rng.random_range(-3i32..3) as f32).collect();
    let mut masked = vec![f32::NEG_INFINITY; size];
    for _ in 0..size.min(70) {
        masked[rng.random_range(0..size)] = rng.random_range(-2i32..2) as f32;
    }
    let mut spike = vec![-20.0; size];
    spike[size - 1] = 30.0;
    let zeroes = (0..size).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect();
    vec![plain, ties, masked, spike, vec![1.5; size], zeroes]
}

#[test]
fn picks_equal_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(1);
    for size in [1, 2, 31, 1003, 4096, 49_152, 151_936] {
        let rows = rows(&mut rng, size);
        let argmax = Argmax::new(&gpu, rows.len(), size).unwrap();
        let logits = gpu.upload(&rows.concat()).unwrap();
        let picks = gpu.pinned(rows.len()).unwrap();
        // All rows, and then fewer: the counters have to be as they were.
        for count in [rows.len(), 1, 3] {
            argmax.run(&gpu, &logits, count, &picks).unwrap();
            gpu.synchronize().unwrap();
            for (row, logits) in rows.iter().take(count).enumerate() {
                let expected = top_k::argmax(logits).ok().map(|(token, _)| token);
                let found = Argmax::token(picks.as_slice()[row]);
                assert_eq!(found, expected, "{size} row {row} of {count}");
            }
        }
    }
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut row = random(&mut rng, 5000);
        row[4321] = bad;
        let argmax = Argmax::new(&gpu, 1, row.len()).unwrap();
        let (logits, picks) = (gpu.upload(&row).unwrap(), gpu.pinned(1).unwrap());
        argmax.run(&gpu, &logits, 1, &picks).unwrap();
        gpu.synchronize().unwrap();
        assert_eq!(Argmax::token(picks.as_slice()[0]), None, "{bad}");
    }
}

#[test]
fn top_k_equals_a_full_sort() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(2);
    for (size, k) in [
        (1, 1),
        (7, 7),
        (64, 64),
        (1003, 5),
        (8192, 64),
        (8193, 64),
        (49_152, 1),
        (49_152, 16),
        (151_936, 64),
        (300_001, 64),
    ] {
        let rows = rows(&mut rng, size);
        let mut kernel = TopK::new(&gpu, rows.len(), size, 64.min(size)).unwrap();
        let logits = gpu.upload(&rows.concat()).unwrap();
        kernel.summarize(&gpu, logits.pointer(), 0..rows.len()).unwrap();
        // All rows, and then some: what was found is at the first places.
        for some in [0..rows.len(), 2..4] {
            kernel.clear();
            kernel.select(&gpu, logits.pointer(), some.clone(), k).unwrap();
            kernel.wait(&gpu, some.len()).unwrap();
            for (place, row) in some.enumerate() {
                let what = format!("{size} top {k} row {row}");
                assert_best(kernel.row(place, k), &rows[row], k, &what);
            }
        }
    }
    // What is no distribution is seen to be none.
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut row = random(&mut rng, 5000);
        row[4321] = bad;
        for row in [row, vec![f32::NEG_INFINITY; 5000]] {
            let kernel = TopK::new(&gpu, 1, row.len(), 8).unwrap();
            let logits = gpu.upload(&row).unwrap();
            kernel.summarize(&gpu, logits.pointer(), 0..1).unwrap();
            kernel.select(&gpu, logits.pointer(), 0..1, 8).unwrap();
            gpu.synchronize().unwrap();
            assert!(kernel.row(0, 8).1[0].is_nan(), "{bad}");
        }
    }
    assert!(TopK::new(&gpu, 1, 1000, 0).is_err());
    assert!(TopK::new(&gpu, 1, 1000, 65).is_err());
    assert!(TopK::new(&gpu, 1, 5, 6).is_err());
}

/// Whether what was selected is the `k` best entries of a row, and their log-probabilities.
fn assert_best((ids, log_probs): (&[u32], &[f32]), logits: &[f32], k: usize, what: &str) {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| {
        let (x, y) = (logits[a as usize], logits[b as usize]);
        y.partial_cmp(&x).unwrap().then(a.cmp(&b))
    });
    assert_eq!(ids, &order[..k], "{what}");
    let sum = top_k::log_sum_exp(logits).unwrap();
    for (&id, &found) in order.iter().zip(log_probs) {
        let expected = (f64::from(logits[id as usize]) - sum) as f32;
        assert_near(found, expected, what);
    }
}

/// Whether a log-probability is that of the host, but for rounding.
fn assert_near(found: f32, expected: f32, what: &str) {
    let near = (found - expected).abs() <= 2e-5 * expected.abs().max(1.0);
    assert!(near || found == expected, "{what}: {found} for {expected}");
}

/// Parents of a random tree of `n` slots.
fn random_parents(rng: &mut StdRng, n: usize) -> Vec<i32> {
    (0..n as i32).map(|slot| if slot == 0 { -1 } else { rng.random_range(0..slot) }).collect()
}

fn ancestor_rows(parents: &[i32], words: usize) -> Vec<u64> {
    let mut mask = vec![0u64; parents.len() * words];
    for slot in 0..parents.len() {
        let mut at = slot as i32;
        while at >= 0 {
            mask[slot * words + at as usize / 64] |= 1 << (at % 64);
            at = parents[at as usize];
        }
    }
    mask
}

#[test]
fn attention_equals_a_sum_over_visible_keys() {
    for gpu in gpu_as_others() {
        attention_on(&gpu);
    }
}

fn attention_on(gpu: &Gpu) {
    let mut rng = StdRng::seed_from_u64(3);
    for dtype in TYPES {
        for (size, kv, group) in
            [(64, 3, 3), (128, 2, 4), (256, 1, 2), (64, 2, 1), (128, 1, 8), (128, 8, 4)]
        {
            let heads = Heads { query: kv * group, kv, size };
            let attention = Attention::new(gpu, dtype, heads, 252).unwrap();
            let few_heads = [
                (0usize, 1usize),
                (1, 1),
                (0, 8),
                (1, 16),
                (63, 24),
                (64, 72),
                (1000, 1),
                (1000, 72),
                (129, 40),
                (77, 136),
                (300, 144),
                (8191, 1),
                (8191, 16),
            ];
            // Wide tiles of rows want work for the whole GPU.
            let many_heads = [(700, 136), (1, 252)];
            let cases = if kv == 8 { &many_heads[..] } else { &few_heads };
            for &(prefix, width) in cases {
                let words = width.div_ceil(64);
                let mask = ancestor_rows(&random_parents(&mut rng, width), words);
                let keys = prefix + width;
                let stride = (kv * group + 2 * kv) * size;
                let (qkv, q) = upload(gpu, dtype, &random(&mut rng, width * stride));
                // What is behind the pass's rows must not matter.
                let rows = keys + width % 3;
                // Scores that grow from key to key, or a single great one late, so that sums have to be scaled anew.
                let growth = [0.0, 30.0, 0.0][width % 3];
                let great = (width % 3 == 2).then_some(keys - 1 - (keys - 1) / 5);
                let mut plane = |is_key: bool| {
                    let mut plane = random(&mut rng, keys * kv * size);
                    let each = plane.chunks_exact_mut(kv * size).enumerate();
                    for (key, row) in each.filter(|_| is_key) {
                        let grown = 1.0 + growth * key as f32 / keys as f32;
                        let factor = if great == Some(key) { 30.0 } else { grown };
                        row.iter_mut().for_each(|x| *x *= factor);
                    }
                    plane.resize(rows * kv * size, f32::NAN);
                    upload(gpu, dtype, &plane)
                };
                let ((k_buffer, k), (v_buffer, v)) = (plane(true), plane(false));
                let out = gpu.allocate(4 * width * kv * group * size).unwrap();
                let prefix_buffer = gpu.upload(&[prefix as u32]).unwrap();
                let mask_buffer = gpu.upload(&mask).unwrap();
                let inputs = Inputs {
                    prefix: prefix_buffer.pointer(),
                    tokens: 0,
                    positions: 0,
                    mask: mask_buffer.pointer(),
                    mask_words: words,
                    rows: width,
                };
                let (keys_at, values_at) = (k_buffer.pointer(), v_buffer.pointer());
                let cached = Cached { keys: keys_at, values: values_at, rows };
                attention.run(gpu, &inputs, &qkv, cached, &out).unwrap();
                let found = download(gpu, dtype, &out, width * kv * group * size);
                let what = format!("{dtype:?} {heads:?} prefix {prefix} width {width}");
                for slot in 0..width {
                    for head in 0..kv * group {
                        let q = &q[slot * stride + head * size..][..size];
                        let sees = |key: usize| {
                            key.checked_sub(prefix)
                                .is_none_or(|j| mask[slot * words + j / 64] >> (j % 64) & 1 == 1)
                        };
                        let at = |key: usize| (key * kv + head / group) * size;
                        let scores: Vec<(usize, f64)> = (0..keys)
                            .filter(|&key| sees(key))
                            .map(|key| {
                                let k = &k[at(key)..][..size];
                                let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(a * b)).sum();
                                (key, dot / (size as f64).sqrt())
                            })
                            .collect();
                        let top = scores.iter().fold(f64::MIN, |top, s| top.max(s.1));
                        let total: f64 = scores.iter().map(|s| (s.1 - top).exp()).sum();
                        let mut expected = vec![0.0f64; size];
                        for (key, score) in scores {
                            let weight = (score - top).exp() / total;
                            for (sum, v) in expected.iter_mut().zip(&v[at(key)..][..size]) {
                                *sum += weight * f64::from(*v);
                            }
                        }
                        let expected: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
                        let found = &found[(slot * kv * group + head) * size..][..size];
                        let limit = match dtype {
                            DType::BF16 => 1e-2,
                            DType::F16 => 2e-3,
                            _ => 1e-5,
                        };
                        let distance = distance(found, &expected);
                        assert!(distance < limit, "{what} slot {slot} head {head}: {distance}");
                    }
                }
            }
        }
    }
}

#[test]
fn commits_move_rows_like_the_host() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(4);
    let kernels = Kernels::new(&gpu, DType::F32, 64).unwrap();
    let (planes, rows, start) = (6, 300, 37);
    // Rows of less and of more than a block moves.
    for (path_len, width) in
        [(1, 192), (2, 192), (3, 1024), (17, 192), (100, 1024), (250, 192), (250, 1024)]
    {
        let mut slots: Vec<u32> = (1..251).collect();
        while slots.len() + 1 > path_len {
            slots.remove(rng.random_range(0..slots.len()));
        }
        slots.insert(0, 0);
        let values = random(&mut rng, planes * rows * width);
        let cache = gpu.upload(&values).unwrap();
        let path = Path::new(&slots);
        kernels.compact(&gpu, &cache, (planes, rows, 4 * width), start, &path).unwrap();
        let found = download(&gpu, DType::F32, &cache, values.len());
        for plane in 0..planes {
            let at = |row: usize| (plane * rows + row) * width;
            for (to, &from) in slots.iter().enumerate() {
                let (found, expected) = (
                    &found[at(start + to)..][..width],
                    &values[at(start + from as usize)..][..width],
                );
                assert_eq!(found, expected, "plane {plane} row {to}");
            }
            assert_eq!(found[at(0)..at(start)], values[at(0)..at(start)], "committed rows");
        }
        let out = gpu.allocate(4 * slots.len() * width).unwrap();
        let tree = gpu.upload(&values[start * width..]).unwrap();
        kernels.gather(&gpu, &tree, &out, 4 * width, &path).unwrap();
        let found = download(&gpu, DType::F32, &out, slots.len() * width);
        for (to, &from) in slots.iter().enumerate() {
            let expected = &values[(start + from as usize) * width..][..width];
            assert_eq!(found[to * width..][..width], *expected, "gathered row {to}");
        }
    }
}

/// The tiny target, with the taps of its drafter or none.
fn tiny(gpu: &Gpu, dtype: DType, taps: bool) -> (CudaTarget, DFlashConfig) {
    let folder = FilePath::new(TINY);
    let config = DecoderConfig::load(folder.join("target")).unwrap();
    let drafter = DFlashConfig::load(folder.join("drafter")).unwrap();
    let weights = Weights::open(folder.join("target"), dtype, &Device::Cpu).unwrap();
    let options = CudaOptions::default().max_len(512);
    let layers = if taps { drafter.target_layer_ids() } else { &[] };
    (CudaTarget::new(gpu, &config, weights, layers, options).unwrap(), drafter)
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The tiny target with its taps, and its drafter.
fn pair(gpu: &Gpu, dtype: DType) -> (CudaTarget, CudaDFlash) {
    let (target, config) = tiny(gpu, dtype, true);
    let weights = Weights::open(FilePath::new(TINY).join("drafter"), dtype, &Device::Cpu).unwrap();
    let drafter = CudaDFlash::new(&target, config, weights, 64).unwrap();
    (target, drafter)
}

/// What every node of a tree stands for: the tokens from the root to it.
fn node_paths(tokens: &[u32], parents: &[i32]) -> Vec<Vec<u32>> {
    let mut paths: Vec<Vec<u32>> = Vec::with_capacity(tokens.len());
    for (&token, &parent) in tokens.iter().zip(parents) {
        let mut path = usize::try_from(parent).map_or(Vec::new(), |parent| paths[parent].clone());
        path.push(token);
        paths.push(path);
    }
    paths
}

#[test]
fn texts_and_rounds_equal_the_reference() {
    let Some(gpu) = gpu() else { return };
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/decode-tiny-qwen3.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let stop = golden["stop_token"].as_u64().unwrap() as u32;
    let limit = golden["max_new_tokens"].as_u64().unwrap() as usize;
    let block = golden["block_size"].as_u64().unwrap() as usize;
    let (mut target, mut drafter) = pair(&gpu, DType::F32);
    for (index, case) in golden["cases"].as_array().unwrap().iter().enumerate() {
        let prompt = tokens(&case["prompt_ids"]);
        let expected = tokens(&case["autoregressive"]);
        let request = Request::new(&prompt).max_new_tokens(limit).stop_tokens(&[stop]);
        let plain = Config::new(Algorithm::Autoregressive);
        let mut decoder = Decoder::new((&mut target, NoDrafter), &plain).unwrap();
        assert_eq!(decoder.generate(&request, |_| Continue(())).unwrap().tokens, expected);
        let chain = (Config::new(Algorithm::Chain), &case["chain"]);
        let trees = case["trees"].as_object().unwrap().iter().map(|(budget, tree)| {
            (Config::new(Algorithm::Tree).budget(budget.parse().unwrap()), tree)
        });
        for (config, reference) in std::iter::once(chain).chain(trees) {
            let config = config.trace(true);
            let mut decoder = Decoder::new((&mut target, &mut drafter), &config).unwrap();
            let text = decoder.generate(&request, |_| Continue(())).unwrap();
            assert_eq!(text.tokens, expected, "{config:?}");
            // The reference lets its last block reach past the limit, which ends ours: rounds are the same as long
            // as a whole block fits.
            let whole = decoder.session().trace().iter().take_while(|round| {
                let generated = round.start + 1 - prompt.len();
                generated + block <= limit
            });
            let lengths = tokens(&reference["acceptance_lengths"]);
            for (number, round) in whole.enumerate() {
                let what = format!("case {index}, {config:?}, round {number}");
                assert_eq!(round.path.len(), lengths[number] as usize, "{what}");
                let Some(tree) = reference["rounds"].get(number) else { continue };
                let reference = [&round.tokens[..1], &tokens(&tree["tokens"])].concat();
                let parents: Vec<i32> = serde_json::from_value(tree["parents"].clone()).unwrap();
                let found = node_paths(&round.tokens, &round.parents);
                let expected = node_paths(&reference, &parents);
                assert_eq!(found.len(), expected.len(), "{what}");
                // Nodes whose scores are nearly equal may change places, and one of them with one beyond the budget.
                let mut missing = 0;
                for (slot, path) in expected.iter().enumerate() {
                    let place = found.iter().position(|found| found == path);
                    missing += usize::from(place.is_none());
                    let gap = round.scores[slot] - round.scores[place.unwrap_or(found.len() - 1)];
                    assert!(gap.abs() < 1e-4, "{what}: slot {slot} is at {place:?}, {gap} apart");
                }
                assert!(missing <= 1, "{what}: {missing}");
                let accepted = tokens(&tree["accepted"]);
                let path = |path: &[u32], of: &[u32]| -> Vec<u32> {
                    path.iter().map(|&slot| of[slot as usize]).collect()
                };
                assert_eq!(path(&round.path, &round.tokens), path(&accepted, &reference), "{what}");
            }
        }
    }
}

#[test]
fn bf16_and_f16_are_near_f32() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(6);
    let text: Vec<u32> = (0..300).map(|_| rng.random_range(0..4096)).collect();
    let logits = |dtype| {
        let (mut target, _) = tiny(&gpu, dtype, false);
        let mut ids = Vec::new();
        let taps = target.prefill(&Prefill::new(0, &text), &mut Picks::new(&mut ids)).unwrap();
        assert_eq!(taps.rows(), 0);
        target.logits((text.len() - 1) % CudaOptions::default().max_slots).unwrap()
    };
    let expected = logits(DType::F32);
    for (dtype, limit) in [(DType::BF16, 4e-2), (DType::F16, 5e-3)] {
        let distance = distance(&logits(dtype), &expected);
        assert!(distance < limit, "{dtype:?}: {distance}");
    }
}

#[test]
fn prompts_are_filled_up_to_few_widths() {
    let mut widths: Vec<_> = (1..=252).map(|rows| padded_to_few(rows, 256)).collect();
    assert!(widths.iter().zip(1..).all(|(&width, rows)| width >= rows), "{widths:?}");
    widths.dedup();
    assert_eq!(widths, [1, 8, 24, 40, 72, 136, 256]);
    // Never wider than what memory was taken for.
    for slots in 1..=252 {
        let widest = padded(slots);
        assert!((1..=slots).all(|rows| (rows..=widest).contains(&padded_to_few(rows, widest))));
    }
}

/// Microseconds of one of `count` pieces of work in a graph: the median of 20 replays.
fn microseconds(gpu: &Gpu, count: usize, work: &dyn Fn(usize) -> crate::candle::Result<()>) -> f64 {
    let graph = gpu.capture(|| (0..count).try_for_each(work)).unwrap();
    let mut times: Vec<f64> = (0..20).map(|_| gpu.time(|| graph.launch()).unwrap()).collect();
    times.sort_by(f64::total_cmp);
    times[10] * 1e3 / count as f64
}

/// How long it takes to open a GPU: the first time in the process, and again.
#[test]
#[ignore = "a measurement"]
fn open_times() {
    for _ in 0..2 {
        let began = Instant::now();
        let Some(_gpu) = gpu() else { return };
        eprintln!("{:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    }
}

/// Microseconds per launch of every kernel at the shapes of Qwen3-8B and SmolLM2-135M, in a graph of 36.
#[test]
#[ignore = "a measurement"]
fn kernel_times() {
    let Some(gpu) = gpu() else { return };
    let heads = Heads { query: 32, kv: 8, size: 128 };
    kernel_times_of(&gpu, heads, 4096, 12_288, 151_936, 1024);
    let heads = Heads { query: 9, kv: 3, size: 64 };
    kernel_times_of(&gpu, heads, 576, 1536, 49_152, 256);
}

fn kernel_times_of(
    gpu: &Gpu,
    heads: Heads,
    hidden: usize,
    intermediate: usize,
    vocab_size: usize,
    prefix: usize,
) {
    let kernels = Kernels::new(gpu, DType::BF16, heads.size).unwrap();
    let attention = Attention::new(gpu, DType::BF16, heads, 144).unwrap();
    let filled = |len: usize| {
        let buffer = gpu.allocate(4 * len).unwrap();
        kernels.fill_random(gpu, &buffer, len, 7, 1.0).unwrap();
        buffer
    };
    let (q, kv) = (heads.q_size(), heads.kv_size());
    let (qkv, mixed) = (filled(144 * (q + 2 * kv)), filled(144 * q));
    let planes: Vec<_> = (0..36).map(|_| (filled(1200 * kv), filled(1200 * kv))).collect();
    let residual = filled(144 * hidden);
    let weight = gpu.upload(&vec![1.0f32; hidden]).unwrap();
    let rope = gpu.upload(&vec![0.5f32; 128]).unwrap();
    let (normed, gate_up, activated) =
        (filled(144 * hidden), filled(144 * 2 * intermediate), filled(144 * intermediate));
    let logits = gpu.upload(&random(&mut StdRng::seed_from_u64(9), 144 * vocab_size)).unwrap();
    let argmax = Argmax::new(gpu, 144, vocab_size).unwrap();
    let picks = gpu.pinned(144).unwrap();
    let top_k = TopK::new(gpu, 15, vocab_size, 64).unwrap();
    eprintln!(
        "{heads:?}, hidden {hidden}, prefix {prefix}\nwidth  attend    norm    rope    silu   parts  argmax"
    );
    let time = |launch: &dyn Fn(usize) -> crate::candle::Result<()>| microseconds(gpu, 36, launch);
    for rows in [1usize, 8, 16, 24, 64, 72, 128, 136, 144] {
        let words = rows.div_ceil(64);
        let mask = ancestor_rows(&random_parents(&mut StdRng::seed_from_u64(8), rows), words);
        let prefix_buffer = gpu.upload(&[prefix as u32]).unwrap();
        let positions = gpu.upload(&vec![0u32; rows]).unwrap();
        let mask_buffer = gpu.upload(&mask).unwrap();
        let inputs = Inputs {
            prefix: prefix_buffer.pointer(),
            tokens: 0,
            positions: positions.pointer(),
            mask: mask_buffer.pointer(),
            mask_words: words,
            rows,
        };
        let attend = time(&|layer| {
            let (k, v) = &planes[layer];
            let cached = Cached { keys: k.pointer(), values: v.pointer(), rows: 1200 };
            attention.run(gpu, &inputs, &qkv, cached, &mixed)
        });
        let norm = time(&|_| {
            let weight = (&weight, 1e-6);
            kernels.norm(gpu, rows, &residual, weight, &normed, None, hidden)
        });
        let rotate = time(&|layer| {
            let how = super::kernels::RopeStore {
                bias: None,
                norms: Some((weight.pointer(), weight.pointer())),
                eps: 1e-6,
                rope: &rope,
                keys: planes[layer].0.pointer(),
                values: planes[layer].1.pointer(),
                layers: 1,
                layer_stride: 0,
            };
            kernels.rope_store(gpu, &inputs, qkv.pointer(), heads, &how)
        });
        let silu = time(&|_| kernels.silu_mul(gpu, &gate_up, &activated, rows * intermediate));
        let pick = time(&|_| argmax.run(gpu, &logits, rows, &picks));
        let parts = vocab_size.div_ceil(192);
        let pick_of_parts = time(&|_| argmax.run_on_parts(gpu, rows, parts, &picks));
        eprintln!(
            "{rows:>5}  {attend:>6.2}  {norm:>6.2}  {rotate:>6.2}  {silu:>6.2}  {pick_of_parts:>6.2}  {pick:>6.2}"
        );
    }
    let summaries = time(&|_| top_k.summarize(gpu, logits.pointer(), 0..15));
    eprintln!("summaries of 15 rows  {summaries:>6.2}");
    for k in [1, 4, 16, 64] {
        let select = time(&|_| top_k.select(gpu, logits.pointer(), 0..15, k));
        eprintln!("best {k:>2} of 15 rows    {select:>6.2}");
    }
}
