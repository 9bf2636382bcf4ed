use crate::{AncestorMask, Capabilities, CommitPlan, DraftTree, Error, Picks};

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
    /// is the same, or the verifier reads [`MaskForm::Links`](crate::MaskForm::Links).
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
    /// features, root first, one row for each of [`CommitPlan::path`].
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
