//! The parts of a round on a GPU, at the shape of a model whose weights are not at hand.

mod report;
mod rounds;
mod shape;

use std::time::Instant;

use anyhow::Result;
use candle_core::DType;
use ddtree::{
    AncestorMask, Committed, DraftTree, Drafter, Picks, Prefill, Proposal, ProposalRequest, Round,
    Verifier,
    candle::cuda::{CudaDFlash, CudaOptions, CudaTarget, Gpu, Roofline},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    figures::Spread,
    gpu::TOP_K,
    measure::{Arm, order},
};
pub use report::Report;
use report::{Pass, RoundRow};

/// What is measured.
#[derive(Clone, Debug)]
pub struct Rounds {
    /// Rows committed before.
    pub context: usize,
    /// Nodes of the trees.
    pub budgets: Vec<usize>,
    /// Times that everything is measured.
    pub repeats: usize,
}

/// Calls of which one repeat takes the median.
const CALLS: usize = 20;

/// Measures passes and rounds of a target and its published drafter with random weights.
pub fn measure(name: &str, ordinal: usize, dtype: DType, what: &Rounds) -> Result<Report> {
    let (config, drafter) = shape::of(name)?;
    let gpu = Gpu::new(ordinal)?;
    let widest = what.budgets.iter().max().map_or(0, |budget| budget + 1);
    let options = CudaOptions::default()
        .max_len(what.context + 2 * rounds::ROWS + widest)
        .max_slots(widest.max(drafter.block_size()));
    let mut target = CudaTarget::random(&gpu, &config, dtype, drafter.target_layer_ids(), options)?;
    let mut drafter = CudaDFlash::random(&target, drafter, TOP_K)?;
    let roofline = Roofline::measure(&target)?;
    let mut rng = StdRng::seed_from_u64(1);
    let prompt: Vec<u32> =
        (0..what.context).map(|_| rng.random_range(0..config.vocab_size as u32)).collect();
    let taps = target.prefill(&Prefill::new(0, &prompt), &mut Picks::new(&mut Vec::new()))?;
    drafter.observe(&Committed::new(0, &prompt), &taps)?;
    drop(taps);

    Ok(Report {
        name: name.to_owned(),
        device: format!("{}, {}", gpu.name()?, dtype.as_str()),
        context: what.context,
        repeats: what.repeats,
        roofline,
        passes: passes(&mut target, &drafter, what, &mut rng)?,
        depths: drafter.horizon(),
        draft: draft(&mut drafter, what)?,
        rounds: all_rounds(&mut target, &mut drafter, &prompt, what)?,
    })
}

/// One slot, the chain, and random trees of the budgets, in turn.
fn passes(
    target: &mut CudaTarget,
    drafter: &CudaDFlash,
    what: &Rounds,
    rng: &mut StdRng,
) -> Result<Vec<Pass>> {
    let chain = drafter.config().block_size();
    let mut widths = vec![("ar".to_owned(), 1), ("chain".to_owned(), chain)];
    widths.extend(what.budgets.iter().map(|budget| (format!("tree {budget}"), budget + 1)));
    let mut trees = Vec::new();
    for (name, slots) in &widths {
        let parents: Vec<i32> = (0..*slots as i32)
            .map(|slot| match slot {
                0 => -1,
                _ if name == "chain" => slot - 1,
                _ => rng.random_range(0..slot),
            })
            .collect();
        let tokens: Vec<u32> = (0..*slots as u32).map(|slot| 1000 + slot).collect();
        trees.push(DraftTree::from_parents(&tokens, &parents)?);
    }
    let mut times = vec![(Vec::new(), Vec::new()); widths.len()];
    for repeat in 0..what.repeats {
        for at in order(widths.len(), repeat) {
            let tree = &trees[at];
            let mut mask = AncestorMask::new();
            mask.build(tree);
            let round = Round::new(what.context, tree, Some(&mask));
            let mut ids = Vec::new();
            let verify = time(|| Ok(target.verify(&round, &mut Picks::new(&mut ids))?))?;
            times[at].0.push(target.time_products(tree.len(), CALLS)?);
            times[at].1.push(verify);
        }
    }
    let pass = |((name, slots), (products, verify))| Pass {
        name,
        slots,
        products: Spread::of(products),
        verify: Spread::of(verify),
    };
    Ok(widths.into_iter().zip(times).map(pass).collect())
}

fn draft(drafter: &mut CudaDFlash, what: &Rounds) -> Result<Spread> {
    let request = ProposalRequest::new(7, what.context, drafter.horizon(), TOP_K);
    let mut proposal = Proposal::new();
    let mut once = || {
        time(|| {
            proposal.clear();
            Ok(drafter.propose(&request, &mut proposal)?)
        })
    };
    Ok(Spread::of((0..what.repeats).map(|_| once()).collect::<Result<_>>()?))
}

/// Median milliseconds of a call, after one that may set things up.
fn time(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    let mut all = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let since = Instant::now();
        call()?;
        all.push(since.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Spread::of(all).median)
}

/// Rounds of every algorithm, in turn.
fn all_rounds(
    target: &mut CudaTarget,
    drafter: &mut CudaDFlash,
    prompt: &[u32],
    what: &Rounds,
) -> Result<Vec<RoundRow>> {
    let arms = Arm::all(&what.budgets, false);
    let mut results = vec![Vec::new(); arms.len()];
    // The first time captures graphs.
    for repeat in 0..=what.repeats {
        for at in order(arms.len(), repeat) {
            let result = rounds::run(target, drafter, &arms[at].config(), prompt)?;
            if repeat > 0 {
                results[at].push(result);
            }
        }
    }
    Ok(arms.iter().zip(&results).map(|(arm, results)| RoundRow::new(arm, results)).collect())
}
