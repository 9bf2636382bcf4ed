use super::{Report, checks, lab::Lab};
use crate::{Stage, Verifier};

/// Runs all checks on a verifier.
///
/// The verifier is reset many times; nothing that it held survives. Every check
/// works on short random texts and trees, so that a run is a few hundred passes
/// of a dozen tokens; two of them also on a [wide](Kit::wide_slots) tree, and the
/// last [fills](Kit::fill) the cache. Trees are left out where
/// [`Capabilities`](crate::Capabilities) rule them out.
pub struct Kit<'a, V: Verifier> {
    pub(super) verifier: &'a mut V,
    pub(super) seed: u64,
    pub(super) trials: usize,
    pub(super) text_len: usize,
    pub(super) wide_slots: usize,
    pub(super) fill: usize,
    pub(super) lead_tolerance: f32,
    pub(super) feature_tolerance: f32,
    pub(super) rows: Option<RowsOf<'a, V::Features>>,
    pub(super) inject: Option<Inject<'a, V>>,
}

pub(super) type RowsOf<'a, F> = Box<dyn FnMut(&F) -> Vec<Vec<f32>> + 'a>;
pub(super) type Inject<'a, V> = Box<dyn FnMut(&mut V, Stage) + 'a>;

impl<V: Verifier> std::fmt::Debug for Kit<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kit").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl<'a, V: Verifier> Kit<'a, V> {
    /// A kit with default settings.
    pub fn new(verifier: &'a mut V) -> Self {
        Self {
            verifier,
            seed: 0,
            trials: 4,
            text_len: 96,
            wide_slots: 130,
            fill: 1024,
            lead_tolerance: 1e-3,
            feature_tolerance: 1e-3,
            rows: None,
            inject: None,
        }
    }

    /// Seed of texts and trees. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Random cases per check, at least 1. Default: 4.
    pub fn trials(mut self, trials: usize) -> Self {
        self.trials = trials.max(1);
        self
    }

    /// Tokens of the long run, or fewer if the cache is smaller. Default: 96.
    ///
    /// The other texts have a few dozen tokens at most. Set this above two pages of
    /// a paged cache and above the window of sliding-window layers: nothing else
    /// decodes across their bounds.
    pub fn text_len(mut self, tokens: usize) -> Self {
        self.text_len = tokens;
        self
    }

    /// Slots of the widest rounds, or fewer if the verifier takes fewer. Default:
    /// 130, two mask words of 64 bits and some more.
    ///
    /// One such tree is compared with its paths, at about a fifth of its slots (a
    /// prefill each), and one has a path committed. Other trees have at most 12
    /// slots, and so have all if this is no more.
    pub fn wide_slots(mut self, slots: usize) -> Self {
        self.wide_slots = slots;
        self
    }

    /// Rows of the largest cache that is filled to its last row, in about ten
    /// prefills of that many tokens; a larger one is not checked for it. Default:
    /// 1,024. Give a verifier a small cache for the kit rather than raise this.
    pub fn fill(mut self, rows: usize) -> Self {
        self.fill = rows;
        self
    }

    /// Where a verifier hands over logits, the lead of the best one over the
    /// second is compared as well as the pick, which shows faults that do not
    /// change a pick; and picks that differ where the lead is no larger than this
    /// are near-ties. Default: 0.001, for f32. A unit in the last place of bf16
    /// logits around 10 is 0.06.
    pub fn lead_tolerance(mut self, logits: f32) -> Self {
        self.lead_tolerance = logits;
        self
    }

    /// Turns features into rows of numbers, one per committed token, to compare
    /// those of a commit with those of a prefill: values may differ by
    /// `tolerance`, relative to the larger one if that is above 1. Without this,
    /// features are not checked.
    pub fn features(
        mut self,
        tolerance: f32,
        rows: impl FnMut(&V::Features) -> Vec<Vec<f32>> + 'a,
    ) -> Self {
        self.feature_tolerance = tolerance;
        self.rows = Some(Box::new(rows));
        self
    }

    /// Makes the next call of [`Stage::Prefill`], [`Stage::Verify`] or
    /// [`Stage::Commit`] fail, as far into it as the engine can. Without this,
    /// recovery is checked only from a prefill whose pick is refused, and only of
    /// a verifier that hands over logits.
    pub fn inject(mut self, inject: impl FnMut(&mut V, Stage) + 'a) -> Self {
        self.inject = Some(Box::new(inject));
        self
    }

    /// Runs all checks.
    pub fn run(self) -> Report {
        checks::run(Lab::new(self))
    }
}
