//! Measures the parts of a round on a GPU, and whole texts.
//!
//! `cargo run --release --features cuda --example bench_cuda -- --random qwen3-8b`

use std::ops::ControlFlow::Continue;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use clap::Parser;
use ddtree::candle::cuda::{CudaDFlash, CudaOptions, CudaTaps, CudaTarget, Gpu, Roofline};
use ddtree::candle::dflash::DFlashConfig;
use ddtree::candle::{DecoderConfig, Gguf, Rounding, Weights};
use ddtree::{
    Algorithm, AncestorMask, Config, Decoder, DraftTree, Drafter, Need, NoDrafter, Picks, Plan,
    Prefill, Proposal, ProposalRequest, Request, Round, RunStats, Session, Stage, Verifier,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;

/// Measures the parts of a round on a GPU at a shape (`--random`), or whole texts with a target and its drafter.
#[derive(Debug, Parser)]
struct Args {
    /// Shape of random weights: qwen3-4b, qwen3-8b
    #[arg(long, value_name = "SHAPE", conflicts_with = "target")]
    random: Option<String>,

    /// Target: a checkpoint folder or a .gguf file
    #[arg(long, value_name = "PATH", requires = "drafter", requires = "cases")]
    target: Option<PathBuf>,

    /// DFlash drafter made for the target
    #[arg(long, value_name = "FOLDER")]
    drafter: Option<PathBuf>,

    /// JSON with `cases` that have `prompt_ids`; where they have `autoregressive`, f32 texts are compared with it
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,

    /// Rows committed before rounds are timed, with `--random`
    #[arg(long, value_name = "ROWS", default_value_t = 1024)]
    context: usize,

    /// Nodes of the trees
    #[arg(long, value_name = "NODES", value_delimiter = ',', default_value = "16,64,128")]
    budgets: Vec<usize>,

    /// Type of weights and caches: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: String,

    /// Tokens to generate per prompt at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,

    /// Times that everything is measured
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dtype = match &*args.dtype {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        other => bail!("--dtype: found {other}, accepted: f32, bf16, f16"),
    };
    ensure!(args.repeat > 0, "--repeat: found 0, accepted: at least 1");
    let gpu = Gpu::new(0)?;
    println!("{}, {}", gpu.name()?, args.dtype);
    match (&args.random, &args.target) {
        (Some(shape), _) => measure_shape(&gpu, shape, dtype, &args),
        (None, Some(target)) => measure_texts(&gpu, target, dtype, &args),
        (None, None) => bail!("accepted: --random SHAPE, or --target, --drafter and --cases"),
    }
}

/// Configurations of a target and its published drafter.
fn shape(name: &str) -> Result<(DecoderConfig, DFlashConfig)> {
    let (hidden, intermediate, tied) = match name {
        "qwen3-4b" => (2560, 9728, true),
        "qwen3-8b" => (4096, 12_288, false),
        _ => bail!("--random: found {name}, accepted: qwen3-4b, qwen3-8b"),
    };
    let layer = format!(
        r#""hidden_size": {hidden}, "intermediate_size": {intermediate}, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
           "max_position_embeddings": 40960, "vocab_size": 151936"#
    );
    let target = format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", {layer},
             "num_hidden_layers": 36, "tie_word_embeddings": {tied}}}"#
    );
    let drafter = format!(
        r#"{{"architectures": ["DFlashDraftModel"], {layer}, "num_hidden_layers": 5,
             "num_target_layers": 36, "block_size": 16,
             "dflash_config": {{"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}}}}"#
    );
    Ok((DecoderConfig::from_json(&target)?, DFlashConfig::from_json(&drafter)?))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median milliseconds of a call.
fn time(times: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..3 {
        call()?;
    }
    let mut all = Vec::with_capacity(times);
    for _ in 0..times {
        let since = Instant::now();
        call()?;
        all.push(since.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(all))
}

fn measure_shape(gpu: &Gpu, name: &str, dtype: DType, args: &Args) -> Result<()> {
    let (config, drafter) = shape(name)?;
    let slots = args.budgets.iter().max().context("--budgets: none")? + 1;
    let options = CudaOptions::default()
        .max_len(args.context + 64 * 40 + slots)
        .max_slots(slots.max(drafter.block_size()));
    let mut target = CudaTarget::random(gpu, &config, dtype, drafter.target_layer_ids(), options)?;
    let mut drafter = CudaDFlash::random(&target, drafter, 64)?;
    let roofline = Roofline::measure(&target)?;
    let mut rng = StdRng::seed_from_u64(1);
    let prompt: Vec<u32> =
        (0..args.context).map(|_| rng.random_range(0..config.vocab_size as u32)).collect();

    println!(
        "{name}, context {}: copy {:.2} TB/s, weights {:.2} GB, floor of a pass {:.2} ms",
        args.context,
        roofline.copy_rate / 1e12,
        roofline.weight_bytes as f64 / 1e9,
        roofline.floor_ms(args.context)
    );
    let mut ids = Vec::new();
    let since = Instant::now();
    let taps = target.prefill(&Prefill::new(0, &prompt), &mut Picks::new(&mut ids))?;
    println!(
        "first prefill of {} tokens: {:.1} ms",
        prompt.len(),
        since.elapsed().as_secs_f64() * 1e3
    );

    print!("products at widths");
    for slots in [64, 72, 96, 112, 128, 136, 144, 160, 192] {
        if slots <= target.capabilities().max_slots.next_multiple_of(8) {
            print!("  {slots}: {:.3}", target.time_products(slots, 30)?);
        }
    }
    println!("\n\nslots  products  verify  verify/products  verify/ar  copy floor");
    let mut ar = 0.0;
    let chain = drafter.config().block_size();
    for slots in [1, chain].into_iter().chain(args.budgets.iter().map(|budget| budget + 1)) {
        let parents: Vec<i32> = (0..slots as i32)
            .map(|slot| if slot == 0 { -1 } else { rng.random_range(0..slot) })
            .collect();
        let tokens: Vec<u32> = (0..slots as u32).map(|slot| 1000 + slot).collect();
        let tree = DraftTree::from_parents(&tokens, &parents)?;
        let mut mask = AncestorMask::new();
        mask.build(&tree);
        let round = Round::new(prompt.len(), &tree, Some(&mask));
        let verify = time(50, || Ok(target.verify(&round, &mut Picks::new(&mut ids))?))?;
        let products = target.time_products(slots, 50)?;
        if slots == 1 {
            ar = verify;
        }
        println!(
            "{slots:>5}  {products:>7.3}  {verify:>7.3}  {:>14.3}  {:>9.3}  {:>9.3}",
            verify / products,
            verify / ar,
            roofline.floor_ms(prompt.len())
        );
    }

    drafter.observe(&ddtree::Committed::new(0, &prompt), &taps)?;
    drop(taps);
    let request = ProposalRequest::new(7, prompt.len(), drafter.horizon(), 64);
    let mut proposal = Proposal::new();
    let draft = time(50, || {
        proposal.clear();
        Ok(drafter.propose(&request, &mut proposal)?)
    })?;
    println!(
        "draft of {} depths, top 64: {draft:.3} ms ({:.3} of ar)",
        drafter.horizon(),
        draft / ar
    );

    println!("\nrounds that accept 4 nodes each");
    println!(
        "arm        round   verify   draft   build    walk  commit observe   outside the models"
    );
    let mut arms = vec![("ar".to_owned(), Config::new(Algorithm::Autoregressive))];
    arms.push(("chain".to_owned(), Config::new(Algorithm::Chain)));
    for &budget in &args.budgets {
        arms.push((format!("tree {budget}"), Config::new(Algorithm::Tree).budget(budget)));
    }
    let mut results: Vec<Vec<(f64, f64, RunStats)>> = vec![Vec::new(); arms.len()];
    for repeat in 0..=args.repeat {
        for at in 0..arms.len() {
            let at = if repeat % 2 == 0 { at } else { arms.len() - 1 - at };
            let result = rounds(&mut target, &mut drafter, &arms[at].1, &prompt, 4)?;
            // The first time captures graphs.
            if repeat > 0 {
                results[at].push(result);
            }
        }
    }
    let mut chain_round = 0.0;
    for ((name, _), results) in arms.iter().zip(&results) {
        let round = median(results.iter().map(|(round, ..)| *round).collect());
        let stage = |stage| {
            let per_round = |(_, _, stats): &(f64, f64, RunStats)| {
                stats.time(stage).as_secs_f64() * 1e3 / stats.rounds as f64
            };
            median(results.iter().map(per_round).collect())
        };
        let (verify, draft) = (stage(Stage::Verify), stage(Stage::Propose));
        if name == "chain" {
            chain_round = round;
        }
        println!(
            "{name:<9} {round:>6.3}  {verify:>6.3}  {draft:>6.3}  {:>6.4}  {:>6.4}  {:>6.4}  {:>6.4}   {:>5.2} %{}",
            stage(Stage::Build),
            stage(Stage::Walk),
            stage(Stage::Commit),
            stage(Stage::Observe),
            median(results.iter().map(|(_, outside, _)| *outside).collect()),
            if chain_round > 0.0 {
                format!("   {:.3} of chain", round / chain_round)
            } else {
                String::new()
            },
        );
    }
    Ok(())
}

/// Runs 40 rounds after a prompt, in which `accept` nodes are accepted wherever the tree is as deep. Gives the
/// median milliseconds of a round and the percentage of time that is not in the two models.
fn rounds(
    target: &mut CudaTarget,
    drafter: &mut CudaDFlash,
    config: &Config,
    prompt: &[u32],
    accept: usize,
) -> Result<(f64, f64, RunStats)> {
    let plan = Plan::resolve(config, &target.capabilities(), drafter.horizon())?;
    let drafting = plan.algorithm().needs_drafter();
    let mut session = Session::new(plan);
    session.start(&Request::new(prompt).max_new_tokens(40 * 20))?;
    target.reset(0)?;
    Drafter::<CudaTaps>::reset(drafter, 0)?;
    let (prefill, mut picks) = session.prefill()?;
    let taps = target.prefill(&prefill, &mut picks)?;
    session.prefilled()?;
    if drafting {
        drafter.observe(&session.committed_tokens(0..prompt.len())?, &taps)?;
    }
    drop(taps);
    let mut times = Vec::new();
    let mut scratch = Vec::new();
    for _ in 0..40 {
        let since = Instant::now();
        if session.need() == Need::Proposal {
            let (request, proposal) = session.proposal()?;
            drafter.propose(&request, proposal)?;
            session.proposed()?;
        }
        let (round, mut picks) = session.verification()?;
        target.verify(&round, &mut Picks::new(&mut scratch))?;
        // The first path that is deep enough.
        let tree = round.tree();
        let deepest = tree.depths().iter().position(|&depth| depth as usize == accept);
        let mut path = vec![0u32; tree.len()];
        let mut at = deepest.map_or(-1, |slot| slot as i32);
        let mut wanted: Option<u32> = None;
        while at >= 0 {
            path[at as usize] = wanted.unwrap_or(scratch[at as usize]);
            wanted = Some(tree.tokens()[at as usize]);
            at = tree.parents()[at as usize];
        }
        picks.extend(&path);
        session.verified()?;
        let start = session.committed_len();
        let taps = target.commit(session.commit()?)?;
        session.committed()?;
        if drafting {
            let since = Instant::now();
            drafter.observe(&session.committed_tokens(start..session.committed_len())?, &taps)?;
            session.add_time(Stage::Observe, since.elapsed());
        }
        times.push(since.elapsed().as_secs_f64() * 1e3);
    }
    let total: f64 = times.iter().sum();
    let stats = session.stats().clone();
    let models = stats.time(Stage::Verify) + stats.time(Stage::Propose);
    let outside = 100.0 * (1.0 - 1e3 * models.as_secs_f64() / total);
    Ok((median(times), outside, stats))
}

fn open(path: &PathBuf, dtype: DType) -> Result<(DecoderConfig, Weights)> {
    if path.extension().is_some_and(|extension| extension == "gguf") {
        let mut gguf = Gguf::open(path)?;
        let config = gguf.config()?;
        return Ok((config, gguf.into_weights(dtype, &Device::Cpu, Rounding::Bf16)?));
    }
    Ok((DecoderConfig::load(path)?, Weights::open(path, dtype, &Device::Cpu)?))
}

fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| Some(id.as_u64()? as u32)).collect()
}

fn measure_texts(gpu: &Gpu, path: &PathBuf, dtype: DType, args: &Args) -> Result<()> {
    let (Some(folder), Some(cases)) = (&args.drafter, &args.cases) else {
        bail!("--target needs --drafter and --cases");
    };
    let (config, weights) = open(path, dtype)?;
    let drafter = DFlashConfig::load(folder)?;
    let slots = args.budgets.iter().max().context("--budgets: none")? + 1;
    let options = CudaOptions::default()
        .max_len(config.max_positions.min(4096))
        .max_slots(slots.max(drafter.block_size()));
    let mut target = CudaTarget::new(gpu, &config, weights, drafter.target_layer_ids(), options)?;
    let weights = Weights::open(folder, dtype, &Device::Cpu)?;
    let mut drafter = CudaDFlash::new(&target, drafter, weights, 64)?;

    let file: Value = serde_json::from_str(&std::fs::read_to_string(cases)?)?;
    let cases = file["cases"].as_array().context("--cases: no `cases`")?;
    let prompts = cases.iter().map(|case| token_ids(&case["prompt_ids"]));
    let prompts: Vec<Vec<u32>> =
        prompts.collect::<Option<_>>().context("a case without prompt_ids")?;

    let mut arms = vec![("ar".to_owned(), Config::new(Algorithm::Autoregressive))];
    arms.push(("chain".to_owned(), Config::new(Algorithm::Chain)));
    for &budget in &args.budgets {
        arms.push((format!("tree {budget}"), Config::new(Algorithm::Tree).budget(budget)));
    }
    let mut texts: Vec<Option<Vec<u32>>> = vec![None; prompts.len()];
    let mut results = vec![Vec::new(); arms.len()];
    let mut different = 0;
    for repeat in 0..=args.repeat {
        let mut sums = vec![(0.0, 0u64, 0u64, 0.0); arms.len()];
        for (index, prompt) in prompts.iter().enumerate() {
            for at in 0..arms.len() {
                let at = if (repeat + index) % 2 == 0 { at } else { arms.len() - 1 - at };
                let request = Request::new(prompt)
                    .max_new_tokens(args.max_new_tokens)
                    .stop_tokens(&config.eos_token_ids);
                let (text, seconds, stats) = if at > 0 {
                    run(Decoder::new((&mut target, &mut drafter), &arms[at].1)?, &request)?
                } else {
                    run(Decoder::new((&mut target, NoDrafter), &arms[at].1)?, &request)?
                };
                let outside = seconds
                    - stats.time(Stage::Verify).as_secs_f64()
                    - stats.time(Stage::Propose).as_secs_f64();
                let sum = &mut sums[at];
                *sum =
                    (sum.0 + seconds, sum.1 + stats.tokens, sum.2 + stats.rounds, sum.3 + outside);
                let Some(first) = &texts[index] else {
                    if let Some(expected) = token_ids(&cases[index]["autoregressive"]) {
                        let common = expected.len().min(text.len());
                        let same = expected[..common] == text[..common];
                        println!(
                            "prompt {index}: {common} tokens {} the reference's",
                            if same { "equal" } else { "DIFFER from" }
                        );
                    }
                    texts[index] = Some(text);
                    continue;
                };
                if *first != text {
                    different += 1;
                    if repeat == 0 {
                        explain(&mut target, prompt, first, &text, &arms[at].0, index)?;
                    }
                }
            }
        }
        // The first time captures graphs.
        if repeat > 0 {
            results.iter_mut().zip(sums).for_each(|(results, sum)| results.push(sum));
        }
    }
    println!("texts that are not the prompt's first: {different}");
    println!("arm        tokens/s  (min to max)        tau    ms/round  outside  x ar    x chain");
    let speed = |results: &Vec<(f64, u64, u64, f64)>| {
        median(results.iter().map(|&(seconds, tokens, ..)| tokens as f64 / seconds).collect())
    };
    let (ar, chain) = (speed(&results[0]), speed(&results[1]));
    for ((name, _), results) in arms.iter().zip(&results) {
        let speeds = results.iter().map(|&(seconds, tokens, ..)| tokens as f64 / seconds);
        let (low, high) = speeds.fold((f64::MAX, 0.0f64), |(l, h), s| (l.min(s), h.max(s)));
        let tau = results[0].1 as f64 / results[0].2 as f64;
        let round = median(results.iter().map(|r| 1e3 * r.0 / r.2 as f64).collect());
        let outside = median(results.iter().map(|r| 100.0 * r.3 / r.0).collect());
        let speed = speed(results);
        println!(
            "{name:<9} {speed:>9.1}  ({low:.1} to {high:.1})  {tau:>6.3}  {round:>8.4}  {outside:>5.2} %  {:>5.3}  {:>5.3}",
            speed / ar,
            speed / chain
        );
    }
    Ok(())
}

/// A text, the seconds after its prefill, and its figures.
fn run<E: ddtree::Engine>(
    mut decoder: Decoder<E>,
    request: &Request,
) -> Result<(Vec<u32>, f64, RunStats)>
where
    ddtree::ErrorOf<E>: Send + Sync,
{
    let since = Instant::now();
    let text = decoder.generate(request, |_| Continue(()))?;
    let seconds = since.elapsed().as_secs_f64() - text.stats.time(Stage::Prefill).as_secs_f64();
    Ok((text.tokens.to_vec(), seconds, text.stats.clone()))
}

/// Says how near the target was to another pick where two texts part.
fn explain(
    target: &mut CudaTarget,
    prompt: &[u32],
    first: &[u32],
    text: &[u32],
    arm: &str,
    index: usize,
) -> Result<()> {
    let common = first.iter().zip(text).take_while(|(a, b)| a == b).count();
    let whole = [prompt, &first[..common]].concat();
    target.reset(0)?;
    let mut ids = Vec::new();
    target.prefill(&Prefill::new(0, &whole), &mut Picks::new(&mut ids))?;
    let last = (whole.len() - 1) % target.capabilities().max_slots;
    let [best, second] = target.top_two(last)?;
    println!(
        "prompt {index}, {arm}: parts at token {common}, where the two best log-probabilities are {:.4} apart",
        best.1 - second.1
    );
    Ok(())
}
