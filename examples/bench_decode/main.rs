//! Measures every algorithm on the same prompts, in alternating order; on a GPU, also the parts of a
//! round at the shape of a model that is not at hand.
//!
//! `cargo run --release --example bench_decode`

#[path = "../common/mod.rs"]
mod common;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod figures;
#[cfg(feature = "cuda")]
#[path = "../common/gpu.rs"]
mod gpu;
mod measure;
#[path = "../common/output.rs"]
mod output;
mod prompts;
#[cfg(feature = "cuda")]
mod random;
mod report;
#[path = "../common/sampling.rs"]
mod sampling;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::{
    device::{DeviceArgs, Place},
    models::{ModelArgs, Models},
};
use cpu::CpuPair;
#[cfg(feature = "cuda")]
use ddtree::candle::cuda::Gpu;
use indicatif::ProgressBar;
use measure::{Arm, Job, Pair};
use output::OutputFile;
use report::{Report, Setting};
use sampling::SamplingArgs;
use serde_json::Value;

/// Measures ar, chain and trees of several budgets on the same prompts.
///
/// Each prompt runs through all of them in turn, in an order that alternates from prompt to prompt
/// and run to run, so that a machine that gets slower or faster does so for all. Texts are compared.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  bench_decode --repeat 10 --json result.json
  bench_decode --temperature 1 --seeds 3 --uncoupled --repeat 1
  bench_decode --target SmolLM2-135M-Instruct.gguf --drafter smollm2-dflash/ --chat --prompts prompts.txt --budgets 8,32
  bench_decode --device cuda --dtype bf16 --random qwen3-8b --budgets 16,63,127

Compare ratios, not tokens per second, and quote the spread. Without --release all figures mislead.")]
struct Args {
    #[command(flatten)]
    models: ModelArgs,

    #[command(flatten)]
    device: DeviceArgs,

    /// Prompts: one per line, or JSON: a list, or an object with a list of `cases`, of texts or of
    /// objects with `prompt` or tokens as `prompt_ids` [default: twelve short ones]
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,

    /// Put every prompt into the target's chat template
    #[arg(long)]
    chat: bool,

    /// Instead of texts, measure the parts of a round with random weights on a GPU. SHAPE: qwen3-4b,
    /// qwen3-8b, smollm2-135m (needs `--features cuda` and --device cuda)
    #[arg(long, value_name = "SHAPE", conflicts_with_all = [
        "target", "drafter", "prompts", "chat", "temperature", "top_k", "top_p", "min_p", "seed",
        "repetition_penalty", "seeds", "uncoupled", "max_new_tokens",
    ])]
    random: Option<String>,

    /// With --random: rows committed before rounds are timed
    #[arg(long, value_name = "ROWS", default_value_t = 1024)]
    context: usize,

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
    // Before anything is measured, so that nothing is in vain.
    let file = args.json.as_deref().map(OutputFile::create).transpose()?;
    let json = match &args.random {
        None => texts(&args)?,
        Some(shape) => random(shape, &args)?,
    };
    if let Some(file) = file {
        file.write(&serde_json::to_string_pretty(&json)?)?;
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn random(shape: &str, args: &Args) -> Result<Value> {
    let Place::Cuda(ordinal) = args.device.device else {
        anyhow::bail!("--random: accepted: with --device cuda");
    };
    ensure!(args.context > 0, "--context: found 0, accepted: at least 1");
    let rounds = random::Rounds {
        context: args.context,
        budgets: args.budgets.clone(),
        repeats: args.repeat,
    };
    let report = random::measure(shape, ordinal, args.device.dtype, &rounds)?;
    print!("{report}");
    Ok(report.json())
}

#[cfg(not(feature = "cuda"))]
fn random(_: &str, _: &Args) -> Result<Value> {
    anyhow::bail!("--random: this build has no GPU engine: build it with `--features cuda`");
}

/// Measures whole texts.
fn texts(args: &Args) -> Result<Value> {
    let checkpoints = args.models.find(true, true)?;
    let mut prompts = match &args.prompts {
        None => prompts::built_in(&checkpoints.text, args.chat)?,
        Some(path) => prompts::read(path, &checkpoints.text, args.chat)
            .with_context(|| format!("--prompts {}", path.display()))?,
    };
    if args.sampling.temperature > 0.0 {
        // References are greedy.
        prompts.iter_mut().for_each(|prompt| prompt.expected = None);
    }
    let (mut pair, stop_tokens, device, warm_up): (Box<dyn Pair>, _, _, _) =
        match args.device.device {
            Place::Cpu => {
                let models = Models::load(&checkpoints, args.device.dtype)?;
                let stop_tokens = models.stop_tokens().to_vec();
                (Box::new(CpuPair::new(models)?), stop_tokens, args.device.describe(), 1)
            }
            #[cfg(feature = "cuda")]
            Place::Cuda(ordinal) => {
                let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
                let budget = args.budgets.iter().copied().max().unwrap_or(0);
                let (gpu, dtype) = (Gpu::new(ordinal)?, args.device.dtype);
                let rows = longest + args.max_new_tokens;
                let models = gpu::GpuModels::load(&checkpoints, &gpu, dtype, rows, budget)?;
                let device = format!("{}, {}", gpu.name()?, dtype.as_str());
                let stop_tokens = models.stop_tokens.clone();
                // Every width of a pass is captured as a graph when it first comes up.
                (Box::new(cuda::CudaPair::new(models)?), stop_tokens, device, prompts.len())
            }
        };
    let job = Job {
        // A prompt with another seed is another text.
        prompts: vec![prompts; args.seeds].concat(),
        arms: Arm::all(&args.budgets, args.uncoupled),
        max_new_tokens: args.max_new_tokens,
        stop_tokens,
        sampling: args.sampling.sampling(),
        seed: args.sampling.seed,
        repeats: args.repeat,
        warm_up,
    };
    let progress = ProgressBar::new(job.texts() as u64);
    let measured = job.run(&mut *pair, || progress.inc(1))?;
    progress.finish_and_clear();
    let differences = measured.differences(&mut *pair, &job.prompts)?;
    let setting = Setting {
        target: &checkpoints.name,
        device: &device,
        temperature: args.sampling.temperature,
        seeds: args.seeds,
    };
    let report = Report::new(&setting, &job, &measured, differences);
    print!("{report}");
    Ok(report.json())
}
