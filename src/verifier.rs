use crate::{AncestorMask, CommitPlan, DraftTree, Error, PickRule, sample::Sampler, top_k};

/// What a verifier offers. [`Plan::resolve`](crate::Plan::resolve) holds it
/// against what is asked for.
///
/// ```
/// use ddtree::{Capabilities, Recurrence};
///
/// // A hybrid model with 4,096 cache rows that runs its recurrent layers in
/// // slot order.
/// let mut capabilities = Capabilities::new(151_936, 4_096);
/// capabilities.recurrence = Recurrence::Sequential;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Number of token ids; every id is below it. At most `u32::MAX`, which stands
    /// for [no pick](Picks::SKIPPED).
    pub vocab_size: usize,
    /// KV rows at most: the committed ones and those of the round in progress.
    pub max_len: usize,
    /// Slots of one round at most, the root included.
    pub max_slots: usize,
    /// Which trees attention can be restricted to.
    pub attention: Attention,
    /// Form in which the verifier reads the tree's shape.
    pub mask: MaskForm,
    /// What its recurrent layers can do, if it has any.
    pub recurrence: Recurrence,
    /// What the token ids that it hands over honour: [`PickRule::Argmax`] or [`PickRule::Noise`].
    /// For requests that need more it has to hand over logits; token ids are refused then.
    pub device_picks: PickRule,
    /// Whether it can hand over logits. If not, requests that need more than
    /// [`device_picks`](Self::device_picks) are refused when they start.
    pub logits: bool,
}

impl Capabilities {
    /// A verifier of `vocab_size` tokens and `max_len` KV rows that verifies
    /// trees of any size, reads the mask as bits, has no recurrent
    /// layers, and hands over logits unless a request is greedy.
    pub fn new(vocab_size: usize, max_len: usize) -> Self {
        Self {
            vocab_size,
            max_len,
            max_slots: usize::MAX,
            attention: Attention::Tree,
            mask: MaskForm::Bits,
            recurrence: Recurrence::None,
            device_picks: PickRule::Argmax,
            logits: true,
        }
    }
}

/// Which keys a verifier's attention can be restricted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attention {
    /// All earlier slots only: paths, no trees.
    Causal,
    /// A slot's ancestors: any tree.
    Tree,
}

/// Form in which a verifier reads the shape of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskForm {
    /// The links of the [`DraftTree`] are enough; no mask is built.
    Links,
    /// An [`AncestorMask`], from which [`layout`](crate::layout) writes others.
    Bits,
}

/// What the recurrent layers of a verifier can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recurrence {
    /// There are none.
    None,
    /// Every slot starts from the state after its parent, as a
    /// [`StatePlan`](crate::StatePlan) says.
    ExactTrees,
    /// Slots run one after another, and a state can be restored. Exact for
    /// chains; on a tree, state leaks between siblings.
    Sequential,
}

/// Tokens to be forwarded and committed at once: a prompt, the rest of one whose
/// beginning is cached, or tokens that the host inserts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefill<'a> {
    pub(crate) start: usize,
    pub(crate) tokens: &'a [u32],
}

impl<'a> Prefill<'a> {
    /// Tokens for the KV rows (and positions) from `start` on.
    pub fn new(start: usize, tokens: &'a [u32]) -> Self {
        Self { start, tokens }
    }

    /// KV row and position of the first token: the number of rows committed.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The tokens, at least one.
    pub fn tokens(&self) -> &'a [u32] {
        self.tokens
    }
}

/// One verification: a tree and where it starts.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    pub(crate) start: usize,
    pub(crate) tree: &'a DraftTree,
    pub(crate) mask: Option<&'a AncestorMask>,
}

impl<'a> Round<'a> {
    /// A round whose root is at position `start`, with the mask of `tree` if it
    /// was built.
    pub fn new(start: usize, tree: &'a DraftTree, mask: Option<&'a AncestorMask>) -> Self {
        Self { start, tree, mask }
    }

    /// KV row of the root: the number of rows committed. It is its position too,
    /// unless the engine counts positions in another way. Slot `i` goes to KV row
    /// `start() + i`; its position is another number, see
    /// [`positions`](Self::positions).
    pub fn start(&self) -> usize {
        self.start
    }

    /// The tree to verify.
    pub fn tree(&self) -> &'a DraftTree {
        self.tree
    }

    /// The tree's mask. `None` if the tree is a chain, where causal attention
    /// is the same, or the verifier reads [`MaskForm::Links`].
    pub fn mask(&self) -> Option<&'a AncestorMask> {
        self.mask
    }

    /// Position of every slot: `start() + depth`, never the slot's index. An
    /// engine whose positions are not rows adds the depths to a base of its own.
    pub fn positions(&self) -> impl ExactSizeIterator<Item = usize> + 'a {
        let start = self.start;
        self.tree.depths().iter().map(move |&depth| start + depth as usize)
    }

    /// Writes the position of every slot into memory of the caller, for kernels
    /// that read them from a fixed buffer.
    ///
    /// # Errors
    ///
    /// If `out` has not one element per slot, or a position does not fit.
    pub fn positions_into<T: TryFrom<usize>>(&self, out: &mut [T]) -> Result<(), Error> {
        if out.len() != self.tree.len() {
            let (found, accepted) = (out.len(), self.tree.len());
            return Err(Error::Length { field: "positions", found, accepted });
        }
        for (out, position) in out.iter_mut().zip(self.positions()) {
            *out = T::try_from(position)
                .map_err(|_| Error::setting("position", position, "what the element type holds"))?;
        }
        Ok(())
    }
}

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
    /// above the verifier's [`device_picks`](Capabilities::device_picks).
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

/// A target model with its caches: everything that this crate asks of an engine.
///
/// # Contract
///
/// 1. **Committed rows are safe.** A verifier knows how many rows are committed: the end of the
///    last `prefill` or `commit` that succeeded. `verify` writes only beyond them. An error from
///    any method leaves them as they were, recurrent state included, and what lies beyond is void.
///    The same call may come again, but for `commit`: a round whose commit failed is verified anew.
/// 2. **A pick at every slot.** `verify` adds exactly one pick per slot, in slot order: the token
///    that the target chooses after the path from the root to that slot, and nothing else (not
///    slots before it, not siblings), as [`Picks::rule`] says. [Unwanted](Picks::wanted) slots may
///    be skipped.
/// 3. **Positions come from depth**: see [`Round::positions`]. Where a token's position is not its
///    KV row (M-RoPE after an image), it is the engine's own base, the position of the root, plus
///    the [depth](DraftTree::depths).
/// 4. **Commit means equality.** After `commit` the caches equal what plain decoding of the
///    accepted path would have left; the bonus has no row.
/// 5. **One arithmetic.** Tokens equal those of decoding without a draft only as far as the logits
///    of a slot do not depend on how many slots are verified with it.
///
/// Rounds alternate `verify` and `commit`; `verify` may be repeated, with another tree too, before
/// a `commit` refers to the last one.
///
/// The trait can be used as an object (`dyn Verifier<Error = E, Features = F>`), and borrows and
/// boxes of a verifier are verifiers.
///
/// ```
/// use std::convert::Infallible;
/// use ddtree::{Capabilities, CommitPlan, Picks, Prefill, Round, Verifier};
///
/// /// Counts upwards modulo 100: a model whose cache is nothing but a length.
/// struct Counter {
///     committed: usize,
/// }
///
/// impl Verifier for Counter {
///     type Error = Infallible;
///     type Features = ();
///
///     fn capabilities(&self) -> Capabilities {
///         Capabilities::new(100, 1_000)
///     }
///
///     fn reset(&mut self, keep: usize) -> Result<(), Infallible> {
///         self.committed = keep;
///         Ok(())
///     }
///
///     fn prefill(&mut self, prefill: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
///         self.committed = prefill.start() + prefill.tokens().len();
///         picks.push((prefill.tokens().last().unwrap() + 1) % 100);
///         Ok(())
///     }
///
///     fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
///         for token in round.tree().tokens() {
///             picks.push((token + 1) % 100);
///         }
///         Ok(())
///     }
///
///     fn commit(&mut self, plan: &CommitPlan) -> Result<(), Infallible> {
///         self.committed = plan.new_len();
///         Ok(())
///     }
/// }
/// ```
pub trait Verifier {
    /// What [`commit`](Self::commit) hands to [`Drafter::observe`](crate::Drafter::observe):
    /// the target's features of the committed rows, `()` if there are none.
    type Features;
    /// What can go wrong in the engine.
    type Error: std::error::Error + 'static;

    /// What this verifier offers. Constant between resets.
    fn capabilities(&self) -> Capabilities;

    /// Forgets all but the first `keep` committed rows. `keep` 0 always
    /// works; a verifier that cannot go back to another length (recurrent state
    /// without a snapshot) says so with an error.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the engine, or `keep` cannot be honoured.
    fn reset(&mut self, keep: usize) -> Result<(), Self::Error>;

    /// Forwards tokens, adds one pick (the token after the last of them), commits
    /// their rows and returns the features of these. In this order: a pick from
    /// logits can fail.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the engine; nothing is committed then. A
    /// [`Decoder`](crate::Decoder) [resets](Self::reset) the verifier to where the
    /// prefill began before it is done again, also if the session refuses the
    /// pick; hosts of a [`Session`](crate::Session) have to do so themselves.
    fn prefill(
        &mut self,
        prefill: &Prefill<'_>,
        picks: &mut Picks<'_>,
    ) -> Result<Self::Features, Self::Error>;

    /// Forwards every slot of a tree and adds one pick per slot.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the engine.
    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Self::Error>;

    /// Commits the accepted rows of the last verification and returns their
    /// features, root first, one row for each of [`CommitPlan::slots`].
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the engine; nothing is committed then.
    fn commit(&mut self, plan: &CommitPlan) -> Result<Self::Features, Self::Error>;
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<V: Verifier + ?Sized> Verifier for $pointer {
            type Features = V::Features;
            type Error = V::Error;

            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }

            fn reset(&mut self, keep: usize) -> Result<(), Self::Error> {
                (**self).reset(keep)
            }

            fn prefill(
                &mut self,
                prefill: &Prefill<'_>,
                picks: &mut Picks<'_>,
            ) -> Result<Self::Features, Self::Error> {
                (**self).prefill(prefill, picks)
            }

            fn verify(
                &mut self,
                round: &Round<'_>,
                picks: &mut Picks<'_>,
            ) -> Result<(), Self::Error> {
                (**self).verify(round, picks)
            }

            fn commit(&mut self, plan: &CommitPlan) -> Result<Self::Features, Self::Error> {
                (**self).commit(plan)
            }
        }
    )*};
}

forward!(&mut V, Box<V>);
