//! Replays golden files of the published reference implementation.
//!
//! `cargo run --example conformance -- tests/goldens/*.json`

#[path = "../common/mod.rs"]
mod common;
mod compare;
mod golden;
mod replay;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::{
    device::{DeviceArgs, Place},
    models::{Checkpoints, ModelArgs, Models},
    text::Text,
};
use ddtree::Algorithm;
use golden::{Build, Decode, Golden, Settings};
use indicatif::{ProgressBar, ProgressStyle};

/// Where the pairs are that come with the repository.
const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models");

/// Replays golden files: trees that were built, and texts that were generated, by the published
/// reference implementation.
///
/// A case is one tree, or one prompt in one mode (ar, chain, or a tree budget). A text passes if its
/// tokens, its acceptance lengths and every round's tree and path are the reference's. Trees may differ in near
/// ties (path sums that differ by less than 1e-4), which are reported. The last line is
/// `N passed, N failed`. Where no models are named, `decode-NAME.json` runs on the pair NAME of this
/// repository if there is one. The exit code is 1 if any failed, 2 if a file or a model cannot be read.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  conformance tests/goldens/*.json
  conformance decode-smollm2.json --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter smollm2-135m-dflash/

A .gguf target is dequantised and rounded to bf16, as a converted checkpoint would be, and then run in
the type that --dtype names.")]
struct Args {
    /// Golden files
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    #[command(flatten)]
    models: ModelArgs,

    #[command(flatten)]
    device: DeviceArgs,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Returns the number of cases that failed.
fn run(args: &Args) -> Result<usize> {
    // Blocks that the reference cut short are drafted in a way that the engine for GPUs does not offer.
    ensure!(args.device.device == Place::Cpu, "--device: accepted: cpu");
    let read = |path: &PathBuf| {
        let golden = Golden::read(path).with_context(|| format!("cannot read {}", path.display()));
        golden.map(|golden| (path.display().to_string(), golden))
    };
    let files: Vec<(String, Golden)> = args.files.iter().map(read).collect::<Result<_>>()?;
    let mut models: Option<(ModelArgs, Checkpoints, Models)> = None;
    let mut report = Report::new(files.iter().map(|(_, golden)| golden.len()).sum());
    for ((file, golden), path) in files.iter().zip(&args.files) {
        match golden {
            Golden::Builds(cases) => builds(file, cases, &mut report),
            Golden::Decodes { settings, cases } => {
                let wanted = pair_of(path, &args.models);
                let (_, checkpoints, models) = match &mut models {
                    Some(loaded) if loaded.0 == wanted => loaded,
                    models => {
                        let checkpoints = wanted.find(true, true)?;
                        let loaded = Models::load(&checkpoints, args.device.dtype)?;
                        eprintln!("{} ({})", checkpoints.name, args.device.describe());
                        models.insert((wanted, checkpoints, loaded))
                    }
                };
                decodes(file, settings, cases, (&checkpoints.text, models), &mut report)?;
            }
        }
    }
    Ok(report.finish())
}

/// The models for a golden file. Where none are named, `decode-NAME.json` runs on the pair `NAME` of
/// this repository, if it has one.
fn pair_of(file: &Path, named: &ModelArgs) -> ModelArgs {
    let name = file.file_stem().and_then(|stem| stem.to_str()?.strip_prefix("decode-"));
    let folder = name.map(|name| Path::new(MODELS).join(name)).filter(|folder| folder.is_dir());
    match folder {
        Some(folder) if *named == ModelArgs::default() => {
            let part = |part| Some(folder.join(part).display().to_string());
            ModelArgs { target: part("target"), drafter: part("drafter") }
        }
        _ => named.clone(),
    }
}

fn builds(file: &str, cases: &[Build], report: &mut Report) {
    for (index, case) in cases.iter().enumerate() {
        let kind = case.kind.as_deref().unwrap_or("tree");
        let name = format!("{file}: case {}, {kind}, budget {}", index + 1, case.budget);
        report.case(&name, compare::build(case).map(|()| Vec::new()));
    }
}

fn decodes(
    file: &str,
    settings: &Settings,
    cases: &[Decode],
    (text, models): (&Text, &mut Models),
    report: &mut Report,
) -> Result<()> {
    let mut target = models.target(true)?;
    if !models.stop_tokens().contains(&settings.stop_token) {
        report.note(&format!(
            "{file}: its stop token {} is none of the target's, which are {:?}; the file's is used",
            settings.stop_token,
            models.stop_tokens()
        ));
    }
    for (index, case) in cases.iter().enumerate() {
        if let Some(prompt) = &case.prompt {
            // Chat templates put more around a prompt, so either is fine.
            let same = |chat| text.encode(prompt, chat).is_ok_and(|ids| ids == case.prompt_ids);
            if !same(false) && !same(true) {
                report.note(&format!(
                    "{file}: case {}: this target's tokenizer gives other ids for the prompt, with \
                     and without its chat template; the file's are used",
                    index + 1
                ));
            }
        }
        for run in &case.runs {
            let mode = match run.algorithm {
                Algorithm::Tree => format!("tree {}", run.budget),
                other => other.to_string(),
            };
            let name = format!("{file}: case {}, {mode}", index + 1);
            let drafter = models.drafter.as_mut().context("no drafter")?;
            let result = replay::replay(&mut target, drafter, settings, case, run);
            report.case(&name, result.map_err(|error| format!("{error:#}")));
        }
    }
    Ok(())
}

impl Golden {
    /// Number of cases.
    fn len(&self) -> usize {
        match self {
            Self::Builds(cases) => cases.len(),
            Self::Decodes { cases, .. } => cases.iter().map(|case| case.runs.len()).sum(),
        }
    }
}

/// Counts and prints: what failed on stdout, progress on stderr if that is a terminal.
struct Report {
    passed: usize,
    failed: usize,
    near_ties: usize,
    progress: ProgressBar,
}

impl Report {
    fn new(cases: usize) -> Self {
        let style = ProgressStyle::with_template("{pos}/{len} {wide_bar} {msg}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let progress = ProgressBar::new(cases as u64).with_style(style);
        Self { passed: 0, failed: 0, near_ties: 0, progress }
    }

    /// Takes note of a case: the near ties in it, or its first difference.
    fn case(&mut self, name: &str, result: Result<Vec<String>, String>) {
        match result {
            Ok(near_ties) => {
                self.passed += 1;
                self.near_ties += near_ties.len();
                for tie in near_ties {
                    self.print(&format!("near tie {name}: {tie}"));
                }
            }
            Err(difference) => {
                self.failed += 1;
                self.print(&format!("FAILED {name}: {difference}"));
            }
        }
        self.progress.set_message(format!("{} failed", self.failed));
        self.progress.inc(1);
    }

    fn note(&self, note: &str) {
        self.print(&format!("note {note}"));
    }

    fn print(&self, line: &str) {
        self.progress.suspend(|| println!("{line}"));
    }

    fn finish(self) -> usize {
        self.progress.finish_and_clear();
        if self.near_ties > 0 {
            let near = compare::NEAR;
            println!("near ties tolerated: {} (path sums within {near:e})", self.near_ties);
        }
        println!("{} passed, {} failed", self.passed, self.failed);
        self.failed
    }
}
