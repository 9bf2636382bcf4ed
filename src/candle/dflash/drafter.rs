//! The drafter behind [`Drafter`].

use super::DFlash;
use crate::{
    Committed, Drafter, Proposal, ProposalRequest,
    candle::{Error, Result, Taps},
};

impl Drafter<Taps> for DFlash {
    type Error = Error;

    fn horizon(&self) -> usize {
        self.config().block_size() - 1
    }

    fn reset(&mut self, keep: usize) -> Result<()> {
        let (start, end) = (self.start(), self.start() + self.context_len());
        self.truncate(keep.clamp(start, end))?;
        self.may_skip = true;
        Ok(())
    }

    fn observe(&mut self, committed: &Committed<'_>, features: &Taps) -> Result<()> {
        let tokens = committed.tokens().len();
        let Some(taps) = features.hidden().filter(|taps| taps.dim(0).ok() == Some(tokens)) else {
            let found = features.hidden().map(|taps| taps.dims());
            let accepted = format!("taps of the {tokens} committed tokens");
            return Err(Error::argument("features", format!("{found:?}"), accepted));
        };
        // What lies between the rows kept at a reset and the first token after it was committed in
        // an earlier session and has no taps: begin anew, as a context with a hole would be read as
        // one without.
        let start = committed.start();
        let anew = self.may_skip && self.next_position().is_some_and(|next| start > next);
        self.observe_from(start, taps, anew)?;
        self.may_skip = false;
        Ok(())
    }

    fn propose(&mut self, request: &ProposalRequest, proposal: &mut Proposal) -> Result<()> {
        let logits = self.logits(request.root(), request.position(), request.horizon())?;
        let (_, vocab_size) = logits.dims2()?;
        for row in logits.flatten_all()?.to_vec1::<f32>()?.chunks_exact(vocab_size) {
            proposal.push_logits(row, request.top_k(), &mut self.top_k)?;
        }
        Ok(())
    }
}
