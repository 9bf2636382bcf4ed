//! Norms, rotations, activations and gathers against plain loops in f64, row by row.

use candle_core::DType;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::device::Gpu;
use super::super::kernels::{Heads, Inputs, Kernels, Path, RopeStore};
use super::{TYPES, distance, download, gpu, random, upload};

/// How far a row may be from exact arithmetic: what rounding it to the type does, and a little for f32 sums.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        _ => 1e-6,
    }
}

#[track_caller]
fn check_row(dtype: DType, found: &[f32], expected: &[f64], what: &str) {
    let expected: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
    let distance = distance(found, &expected);
    assert!(distance < limit(dtype), "{dtype:?} {what}: {distance}");
}

fn normed(row: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let scale = (squares / row.len() as f64 + f64::from(eps)).sqrt().recip();
    row.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect()
}

/// `values` as a type holds them.
fn rounded(gpu: &Gpu, dtype: DType, values: &[f32]) -> Vec<f32> {
    upload(gpu, dtype, values).1
}

/// Rows of ordinary sizes, of tiny and of great ones, and one with an outlier.
fn some_rows(rng: &mut StdRng, rows: usize, size: usize) -> Vec<f32> {
    let mut values = random(rng, rows * size);
    for (row, values) in values.chunks_mut(size).enumerate() {
        let scale = [1.0, 1e-3, 100.0, 1.0][row % 4];
        values.iter_mut().for_each(|x| *x *= scale);
        if row % 4 == 3 {
            values[size / 2] = 3000.0;
        }
    }
    values
}

#[test]
fn norms_equal_the_hosts_and_leave_taps() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(21);
    let (eps, stride_layers, at_layer) = (1e-6f32, 3, 1);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        let element = dtype.size_in_bytes();
        for (rows, size) in
            [(1, 8), (5, 64), (8, 576), (72, 960), (3, 2560), (9, 4096), (2, 5128), (1, 16_384)]
        {
            let x = some_rows(&mut rng, rows, size);
            let weight = random(&mut rng, size);
            let (x_buffer, weight_buffer) = (gpu.upload(&x).unwrap(), gpu.upload(&weight).unwrap());
            let out = gpu.allocate(element * rows * size).unwrap();
            let taps = gpu.allocate(element * rows * size * stride_layers).unwrap();
            let tap = (taps.at(element * at_layer * size), stride_layers * size);
            let weights = (&weight_buffer, eps);
            kernels.norm(&gpu, rows, &x_buffer, weights, &out, Some(tap), size).unwrap();
            let found = download(&gpu, dtype, &out, rows * size);
            let tapped = download(&gpu, dtype, &taps, rows * size * stride_layers);
            let kept = rounded(&gpu, dtype, &x);
            for row in 0..rows {
                let range = row * size..(row + 1) * size;
                let what = format!("norm of row {row} of {rows} x {size}");
                let expected = normed(&x[range.clone()], &weight, eps);
                check_row(dtype, &found[range.clone()], &expected, &what);
                // Taps are the row itself, in their column of the tap rows and nowhere else.
                let columns = &tapped[row * size * stride_layers..][..size * stride_layers];
                for (layer, column) in columns.chunks(size).enumerate() {
                    if layer == at_layer {
                        assert_eq!(column, &kept[range.clone()], "{dtype:?} tap, {what}");
                    } else {
                        assert!(column.iter().all(|&x| x == 0.0), "{dtype:?} beside the tap");
                    }
                }
            }
            // Without a tap, the same.
            kernels.norm(&gpu, rows, &x_buffer, weights, &out, None, size).unwrap();
            assert_eq!(download(&gpu, dtype, &out, rows * size), found);
        }
    }
}

#[test]
fn embeddings_are_rows_of_the_table_and_their_norms() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(22);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        for (rows, size) in [(1, 8), (17, 576), (8, 4096)] {
            let entries = 50;
            let (table, held) = upload(&gpu, dtype, &some_rows(&mut rng, entries, size));
            let weight = random(&mut rng, size);
            let tokens: Vec<u32> = (0..rows).map(|_| rng.random_range(0..entries as u32)).collect();
            let (tokens_buffer, weight_buffer) =
                (gpu.upload(&tokens).unwrap(), gpu.upload(&weight).unwrap());
            let residual = gpu.allocate(4 * rows * size).unwrap();
            let out = gpu.allocate(dtype.size_in_bytes() * rows * size).unwrap();
            let inputs = Inputs {
                prefix: 0,
                tokens: tokens_buffer.pointer(),
                positions: 0,
                mask: 0,
                mask_words: 1,
                rows,
            };
            let weights = (&weight_buffer, 1e-5);
            kernels.embed_norm(&gpu, &inputs, &table, &residual, weights, &out, size).unwrap();
            let stream = download(&gpu, DType::F32, &residual, rows * size);
            let found = download(&gpu, dtype, &out, rows * size);
            for (row, &token) in tokens.iter().enumerate() {
                let expected = &held[token as usize * size..][..size];
                assert_eq!(stream[row * size..][..size], *expected, "{dtype:?} token {token}");
                let what = format!("norm of token {token}");
                let expected = normed(expected, &weight, 1e-5);
                check_row(dtype, &found[row * size..][..size], &expected, &what);
            }
        }
    }
}

/// Of eight gates and their eight ups.
pub(super) fn gated(unit: &[f32]) -> impl Iterator<Item = f64> {
    let (gates, ups) = unit.split_at(8);
    gates
        .iter()
        .zip(ups)
        .map(|(&gate, &up)| f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up))
}

#[test]
fn activations_equal_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(23);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        for (rows, size) in [(1, 8), (8, 1536), (72, 512), (3, 12_288), (1, 9728)] {
            // Gates from where the function vanishes to where it is the identity.
            let values: Vec<f32> =
                random(&mut rng, rows * 2 * size).iter().map(|x| 6.0 * x).collect();
            let (gate_up, held) = upload(&gpu, dtype, &values);
            let out = gpu.allocate(dtype.size_in_bytes() * rows * size).unwrap();
            kernels.silu_mul(&gpu, &gate_up, &out, rows * size).unwrap();
            let found = download(&gpu, dtype, &out, rows * size);
            for (row, held) in held.chunks(2 * size).enumerate() {
                let expected: Vec<f64> = held.chunks(16).flat_map(gated).collect();
                let what = format!("activation of row {row} of {rows} x {size}");
                check_row(dtype, &found[row * size..][..size], &expected, &what);
            }
        }
    }
}

/// One case of the kernel for queries and keys.
#[derive(Clone, Copy, Debug)]
struct Rotation {
    heads: Heads,
    layers: usize,
    rows: usize,
    /// Cache rows before; the kernel reads it on the GPU.
    prefix: usize,
    bias: bool,
    norms: bool,
}

#[test]
fn queries_are_rotated_in_place_and_keys_and_values_stored() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(24);
    for dtype in TYPES {
        for size in [64, 128, 256] {
            for (query, kv, layers, rows, prefix, bias, norms) in [
                (8, 2, 1, 1, 0, false, true),
                (3, 3, 1, 8, 37, true, false),
                (9, 3, 1, 72, 5, false, false),
                (4, 1, 1, 17, 200, true, true),
                // So many that blocks get larger, and more than blocks can be started early.
                (12, 2, 1, 160, 3, true, true),
                (28, 8, 1, 250, 0, false, false),
                // Keys and values alone, as a drafter's context has them, of several layers.
                (0, 2, 1, 24, 11, true, true),
                (0, 3, 3, 1, 0, false, false),
                (0, 2, 5, 24, 7, true, true),
            ] {
                let heads = Heads { query, kv, size };
                let case = Rotation { heads, layers, rows, prefix, bias, norms };
                check_rotation(&gpu, &mut rng, dtype, case);
            }
        }
    }
}

fn check_rotation(gpu: &Gpu, rng: &mut StdRng, dtype: DType, case: Rotation) {
    let Rotation { heads, layers, rows, prefix, .. } = case;
    let Heads { query, kv, size } = heads;
    let (heads_of_layer, all) = (query + 2 * kv, layers * (query + 2 * kv));
    let (positions_len, cache_rows, eps) = (300, prefix + rows + 3, 1e-6f32);
    let kernels = Kernels::new(gpu, dtype, size).unwrap();
    let (qkv, held) = upload(gpu, dtype, &random(rng, rows * all * size));
    let (bias, bias_held) = upload(gpu, dtype, &random(rng, all * size));
    let (q_norm, k_norm) = (random(rng, layers * size), random(rng, layers * size));
    let (q_norm_buffer, k_norm_buffer) =
        (gpu.upload(&q_norm).unwrap(), gpu.upload(&k_norm).unwrap());
    let angle = |position: usize, i: usize| {
        let frequency = 10_000f64.powf(-2.0 * i as f64 / size as f64);
        let angle = position as f64 * frequency;
        (angle.cos() as f32, angle.sin() as f32)
    };
    let angles: Vec<f32> = (0..positions_len)
        .flat_map(|position| (0..size / 2).map(move |i| (position, i)))
        .flat_map(|(position, i)| {
            let (cos, sin) = angle(position, i);
            [cos, sin]
        })
        .collect();
    let rope = gpu.upload(&angles).unwrap();
    // Siblings share positions.
    let positions: Vec<u32> =
        (0..rows).map(|_| rng.random_range(0..positions_len as u32)).collect();
    let (positions_buffer, prefix_buffer) =
        (gpu.upload(&positions).unwrap(), gpu.upload(&[prefix as u32]).unwrap());
    let plane = cache_rows * kv * size;
    let before = rounded(gpu, dtype, &random(rng, layers * plane));
    let (keys, values) = (upload(gpu, dtype, &before).0, upload(gpu, dtype, &before).0);
    let how = RopeStore {
        bias: case.bias.then(|| bias.pointer()),
        norms: case.norms.then(|| (q_norm_buffer.pointer(), k_norm_buffer.pointer())),
        eps,
        rope: &rope,
        keys: keys.pointer(),
        values: values.pointer(),
        layers,
        layer_stride: plane,
    };
    let inputs = Inputs {
        prefix: prefix_buffer.pointer(),
        tokens: 0,
        positions: positions_buffer.pointer(),
        mask: 0,
        mask_words: 1,
        rows,
    };
    kernels.rope_store(gpu, &inputs, qkv.pointer(), heads, &how).unwrap();
    let found_qkv = download(gpu, dtype, &qkv, rows * all * size);
    let found_keys = download(gpu, dtype, &keys, layers * plane);
    let found_values = download(gpu, dtype, &values, layers * plane);

    for row in 0..rows {
        for row_head in 0..all {
            let (layer, head) = (row_head / heads_of_layer, row_head % heads_of_layer);
            let at = (row * all + row_head) * size;
            let mut x: Vec<f32> = held[at..][..size].to_vec();
            if case.bias {
                x.iter_mut().zip(&bias_held[row_head * size..]).for_each(|(x, b)| *x += b);
            }
            let (is_query, is_value) = (head < query, head >= query + kv);
            let norm = &(if is_query { &q_norm } else { &k_norm })[layer * size..][..size];
            let x: Vec<f64> = if case.norms && !is_value {
                normed(&x, norm, eps)
            } else {
                x.iter().map(|&x| f64::from(x)).collect()
            };
            let mut expected = x.clone();
            if !is_value {
                for i in 0..size / 2 {
                    let (cos, sin) = angle(positions[row] as usize, i);
                    let (cos, sin) = (f64::from(cos), f64::from(sin));
                    let (a, b) = (x[i], x[i + size / 2]);
                    expected[i] = a * cos - b * sin;
                    expected[i + size / 2] = b * cos + a * sin;
                }
            }
            let found = if is_query {
                &found_qkv[at..]
            } else {
                // What is stored elsewhere stays as it was.
                assert_eq!(found_qkv[at..][..size], held[at..][..size], "{dtype:?} {case:?}");
                let kv_head = (head - query) % kv;
                let stored = if is_value { &found_values } else { &found_keys };
                &stored[layer * plane + ((prefix + row) * kv + kv_head) * size..]
            };
            check_row(
                dtype,
                &found[..size],
                &expected,
                &format!("{case:?} row {row} head {row_head}"),
            );
        }
    }
    for (found, what) in [(&found_keys, "keys"), (&found_values, "values")] {
        let (start, end) = (prefix * kv * size, (prefix + rows) * kv * size);
        for (found, before) in found.chunks(plane).zip(before.chunks(plane)) {
            assert_eq!(found[..start], before[..start], "{dtype:?} {case:?}: committed {what}");
            assert_eq!(found[end..], before[end..], "{dtype:?} {case:?}: {what} behind");
        }
    }
}

#[test]
fn taps_are_gathered_row_by_row() {
    let Some(gpu) = gpu() else { return };
    let mut rng = StdRng::seed_from_u64(25);
    for dtype in TYPES {
        let kernels = Kernels::new(&gpu, dtype, 64).unwrap();
        for (width, size) in [(1, 8), (16, 576 * 3), (129, 2560), (252, 264)] {
            let (rows, held) = upload(&gpu, dtype, &random(&mut rng, width * size));
            let row_bytes = dtype.size_in_bytes() * size;
            for _ in 0..3 {
                let slots: Vec<u32> =
                    (0..width as u32).filter(|&slot| slot == 0 || rng.random()).collect();
                let out = gpu.allocate(slots.len() * row_bytes).unwrap();
                kernels.gather(&gpu, &rows, &out, row_bytes, &Path::new(&slots)).unwrap();
                let found = download(&gpu, dtype, &out, slots.len() * size);
                for (found, &slot) in found.chunks(size).zip(&slots) {
                    assert_eq!(found, &held[slot as usize * size..][..size], "{dtype:?} {slot}");
                }
            }
        }
    }
}
