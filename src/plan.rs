use std::fmt;

use crate::{
    Algorithm, Attention, Capabilities, Config, Error, MaskForm, PickRule, Picks, Recurrence,
    TreeSettings,
};

/// Entries per depth that coupled drafting asks for unless told otherwise. Noise lifts tokens from
/// far down the list: at temperature 1.3, trees of 64 nodes over 32 entries are accepted no more
/// than uncoupled ones.
const COUPLED_CANDIDATES: usize = 128;

/// Why a round is not the one that was asked for.
///
/// Every such round carries one of these; they are counted in
/// [`RunStats::reasons`](crate::RunStats::reasons), and emitted as events with
/// the `tracing` feature. A tree that silently never engages is the failure this
/// is there to prevent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reason {
    /// The verifier attends causally, so trees run as chains.
    CausalAttention,
    /// The drafter, or the block size asked for, has no depth to draft.
    NoHorizon,
    /// The budget asked for is zero.
    ZeroBudget,
    /// The verifier takes fewer slots than the budget or the chain needs.
    SlotLimit,
    /// The drafter proposed nothing that can be drafted.
    EmptyProposal,
    /// The tree of this round came out as a single path and took the chain's
    /// way.
    SinglePath,
    /// Only one more token is wanted.
    LastToken,
    /// The cache has no or not enough rows left for the nodes.
    CacheLimit,
    /// The host asked for a round without a draft
    /// ([`Session::skip_proposal`](crate::Session::skip_proposal)).
    Skipped,
    /// The host kept only a part of the tree
    /// ([`Session::truncate_tree`](crate::Session::truncate_tree)).
    Truncated,
}

impl Reason {
    /// All reasons.
    pub const ALL: &'static [Self] = &[
        Self::CausalAttention,
        Self::NoHorizon,
        Self::ZeroBudget,
        Self::SlotLimit,
        Self::EmptyProposal,
        Self::SinglePath,
        Self::LastToken,
        Self::CacheLimit,
        Self::Skipped,
        Self::Truncated,
    ];

    /// Short name in snake case.
    pub fn name(self) -> &'static str {
        match self {
            Self::CausalAttention => "causal_attention",
            Self::NoHorizon => "no_horizon",
            Self::ZeroBudget => "zero_budget",
            Self::SlotLimit => "slot_limit",
            Self::EmptyProposal => "empty_proposal",
            Self::SinglePath => "single_path",
            Self::LastToken => "last_token",
            Self::CacheLimit => "cache_limit",
            Self::Skipped => "skipped",
            Self::Truncated => "truncated",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What the rounds of a session will do: a [`Config`] resolved against a
/// verifier and a drafter. There is no other way from settings to rounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    asked: Algorithm,
    algorithm: Algorithm,
    reason: Option<Reason>,
    horizon: usize,
    tree: TreeSettings,
    candidates: usize,
    coupled: bool,
    shadow: bool,
    expand_below_stop: bool,
    trace: bool,
    capabilities: Capabilities,
}

/// Nodes of a round at most, whatever a verifier takes. Slots stay far from the
/// limits of `i32`, and a session that reserves its memory ahead stays within
/// what a machine has: the bits of such a mask are half a gigabyte.
const MAX_NODES: usize = 1 << 16;

impl Plan {
    /// Resolves settings against what a verifier offers and a drafter whose
    /// proposals have at most `horizon` depths (0 without a drafter).
    ///
    /// What the verifier cannot do is replaced by what it can, with a
    /// [`Reason`]; what would change the output is refused.
    ///
    /// # Errors
    ///
    /// If a setting is out of its range, or a tree is asked for on recurrent
    /// layers that cannot verify it exactly.
    ///
    /// ```
    /// use ddtree::{Algorithm, Attention, Capabilities, Config, Plan, Reason};
    ///
    /// let mut capabilities = Capabilities::new(1_000, 512);
    /// capabilities.attention = Attention::Causal;
    /// let plan = Plan::resolve(&Config::new(Algorithm::Tree), &capabilities, 15)?;
    /// assert_eq!(plan.algorithm(), Algorithm::Chain);
    /// assert_eq!(plan.reason(), Some(Reason::CausalAttention));
    /// # Ok::<(), ddtree::Error>(())
    /// ```
    pub fn resolve(
        config: &Config,
        capabilities: &Capabilities,
        horizon: usize,
    ) -> Result<Self, Error> {
        check_capabilities(capabilities)?;
        let asked = config.algorithm;
        let horizon = match config.block_size {
            None => horizon,
            Some(0) => return Err(Error::setting("block_size", 0, "at least 1")),
            Some(block_size) if asked.needs_drafter() && block_size - 1 > horizon => {
                let accepted = format_args!("at most the drafter's, {}", horizon + 1);
                return Err(Error::setting("block_size", block_size, accepted));
            }
            Some(block_size) => block_size - 1,
        };
        if asked.needs_drafter() && horizon > MAX_NODES {
            return Err(Error::setting("horizon", horizon, format_args!("at most {MAX_NODES}")));
        }
        if config.budget > MAX_NODES {
            let accepted = format_args!("at most {MAX_NODES}");
            return Err(Error::setting("budget", config.budget, accepted));
        }
        if config.top_k == Some(0) {
            return Err(Error::setting("top_k", 0, "at least 1"));
        }
        let log_prob_cutoff = config.log_prob_cutoff.unwrap_or(f64::NEG_INFINITY);
        if log_prob_cutoff.is_nan() || log_prob_cutoff > 0.0 {
            return Err(Error::setting("log_prob_cutoff", log_prob_cutoff, "at most 0"));
        }
        if config.shadow && (asked.needs_tree_mask() || !asked.needs_drafter()) {
            return Err(Error::setting("shadow", format_args!("on, with {asked}"), "chain only"));
        }

        // Each step can only take away: from tree to chain to no draft.
        let mut algorithm = asked;
        let mut reason = None;
        let mut fall_back = |algorithm: &mut Algorithm, to, why| {
            *algorithm = to;
            reason.get_or_insert(why);
        };
        if algorithm.needs_tree_mask() {
            match capabilities.recurrence {
                Recurrence::None | Recurrence::ExactTrees => {}
                Recurrence::Sequential if config.allow_inexact_recurrent => {}
                Recurrence::Sequential => {
                    return Err(Error::Unsupported {
                        asked: asked.to_string(),
                        found: "the verifier's recurrent layers run in slot order, so that state \
                                would leak between siblings",
                        remedy: "ask for chain, which is exact, or set allow_inexact_recurrent",
                    });
                }
            }
            if config.budget == 0 {
                fall_back(&mut algorithm, Algorithm::Autoregressive, Reason::ZeroBudget);
            } else if capabilities.attention == Attention::Causal {
                fall_back(&mut algorithm, Algorithm::Chain, Reason::CausalAttention);
            }
        }
        let mut budget = config.budget;
        let mut horizon = horizon;
        if asked.needs_tree_mask() {
            // A tree of so many nodes is no deeper, and a chain in place of one
            // has no more nodes than were asked for.
            horizon = horizon.min(budget);
        }
        let nodes = capabilities.max_slots - 1;
        if algorithm.needs_drafter() {
            if horizon == 0 {
                fall_back(&mut algorithm, Algorithm::Autoregressive, Reason::NoHorizon);
            } else if nodes == 0 {
                fall_back(&mut algorithm, Algorithm::Autoregressive, Reason::SlotLimit);
            } else {
                let wanted = if algorithm.needs_tree_mask() { budget } else { horizon };
                if wanted > nodes {
                    reason.get_or_insert(Reason::SlotLimit);
                }
                budget = budget.min(nodes);
                horizon = horizon.min(nodes);
            }
        }
        if !algorithm.needs_drafter() {
            horizon = 0;
        }
        let shadow = config.shadow && algorithm.needs_drafter();
        let top_k = if algorithm.needs_tree_mask() || shadow {
            // Beyond the budget no entry can be in the tree.
            config.top_k.unwrap_or(budget).min(budget).clamp(1, capabilities.vocab_size)
        } else {
            1
        };
        // Noise favours tokens that are far down the list, so coupled drafting reranks more of
        // them.
        let candidates = config.top_k.unwrap_or(budget.max(COUPLED_CANDIDATES));
        let plan = Self {
            asked,
            algorithm,
            reason,
            horizon,
            tree: TreeSettings { budget, top_k, log_prob_cutoff, spine: config.spine },
            candidates: candidates.min(capabilities.vocab_size),
            coupled: config.coupled && algorithm.needs_drafter(),
            shadow,
            expand_below_stop: config.expand_below_stop,
            trace: config.trace,
            capabilities: capabilities.clone(),
        };
        #[cfg(feature = "tracing")]
        if let Some(reason) = plan.reason {
            tracing::warn!(asked = %plan.asked, running = %plan.algorithm, %reason, "ddtree plan");
        }
        Ok(plan)
    }

    /// The algorithm asked for.
    pub fn asked(&self) -> Algorithm {
        self.asked
    }

    /// The algorithm that will run.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Why rounds are not what was asked for; `None` if they are.
    pub fn reason(&self) -> Option<Reason> {
        self.reason
    }

    /// Depths drafted per round at most.
    pub fn horizon(&self) -> usize {
        self.horizon
    }

    /// Limits of the trees built, also in shadow mode.
    pub fn tree(&self) -> TreeSettings {
        self.tree
    }

    /// Slots of a round at most, the root included.
    pub fn max_slots(&self) -> usize {
        1 + if self.algorithm.needs_tree_mask() { self.tree.budget } else { self.horizon }
    }

    /// What the verifier offers.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Entries per depth that a round asks the drafter for if drafts are coupled to noise or a
    /// constraint holds; others ask for the `top_k` of [`tree`](Self::tree). The room that a
    /// drafter needs is that of the larger.
    pub fn candidates(&self) -> usize {
        self.candidates
    }

    pub(crate) fn coupled(&self) -> bool {
        self.coupled
    }

    pub(crate) fn shadow(&self) -> bool {
        self.shadow
    }

    pub(crate) fn expand_below_stop(&self) -> bool {
        self.expand_below_stop
    }

    pub(crate) fn trace(&self) -> bool {
        self.trace
    }

    pub(crate) fn wants_bits(&self) -> bool {
        self.capabilities.mask == MaskForm::Bits
    }
}

fn check_capabilities(capabilities: &Capabilities) -> Result<(), Error> {
    for (field, found) in [
        ("capabilities.vocab_size", capabilities.vocab_size),
        ("capabilities.max_len", capabilities.max_len),
        ("capabilities.max_slots", capabilities.max_slots),
    ] {
        if found == 0 {
            return Err(Error::setting(field, found, "at least 1"));
        }
    }
    let most = Picks::SKIPPED as usize;
    if capabilities.vocab_size > most {
        let accepted = format_args!("at most {most}, so that every id is a u32 below it");
        let found = capabilities.vocab_size;
        return Err(Error::setting("capabilities.vocab_size", found, accepted));
    }
    if capabilities.device_picks >= PickRule::Pipeline {
        let accepted = format_args!("{} or {}", PickRule::Argmax, PickRule::Noise);
        let found = capabilities.device_picks;
        return Err(Error::setting("capabilities.device_picks", found, accepted));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(config: Config) -> Result<Plan, Error> {
        Plan::resolve(&config, &Capabilities::new(100, 1000), 7)
    }

    fn tree() -> Config {
        Config::new(Algorithm::Tree)
    }

    fn field(error: Error) -> &'static str {
        match error {
            Error::Setting { field, .. } => field,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        assert_eq!(field(resolve(tree().block_size(0)).unwrap_err()), "block_size");
        assert_eq!(field(resolve(tree().block_size(9)).unwrap_err()), "block_size");
        assert_eq!(field(resolve(tree().top_k(0)).unwrap_err()), "top_k");
        for cutoff in [f64::NAN, 0.5] {
            let error = resolve(tree().log_prob_cutoff(cutoff)).unwrap_err();
            assert_eq!(field(error), "log_prob_cutoff");
        }
        assert_eq!(field(resolve(tree().shadow(true)).unwrap_err()), "shadow");
        let ar = Config::new(Algorithm::Autoregressive);
        assert_eq!(field(resolve(ar.shadow(true)).unwrap_err()), "shadow");
        // Ids that honour penalties and constraints cannot be picked without knowing them.
        let device_picks = PickRule::Pipeline;
        let capabilities = Capabilities { device_picks, ..Capabilities::new(100, 1000) };
        let error = Plan::resolve(&tree(), &capabilities, 7).unwrap_err();
        assert_eq!(field(error), "capabilities.device_picks");
        for capabilities in [
            Capabilities::new(0, 10),
            Capabilities::new(10, 0),
            #[cfg(target_pointer_width = "64")]
            Capabilities::new(u32::MAX as usize + 1, 10),
            Capabilities { max_slots: 0, ..Capabilities::new(10, 10) },
        ] {
            assert!(Plan::resolve(&tree(), &capabilities, 7).is_err());
        }
        let most = Capabilities::new(u32::MAX as usize, 10);
        assert!(Plan::resolve(&tree(), &most, 7).is_ok());
    }

    #[test]
    fn what_was_asked_for_carries_no_reason() {
        let plan = resolve(tree().block_size(8).budget(30)).unwrap();
        assert_eq!((plan.algorithm(), plan.reason()), (Algorithm::Tree, None));
        assert_eq!((plan.horizon(), plan.tree().budget, plan.tree().top_k), (7, 30, 30));
        let chain = resolve(Config::new(Algorithm::Chain)).unwrap();
        assert_eq!((chain.reason(), chain.tree().top_k, chain.max_slots()), (None, 1, 8));
        let ar = resolve(Config::new(Algorithm::Autoregressive)).unwrap();
        assert_eq!((ar.reason(), ar.horizon(), ar.max_slots()), (None, 0, 1));
    }

    #[test]
    fn top_k_never_exceeds_the_vocabulary_or_the_budget() {
        assert_eq!(resolve(tree().budget(500)).unwrap().tree().top_k, 100);
        assert_eq!(resolve(tree().budget(5).top_k(50)).unwrap().tree().top_k, 5);
    }

    #[test]
    fn every_plan_that_is_not_what_was_asked_for_says_why() {
        use Algorithm::{Autoregressive, Chain, Tree};
        let run = |config: Config, change: &dyn Fn(&mut Capabilities), horizon| {
            let mut capabilities = Capabilities::new(100, 1000);
            change(&mut capabilities);
            let plan = Plan::resolve(&config, &capabilities, horizon).unwrap();
            (plan.algorithm(), plan.reason(), plan.max_slots())
        };
        let same = |_: &mut Capabilities| {};
        let causal = |c: &mut Capabilities| c.attention = Attention::Causal;
        let few = |c: &mut Capabilities| c.max_slots = 5;
        let one = |c: &mut Capabilities| c.max_slots = 1;
        assert_eq!(run(tree(), &causal, 7), (Chain, Some(Reason::CausalAttention), 8));
        assert_eq!(run(tree().budget(0), &same, 7), (Autoregressive, Some(Reason::ZeroBudget), 1));
        assert_eq!(run(tree(), &same, 0), (Autoregressive, Some(Reason::NoHorizon), 1));
        assert_eq!(
            run(tree().block_size(1), &same, 7),
            (Autoregressive, Some(Reason::NoHorizon), 1)
        );
        assert_eq!(run(tree(), &few, 7), (Tree, Some(Reason::SlotLimit), 5));
        assert_eq!(run(Config::new(Chain), &few, 7), (Chain, Some(Reason::SlotLimit), 5));
        assert_eq!(run(tree(), &one, 7), (Autoregressive, Some(Reason::SlotLimit), 1));
    }

    #[test]
    fn trees_on_sequential_recurrence_are_gated() {
        let mut capabilities = Capabilities::new(100, 1000);
        capabilities.recurrence = Recurrence::Sequential;
        let error = Plan::resolve(&tree(), &capabilities, 7).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("allow_inexact_recurrent"));
        let allowed = tree().allow_inexact_recurrent(true);
        assert_eq!(Plan::resolve(&allowed, &capabilities, 7).unwrap().algorithm(), Algorithm::Tree);
        let chain = Config::new(Algorithm::Chain);
        assert_eq!(Plan::resolve(&chain, &capabilities, 7).unwrap().reason(), None);
        capabilities.recurrence = Recurrence::ExactTrees;
        assert_eq!(Plan::resolve(&tree(), &capabilities, 7).unwrap().reason(), None);
    }
}
