//! Top-k, argmax and log-sum-exp of a row of 151,936 logits, the vocabulary of the Qwen models.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ddtree::top_k::{TopK, argmax, log_sum_exp};
use rand::{Rng, SeedableRng, rngs::StdRng};

const VOCABULARY: usize = 151_936;

/// Normally distributed logits with the spread that language models show.
fn normal_row() -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(15);
    (0..VOCABULARY)
        .map(|_| {
            let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random());
            2.5 * (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
        })
        .collect()
}

fn sorted_ids(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids
}

fn exact_log_sum_exp(logits: &[f32]) -> f64 {
    logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln()
}

fn bench_select(c: &mut Criterion) {
    let rising: Vec<f32> = (0..VOCABULARY).map(|i| i as f32 * 1e-4).collect();
    let falling = rising.iter().rev().copied().collect();
    let ties = (0..VOCABULARY).map(|i| (i * 7919 % 4) as f32).collect();
    let rows: [(&str, Vec<f32>, &[usize]); 5] = [
        ("normal", normal_row(), &[1, 4, 8, 16, 64]),
        ("rising", rising, &[16, 64]),
        ("falling", falling, &[16, 64]),
        ("equal", vec![0.5; VOCABULARY], &[16, 64]),
        ("ties", ties, &[16, 64]),
    ];
    let mut group = c.benchmark_group("select");
    let mut top_k = TopK::new();
    for (name, logits, ks) in &rows {
        let expected = sorted_ids(logits);
        for &k in *ks {
            let (mut tokens, mut values) = (Vec::new(), Vec::new());
            top_k.select(logits, k, &mut tokens, &mut values).unwrap();
            assert_eq!(tokens, expected[..k], "{name}, k = {k}");
            group.bench_function(BenchmarkId::new(*name, k), |b| {
                b.iter(|| {
                    tokens.clear();
                    values.clear();
                    top_k.select(black_box(logits), k, &mut tokens, &mut values).unwrap();
                    black_box((&tokens, &values));
                });
            });
        }
    }
    group.finish();
}

fn bench_row(c: &mut Criterion) {
    let logits = normal_row();
    let expected = sorted_ids(&logits);
    let normaliser = exact_log_sum_exp(&logits);

    assert_eq!(argmax(&logits).unwrap().0, expected[0]);
    c.bench_function("argmax", |b| b.iter(|| argmax(black_box(&logits))));

    assert!((log_sum_exp(&logits).unwrap() - normaliser).abs() < 1e-6);
    c.bench_function("log_sum_exp", |b| b.iter(|| log_sum_exp(black_box(&logits))));

    let mut top_k = TopK::new();
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    top_k.top_k_log_probs(&logits, 16, &mut tokens, &mut log_probs).unwrap();
    assert_eq!(tokens, expected[..16]);
    for (&id, &log_prob) in tokens.iter().zip(&log_probs) {
        let exact = f64::from(logits[id as usize]) - normaliser;
        assert!((f64::from(log_prob) - exact).abs() < 3e-6);
    }
    c.bench_function("top_k_log_probs/16", |b| {
        b.iter(|| {
            tokens.clear();
            log_probs.clear();
            top_k.top_k_log_probs(black_box(&logits), 16, &mut tokens, &mut log_probs).unwrap();
            black_box((&tokens, &log_probs));
        });
    });
}

criterion_group!(benches, bench_select, bench_row);
criterion_main!(benches);
