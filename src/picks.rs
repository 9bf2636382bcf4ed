use crate::{DraftTree, Error, PickRule, sample::Sampler, top_k};

/// Takes the target's choice at every slot, in slot order.
///
/// An engine that picks on its device hands over token ids; one that does not
/// hands over rows of logits, and this crate picks as the request's
/// [`Sampling`](crate::Sampling) says. [`rule`](Self::rule) tells what ids
/// would have to honour. Each call adds the pick of the next slot.
///
/// Picks at slots that the text does not reach have no effect. An engine that
/// hands over logits can save fetching them:
///
/// ```
/// # use ddtree::{DraftTree, Error, PickRule, Picks};
/// # fn row(_: usize) -> Vec<f32> { vec![0.0, 1.0] }
/// fn hand_over(slots: usize, picks: &mut Picks<'_>) -> Result<(), Error> {
///     for slot in 0..slots {
///         if picks.wanted() {
///             picks.push_logits(&row(slot))?;
///         } else {
///             picks.skip();
///         }
///     }
///     Ok(())
/// }
/// # let mut ids = Vec::new();
/// # hand_over(2, &mut Picks::new(&mut ids)).unwrap();
/// # assert_eq!(ids, [1, 1]);
/// ```
#[derive(Debug)]
pub struct Picks<'a> {
    ids: &'a mut Vec<u32>,
    leads: Option<&'a mut Vec<f32>>,
    context: Option<PickContext<'a>>,
}

/// What picking depends on besides the logits.
#[derive(Debug)]
pub(crate) struct PickContext<'a> {
    pub(crate) sampler: &'a mut Sampler,
    /// The sequence up to the root.
    pub(crate) tokens: &'a [u32],
    /// `None` for the single pick after a prefill.
    pub(crate) tree: Option<&'a DraftTree>,
    /// Tokens after which there are none.
    pub(crate) stop_tokens: &'a [u32],
    /// Whether picks off the path are wanted too.
    pub(crate) everywhere: bool,
    /// The least rule to ask for, whatever the request needs.
    pub(crate) at_least: PickRule,
    /// Set when token ids are handed over.
    pub(crate) by_id: &'a mut bool,
}

impl PickContext<'_> {
    /// Whether a stop token is drafted on the way to a slot.
    fn has_ended(&self, slot: usize) -> bool {
        self.tree.is_some_and(|tree| {
            let mut nodes = tree.ancestors(slot).filter(|&slot| slot > 0);
            nodes.any(|slot| self.stop_tokens.contains(&tree.tokens()[slot]))
        })
    }
}

/// What the noise of a round's picks depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NoiseKey {
    /// The request's seed.
    pub seed: u64,
    /// The request's temperature, above 0.
    pub temperature: f32,
    /// Absolute position of the token picked at the root, or after a prefill. The one picked at a
    /// slot of depth d is at `position + d`.
    pub position: usize,
}

impl<'a> Picks<'a> {
    /// The entry of [`ids`](Self::ids) for a slot that was [skipped](Self::skip).
    pub const SKIPPED: u32 = u32::MAX;

    /// Collects greedy picks into `ids`, which is cleared. Sessions make picks that know the
    /// request's settings.
    pub fn new(ids: &'a mut Vec<u32>) -> Self {
        ids.clear();
        Self { ids, leads: None, context: None }
    }

    /// Collects into `ids`, and into `leads` by how much the best logit of every
    /// slot leads the second one; NaN where a token id was handed over, or none. A pick
    /// that differs from another run's at a small lead is a near-tie, in which
    /// floating point decides; at a large one it is a fault.
    pub fn with_leads(ids: &'a mut Vec<u32>, leads: &'a mut Vec<f32>) -> Self {
        ids.clear();
        leads.clear();
        Self { ids, leads: Some(leads), context: None }
    }

    pub(crate) fn with(ids: &'a mut Vec<u32>, context: PickContext<'a>) -> Self {
        ids.clear();
        *context.by_id = false;
        context.sampler.dead_end = None;
        Self { ids, leads: None, context: Some(context) }
    }

    /// What picks have to honour. Token ids may be handed over if this is not
    /// above the verifier's [`device_picks`](crate::Capabilities::device_picks).
    pub fn rule(&self) -> PickRule {
        let context = self.context.as_ref();
        context.map_or(PickRule::Argmax, |context| context.sampler.rule().max(context.at_least))
    }

    /// For picking with [noise](crate::sample#noise) on a device; `None` if the request is greedy.
    pub fn noise(&self) -> Option<NoiseKey> {
        let context = self.context.as_ref()?;
        context.sampler.noise(context.tokens.len())
    }

    /// Whether the pick of the next slot can have an effect: whether the picks so far lead there.
    /// True for all slots while a [trace](crate::Config::trace) is kept (but for those after a
    /// stop token if there is a constraint), and if the tree is not known.
    pub fn wanted(&self) -> bool {
        let slot = self.ids.len();
        let everywhere = self.context.as_ref().is_some_and(|context| {
            // A constraint is not asked what follows the end.
            context.everywhere && !(context.sampler.is_constrained() && context.has_ended(slot))
        });
        everywhere || self.reaches(slot)
    }

    /// Whether the picks so far lead to a slot.
    fn reaches(&self, slot: usize) -> bool {
        // A slot beyond the tree is an error, which is found when picks are counted.
        let Some(PickContext { tree: Some(tree), stop_tokens, .. }) = &self.context else {
            return true;
        };
        slot >= tree.len() || leads_to(tree, self.ids, stop_tokens, slot)
    }

    /// Leaves the next slot without a pick. An error follows if it was [wanted](Self::wanted).
    pub fn skip(&mut self) {
        self.ids.push(Self::SKIPPED);
        self.fill_leads();
    }

    /// Adds the pick of the next slot.
    pub fn push(&mut self, token: u32) {
        self.extend(&[token]);
    }

    /// Adds the picks of the next slots.
    pub fn extend(&mut self, tokens: &[u32]) {
        if tokens.is_empty() {
            return;
        }
        self.ids.extend_from_slice(tokens);
        self.fill_leads();
        if let Some(context) = &mut self.context {
            *context.by_id = true;
        }
    }

    fn fill_leads(&mut self) {
        if let Some(leads) = &mut self.leads {
            leads.resize(self.ids.len(), f32::NAN);
        }
    }

    /// Picks from the logits of the next slot, as the request says; greedy
    /// picks are the greatest logit, of equal ones that with the lowest id. A slot that
    /// is not [wanted](Self::wanted) is skipped without a look at the logits.
    ///
    /// # Errors
    ///
    /// If the row is empty or holds NaN or +inf, or has not one entry per token where the request
    /// is not plainly greedy. [`Error::NoToken`] if all entries are -inf, and if the request
    /// forbids every token, but not for slots of a session's tree: such a slot gets no pick, and
    /// [`Session::verified`](crate::Session::verified) ends the round with the token before it, or
    /// fails if the slot is the root.
    ///
    /// After an error nothing is added. A verifier that stores rows before it picks has to drop them.
    pub fn push_logits(&mut self, logits: &[f32]) -> Result<(), Error> {
        let wanted = self.wanted();
        let slot = self.ids.len();
        let picked = match &mut self.context {
            _ if !wanted => Ok(Self::SKIPPED),
            Some(context) if context.sampler.rule() > PickRule::Argmax => {
                let node = context.tree.filter(|tree| slot < tree.len()).map(|tree| (tree, slot));
                context.sampler.pick(logits, context.tokens, node)
            }
            _ => match top_k::argmax(logits) {
                Ok((_, f32::NEG_INFINITY)) => Err(Error::NoToken { slot }),
                Ok((token, _)) => Ok(token),
                Err(source) => Err(Error::Logits { row: slot, source }),
            },
        };
        let token = match (picked, self.reaches(slot), &mut self.context) {
            // Off the path faults do no harm: an illegal draft leads there.
            (Err(Error::NoToken { .. } | Error::Logits { .. }), false, _) => Self::SKIPPED,
            // A row without any logit is the model's fault, not the end of what is allowed.
            (Err(Error::NoToken { .. }), true, Some(context))
                if logits.iter().any(|&logit| logit > f32::NEG_INFINITY) =>
            {
                context.sampler.dead_end = Some(slot);
                if context.tree.is_none() {
                    // The rows of a prefill are not to be committed then.
                    return Err(Error::NoToken { slot });
                }
                Self::SKIPPED
            }
            (picked, ..) => picked?,
        };
        self.ids.push(token);
        // Leads are noted without a context, where every slot is reached.
        if let Some(leads) = &mut self.leads {
            let (before, after) = logits.split_at(token as usize);
            let (best, others) = (after[0], before.iter().chain(&after[1..]));
            leads.push(best - others.copied().fold(f32::NEG_INFINITY, f32::max));
        }
        Ok(())
    }

    /// Picks taken so far, [`SKIPPED`](Self::SKIPPED) where there is none.
    pub fn ids(&self) -> &[u32] {
        self.ids
    }
}

/// Whether the picks of a slot's ancestors lead to it, and the text goes on there.
pub(crate) fn leads_to(tree: &DraftTree, picks: &[u32], stop_tokens: &[u32], slot: usize) -> bool {
    let mut nodes = tree.ancestors(slot).filter(|&slot| slot > 0);
    nodes.all(|slot| {
        let token = tree.tokens()[slot];
        picks[tree.parents()[slot] as usize] == token && !stop_tokens.contains(&token)
    })
}
