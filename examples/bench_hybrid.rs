//! What a tree costs on a recurrent target: time per round and bytes of state against the budget, for
//! both ways of keeping states. Prints the table of `docs/hybrid.md`.
//!
//! ```text
//! cargo run --release --example bench_hybrid
//! ```

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use ddtree::candle::{CandleTarget, DecoderConfig, DecoderModel, StateMethod, Weights};
use ddtree::{
    Acceptance, AncestorMask, BestFirst, CommitPlan, DraftTree, Picks, Prefill, Proposal, Round,
    TreeSettings, Verifier,
};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3_5/target");

/// The methods whose rounds take turns.
const METHODS: [(StateMethod, &str); 2] =
    [(StateMethod::PerSlot, "per slot"), (StateMethod::Factors, "factors")];

/// Drafted depths per round.
const HORIZON: usize = 15;

#[derive(Parser)]
#[command(about = "Time and memory of a round on a recurrent target, by method and budget")]
struct Args {
    /// Rounds to take the median of, per method and budget
    #[arg(long, default_value_t = 40)]
    rounds: usize,

    /// Budgets of the trees
    #[arg(long, value_delimiter = ',', default_value = "8,16,32,64")]
    budgets: Vec<usize>,

    /// Drafted tokens accepted per round
    #[arg(long, default_value_t = 3)]
    accepted: usize,

    /// Print means of the thread's CPU time instead of medians of the clock's, for a machine that is
    /// busy (Linux only; set RAYON_NUM_THREADS=1)
    #[arg(long)]
    cpu_time: bool,
}

impl Args {
    /// Milliseconds since some point in the past.
    fn now(&self, origin: Instant) -> Result<f64> {
        if !self.cpu_time {
            return Ok(origin.elapsed().as_secs_f64() * 1e3);
        }
        let times = std::fs::read_to_string("/proc/thread-self/schedstat")?;
        let running = times.split(' ').next().context("no time in schedstat")?;
        Ok(running.parse::<f64>()? / 1e6)
    }

    /// CPU time is only counted up now and then, which evens out in the mean.
    fn middle(&self, mut times: Vec<f64>) -> f64 {
        if self.cpu_time {
            return times.iter().sum::<f64>() / times.len() as f64;
        }
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0, "--rounds: found 0, accepted: at least 1");
    println!(
        "| model | budget | method | verify, ms | commit, ms | round, ms | states, MiB | kept, MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let tiny = DecoderModel::load(TINY, DType::F32, &Device::Cpu).context("the tiny pair")?;
    for (name, model) in [("tiny", tiny), ("random", random_model()?)] {
        for &budget in &args.budgets {
            measure(name, &model, budget, &args)?;
        }
    }
    Ok(())
}

/// Prints a line per method.
fn measure(name: &str, model: &DecoderModel, budget: usize, args: &Args) -> Result<()> {
    let prompt: Vec<u32> = (2..66).collect();
    let warm_up = 3;
    let max_len = prompt.len() + (args.rounds + warm_up) * (args.accepted + 1) + budget + 1;
    let positions = model.config().max_positions;
    ensure!(
        max_len <= positions,
        "--rounds, --accepted and --budgets: found {max_len} rows, accepted: at most {positions}, the model's positions"
    );
    let mut targets = Vec::new();
    for (method, _) in METHODS {
        let mut target = CandleTarget::new(model.clone(), max_len, &[])?.state_method(method);
        target.prefill(&Prefill::new(0, &prompt), &mut Picks::new(&mut Vec::new()))?;
        targets.push(target);
    }
    let tree = draft(budget)?;
    let mut mask = AncestorMask::new();
    mask.build(&tree);
    let outcome = accept(&tree, args.accepted)?;
    let mut plan = CommitPlan::new();
    let mut picks = Vec::new();
    let origin = Instant::now();
    let mut times = [(); METHODS.len()].map(|()| (Vec::new(), Vec::new()));
    for round in 0..warm_up + args.rounds {
        for (target, (verify, commit)) in targets.iter_mut().zip(&mut times) {
            let start = target.cache().len();
            let begun = args.now(origin)?;
            target.verify(&Round::new(start, &tree, Some(&mask)), &mut Picks::new(&mut picks))?;
            let verified = args.now(origin)?;
            plan.set(start, &outcome);
            target.commit(&plan)?;
            if round >= warm_up {
                verify.push(verified - begun);
                commit.push(args.now(origin)? - verified);
            }
        }
    }
    for (((_, method), target), (verify, commit)) in METHODS.iter().zip(&targets).zip(times) {
        let rounds: Vec<f64> = verify.iter().zip(&commit).map(|(v, c)| v + c).collect();
        let (states, kept) = target.cache().state_memory();
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        println!(
            "| {name} | {budget} | {method} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
            args.middle(verify),
            args.middle(commit),
            args.middle(rounds),
            mib(states),
            mib(kept),
        );
    }
    Ok(())
}

/// A tree as a drafter would have it that is fairly sure of itself.
fn draft(budget: usize) -> Result<DraftTree> {
    let mut proposal = Proposal::new();
    for depth in 0..HORIZON as u32 {
        let tokens: Vec<u32> = (0..16).map(|rank| 100 + 16 * depth + rank).collect();
        let log_probs: Vec<f32> = (1..=16).map(|rank| -0.7 * rank as f32).collect();
        proposal.push(&tokens, &log_probs)?;
    }
    let mut tree = DraftTree::new(5);
    let settings = TreeSettings { budget, ..TreeSettings::default() };
    BestFirst::new().build(&proposal, settings, &mut tree)?;
    Ok(tree)
}

/// The outcome that accepts `nodes` drafted tokens, or as many as the first path has.
fn accept(tree: &DraftTree, nodes: usize) -> Result<Acceptance> {
    let mut slot = 0;
    for _ in 0..nodes {
        let Some(child) = tree.children(slot).next() else { break };
        slot = child;
    }
    let mut outcome = Acceptance::new();
    outcome.set(tree, slot, 0)?;
    Ok(outcome)
}

/// Random weights with the head sizes of published models: 16 heads of 128 x 128 per layer.
fn random_model() -> Result<DecoderModel> {
    let config = DecoderConfig::from_json(
        r#"{
            "model_type": "qwen3_5_text", "vocab_size": 4096, "hidden_size": 512,
            "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096, "tie_word_embeddings": true,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4
        }"#,
    )?;
    let hybrid = config.hybrid.as_ref().context("a hybrid configuration")?;
    let (net, hidden, mlp) = (hybrid.delta_net, config.hidden_size, config.intermediate_size);
    let (queries, keys) =
        (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut tensors = HashMap::new();
    let mut add = |name: String, dims: &[usize]| -> Result<()> {
        let bound = (3.0 / dims[dims.len() - 1] as f32).sqrt();
        tensors.insert(name, Tensor::rand(-bound, bound, dims, &Device::Cpu)?);
        Ok(())
    };
    add("model.embed_tokens.weight".to_owned(), &[config.vocab_size, hidden])?;
    add("model.norm.weight".to_owned(), &[hidden])?;
    for layer in 0..config.num_layers() {
        let mut add =
            |name: &str, dims: &[usize]| add(format!("model.layers.{layer}.{name}.weight"), dims);
        add("input_layernorm", &[hidden])?;
        add("post_attention_layernorm", &[hidden])?;
        add("mlp.gate_proj", &[mlp, hidden])?;
        add("mlp.up_proj", &[mlp, hidden])?;
        add("mlp.down_proj", &[hidden, mlp])?;
        if hybrid.linear_layers.contains(&layer) {
            add("linear_attn.in_proj_qkv", &[net.channels(), hidden])?;
            add("linear_attn.in_proj_z", &[net.value_size(), hidden])?;
            add("linear_attn.in_proj_b", &[net.value_heads, hidden])?;
            add("linear_attn.in_proj_a", &[net.value_heads, hidden])?;
            add("linear_attn.conv1d", &[net.channels(), 1, net.conv_kernel])?;
            add("linear_attn.norm", &[net.value_dim])?;
            add("linear_attn.out_proj", &[hidden, net.value_size()])?;
        } else {
            add("self_attn.q_proj", &[2 * queries, hidden])?;
            add("self_attn.k_proj", &[keys, hidden])?;
            add("self_attn.v_proj", &[keys, hidden])?;
            add("self_attn.o_proj", &[hidden, queries])?;
            add("self_attn.q_norm", &[config.head_dim])?;
            add("self_attn.k_norm", &[config.head_dim])?;
        }
    }
    for layer in &hybrid.linear_layers {
        for name in ["A_log", "dt_bias"] {
            let values = Tensor::rand(-1f32, 1.0, net.value_heads, &Device::Cpu)?;
            tensors.insert(format!("model.layers.{layer}.linear_attn.{name}"), values);
        }
    }
    let weights = Weights::from_tensors(tensors, DType::F32, &Device::Cpu)?;
    Ok(DecoderModel::new(config, weights)?)
}
