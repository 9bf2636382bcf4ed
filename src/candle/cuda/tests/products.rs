//! Products in every way that there is, against plain loops on the host.

use candle_core::DType;
use half::{bf16, f16};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::rows::gated;
use super::{TYPES, distance, download, gpu, microseconds, random, upload};
use crate::candle::Result;
use crate::candle::cuda::device::{Buffer, Gpu, Pinned};
use crate::candle::cuda::kernels::{Argmax, Kernels};
use crate::candle::cuda::products::{Operands, Output, Place, Product, Rest};
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
    for (inputs, outputs) in [(768, 320), (200, 48), (1544, 208)] {
        for dtype in TYPES {
            let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
            let scale = (inputs as f32).sqrt().recip();
            let weights: Vec<f32> = random(&mut rng, outputs * inputs);
            let weights: Vec<f32> = weights.iter().map(|x| x * scale).collect();
            let (w_buffer, w) = upload(&gpu, dtype, &weights);
            for rows in [1, 8, 9, 24, 33, 72, 65, 136, 129, 200, 252] {
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
                    let rest = Rest::Gates(&scratch, &kernels);
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
                        gpu.product(x_at, &w_buffer, y, shape, rest).unwrap();
                    });
                    for tiles in Tiles::ways(&gpu, &shape).unwrap() {
                        ways += 1;
                        check(&format!("by {tiles}"), &|y| {
                            let w = w_buffer.pointer();
                            tiles
                                .run(&gpu, &shape, Operands { x: x_at, w, y: y.pointer() })
                                .unwrap();
                        });
                    }
                }
            }
        }
    }
    let (major, minor) = gpu.compute_capability().unwrap();
    assert_eq!(ways > 0, (major, minor) == (9, 0), "{major}.{minor}: {ways} ways");
}

/// Picks of a product's rows, in every way, are those of its sums in that way: values with ties, infinities and NaN, which
/// sums of one product each are exactly.
#[test]
fn the_greatest_of_a_products_rows_is_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(9);
    for dtype in TYPES {
        for (rows, outputs) in [(1, 48), (8, 1008), (16, 2000), (65, 1600), (129, 272), (252, 400)]
        {
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
            for kinds in std::iter::once(&logits[..6]).chain(logits[6..].chunks(1)) {
                let inputs = 8;
                let finite =
                    |x: f32| if x == f32::NEG_INFINITY && kinds.len() > 1 { -1e4 } else { x };
                let w: Vec<f32> = (0..outputs * inputs)
                    .map(|at| kinds.get(at % inputs).map_or(0.0, |kind| finite(kind[at / inputs])))
                    .collect();
                let x: Vec<f32> = (0..rows * inputs)
                    .map(|at| f32::from(u8::from(at / inputs % kinds.len() == at % inputs)))
                    .collect();
                let (w_buffer, w) = upload(&gpu, dtype, &w);
                let x_buffer = upload(&gpu, dtype, &x).0;
                let output = Output::Greatest;
                let shape = Product { rows, inputs, outputs, dtype, output, weights: 1 };
                let argmax = Argmax::new(&gpu, rows, outputs).unwrap();
                let scratch = gpu.allocate(4 * rows * outputs).unwrap();
                let check = |how: &str, run: &dyn Fn(&Pinned<u64>)| {
                    let picks = gpu.pinned(rows).unwrap();
                    run(&picks);
                    gpu.synchronize().unwrap();
                    for row in 0..rows {
                        let kind = row % kinds.len();
                        let sums: Vec<f32> =
                            (0..outputs).map(|output| w[output * inputs + kind]).collect();
                        let greatest = top_k::argmax(&sums).ok();
                        let expected = greatest
                            .filter(|found| found.1 > f32::NEG_INFINITY)
                            .map(|found| found.0);
                        let found = Argmax::token(picks.as_slice()[row]);
                        assert_eq!(found, expected, "{shape:?} {how} row {row}");
                    }
                };
                let x = x_buffer.pointer();
                check("by default", &|picks| {
                    let rest = Rest::Picks { logits: &scratch, argmax: &argmax, picks };
                    gpu.product(x, &w_buffer, argmax.bests(), shape, rest).unwrap();
                });
                let ways = Tiles::ways(&gpu, &shape).unwrap();
                assert_eq!(
                    ways.is_empty(),
                    dtype == DType::F32 || gpu.compute_capability().unwrap() != (9, 0)
                );
                for tiles in ways {
                    check(&format!("by {tiles}"), &|picks| {
                        let (w, y) = (w_buffer.pointer(), argmax.bests().pointer());
                        tiles.run(&gpu, &shape, Operands { x, w, y }).unwrap();
                        argmax.run_on_parts(&gpu, rows, tiles.parts(outputs), picks).unwrap();
                    });
                }
            }
        }
    }
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
            let place = Place { rest: Rest::Gates(&scratch, &kernels), before: &|| Ok(()) };
            let y = upload(&gpu, y_dtype, &before).0;
            let weights = [&w_buffer, &w_buffer];
            gpu.plan_product(x_buffer.pointer(), &weights, &y, shape, place).unwrap();
            let y = upload(&gpu, y_dtype, &before).0;
            gpu.product(x_buffer.pointer(), &w_buffer, &y, shape, place.rest).unwrap();
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
                let place = Place { rest: Rest::Gates(&scratch, &kernels), before: &norm };
                let all: Vec<_> = weights.iter().collect();
                if std::ptr::eq(gpu, &old) {
                    gpu.plan_product(x.pointer(), &all, &y, shape, place).unwrap();
                    let best = time(&|w| gpu.product(x.pointer(), w, &y, shape, place.rest));
                    line += &format!("{best:>6.2} |");
                    continue;
                }
                let mut times = Vec::new();
                for tiles in Tiles::ways(gpu, &shape).unwrap() {
                    let run = |w: &Buffer| {
                        let operands = Operands { x: x.pointer(), w: w.pointer(), y: y.pointer() };
                        tiles.run(gpu, &shape, operands)
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
