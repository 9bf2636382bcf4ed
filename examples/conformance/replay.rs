//! A text generated again, round by round beside the reference.

use anyhow::{Context, Result, bail};
use ddtree::{
    Committed, Config, Decoder, Drafter, Proposal, ProposalRequest, Request,
    candle::{CandleTarget, Taps, dflash::DFlash},
};

use crate::{
    compare,
    golden::{Decode, Run, Settings},
};

/// Entries per depth beyond those that trees are built from: in a near tie, what the reference
/// drafted instead may be ranked just below.
const MARGIN: usize = 8;

/// What a text that passed differs in all the same.
#[derive(Debug, Default)]
pub struct Remarks {
    /// Descriptions of the near ties that were tolerated.
    pub near_ties: Vec<String>,
    /// Rounds at the end of which only the tokens can be compared, see [`block_is_cut`].
    pub cut_rounds: usize,
}

/// Generates the text of `case` as `run` did, and compares tokens, acceptance lengths, trees and
/// paths.
pub fn replay(
    target: &mut CandleTarget,
    drafter: &mut DFlash,
    settings: &Settings,
    case: &Decode,
    run: &Run,
) -> Result<Remarks> {
    let lengths = &run.acceptance_lengths;
    // The reference lets its last round overshoot the limit, so ours is set where it does not matter.
    let limit = settings.max_new_tokens + lengths.iter().sum::<usize>() + settings.block_size;
    let config =
        Config::new(run.algorithm).block_size(settings.block_size).budget(run.budget).trace(true);
    let request =
        Request::new(&case.prompt_ids).max_new_tokens(limit).stop_tokens(&[settings.stop_token]);
    let drafter = Recorder { drafter, proposal: Proposal::new() };
    let mut decoder = Decoder::new((target, drafter), &config)?;
    decoder.start(&request)?;
    decoder.step()?.context("no token came from the prompt")?;

    let mut remarks = Remarks::default();
    // The reference looks for stop tokens only after its first round.
    let rounds = if decoder.session().finish().is_none() { lengths.len() } else { 0 };
    for index in 0..rounds {
        let generated = decoder.session().generated().len();
        let number = index + 1;
        let Some(_) = decoder.step().with_context(|| format!("round {number}"))? else {
            bail!("the text ends after {index} rounds, the reference's after {rounds}");
        };
        let trace = decoder.session().trace().last().context("the session keeps no trace")?;
        let verdict = match run.rounds.get(index) {
            Some(reference) => compare::round(trace, reference, &decoder.engine().1.proposal),
            None => Ok(None),
        };
        let found = trace.path.len();
        let verdict = verdict.and_then(|near_tie| {
            let same = found == lengths[index];
            let difference = || format!("acceptance length {found}, reference: {}", lengths[index]);
            same.then_some(near_tie).ok_or_else(difference)
        });
        match verdict {
            Ok(near_tie) => {
                remarks.near_ties.extend(near_tie.map(|tie| format!("round {number}: {tie}")));
            }
            Err(_) if block_is_cut(settings, run, generated) => {
                remarks.cut_rounds = rounds - index;
                break;
            }
            Err(difference) => bail!("round {number}: {difference}"),
        }
    }
    while decoder.session().generated().len() < settings.max_new_tokens && remarks.cut_rounds > 0 {
        if decoder.step()?.is_none() {
            break;
        }
    }
    let tokens = decoder.session().generated();
    compare_tokens(tokens, settings, run)?;
    Ok(remarks)
}

/// Whether the reference cannot give its drafter a whole block after this many tokens.
///
/// Its buffer ends `budget + 1` tokens after the limit, and the block is a slice of it. Where that is
/// short, the drafter sees fewer masks, and as the reference then counts depths from the end of the
/// block, the first depth is read from the root's own slot. Such drafts are worthless and no model
/// for ours; the text is the same.
fn block_is_cut(settings: &Settings, run: &Run, generated: usize) -> bool {
    let end = settings.max_new_tokens + run.budget + 1;
    run.algorithm.needs_tree_mask() && generated - 1 + settings.block_size > end
}

fn compare_tokens(tokens: &[u32], settings: &Settings, run: &Run) -> Result<()> {
    let stop = tokens.iter().position(|&token| token == settings.stop_token);
    let end = stop.map_or(tokens.len(), |stop| stop + 1).min(settings.max_new_tokens);
    let whole = if run.output_is_longer { end.min(run.output.len()) } else { run.output.len() };
    let (tokens, expected) = (&tokens[..end], &run.output[..whole]);
    match (0..end.max(whole)).find(|&index| tokens.get(index) != expected.get(index)) {
        None => Ok(()),
        Some(index) => {
            let show = |token: Option<&u32>| token.map_or("none".to_owned(), u32::to_string);
            let (found, expected) = (show(tokens.get(index)), show(expected.get(index)));
            bail!("token {}: {found}, reference: {expected}", index + 1)
        }
    }
}

/// Passes on what a drafter proposes, and keeps it.
struct Recorder<'a> {
    drafter: &'a mut DFlash,
    proposal: Proposal,
}

impl Drafter<Taps> for Recorder<'_> {
    type Error = <DFlash as Drafter<Taps>>::Error;

    fn horizon(&self) -> usize {
        self.drafter.horizon()
    }

    fn reset(&mut self, keep: usize) -> Result<(), Self::Error> {
        self.drafter.reset(keep)
    }

    fn observe(&mut self, committed: &Committed<'_>, taps: &Taps) -> Result<(), Self::Error> {
        Drafter::observe(self.drafter, committed, taps)
    }

    fn propose(
        &mut self,
        request: &ProposalRequest,
        proposal: &mut Proposal,
    ) -> Result<(), Self::Error> {
        let (root, position) = (request.root(), request.position());
        let top_k = request.top_k() + MARGIN;
        let wider = ProposalRequest::new(root, position, request.horizon(), top_k);
        self.drafter.propose(&wider, proposal)?;
        self.proposal.clone_from(proposal);
        Ok(())
    }
}
