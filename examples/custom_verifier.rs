//! A target of your own, without any tensor library: everything that an engine has to implement.
//! It knows a rhyme by heart; the drafter guesses from what was said before. Tokens are bytes.
use ddtree::*;
use std::{convert::Infallible, ops::ControlFlow::Continue};

const RHYME: &[u8] = b"This is the cat that killed the rat that ate the malt in the house. ";

/// The target. An engine holds its model and its KV cache here.
#[derive(Default)]
pub struct Reciter {
    cache: Vec<u32>,    // one row per committed token
    verified: Vec<u32>, // rows of the last verification, not committed yet
}

/// The forward pass: continues the longest match of `context` in the rhyme, again and again.
fn next(context: &[u32]) -> u32 {
    let matching = |end: &usize| {
        let pairs = RHYME[..*end].iter().rev().zip(context.iter().rev());
        pairs.take_while(|&(&known, &token)| u32::from(known) == token).count()
    };
    RHYME[(1..=RHYME.len()).rev().max_by_key(matching).unwrap_or(0) % RHYME.len()].into()
}

impl Verifier for Reciter {
    type Features = (); // what a drafter reads of committed rows: hidden states, for some
    type Error = Infallible; // whatever your engine fails with
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(256, 4_096) // token ids and cache rows; trees of any shape
    }
    fn reset(&mut self, keep: usize) -> Result<(), Infallible> {
        self.cache.truncate(keep); // a new text begins: only the first `keep` rows stay
        Ok(())
    }
    // Forward and commit the prompt, and pick the token after it.
    fn prefill(&mut self, prompt: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
        self.cache.extend(prompt.tokens());
        picks.push(next(&self.cache));
        Ok(())
    }
    // The heart: a pick at every slot of the tree, given only the path that leads there. A model
    // does it in one pass, at `round.positions()`, with attention limited to `round.mask()`.
    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
        self.verified = round.tree().tokens().to_vec();
        for slot in 0..round.tree().len() {
            let path = round.tree().ancestors(slot).map(|slot| self.verified[slot]); // root last
            let mut context: Vec<u32> = path.chain(self.cache.iter().rev().copied()).collect();
            context.reverse();
            picks.push(next(&context));
        }
        Ok(())
    }
    // Keep the rows of the accepted slots, in this order, and forget the others.
    fn commit(&mut self, plan: &CommitPlan) -> Result<(), Infallible> {
        self.cache.extend(plan.path().iter().map(|&slot| self.verified[slot as usize]));
        Ok(())
    }
}

/// The drafter: what followed earlier occurrences of the last two tokens? Goes with any target.
struct Bigrams(Vec<u32>);

impl<F> Drafter<F> for Bigrams {
    type Error = Error;
    fn horizon(&self) -> usize {
        15 // depths at most
    }
    fn reset(&mut self, keep: usize) -> Result<(), Error> {
        self.0.truncate(keep);
        Ok(())
    }
    fn observe(&mut self, committed: &Committed<'_>, _: &F) -> Result<(), Error> {
        self.0.extend(committed.tokens());
        Ok(())
    }
    fn propose(&mut self, ask: &ProposalRequest, proposal: &mut Proposal) -> Result<(), Error> {
        let last = [self.0.last().copied().unwrap_or(0), ask.root()]; // the root is not observed
        let places = (1..self.0.len()).filter(|&end| self.0[end - 1..=end] == last);
        for depth in 1..=ask.horizon() {
            let mut counts = [0f32; 256];
            let tokens = places.clone().filter_map(|end| self.0.get(end + depth));
            tokens.for_each(|&token| counts[token as usize] += 1.0);
            // Logarithms of counts are logits: normalised, they are frequencies.
            proposal.push_logits(&counts.map(f32::ln), ask.top_k(), &mut TopK::new())?;
        }
        Ok(())
    }
}

pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let request = Request::new(&b"This".map(u32::from)).max_new_tokens(160);
    for &algorithm in Algorithm::ALL {
        let engine = (Reciter::default(), Bigrams(Vec::new()));
        let mut decoder = Decoder::new(engine, &Config::new(algorithm))?;
        let done = decoder.generate(&request, |_new_tokens| Continue(()))?;
        let text: String = done.tokens.iter().map(|&token| char::from(token as u8)).collect();
        println!("{algorithm}, {:.2} tokens per pass: This{text}", done.stats.tau());
    }
    Ok(())
}
