//! Rounds whose outcome is given: random weights agree on nothing.

use std::time::Instant;

use anyhow::Result;
use ddtree::{
    Config, DraftTree, Drafter, Need, Picks, Plan, Request, Session, Stage, Verifier,
    candle::cuda::{CudaDFlash, CudaTaps, CudaTarget},
};

use crate::{figures::Spread, report::STAGES};

/// Rounds of one run.
const ROUNDS: usize = 40;

/// Nodes accepted in each of them, wherever the tree is as deep.
pub const ACCEPTED: usize = 4;

/// Rows that a run commits.
pub const ROWS: usize = ROUNDS * (ACCEPTED + 1);

/// One run.
#[derive(Clone, Debug)]
pub struct RoundTimes {
    /// Median milliseconds of a round.
    pub round: f64,
    /// Mean milliseconds of its stages, in the order of [`STAGES`].
    pub stages: [f64; STAGES.len()],
    /// Percentage of the time in which the host waits for neither model.
    pub outside: f64,
}

/// Runs rounds after a prompt.
pub fn run(
    target: &mut CudaTarget,
    drafter: &mut CudaDFlash,
    config: &Config,
    prompt: &[u32],
) -> Result<RoundTimes> {
    let plan = Plan::resolve(config, &target.capabilities(), drafter.horizon())?;
    let drafting = plan.algorithm().needs_drafter();
    let mut session = Session::new(plan);
    session.start(&Request::new(prompt).max_new_tokens(2 * ROWS))?;
    target.reset(0)?;
    Drafter::<CudaTaps>::reset(drafter, 0)?;
    let (prefill, mut picks) = session.prefill()?;
    let taps = target.prefill(&prefill, &mut picks)?;
    session.prefilled()?;
    if drafting {
        let since = Instant::now();
        drafter.observe(&session.committed_tokens(0..prompt.len())?, &taps)?;
        session.add_time(Stage::Prefill, since.elapsed());
    }
    drop(taps);
    let mut times = Vec::new();
    let mut target_picks = Vec::new();
    for _ in 0..ROUNDS {
        let since = Instant::now();
        if session.need() == Need::Proposal {
            let (request, proposal) = session.proposal()?;
            drafter.propose(&request, proposal)?;
            session.proposed()?;
        }
        let (round, mut picks) = session.verification()?;
        target.verify(&round, &mut Picks::new(&mut target_picks))?;
        accept(round.tree(), &mut target_picks);
        picks.extend(&target_picks);
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
    let stats = session.stats();
    let models = stats.time(Stage::Verify) + stats.time(Stage::Propose);
    Ok(RoundTimes {
        round: Spread::of(times).median,
        stages: STAGES.map(|stage| stats.time(stage).as_secs_f64() * 1e3 / ROUNDS as f64),
        outside: 100.0 * (1.0 - 1e3 * models.as_secs_f64() / total),
    })
}

/// Makes picks follow the first path that is deep enough.
fn accept(tree: &DraftTree, picks: &mut [u32]) {
    let end = tree.depths().iter().position(|&depth| depth as usize == ACCEPTED);
    let mut child: Option<usize> = None;
    for slot in end.into_iter().flat_map(|slot| tree.ancestors(slot)) {
        if let Some(child) = child {
            picks[slot] = tree.tokens()[child];
        }
        child = Some(slot);
    }
}
