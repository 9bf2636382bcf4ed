//! An engine with paged KV memory, continuous batching and a scheduler of its own, which takes trees
//! from ddtree: requests join and leave, share prefixes, are cancelled, and kernels fail.
//!
//! `cargo run --example paged_engine`

pub mod engine;
pub mod model;

use engine::{Engine, Limits};
use model::{Call, Model};

pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut model = Model::new(400);
    let mut calls = 0;
    // Every 20th pass fails, and with it the whole batch.
    model.inject = Box::new(move |call| {
        calls += u64::from(call == Call::Forward);
        call == Call::Forward && calls % 20 == 0
    });
    let mut engine =
        Engine::new(model, Limits { sequences: 8, nodes_per_sequence: 15, nodes: 48 })?;
    for request in 0..16u32 {
        let prompt: Vec<u32> = (0..12).chain([20 + request]).collect();
        engine.submit(&prompt, 40)?;
    }
    let mut texts = vec![Vec::new(); 17];
    while !engine.is_idle() {
        for event in engine.tick()? {
            texts[event.id as usize].extend(event.tokens);
        }
    }
    for (id, text) in texts.iter().enumerate().skip(1).take(4) {
        println!("request {id}: {:?} ...", &text[..12]);
    }
    let counters = &engine.counters;
    println!("{counters:?}");
    println!("{:.1} tokens per pass of the model", counters.tokens as f64 / counters.passes as f64);
    Ok(())
}
