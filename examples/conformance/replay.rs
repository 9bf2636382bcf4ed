//! A text generated again, round by round beside the reference.

use anyhow::{Context, Result, bail};
use ddtree::{
    Committed, Config, Decoder, Drafter, Proposal, ProposalRequest, Request, TopK,
    candle::{self, CandleTarget, Taps, dflash::DFlash},
};

use crate::{
    compare,
    golden::{Decode, Run, Settings},
};

/// Entries per depth beyond those that trees are built from: in a near tie, what the reference
/// drafted instead may be ranked just below.
const MARGIN: usize = 8;

/// Generates the text of `case` as `run` did, and compares tokens, acceptance lengths, trees and
/// paths. Returns descriptions of the near ties that were tolerated.
pub fn replay(
    target: &mut CandleTarget,
    drafter: &mut DFlash,
    settings: &Settings,
    case: &Decode,
    run: &Run,
) -> Result<Vec<String>> {
    let lengths = &run.acceptance_lengths;
    // The reference lets its last round overshoot the limit, so ours is set where it does not matter.
    let limit = settings.max_new_tokens + lengths.iter().sum::<usize>() + settings.block_size;
    let config =
        Config::new(run.algorithm).block_size(settings.block_size).budget(run.budget).trace(true);
    let request =
        Request::new(&case.prompt_ids).max_new_tokens(limit).stop_tokens(&[settings.stop_token]);
    // The reference drafts into a buffer of this many tokens, and its blocks end with it. Runs without
    // outputs of their own were made otherwise.
    let buffer = case.prompt_ids.len() + settings.max_new_tokens + 1 + run.budget;
    let cuts = run.algorithm.needs_tree_mask() && !run.output_is_longer;
    let buffer = if cuts { buffer } else { usize::MAX };
    let recorder = Recorder { drafter, buffer, proposal: Proposal::new(), top_k: TopK::new() };
    let mut decoder = Decoder::new((target, recorder), &config)?;
    decoder.start(&request)?;
    decoder.step()?.context("no token came from the prompt")?;

    let mut near_ties = Vec::new();
    // The reference looks for stop tokens only after its first round.
    let lengths = if decoder.session().finish().is_none() { &lengths[..] } else { &[] };
    for (index, &length) in lengths.iter().enumerate() {
        let number = index + 1;
        let Some(_) = decoder.step().with_context(|| format!("round {number}"))? else {
            let expected = lengths.len();
            bail!("the text ends after {index} rounds, the reference's after {expected}");
        };
        let trace = decoder.session().trace().last().context("the session keeps no trace")?;
        let verdict = match run.rounds.get(index) {
            Some(reference) => compare::round(trace, reference, &decoder.engine().1.proposal),
            None => Ok(None),
        };
        let found = trace.path.len();
        let verdict = verdict.and_then(|near_tie| {
            let difference = || format!("acceptance length {found}, reference: {length}");
            (found == length).then_some(near_tie).ok_or_else(difference)
        });
        match verdict {
            Ok(near_tie) => {
                near_ties.extend(near_tie.map(|tie| format!("round {number}: {tie}")));
            }
            Err(difference) => bail!("round {number}: {difference}"),
        }
    }
    let tokens = decoder.session().generated();
    compare_tokens(tokens, settings, run)?;
    Ok(near_ties)
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
    buffer: usize,
    proposal: Proposal,
    top_k: TopK,
}

impl Recorder<'_> {
    /// What the reference makes of a block that the end of its buffer cuts to `slots` slots. It takes
    /// the logits of the last `block_size - 1` slots; of a shorter block those are all of them, the
    /// root's too, so that depth `d` is drafted from slot `d - 1`.
    fn propose_cut(
        &mut self,
        request: &ProposalRequest,
        slots: usize,
        proposal: &mut Proposal,
    ) -> Result<(), candle::Error> {
        let logits = self.drafter.slot_logits(request.root(), request.position(), slots)?;
        for row in logits.to_vec2::<f32>()?.iter().take(request.horizon()) {
            proposal.push_logits(row, request.top_k(), &mut self.top_k)?;
        }
        Ok(())
    }
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
        let left = self.buffer.saturating_sub(position);
        if left < self.drafter.config().block_size() {
            self.propose_cut(&wider, left, proposal)?;
        } else {
            self.drafter.propose(&wider, proposal)?;
        }
        self.proposal.clone_from(proposal);
        Ok(())
    }
}
