//! Products in every way that there is, against plain loops on the host.

use candle_core::DType;
use half::{bf16, f16};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::rows::gated;
use super::{TYPES, assert_best, cases, distance, download, gpu, microseconds, random, upload};
use crate::candle::Result;
use crate::candle::cuda::device::{Buffer, Gpu, Pinned};
use crate::candle::cuda::kernels::{Argmax, Kernels, TopK};
use crate::candle::cuda::products::{Operands, Output, Product, Sums};
use crate::candle::cuda::tiles::Tiles;
use crate::top_k;

fn rounded(dtype: DType, x: f64) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f64(x).to_f32(),
        DType::F16 => f16::from_f64(x).to_f32(),
        _ => x as f32,
    }
}

/// `x w^T`, row by row.
fn sums(x: &[f32], w: &[f32], rows: usize, inputs: usize, outputs: usize) -> Vec<f64> {
    let sum = |at: usize| {
        let x = &x[at / outputs * inputs..][..inputs];
        let w = &w[at % outputs * inputs..][..inputs];
        x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
    };
    (0..rows * outputs).map(sum).collect()
}

/// Where `output` goes, of those that are one array: `y`, with `scratch` for gates and ups.
fn one_array<'a>(
    output: Output,
    y: &'a Buffer,
    gate_up: &'a Buffer,
    kernels: &'a Kernels,
) -> Sums<'a> {
    match output {
        Output::Elements => Sums::Elements(y),
        Output::Added => Sums::Added(y),
        Output::Gated => Sums::Gated { y, gate_up, kernels },
        _ => Sums::Floats(y),
    }
}

/// The type that a product's results are left in.
fn y_dtype(shape: &Product) -> DType {
    match shape.output {
        Output::Elements | Output::Gated => shape.dtype,
        _ => DType::F32,
    }
}

/// What is expected of `shape`, given the sums and what was there before.
fn expected(shape: &Product, sums: &[f64], before: &[f32]) -> Vec<f32> {
    let Product { dtype, output, .. } = *shape;
    if output == Output::Gated {
        let sums: Vec<f32> = sums.iter().map(|&sum| rounded(dtype, sum)).collect();
        return sums.chunks(16).flat_map(gated).map(|x| rounded(dtype, x)).collect();
    }
    let added = |(&sum, &before): (&f64, &f32)| match output {
        Output::Elements => rounded(dtype, sum),
        Output::Added => (sum + f64::from(before)) as f32,
        _ => sum as f32,
    };
    sums.iter().zip(before).map(added).collect()
}

#[test]
fn products_equal_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(7);
    let mut ways = 0;
    // Inputs that are no whole number of tiles, outputs likewise; rows of every kernel.
    let shapes = [(768, 320), (200, 48), (1544, 208)];
    let rows_of_kernels = [1, 8, 9, 24, 33, 72, 65, 136, 129, 200, 252];
    for &(inputs, outputs) in cases(&shapes, &shapes[1..2]) {
        for dtype in TYPES {
            let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
            let scale = (inputs as f32).sqrt().recip();
            let weights: Vec<f32> = random(&mut rng, outputs * inputs);
            let weights: Vec<f32> = weights.iter().map(|x| x * scale).collect();
            let (w_buffer, w) = upload(&gpu, dtype, &weights);
            // With the most rows, all kernels have a part.
            for &rows in cases(&rows_of_kernels, &rows_of_kernels[10..]) {
                let (x_buffer, x) = upload(&gpu, dtype, &random(&mut rng, rows * inputs));
                let before = random(&mut rng, rows * outputs);
                let sums = sums(&x, &w, rows, inputs, outputs);
                for output in [Output::Floats, Output::Added, Output::Elements, Output::Gated] {
                    let shape = Product { rows, inputs, outputs, dtype, output, weights: 1 };
                    let y_dtype = y_dtype(&shape);
                    let expected = expected(&shape, &sums, &before);
                    let limit = match y_dtype {
                        DType::BF16 => 4e-3,
                        DType::F16 => 5e-4,
                        _ => 1e-5,
                    };
                    let scratch = upload(&gpu, dtype, &before).0;
                    let x_at = x_buffer.pointer();
                    let check = |how: &str, run: &dyn Fn(&Buffer)| {
                        let y = upload(&gpu, y_dtype, &before).0;
                        run(&y);
                        let found = download(&gpu, y_dtype, &y, expected.len());
                        let distance = distance(&found, &expected);
                        assert!(distance < limit, "{shape:?} {how}: {distance}");
                    };
                    // The library's first choice: nothing is planned yet.
                    check("by default", &|y| {
                        let sums = one_array(output, y, &scratch, &kernels);
                        gpu.product(x_at, &w_buffer, sums, shape).unwrap();
                    });
                    for tiles in Tiles::ways(&gpu, &shape).unwrap() {
                        ways += 1;
                        check(&format!("by {tiles}"), &|y| {
                            let (w, y) = (w_buffer.pointer(), y.pointer());
                            let operands = Operands { x: x_at, w, y, summaries: 0 };
                            tiles.run(&gpu, &shape, operands).unwrap();
                        });
                    }
                }
            }
        }
    }
    let (major, minor) = gpu.compute_capability().unwrap();
    assert_eq!(ways > 0, (major, minor) == (9, 0), "{major}.{minor}: {ways} ways");
}

/// A product whose sums are known exactly, as each is of one factor that is not zero.
struct Known {
    dtype: DType,
    rows: usize,
    inputs: usize,
    outputs: usize,
    x: Buffer,
    w: Buffer,
    /// Row `i` of the product is that of kind `i % kinds.len()`.
    kinds: Vec<Vec<f32>>,
}

/// Calls `check` for products of each type whose rows have ties, infinities or NaN.
fn for_known_sums(gpu: &Gpu, mut check: impl FnMut(&Known)) {
    let mut rng = StdRng::seed_from_u64(9);
    for dtype in TYPES {
        let shapes = [(1, 48), (8, 1008), (16, 2000), (65, 1600), (129, 272), (252, 400)];
        for &(rows, outputs) in cases(&shapes, &shapes[5..]) {
            let mut logits = super::rows(&mut rng, outputs);
            logits.iter_mut().flatten().for_each(|x| *x = rounded(dtype, f64::from(*x)));
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = logits[0].clone();
                row[outputs - 2] = bad;
                logits.push(row);
            }
            logits.push(vec![f32::NEG_INFINITY; outputs]);
            // Column `i` of the weight holds one kind of row, which row `i` of `x` selects. What is not selected is multiplied
            // by zero, so infinities and NaN reach all rows: those come last, in a weight of their own.
            let bad = cases(&logits[6..], &[]).chunks(1);
            for kinds in std::iter::once(&logits[..6]).chain(bad) {
                let inputs = 8;
                let finite =
                    |x: f32| if x == f32::NEG_INFINITY && kinds.len() > 1 { -1e4 } else { x };
                let w: Vec<f32> = (0..outputs * inputs)
                    .map(|at| kinds.get(at % inputs).map_or(0.0, |kind| finite(kind[at / inputs])))
                    .collect();
                let x: Vec<f32> = (0..rows * inputs)
                    .map(|at| f32::from(u8::from(at / inputs % kinds.len() == at % inputs)))
                    .collect();
                let (w_buffer, w) = upload(gpu, dtype, &w);
                let kind = |kind| (0..outputs).map(|output| w[output * inputs + kind]).collect();
                let kinds = (0..kinds.len()).map(kind).collect();
                let x = upload(gpu, dtype, &x).0;
                check(&Known { dtype, rows, inputs, outputs, x, w: w_buffer, kinds });
            }
        }
    }
}

impl Known {
    fn shape(&self, output: Output) -> Product {
        let Self { dtype, rows, inputs, outputs, .. } = *self;
        Product { rows, inputs, outputs, dtype, output, weights: 1 }
    }

    /// Our ways, which there have to be where the GPU has them.
    fn ways(&self, gpu: &Gpu, shape: &Product) -> Vec<Tiles> {
        let ways = Tiles::ways(gpu, shape).unwrap();
        let none = self.dtype == DType::F32 || gpu.compute_capability().unwrap() != (9, 0);
        assert_eq!(ways.is_empty(), none);
        ways
    }
}

/// Picks of a product's rows, in every way, are those of its sums.
#[test]
fn the_greatest_of_a_products_rows_is_the_hosts() {
    let Some(gpu) = gpu() else { return };
    for_known_sums(&gpu, |known| {
        let Known { rows, outputs, ref x, ref w, ref kinds, .. } = *known;
        let shape = known.shape(Output::Greatest);
        let argmax = Argmax::new(&gpu, rows, outputs).unwrap();
        let logits = gpu.allocate(4 * rows * outputs).unwrap();
        let check = |how: &str, run: &dyn Fn(&Pinned<u64>)| {
            let picks = gpu.pinned(rows).unwrap();
            run(&picks);
            gpu.wait_for(&picks, rows).unwrap();
            for (row, kind) in (0..rows).zip(kinds.iter().cycle()) {
                let greatest = top_k::argmax(kind).ok();
                let expected = greatest.filter(|found| found.1 > f32::NEG_INFINITY);
                let found = Argmax::token(picks.as_slice()[row]);
                assert_eq!(found, expected.map(|found| found.0), "{shape:?} {how} row {row}");
            }
        };
        check("by default", &|picks| {
            let sums = Sums::Greatest { picks, argmax: &argmax, logits: &logits };
            gpu.product(x.pointer(), w, sums, shape).unwrap();
        });
        for tiles in known.ways(&gpu, &shape) {
            check(&format!("by {tiles}"), &|picks| {
                let (x, w, y) = (x.pointer(), w.pointer(), argmax.bests().pointer());
                tiles.run(&gpu, &shape, Operands { x, w, y, summaries: 0 }).unwrap();
                argmax.run_on_parts(&gpu, rows, tiles.parts(outputs), picks).unwrap();
            });
        }
    });
}

/// What is selected by a product's own summaries, in every way, are the best of its sums.
#[test]
fn the_best_of_a_products_rows_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    for_known_sums(&gpu, |known| {
        let Known { rows, outputs, ref x, ref w, ref kinds, .. } = *known;
        let shape = known.shape(Output::Summarized);
        let k = 20;
        let check = |how: &str, run: &dyn Fn(&Buffer, &TopK)| {
            let logits = gpu.upload(&vec![7.0f32; rows * outputs]).unwrap();
            let top_k = TopK::new(&gpu, rows, outputs, k).unwrap();
            run(&logits, &top_k);
            top_k.select(&gpu, logits.pointer(), 0..rows, k).unwrap();
            top_k.wait(&gpu, rows).unwrap();
            for (row, kind) in (0..rows).zip(kinds.iter().cycle()) {
                let what = format!("{shape:?} {how} row {row}");
                // What is no distribution is seen to be none.
                let infinite = kind.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
                if infinite || kind.iter().all(|&x| x == f32::NEG_INFINITY) {
                    assert!(top_k.row(row, k).1[0].is_nan(), "{what}");
                } else {
                    assert_best(top_k.row(row, k), kind, k, &what);
                }
            }
        };
        check("by default", &|logits, top_k| {
            gpu.product(x.pointer(), w, Sums::Summarized { logits, top_k }, shape).unwrap();
        });
        for tiles in known.ways(&gpu, &shape) {
            check(&format!("by {tiles}"), &|logits, top_k| {
                let (x, w, y) = (x.pointer(), w.pointer(), logits.pointer());
                let summaries = top_k.summaries(rows);
                tiles.run(&gpu, &shape, Operands { x, w, y, summaries }).unwrap();
            });
        }
    });
}

#[test]
fn what_is_planned_stays_right() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(8);
    let (inputs, outputs) = (512, 256);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        let (w_buffer, w) = upload(&gpu, dtype, &random(&mut rng, outputs * inputs));
        for (rows, output) in [(1, Output::Added), (24, Output::Gated), (136, Output::Added)] {
            let (x_buffer, x) = upload(&gpu, dtype, &random(&mut rng, rows * inputs));
            let before = random(&mut rng, rows * outputs);
            let sums = sums(&x, &w, rows, inputs, outputs);
            let shape = Product { rows, inputs, outputs, dtype, output, weights: 2 };
            let y_dtype = y_dtype(&shape);
            let scratch = upload(&gpu, dtype, &before).0;
            let x_at = x_buffer.pointer();
            let y = upload(&gpu, y_dtype, &before).0;
            let lost = one_array(output, &y, &scratch, &kernels);
            let weights = [&w_buffer, &w_buffer];
            gpu.plan_product(x_at, &weights, lost, shape, &|| Ok(())).unwrap();
            let y = upload(&gpu, y_dtype, &before).0;
            let kept = one_array(output, &y, &scratch, &kernels);
            gpu.product(x_at, &w_buffer, kept, shape).unwrap();
            let expected = expected(&shape, &sums, &before);
            let found = download(&gpu, y_dtype, &y, expected.len());
            let distance = distance(&found, &expected);
            assert!(distance < 4e-3, "{shape:?}: {distance}");
        }
    }
}

/// Prints how long the fastest ways take at the shapes of Qwen3-8B and SmolLM2-135M, each product behind a norm.
#[test]
#[ignore = "measures"]
fn product_times() {
    let Some(new) = gpu() else { return };
    let old = Gpu::open(0, Some((8, 0))).unwrap();
    eprintln!("The library's best, ours by rows x warpgroups x splits; us, the norm included");
    for (name, inputs, outputs, output, hidden) in [
        ("qkv", 4096, 6144, Output::Elements, 4096),
        ("o", 4096, 4096, Output::Added, 4096),
        ("gate_up", 4096, 24_576, Output::Gated, 4096),
        ("down", 12_288, 4096, Output::Added, 4096),
        ("small qkv", 576, 960, Output::Elements, 576),
        ("small o", 576, 576, Output::Added, 576),
        ("small gate_up", 576, 3072, Output::Gated, 576),
        ("small down", 1536, 576, Output::Added, 576),
    ] {
        eprintln!("{name}");
        for rows in [1, 16, 24, 40, 64, 72, 128, 136] {
            let dtype = DType::BF16;
            let shape = Product { rows, inputs, outputs, dtype, output, weights: 8 };
            let mut line = format!("{rows:>5} ");
            for gpu in [&old, &new] {
                let kernels = Kernels::new(gpu, dtype, 128).unwrap();
                let weights: Vec<_> = (0..8)
                    .map(|seed| {
                        let weight = gpu.allocate(2 * inputs * outputs).unwrap();
                        let len = inputs * outputs;
                        kernels.fill_random(gpu, &weight, len, seed, 0.02).unwrap();
                        weight
                    })
                    .collect();
                let allocate = |row: usize| gpu.allocate(rows * row).unwrap();
                let (residual, normed) = (allocate(4 * hidden), allocate(2 * hidden));
                let (x, y) = (allocate(2 * inputs), allocate(4 * outputs));
                let scratch = allocate(2 * outputs);
                kernels.fill_random(gpu, &x, rows * inputs, 9, 1.0).unwrap();
                let weight = gpu.upload(&vec![1.0f32; hidden]).unwrap();
                let norm = || {
                    let weight = (&weight, 1e-6);
                    kernels.norm(gpu, rows, &residual, weight, &normed, None, hidden)
                };
                let time = |run: &dyn Fn(&Buffer) -> Result<()>| {
                    let work = |at: usize| norm().and_then(|()| run(&weights[at]));
                    microseconds(gpu, weights.len(), &work)
                };
                let sums = one_array(output, &y, &scratch, &kernels);
                let all: Vec<_> = weights.iter().collect();
                if std::ptr::eq(gpu, &old) {
                    gpu.plan_product(x.pointer(), &all, sums, shape, &norm).unwrap();
                    let best = time(&|w| gpu.product(x.pointer(), w, sums, shape));
                    line += &format!("{best:>6.2} |");
                    continue;
                }
                let mut times = Vec::new();
                for tiles in Tiles::ways(gpu, &shape).unwrap() {
                    let run = |w: &Buffer| {
                        let (x, w, y) = (x.pointer(), w.pointer(), y.pointer());
                        tiles.run(gpu, &shape, Operands { x, w, y, summaries: 0 })
                    };
                    times.push((time(&run), tiles.to_string()));
                }
                times.sort_by(|a, b| a.0.total_cmp(&b.0));
                for (time, tiles) in times.iter().take(6) {
                    line += &format!("  {time:.2} ({tiles})");
                }
            }
            eprintln!("{line}");
        }
    }
}
