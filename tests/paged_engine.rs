//! The example of a paged engine, under load: every request gets the text that it gets alone.

#[path = "../examples/paged_engine/main.rs"]
mod paged_engine;

use paged_engine::{
    engine::{Engine, Limits},
    model::{self, Call, Model},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{cell::Cell, collections::HashMap, rc::Rc};

const PAGES: usize = 800;

/// Plain decoding, without pages, batches, trees or a session.
fn alone(prompt: &[u32], count: usize) -> Vec<u32> {
    let (mut rows, mut text) = (Vec::new(), prompt.to_vec());
    while text.len() < prompt.len() + count {
        for &token in &text[rows.len()..] {
            let row = model::attend(token, rows.len() as i64, rows.iter().copied());
            rows.push(row);
        }
        text.push(model::pick(text[text.len() - 1], rows[rows.len() - 1]));
    }
    text.split_off(prompt.len())
}

struct Submitted {
    prompt: Vec<u32>,
    count: usize,
    cancel_after: Option<usize>,
    text: Vec<u32>,
    finished: bool,
    cancelled: bool,
}

/// Runs 32 requests at once, and more that arrive, under kernel failures.
fn run(seed: u64) -> Engine {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut model = Model::new(PAGES);
    let (mut faults, failed) = (StdRng::seed_from_u64(seed + 1_000), Rc::new(Cell::new(0)));
    let count = failed.clone();
    model.inject = Box::new(move |call| {
        let fails = faults.random_bool(if call == Call::Forward { 0.1 } else { 0.03 });
        count.set(count.get() + u64::from(fails));
        fails
    });
    let limits = Limits { sequences: 32, nodes_per_sequence: 24, nodes: 160 };
    let mut engine = Engine::new(model, limits).unwrap();

    let preamble: Vec<u32> = (0..30).map(|_| rng.random_range(0..model::VOCAB)).collect();
    let mut requests: HashMap<u64, Submitted> = HashMap::new();
    let mut to_come = 64;
    while to_come > 0 || !engine.is_idle() {
        // Half of them at once, the others as they come.
        let arrivals = if to_come == 64 { 32 } else { rng.random_range(0..3).min(to_come) };
        for _ in 0..arrivals {
            to_come -= 1;
            let shared = rng.random_range(0..=preamble.len());
            let mut prompt = preamble[..shared].to_vec();
            prompt.extend((0..rng.random_range(1..10)).map(|_| rng.random_range(0..model::VOCAB)));
            let count = rng.random_range(1..60);
            let cancel_after = rng.random_bool(0.2).then(|| rng.random_range(0..count));
            let id = engine.submit(&prompt, count).unwrap();
            let (text, finished, cancelled) = (Vec::new(), false, false);
            let request = Submitted { prompt, count, cancel_after, text, finished, cancelled };
            requests.insert(id, request);
        }
        for event in engine.tick().unwrap() {
            let request = requests.get_mut(&event.id).unwrap();
            assert!(!request.finished && !request.cancelled, "tokens after the end");
            request.text.extend(event.tokens);
            request.finished = event.finish.is_some();
        }
        for (&id, request) in &mut requests {
            let due = request.cancel_after.is_some_and(|after| request.text.len() > after);
            if due && !request.finished && !request.cancelled {
                engine.cancel(id);
                request.cancelled = true;
            }
        }
    }
    for (id, request) in &requests {
        let expected = alone(&request.prompt, request.count);
        if request.cancelled {
            assert!(expected.starts_with(&request.text), "request {id}, seed {seed}");
        } else {
            assert!(request.finished);
            assert_eq!(request.text, expected, "request {id}, seed {seed}");
        }
    }
    assert_eq!(engine.counters.failures, failed.get(), "a failure that nobody noticed");
    assert!(failed.get() > 0 && requests.values().any(|request| request.cancelled));
    engine
}

#[test]
fn concurrent_requests_get_the_text_that_they_get_alone() {
    for seed in 0..8 {
        let mut engine = run(seed);
        let counters = &engine.counters;
        assert_eq!(counters.largest_batch, 32, "{counters:?}");
        assert!(counters.reused_rows > 0 && counters.truncated_trees > 0, "{counters:?}");
        engine.drop_prefixes();
        assert_eq!(engine.model.free_pages(), PAGES, "pages are lost");
    }
}

#[test]
fn requests_that_could_never_run_are_refused() {
    let limits = Limits { sequences: 2, nodes_per_sequence: 4, nodes: 8 };
    let mut engine = Engine::new(Model::new(4), limits).unwrap();
    assert!(engine.submit(&[], 4).is_err());
    assert!(engine.submit(&[1, 2, 3], 200).is_err());
    assert!(engine.is_idle());
    engine.submit(&[1, 2, 3], 4).unwrap();
    while !engine.is_idle() {
        engine.tick().unwrap();
    }
    engine.drop_prefixes();
    assert_eq!(engine.model.free_pages(), 4);
}

#[test]
fn trees_pay_in_passes() {
    let mut engine =
        Engine::new(Model::new(PAGES), Limits { sequences: 1, nodes_per_sequence: 24, nodes: 24 })
            .unwrap();
    engine.submit(&[1, 2, 3], 100).unwrap();
    while !engine.is_idle() {
        engine.tick().unwrap();
    }
    let counters = &engine.counters;
    assert_eq!(counters.tokens, 100);
    assert!(counters.passes < 60, "{counters:?}");
}

#[test]
fn the_example_runs() {
    paged_engine::main().unwrap();
}
