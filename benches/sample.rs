//! Picking on the host from 64 rows of 151,936 logits, the vocabulary of the Qwen models. Times are
//! per slot, except for `round`, in which only the slots that the text reaches are picked from.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use ddtree::{Algorithm, Capabilities, Config, Plan, Request, Sampling, Session, sample::gumbel};
use rand::{Rng, SeedableRng, rngs::StdRng};

const VOCABULARY: usize = 151_936;
const SLOTS: usize = 64;

/// Normally distributed logits with the spread that language models show, and a few that stand out.
fn rows() -> Vec<Vec<f32>> {
    let mut rng = StdRng::seed_from_u64(15);
    let mut row = || {
        let mut normal = || {
            let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random());
            2.5 * (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
        };
        let mut row: Vec<f32> = (0..VOCABULARY).map(|_| normal()).collect();
        for token in 0..40 {
            row[token * 3_571] += 12.0 + 2.0 * normal();
        }
        row
    };
    (0..SLOTS).map(|_| row()).collect()
}

/// A session that waits for the picks of a tree of 64 slots, after a prompt of 2,000 tokens.
fn session(sampling: Sampling, trace: bool) -> Session {
    let config = Config::new(Algorithm::Tree).budget(SLOTS - 1).trace(trace).coupled(false);
    let capabilities = Capabilities::new(VOCABULARY, 4_096);
    let mut session = Session::new(Plan::resolve(&config, &capabilities, 15).unwrap());
    let prompt: Vec<u32> = (0..2_000u32).map(|i| i * i % 50_021).collect();
    session.start(&Request::new(&prompt).sampling(sampling)).unwrap();
    let (_, mut picks) = session.prefill().unwrap();
    picks.push_logits(&vec![0.0; VOCABULARY]).unwrap();
    session.prefilled().unwrap();
    let (_, proposal) = session.proposal().unwrap();
    for _ in 0..15 {
        let tokens: Vec<u32> = (0..16).map(|token| token * 3_571).collect();
        let log_probs: Vec<f32> = (0..16).map(|rank| -1.5 - 0.2 * rank as f32).collect();
        proposal.push(&tokens, &log_probs).unwrap();
    }
    session.proposed().unwrap();
    session
}

fn pick_all(session: &mut Session, rows: &[Vec<f32>]) {
    let (_, mut picks) = session.verification().unwrap();
    for row in rows {
        picks.push_logits(row).unwrap();
    }
    black_box(picks.ids());
}

fn bench_pick(c: &mut Criterion) {
    let rows = rows();
    let warm = || Sampling::new().temperature(1.0).seed(7);

    // The pick at the root, from noise for every token.
    let mut plain = session(warm(), true);
    let (round, mut picks) = plain.verification().unwrap();
    assert_eq!(round.tree().len(), SLOTS);
    picks.push_logits(&rows[0]).unwrap();
    let sum = |token: u32| f64::from(rows[0][token as usize]) + gumbel(7, 2_001, token);
    let best = (0..VOCABULARY as u32).max_by(|&a, &b| sum(a).total_cmp(&sum(b)));
    assert_eq!(Some(picks.ids()[0]), best);

    let cases = [
        ("greedy", Sampling::new()),
        ("temperature", warm()),
        ("top_p_0.95", warm().top_p(0.95)),
        ("top_k_50", warm().top_k(50)),
        ("min_p_0.05", warm().min_p(0.05)),
        ("top_k_20_top_p_0.8", warm().temperature(0.7).top_k(20).top_p(0.8)),
        ("repetition_penalty", warm().repetition_penalty(1.1)),
    ];
    for (name, sampling) in cases {
        let mut everywhere = session(sampling.clone(), true);
        c.bench_function(&format!("pick/{name}"), |b| {
            b.iter_custom(|iterations| {
                let mut time = Duration::ZERO;
                for _ in 0..iterations {
                    let since = Instant::now();
                    pick_all(&mut everywhere, &rows);
                    time += since.elapsed();
                }
                time / SLOTS as u32
            });
        });
    }
    let mut reached = session(warm().top_p(0.95), false);
    c.bench_function("round/top_p_0.95", |b| b.iter(|| pick_all(&mut reached, &rows)));
}

criterion_group!(benches, bench_pick);
criterion_main!(benches);
