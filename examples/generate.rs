//! Continues a prompt: the text on stdout as it comes, figures on stderr.
//!
//! `cargo run --release --example generate -- --help`

mod common;
#[cfg(feature = "cuda")]
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/output.rs"]
mod output;
#[path = "common/sampling.rs"]
mod sampling;
#[path = "common/stream.rs"]
mod stream;

use std::{
    io::{self, IsTerminal, Read, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use common::{
    device::{DeviceArgs, Place},
    models::{Checkpoints, ModelArgs, Models},
    text::Text,
};
use ddtree::{
    Algorithm, Config, Decoder, Engine, ErrorOf, Finish, NoDrafter, Plan, Reason, Request, Session,
    ShadowStats, Stage, TreeSettings,
};
use output::OutputFile;
use sampling::SamplingArgs;
use serde_json::json;
use stream::TextStream;

const PROMPT: &str = "Question: Tom has 3 boxes with 12 apples each. He gives away 7 apples. How many \
                      apples are left?\nAnswer:";

/// Continues a prompt with a target model and its drafter.
///
/// The text goes to stdout as it comes; everything else goes to stderr. Without any option a pair of
/// tiny models that is part of the repository continues a prompt of its own.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  generate
  generate --algorithm chain --max-new-tokens 64 'def fibonacci(n):'
  generate --temperature 0.8 --top-p 0.95 --seed 7 'The quick brown fox'
  generate --quiet --trace rounds.json - < prompt.txt
  generate --target SmolLM2-135M-Instruct.gguf --drafter smollm2-dflash/ --chat 'Why is the sky blue?'")]
struct Args {
    /// The prompt, or - to read it from stdin (less one newline at the end) [default: a question]
    #[arg(value_name = "PROMPT", conflicts_with = "prompt")]
    positional: Option<String>,

    /// The same as an option
    #[arg(long)]
    prompt: Option<String>,

    /// How to draft: ar (not at all), chain or tree
    #[arg(long, default_value_t = Algorithm::Tree)]
    algorithm: Algorithm,

    /// Nodes of a tree
    #[arg(long, value_name = "NODES", default_value_t = 16)]
    budget: usize,

    /// Children of a node at most, and entries per depth asked of the drafter [default: the budget]
    #[arg(long, value_name = "K")]
    width: Option<usize>,

    /// Keep the chain of the drafter's best tokens in every tree, however improbable
    #[arg(long)]
    spine: bool,

    /// With chain: count how often a tree would have held what the chain did not
    #[arg(long)]
    shadow: bool,

    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    models: ModelArgs,

    #[command(flatten)]
    device: DeviceArgs,

    /// Put the prompt into the target's chat template
    #[arg(long)]
    chat: bool,

    /// Write every round (tree, picks, path) to a JSON file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Print the generated text and nothing else
    #[arg(long, short)]
    quiet: bool,
}

impl Args {
    fn config(&self) -> Config {
        let config = Config::new(self.algorithm)
            .budget(self.budget)
            .spine(self.spine)
            .shadow(self.shadow)
            .trace(self.trace.is_some());
        match self.width {
            Some(width) => config.top_k(width),
            None => config,
        }
    }

    fn prompt(&self) -> Result<String> {
        let prompt = self.positional.as_deref().or(self.prompt.as_deref()).unwrap_or(PROMPT);
        if prompt != "-" {
            return Ok(prompt.to_owned());
        }
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
        if text.ends_with('\n') {
            text.pop();
        }
        Ok(text)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let prompt = args.prompt()?;
    ensure!(!prompt.is_empty(), "the prompt is empty");
    // Created first, so that no text is generated in vain.
    let trace = args.trace.as_deref().map(OutputFile::create).transpose()?;
    let drafting = args.algorithm.needs_drafter();
    let checkpoints = args.models.find(drafting, !args.quiet)?;
    let prompt_ids = checkpoints.text.encode(&prompt, args.chat)?;
    let job = Job { args, prompt, prompt_ids, checkpoints, trace };
    match job.args.device.device {
        Place::Cpu => {
            let models = Models::load(&job.checkpoints, job.args.device.dtype)?;
            let stop_tokens = models.stop_tokens().to_vec();
            let target = models.target(drafting)?;
            match models.drafter {
                Some(drafter) => job.run((target, drafter), &stop_tokens),
                None => job.run((target, NoDrafter), &stop_tokens),
            }
        }
        #[cfg(feature = "cuda")]
        Place::Cuda(ordinal) => {
            let rows = job.prompt_ids.len() + job.args.max_new_tokens;
            let trees = job.args.algorithm.needs_tree_mask();
            let budget = if trees { job.args.budget } else { 0 };
            let gpu = ddtree::candle::cuda::Gpu::new(ordinal)?;
            let dtype = job.args.device.dtype;
            let models = gpu::GpuModels::load(&job.checkpoints, &gpu, dtype, rows, budget)?;
            match models.drafter {
                Some(drafter) => job.run((models.target, drafter), &models.stop_tokens),
                None => job.run((models.target, NoDrafter), &models.stop_tokens),
            }
        }
    }
}

/// One text to generate.
struct Job {
    args: Args,
    prompt: String,
    prompt_ids: Vec<u32>,
    checkpoints: Checkpoints,
    trace: Option<OutputFile>,
}

impl Job {
    fn run<E: Engine>(self, engine: E, stop_tokens: &[u32]) -> Result<()>
    where
        ErrorOf<E>: Send + Sync,
    {
        let Self { args, prompt, prompt_ids, checkpoints, trace } = self;
        let Checkpoints { name, text, .. } = checkpoints;
        let request = Request::new(&prompt_ids)
            .max_new_tokens(args.max_new_tokens)
            .stop_tokens(stop_tokens)
            .sampling(args.sampling.sampling());
        let mut decoder = Decoder::new(engine, &args.config())?;
        decoder.start(&request)?;
        if !args.quiet {
            eprintln!(
                "{name} ({}), {}",
                args.device.describe(),
                rounds_of(decoder.session().plan())
            );
            eprint!("{prompt}{}", if args.chat { "\n" } else { "" });
        }

        let since = Instant::now();
        let mut printer = Printer::new(&text);
        while let Some(tokens) = decoder.step()? {
            printer.push(tokens)?;
        }
        let wall = since.elapsed();
        let text = printer.finish()?;

        let session = decoder.session();
        if !args.quiet {
            eprint!("{}", summary(session, prompt_ids.len(), wall));
        }
        if let Some(trace) = trace {
            trace.write(&trace_of(session, &name, &prompt, &text).to_string())?;
        }
        Ok(())
    }
}

/// Prints a text as it comes.
struct Printer<'a> {
    stream: TextStream<'a>,
    text: String,
    stdout: io::StdoutLock<'static>,
}

impl<'a> Printer<'a> {
    fn new(text: &'a Text) -> Self {
        Self { stream: TextStream::new(text), text: String::new(), stdout: io::stdout().lock() }
    }

    fn push(&mut self, tokens: &[u32]) -> Result<()> {
        let piece = self.stream.push(tokens)?;
        self.print(&piece)
    }

    fn print(&mut self, piece: &str) -> Result<()> {
        self.text.push_str(piece);
        self.stdout.write_all(piece.as_bytes()).context("cannot write to stdout")?;
        self.stdout.flush().context("cannot write to stdout")
    }

    /// Prints what is left and returns the whole text.
    fn finish(mut self) -> Result<String> {
        let rest = self.stream.rest()?;
        self.print(&rest)?;
        // A prompt of the shell should not follow on the same line; in a file, the text is all there is.
        if self.stdout.is_terminal() {
            writeln!(self.stdout)?;
        }
        Ok(self.text)
    }
}

/// For people: what the rounds will be.
fn rounds_of(plan: &Plan) -> String {
    let algorithm = match plan.algorithm() {
        Algorithm::Tree => {
            let TreeSettings { budget, top_k, .. } = plan.tree();
            format!("trees of {budget} nodes, {} deep, {top_k} wide at most", plan.horizon())
        }
        Algorithm::Chain => format!("chains of {}", plan.horizon()),
        _ => "no draft".to_owned(),
    };
    match plan.reason() {
        Some(reason) => format!("{algorithm} instead of {}: {reason}", plan.asked()),
        None => algorithm,
    }
}

/// For people: how it went.
fn summary(session: &Session, prompt_len: usize, wall: Duration) -> String {
    let stats = session.stats();
    let prefill = stats.time(Stage::Prefill);
    let rounds = stats.rounds.max(1) as f64;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let seconds = (wall - prefill.min(wall)).as_secs_f64();
    let per_second = stats.tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    let finish = match session.finish() {
        Some(Finish::StopToken) => ", then it stopped by itself",
        Some(Finish::CacheFull) => ", then the cache was full",
        _ => "",
    };

    let mut lines = vec![
        String::new(), // ends the line of the text
        format!("{} tokens{finish}", session.generated().len()),
        format!(
            "{per_second:.1} tokens/s after {:.1} ms for the prompt's {prompt_len}",
            ms(prefill)
        ),
    ];
    if stats.rounds > 0 {
        let shapes: Vec<String> = Algorithm::ALL
            .iter()
            .map(|&algorithm| (stats.rounds_as(algorithm), algorithm))
            .filter(|(rounds, _)| *rounds > 0)
            .map(|(rounds, algorithm)| format!("{rounds} {algorithm}"))
            .collect();
        lines.push(format!(
            "tau {:.2} tokens per round: {} rounds ({}), {:.1} nodes each",
            stats.tau(),
            stats.rounds,
            shapes.join(", "),
            stats.nodes as f64 / rounds
        ));
        let stages: Vec<String> = Stage::ALL
            .iter()
            .filter(|&&stage| stage != Stage::Prefill)
            .map(|&stage| format!("{stage} {:.2}", ms(stats.time(stage)) / rounds))
            .collect();
        lines.push(format!("{:.2} ms per round: {}", seconds * 1e3 / rounds, stages.join(", ")));
    }
    let depths: Vec<String> = stats
        .acceptance()
        .enumerate()
        .filter(|(_, (_, drafted))| *drafted > 0)
        .map(|(i, (accepted, drafted))| format!("{}: {}%", i + 1, 100 * accepted / drafted))
        .collect();
    if !depths.is_empty() {
        lines.push(format!("accepted at depth {}", depths.join(", ")));
    }
    if stats.shadow.rejections > 0 {
        let ShadowStats { caught, rejections, .. } = stats.shadow;
        lines.push(format!(
            "a tree would have held {caught} of the {rejections} picks that the chain lacked"
        ));
    }
    let reasons: Vec<String> =
        stats.reasons().map(|(reason, rounds)| format!("{rounds} {reason}")).collect();
    if !reasons.is_empty() {
        lines.push(format!("rounds not as asked: {}", reasons.join(", ")));
    }
    lines.join("\n") + "\n"
}

/// All rounds: `tokens`, `parents` and so on have an entry per slot, root first; `path` are the slots that
/// the picks lead through; `emitted` are the tokens that the round added to the text. The first
/// token of `output` comes from the prompt, the others from the rounds.
fn trace_of(session: &Session, name: &str, prompt: &str, text: &str) -> serde_json::Value {
    let mut end = 1;
    let rounds: Vec<_> = session
        .trace()
        .iter()
        .map(|round| {
            let start = end;
            end += round.stats.tokens;
            json!({
                "position": round.start,
                "algorithm": round.stats.algorithm.name(),
                "reason": round.stats.reason.map(Reason::name),
                "tokens": round.tokens,
                "parents": round.parents,
                "depths": round.depths,
                "scores": round.scores,
                "picks": round.picks,
                "path": round.path,
                "emitted": session.generated()[start..end],
            })
        })
        .collect();
    let plan = session.plan();
    let prompt_len = session.tokens().len() - session.generated().len();
    json!({
        "target": name,
        "algorithm": plan.algorithm().name(),
        "budget": plan.tree().budget,
        "prompt": prompt,
        "prompt_ids": session.tokens()[..prompt_len],
        "text": text,
        "output": session.generated(),
        "tau": session.stats().tau(),
        "rounds": rounds,
    })
}
