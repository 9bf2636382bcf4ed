use super::lab::{asking, round};
use crate::{
    AncestorMask, DraftTree, Error, PickRule, Picks, Prefill, Sampling, Verifier, picks::leads_to,
    sample::Sampler,
};

/// What [`check_picks`] finds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PickFault<E: std::error::Error + 'static> {
    /// The engine failed.
    #[error("the verifier failed")]
    Verifier(#[source] E),
    /// This crate refused the settings, the tree's tokens or a row of logits.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The engine handed over token ids although more was asked for than they honour.
    #[error("token ids were handed over where {rule} was asked for")]
    Ids {
        /// What was asked for.
        rule: PickRule,
    },
    /// The engine did not hand over one pick per slot, or skipped one that others lead to.
    #[error("found {found} picks, accepted: exactly {accepted}")]
    Count {
        /// Picks handed over.
        found: usize,
        /// Slots.
        accepted: usize,
    },
    /// The engine's own pick is another one than the one from its logits.
    #[error("{}, seed {seed}: the device picks token {device}, its logits give {logits}", place(.slot))]
    Differs {
        /// The slot; `None` for the pick after the prefill.
        slot: Option<usize>,
        /// The seed, see [`check_picks`].
        seed: u64,
        /// The engine's pick.
        device: u32,
        /// The pick that its logits give.
        logits: u32,
    },
    /// The pick at a slot changes if slots that the picks do not lead to may be skipped.
    #[error(
        "{}: token {found} is picked where unwanted slots may be skipped, {expected} where all are wanted",
        place(.slot)
    )]
    Skipping {
        /// The slot; `None` for the pick after the prefill.
        slot: Option<usize>,
        /// The pick where all are wanted.
        expected: u32,
        /// The pick where only those are that the picks lead to.
        found: u32,
    },
}

fn place(slot: &Option<usize>) -> String {
    slot.map_or("after the prefill".into(), |slot| format!("slot {slot}"))
}

/// Checks that the token ids that a verifier picks on its device are those that this crate picks
/// from its logits: after a prompt, and at every slot of a tree.
///
/// The verifier is reset. It is asked for the same work in the way that `sampling` needs
/// ([`Picks::rule`]) and with logits demanded, and each time with all slots wanted and with only
/// those that the picks [lead to](Picks::wanted). One that always hands over logits, for every slot,
/// passes. The root of `tree` stands for the token after the prompt.
///
/// Unless `sampling` is greedy, all of that is done with its seed, with two more that differ in the
/// upper 32 bits only, and with its complement, so that it shows if a device ignores the seed or a
/// part of it.
///
/// # Errors
///
/// [`Refused`](PickFault::Refused) if settings or tokens cannot be, or the prompt is empty;
/// otherwise the first [fault](PickFault) found.
///
/// ```
/// # use ddtree::{Capabilities, CommitPlan, Error, Picks, PickRule, Prefill, Round, Verifier};
/// # struct Counter;
/// # impl Verifier for Counter {
/// #     type Error = Error;
/// #     type Features = ();
/// #     fn capabilities(&self) -> Capabilities { Capabilities::new(100, 1_000) }
/// #     fn reset(&mut self, _: usize) -> Result<(), Error> { Ok(()) }
/// #     fn prefill(&mut self, p: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
/// #         one(*p.tokens().last().unwrap(), picks)
/// #     }
/// #     fn verify(&mut self, r: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Error> {
/// #         r.tree().tokens().iter().try_for_each(|&token| one(token, picks))
/// #     }
/// #     fn commit(&mut self, _: &CommitPlan) -> Result<(), Error> { Ok(()) }
/// # }
/// # fn one(token: u32, picks: &mut Picks<'_>) -> Result<(), Error> {
/// #     if picks.rule() == PickRule::Argmax {
/// #         picks.push((token + 1) % 100);
/// #     } else {
/// #         let mut logits = [0.0; 100];
/// #         logits[(token as usize + 1) % 100] = 9.0;
/// #         picks.push_logits(&logits)?;
/// #     }
/// #     Ok(())
/// # }
/// use ddtree::{DraftTree, Sampling, conformance};
///
/// let tree = DraftTree::from_parents(&[8, 9, 20, 10], &[-1, 0, 0, 1])?;
/// let mut verifier = Counter; // counts upwards, by token id or with logits
/// for sampling in [Sampling::new(), Sampling::new().temperature(0.8).top_p(0.9)] {
///     conformance::check_picks(&mut verifier, &[6, 7], &tree, &sampling)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn check_picks<V: Verifier>(
    verifier: &mut V,
    prompt: &[u32],
    tree: &DraftTree,
    sampling: &Sampling,
) -> Result<(), PickFault<V::Error>> {
    let vocab_size = verifier.capabilities().vocab_size;
    sampling.check(vocab_size)?;
    if prompt.is_empty() {
        return Err(Error::setting("prompt", "no tokens", "at least one").into());
    }
    for (field, tokens) in [("prompt", prompt), ("tree.tokens", tree.tokens())] {
        if let Some(index) = tokens.iter().position(|&token| token as usize >= vocab_size) {
            return Err(Error::Token { field, index, found: tokens[index], vocab_size }.into());
        }
    }
    let seed = sampling.seed;
    let seeds = [seed, seed ^ (1 << 32), seed ^ (0xa5a5_a5a5 << 32), !seed];
    let count = if sampling.is_greedy() { 1 } else { seeds.len() };
    seeds[..count]
        .iter()
        .try_for_each(|&seed| check_seed(verifier, prompt, tree, &sampling.clone().seed(seed)))
}

fn check_seed<V: Verifier>(
    verifier: &mut V,
    prompt: &[u32],
    tree: &DraftTree,
    sampling: &Sampling,
) -> Result<(), PickFault<V::Error>> {
    let capabilities = verifier.capabilities();
    let vocab_size = capabilities.vocab_size;
    let mut mask = AncestorMask::new();
    let round = round(&capabilities, prompt.len(), tree, &mut mask);

    let mut picks_asking = |at_least: PickRule, everywhere: bool| {
        let mut sampler = Sampler::default();
        sampler.start(sampling, vocab_size, prompt.len(), prompt.len() + tree.len());
        let rule = sampler.rule().max(at_least);
        let mut tokens = prompt.to_vec();
        let (mut ids, mut all, mut by_id) = (Vec::new(), Vec::new(), false);
        verifier.reset(0).map_err(PickFault::Verifier)?;
        for tree in [None, Some(tree)] {
            let mut context = asking(&mut sampler, &tokens, tree, &mut by_id);
            (context.everywhere, context.at_least) = (everywhere, at_least);
            let mut picks = Picks::with(&mut ids, context);
            match tree {
                None => {
                    let prefill = Prefill::new(0, prompt);
                    verifier.prefill(&prefill, &mut picks).map(drop)
                }
                Some(_) => verifier.verify(&round, &mut picks),
            }
            .map_err(PickFault::Verifier)?;
            if by_id && rule > capabilities.device_picks {
                return Err(PickFault::Ids { rule });
            }
            let accepted = tree.map_or(1, DraftTree::len);
            // A pick that the others lead to is not to be skipped.
            let skipped = |slot: usize| {
                ids[slot] == Picks::SKIPPED
                    && tree.is_none_or(|tree| leads_to(tree, &ids, &[], slot))
            };
            if ids.len() != accepted || (0..accepted).any(skipped) {
                let found = ids.iter().filter(|&&id| id != Picks::SKIPPED).count();
                return Err(PickFault::Count { found, accepted });
            }
            all.extend_from_slice(&ids);
            tokens.push(round.tree().tokens()[0]);
        }
        Ok(all)
    };
    let device = picks_asking(PickRule::Argmax, true)?;
    let logits = picks_asking(PickRule::Pipeline, true)?;
    if let Some(i) = device.iter().zip(&logits).position(|(device, logits)| device != logits) {
        let (slot, seed) = (i.checked_sub(1), sampling.seed);
        return Err(PickFault::Differs { slot, seed, device: device[i], logits: logits[i] });
    }
    for at_least in [PickRule::Argmax, PickRule::Pipeline] {
        let on_path = picks_asking(at_least, false)?;
        for (i, (&expected, &found)) in device.iter().zip(&on_path).enumerate() {
            if found != expected && found != Picks::SKIPPED {
                return Err(PickFault::Skipping { slot: i.checked_sub(1), expected, found });
            }
        }
    }
    Ok(())
}
