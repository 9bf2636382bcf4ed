use crate::{AncestorMask, CommitPlan, DraftTree, Error, top_k};

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
    /// Number of token ids; every id is below it.
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
}

impl Capabilities {
    /// A verifier of `vocab_size` tokens and `max_len` KV rows that verifies
    /// trees of any size, reads the mask as bits and has no recurrent layers.
    pub fn new(vocab_size: usize, max_len: usize) -> Self {
        Self {
            vocab_size,
            max_len,
            max_slots: usize::MAX,
            attention: Attention::Tree,
            mask: MaskForm::Bits,
            recurrence: Recurrence::None,
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
    /// Every slot starts from the state after its parent.
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

    /// Position and KV row of the root: the number of rows committed. Slot `i`
    /// goes to KV row `start() + i`; its position is another number, see
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

    /// Position of every slot: `start() + depth`, never the slot's index.
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
/// hands over rows of logits, and this crate picks. One round does the one or
/// the other, or both in turn: each call adds the pick of the next slot.
#[derive(Debug)]
pub struct Picks<'a> {
    ids: &'a mut Vec<u32>,
    leads: Option<&'a mut Vec<f32>>,
}

impl<'a> Picks<'a> {
    /// Collects into `ids`, which is cleared.
    pub fn new(ids: &'a mut Vec<u32>) -> Self {
        ids.clear();
        Self { ids, leads: None }
    }

    /// Collects into `ids`, and into `leads` by how much the best logit of every
    /// slot leads the second one; NaN where a token id was handed over. A pick
    /// that differs from another run's at a small lead is a near-tie, in which
    /// floating point decides; at a large one it is a fault.
    pub fn with_leads(ids: &'a mut Vec<u32>, leads: &'a mut Vec<f32>) -> Self {
        ids.clear();
        leads.clear();
        Self { ids, leads: Some(leads) }
    }

    /// Adds the pick of the next slot.
    pub fn push(&mut self, token: u32) {
        self.extend(&[token]);
    }

    /// Adds the picks of the next slots.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.ids.extend_from_slice(tokens);
        if let Some(leads) = &mut self.leads {
            leads.resize(self.ids.len(), f32::NAN);
        }
    }

    /// Picks from the logits of the next slot: the greatest, of equal ones that
    /// with the lowest id.
    ///
    /// # Errors
    ///
    /// If the row is empty or holds NaN or +inf.
    pub fn push_logits(&mut self, logits: &[f32]) -> Result<(), Error> {
        let row = self.ids.len();
        let (token, best) =
            top_k::argmax(logits).map_err(|source| Error::Logits { row, source })?;
        self.ids.push(token);
        if let Some(leads) = &mut self.leads {
            let (before, after) = logits.split_at(token as usize);
            let others = before.iter().chain(&after[1..]);
            leads.push(best - others.copied().fold(f32::NEG_INFINITY, f32::max));
        }
        Ok(())
    }

    /// Picks taken so far.
    pub fn ids(&self) -> &[u32] {
        self.ids
    }
}

/// A target model with its caches: everything that this crate asks of an
/// engine.
///
/// # Contract
///
/// 1. **Committed rows are safe.** A verifier knows how many rows are
///    committed: the end of the last `prefill` or `commit` that succeeded.
///    `verify` writes only beyond them. An error from any method leaves them as
///    they were, recurrent state included, and what lies beyond is void. The
///    same call may come again, but for `commit`: a round whose commit failed is
///    verified anew.
/// 2. **A pick at every slot.** `verify` adds exactly one pick per slot, in slot
///    order: the token that the target chooses after the path from the root to
///    that slot, and nothing else (not slots before it, not siblings).
/// 3. **Positions come from depth**: see [`Round::positions`].
/// 4. **Commit means equality.** After `commit` the caches equal what plain
///    decoding of the accepted path would have left; the bonus has no row.
/// 5. **One arithmetic.** Tokens equal those of decoding without a draft only
///    as far as the logits of a slot do not depend on how many slots are
///    verified with it.
///
/// Rounds alternate `verify` and `commit`; `verify` may be repeated, with
/// another tree too, before a `commit` refers to the last one.
///
/// The trait can be used as an object (`dyn Verifier<Error = E, Features = F>`),
/// and borrows and boxes of a verifier are verifiers.
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

    /// Forwards and commits tokens, adds one pick (the token after the last of
    /// them) and returns the features of their rows.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong in the engine; nothing is committed then.
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
