//! Products in every way that there is, against plain loops on the host.

use candle_core::DType;
use half::{bf16, f16};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::rows::gated;
use super::{TYPES, distance, download, gpu, microseconds, random, upload};
use crate::candle::Result;
use crate::candle::cuda::device::{Buffer, Gpu};
use crate::candle::cuda::kernels::Kernels;
use crate::candle::cuda::products::{Operands, Place, Product};
use crate::candle::cuda::tiles::Tiles;

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

/// What is expected of `shape`, given the sums and what was there before.
fn expected(shape: &Product, sums: &[f64], before: &[f32]) -> Vec<f32> {
    let Product { dtype, y_dtype, .. } = *shape;
    if shape.gated {
        let sums: Vec<f32> = sums.iter().map(|&sum| rounded(dtype, sum)).collect();
        return sums.chunks(16).flat_map(gated).map(|x| rounded(dtype, x)).collect();
    }
    let added = |(&sum, &before): (&f64, &f32)| {
        rounded(y_dtype, if shape.add { sum + f64::from(before) } else { sum })
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
                for (y_dtype, add, gated) in [
                    (DType::F32, false, false),
                    (DType::F32, true, false),
                    (dtype, false, false),
                    (dtype, false, true),
                ] {
                    let shape =
                        Product { rows, inputs, outputs, dtype, y_dtype, add, gated, weights: 1 };
                    let expected = expected(&shape, &sums, &before);
                    let limit = match y_dtype {
                        DType::BF16 => 4e-3,
                        DType::F16 => 5e-4,
                        _ => 1e-5,
                    };
                    let scratch = upload(&gpu, dtype, &before).0;
                    let gates = Some((&scratch, &kernels));
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
                        gpu.product(x_at, &w_buffer, y, shape, gates).unwrap();
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

#[test]
fn what_is_planned_stays_right() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(8);
    let (inputs, outputs) = (512, 256);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        let (w_buffer, w) = upload(&gpu, dtype, &random(&mut rng, outputs * inputs));
        for (rows, add, gated) in [(1, true, false), (24, false, true), (136, true, false)] {
            let y_dtype = if add { DType::F32 } else { dtype };
            let (x_buffer, x) = upload(&gpu, dtype, &random(&mut rng, rows * inputs));
            let before = random(&mut rng, rows * outputs);
            let sums = sums(&x, &w, rows, inputs, outputs);
            let shape = Product { rows, inputs, outputs, dtype, y_dtype, add, gated, weights: 2 };
            let scratch = upload(&gpu, dtype, &before).0;
            let place = Place { gates: Some((&scratch, &kernels)), before: &|| Ok(()) };
            let y = upload(&gpu, y_dtype, &before).0;
            let weights = [&w_buffer, &w_buffer];
            gpu.plan_product(x_buffer.pointer(), &weights, &y, shape, place).unwrap();
            let y = upload(&gpu, y_dtype, &before).0;
            gpu.product(x_buffer.pointer(), &w_buffer, &y, shape, place.gates).unwrap();
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
    for (name, inputs, outputs, gated, add, hidden) in [
        ("qkv", 4096, 6144, false, false, 4096),
        ("o", 4096, 4096, false, true, 4096),
        ("gate_up", 4096, 24_576, true, false, 4096),
        ("down", 12_288, 4096, false, true, 4096),
        ("small qkv", 576, 960, false, false, 576),
        ("small o", 576, 576, false, true, 576),
        ("small gate_up", 576, 3072, true, false, 576),
        ("small down", 1536, 576, false, true, 576),
    ] {
        eprintln!("{name}");
        for rows in [1, 16, 24, 40, 64, 72, 128, 136] {
            let dtype = DType::BF16;
            let y_dtype = if add { DType::F32 } else { dtype };
            let shape = Product { rows, inputs, outputs, dtype, y_dtype, add, gated, weights: 8 };
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
                let place = Place { gates: Some((&scratch, &kernels)), before: &norm };
                let all: Vec<_> = weights.iter().collect();
                if std::ptr::eq(gpu, &old) {
                    gpu.plan_product(x.pointer(), &all, &y, shape, place).unwrap();
                    let best = time(&|w| gpu.product(x.pointer(), w, &y, shape, place.gates));
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
