use crate::PickRule;

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
    /// for [no pick](crate::Picks::SKIPPED).
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
    /// The links of the [`DraftTree`](crate::DraftTree) are enough; no mask is built.
    Links,
    /// An [`AncestorMask`](crate::AncestorMask), from which [`layout`](crate::layout)
    /// writes others.
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
