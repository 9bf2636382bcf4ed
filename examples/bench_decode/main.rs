//! Measures every algorithm on the same prompts, in alternating order.
//!
//! `cargo run --release --example bench_decode`

#[path = "../common/mod.rs"]
mod common;
mod measure;
mod prompts;
mod report;
#[path = "../common/sampling.rs"]
mod sampling;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::{device::DeviceArgs, models::ModelArgs, models::Models};
use indicatif::ProgressBar;
use measure::{Arm, Bench, Measured};
use report::{Report, Setting};
use sampling::SamplingArgs;

/// Measures ar, chain and trees of several budgets on the same prompts.
///
/// Each prompt runs through all of them in turn, in an order that alternates from prompt to prompt
/// and run to run, so that a machine that gets slower or faster does so for all. Texts are compared.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  bench_decode --repeat 10 --json result.json
  bench_decode --temperature 1 --seeds 3 --uncoupled --repeat 1
  bench_decode --target SmolLM2-135M-Instruct.gguf --drafter smollm2-dflash/ --chat --prompts prompts.txt --budgets 8,32

Compare ratios, not tokens per second, and quote the spread. Without --release all figures mislead.")]
struct Args {
    #[command(flatten)]
    models: ModelArgs,

    #[command(flatten)]
    device: DeviceArgs,

    /// Prompts: one per line, or JSON (a list of strings, or a golden file) [default: twelve short ones]
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,

    /// Put every prompt into the target's chat template
    #[arg(long)]
    chat: bool,

    /// Nodes of the trees to measure
    #[arg(long, value_name = "NODES", value_delimiter = ',', default_value = "4,16,64")]
    budgets: Vec<usize>,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Texts per prompt, each with a seed of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: usize,

    /// With a temperature: also measure drafts that do not use the noise of the draws
    #[arg(long)]
    uncoupled: bool,

    /// Tokens to generate per prompt at most
    #[arg(long, value_name = "N", default_value_t = 96)]
    max_new_tokens: usize,

    /// Times that everything is measured
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,

    /// Write the figures to a JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.repeat > 0, "--repeat: found 0, accepted: at least 1");
    ensure!(args.seeds > 0, "--seeds: found 0, accepted: at least 1");
    ensure!(
        !args.uncoupled || args.sampling.temperature > 0.0,
        "--uncoupled: accepted: with a --temperature above 0"
    );
    ensure!(
        args.max_new_tokens > 1,
        "--max-new-tokens: accepted: at least 2, as the first comes from the prompt"
    );
    let prompts = match &args.prompts {
        None => prompts::BUILT_IN.map(str::to_owned).to_vec(),
        Some(path) => {
            prompts::read(path).with_context(|| format!("--prompts {}", path.display()))?
        }
    };
    let models = Models::load(&args.models, &args.device, true, true)?;
    let encode = |prompt: &String| models.text.encode(prompt, args.chat);
    let prompt_ids: Vec<Vec<u32>> = prompts.iter().map(encode).collect::<Result<_>>()?;

    // A prompt with another seed is another text.
    let prompt_ids = vec![prompt_ids; args.seeds].concat();

    let arms = Arm::all(&args.budgets, args.uncoupled);
    let mut bench = Bench::new(models, args.max_new_tokens, args.sampling.sampling())?;
    let progress = ProgressBar::new((args.repeat * prompt_ids.len() * arms.len()) as u64);
    for arm in &arms {
        bench.run(*arm, &prompt_ids[0], 0)?; // warms caches and buffers up
    }
    let mut measured = Measured::new(arms.clone(), args.repeat, prompt_ids.len());
    for repeat in 0..args.repeat {
        for (prompt, ids) in prompt_ids.iter().enumerate() {
            let mut order: Vec<usize> = (0..arms.len()).collect();
            if (repeat + prompt) % 2 == 1 {
                order.reverse();
            }
            for arm in order {
                let seed = args.sampling.seed + prompt as u64;
                measured.add(repeat, prompt, arm, bench.run(arms[arm], ids, seed)?);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();

    let explain = |difference| bench.explain(difference, &prompt_ids);
    let difference = measured.difference.as_ref().map(explain).transpose()?;
    let setting = Setting {
        target: bench.name(),
        device: &args.device.describe(),
        max_new_tokens: args.max_new_tokens,
        temperature: args.sampling.temperature,
        seeds: args.seeds,
    };
    let report = Report::new(&setting, &measured, difference);
    print!("{report}");
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report.json())?;
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
