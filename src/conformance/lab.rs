//! What checks are made of: the verifier's calls, their comparison, and random
//! texts and trees.

use super::{Finding, Kit};
use crate::{
    Acceptance, AncestorMask, Attention, Capabilities, CommitPlan, Constraint, DraftTree, MaskForm,
    PickRule, Picks, Prefill, Recurrence, Round, Sampling, Stage, TokenPath, Verifier,
    picks::PickContext, sample::Sampler,
};

/// What checks return on the way.
pub(super) type Found<T> = Result<T, Box<Finding>>;

/// A pick, and by how much its logit leads the second one if that is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pick {
    pub(super) token: u32,
    pub(super) lead: Option<f32>,
}

pub(super) struct Lab<'a, V: Verifier> {
    pub(super) kit: Kit<'a, V>,
    pub(super) capabilities: Capabilities,
    pub(super) comparisons: usize,
    pub(super) near_ties: usize,
    random: u64,
}

impl<'a, V: Verifier> Lab<'a, V> {
    pub(super) fn new(kit: Kit<'a, V>) -> Self {
        let capabilities = kit.verifier.capabilities();
        let random = kit.seed;
        Self { kit, capabilities, comparisons: 0, near_ties: 0, random }
    }

    /// Begins a check: its cases do not depend on those of checks before it.
    pub(super) fn begin(&mut self, check: usize) {
        self.random = self.kit.seed ^ ((check as u64 + 1) << 32);
        (self.comparisons, self.near_ties) = (0, 0);
    }

    // Calls.

    pub(super) fn reset(&mut self, keep: usize) -> Found<()> {
        self.kit.verifier.reset(keep).map_err(|error| failed("reset", &error))
    }

    /// Commits tokens; gives the pick after them and their features.
    pub(super) fn prefill(&mut self, start: usize, tokens: &[u32]) -> Found<(Pick, V::Features)> {
        let (mut ids, mut leads) = (Vec::new(), Vec::new());
        let features = self
            .kit
            .verifier
            .prefill(&Prefill::new(start, tokens), &mut Picks::with_leads(&mut ids, &mut leads))
            .map_err(|error| failed("prefill", &error))?;
        Ok((self.take_picks("prefill", ids, leads, 1)?[0], features))
    }

    /// A prefill that fails, since no token is left to be picked. False if the
    /// verifier hands over a token id nevertheless.
    pub(super) fn refused_prefill(&mut self, context: &[u32], tokens: &[u32]) -> Found<bool> {
        struct Nothing;
        impl Constraint for Nothing {
            fn constrain(&mut self, _: TokenPath<'_>, logits: &mut [f32]) {
                logits.fill(f32::NEG_INFINITY);
            }
        }
        let text = [context, tokens].concat();
        let (mut ids, mut by_id) = (Vec::new(), false);
        let mut sampler = self.greedy();
        sampler.set_constraint(Some(Box::new(Nothing)));
        let mut picks = Picks::with(&mut ids, asking(&mut sampler, &text, None, &mut by_id));
        let prefill = Prefill::new(context.len(), tokens);
        let result = self.kit.verifier.prefill(&prefill, &mut picks);
        match result {
            _ if by_id => Ok(false),
            Ok(_) => Err(Box::new(Finding::NoError { call: "prefill" })),
            Err(_) => Ok(true),
        }
    }

    pub(super) fn verify(&mut self, start: usize, tree: &DraftTree) -> Found<Vec<Pick>> {
        let (mut ids, mut leads) = (Vec::new(), Vec::new());
        self.verify_into(start, tree, &mut Picks::with_leads(&mut ids, &mut leads))?;
        self.take_picks("verify", ids, leads, tree.len())
    }

    /// The picks where slots that the picks do not lead to are not wanted: `None`
    /// where there is none. Logits are asked for if the verifier has them.
    pub(super) fn verify_wanted(
        &mut self,
        context: &[u32],
        tree: &DraftTree,
    ) -> Found<Vec<Option<Pick>>> {
        let text = [context, &tree.tokens()[..1]].concat();
        let (mut ids, mut by_id) = (Vec::new(), false);
        let mut sampler = self.greedy();
        let mut context_of_picks = asking(&mut sampler, &text, Some(tree), &mut by_id);
        if self.capabilities.logits {
            context_of_picks.at_least = PickRule::Pipeline;
        }
        self.verify_into(context.len(), tree, &mut Picks::with(&mut ids, context_of_picks))?;
        let vocab_size = self.capabilities.vocab_size;
        let is_wrong = |&id: &u32| id as usize >= vocab_size && id != Picks::SKIPPED;
        if ids.len() != tree.len() || ids.iter().any(is_wrong) {
            let (call, accepted) = ("verify", tree.len());
            return Err(Box::new(Finding::Picks { call, found: ids, accepted, vocab_size }));
        }
        let picks = ids.into_iter().map(|token| Pick { token, lead: None });
        Ok(picks.map(|pick| (pick.token != Picks::SKIPPED).then_some(pick)).collect())
    }

    fn verify_into(&mut self, start: usize, tree: &DraftTree, picks: &mut Picks<'_>) -> Found<()> {
        let mut mask = AncestorMask::new();
        let round = round(&self.capabilities, start, tree, &mut mask);
        self.kit.verifier.verify(&round, picks).map_err(|error| failed("verify", &error))
    }

    fn greedy(&self) -> Sampler {
        let mut sampler = Sampler::default();
        sampler.start(&Sampling::new(), self.capabilities.vocab_size, 0, 0);
        sampler
    }

    /// Commits the path from the root to slot `last`; its features.
    pub(super) fn commit(
        &mut self,
        start: usize,
        tree: &DraftTree,
        last: usize,
    ) -> Found<V::Features> {
        let plan = plan_to(start, tree, last);
        self.kit.verifier.commit(&plan).map_err(|error| failed("commit", &error))
    }

    /// The call fails since the kit's user has it fail.
    pub(super) fn inject(&mut self, stage: Stage) {
        if let Some(inject) = &mut self.kit.inject {
            inject(self.kit.verifier, stage);
        }
    }

    fn take_picks(
        &self,
        call: &'static str,
        ids: Vec<u32>,
        leads: Vec<f32>,
        accepted: usize,
    ) -> Found<Vec<Pick>> {
        let vocab_size = self.capabilities.vocab_size;
        if ids.len() != accepted || ids.iter().any(|&id| id as usize >= vocab_size) {
            return Err(Box::new(Finding::Picks { call, found: ids, accepted, vocab_size }));
        }
        let lead = |lead: f32| (!lead.is_nan()).then_some(lead);
        let picks = ids.into_iter().zip(leads);
        Ok(picks.map(|(token, value)| Pick { token, lead: lead(value) }).collect())
    }

    // What should be.

    /// Starts a text.
    pub(super) fn fresh(&mut self, context: &[u32]) -> Found<()> {
        self.reset(0)?;
        self.prefill(0, context).map(drop)
    }

    /// The pick after a text, by one prefill.
    pub(super) fn plain(&mut self, text: &[u32]) -> Found<Pick> {
        self.reset(0)?;
        Ok(self.prefill(0, text)?.0)
    }

    /// The picks of a tree after a context, path by path.
    pub(super) fn plain_tree(&mut self, context: &[u32], tree: &DraftTree) -> Found<Vec<Pick>> {
        self.plain_slots(context, tree, &Vec::from_iter(0..tree.len()))
    }

    /// The same of some slots.
    pub(super) fn plain_slots(
        &mut self,
        context: &[u32],
        tree: &DraftTree,
        slots: &[usize],
    ) -> Found<Vec<Pick>> {
        let mut text = Vec::new();
        let mut picks = Vec::new();
        for &slot in slots {
            text.clear();
            text.extend_from_slice(context);
            text.extend(path_tokens(tree, slot));
            picks.push(self.plain(&text)?);
        }
        Ok(picks)
    }

    /// What the verifier picks now that `len` rows are committed, for a few trees.
    pub(super) fn probe(&mut self, len: usize, probes: &[DraftTree]) -> Found<Vec<Pick>> {
        let mut picks = Vec::new();
        for probe in probes {
            picks.extend(self.verify(len, probe)?);
        }
        Ok(picks)
    }

    /// The same after nothing but a prefill of `text`.
    pub(super) fn probe_plain(&mut self, text: &[u32], probes: &[DraftTree]) -> Found<Vec<Pick>> {
        self.fresh(text)?;
        self.probe(text.len(), probes)
    }

    // Comparison.

    /// Whether picks are the same, as far as the tolerance can tell.
    pub(super) fn is_same(&self, expected: Pick, found: Pick) -> bool {
        let tolerance = self.kit.lead_tolerance;
        match (expected.lead, found.lead) {
            (Some(expected_lead), Some(found_lead)) if expected.token == found.token => {
                // Equal ones may be infinite.
                expected_lead == found_lead || (expected_lead - found_lead).abs() <= tolerance
            }
            _ => expected.token == found.token || self.is_near_tie(expected, found),
        }
    }

    fn is_near_tie(&self, expected: Pick, found: Pick) -> bool {
        let leads = [expected.lead, found.lead].into_iter().flatten();
        let greatest = leads.fold(None, |greatest: Option<f32>, lead| {
            Some(greatest.map_or(lead, |greatest| greatest.max(lead)))
        });
        expected.token != found.token
            && greatest.is_some_and(|lead| lead <= self.kit.lead_tolerance)
    }

    /// Compares picks slot by slot; `experiment` says what was done.
    pub(super) fn compare(
        &mut self,
        expected: &[Pick],
        found: &[Pick],
        experiment: impl Fn() -> String,
    ) -> Found<()> {
        for (slot, (&expected, &found)) in expected.iter().zip(found).enumerate() {
            self.compare_at(slot, expected, found, &experiment)?;
        }
        Ok(())
    }

    /// Compares the picks at one slot.
    pub(super) fn compare_at(
        &mut self,
        slot: usize,
        expected: Pick,
        found: Pick,
        experiment: impl Fn() -> String,
    ) -> Found<()> {
        self.comparisons += 1;
        self.near_ties += usize::from(self.is_near_tie(expected, found));
        if self.is_same(expected, found) {
            return Ok(());
        }
        Err(Box::new(Finding::Pick {
            experiment: experiment(),
            slot,
            expected: expected.token,
            found: found.token,
            expected_lead: expected.lead,
            found_lead: found.lead,
        }))
    }

    // Random cases.

    /// A number below `limit`, by SplitMix64.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }

    /// A token that is not 0 and not in `taken`.
    pub(super) fn token(&mut self, taken: &[u32]) -> u32 {
        let others = self.capabilities.vocab_size - 1;
        let first = self.below(others);
        let mut tokens = (first..first + others).map(|index| (index % others) as u32 + 1);
        tokens.find(|token| !taken.contains(token)).unwrap_or(first as u32 + 1)
    }

    /// A text of 3 to 8 tokens.
    pub(super) fn context(&mut self) -> Vec<u32> {
        let len = 3 + self.below(6);
        (0..len).map(|_| self.token(&[])).collect()
    }

    /// Slots of the largest tree that checks use, wide ones aside. Its tokens are distinct and not 0,
    /// and there is one more, to change one to.
    pub(super) fn max_slots(&self) -> usize {
        12.min(self.capabilities.max_slots).min(self.capabilities.vocab_size - 2)
    }

    /// A tree of the given parents and distinct tokens that are not 0.
    pub(super) fn tree(&mut self, parents: &[i32]) -> DraftTree {
        let mut tokens = Vec::new();
        for _ in parents {
            let token = self.token(&tokens);
            tokens.push(token);
        }
        grow(&tokens, parents)
    }

    /// A chain of at most `slots` slots.
    pub(super) fn chain(&mut self, slots: usize) -> DraftTree {
        let slots = slots.min(self.max_slots()) as i32;
        self.tree(&Vec::from_iter(-1..slots - 1))
    }

    /// A random tree that branches; deep or wide.
    pub(super) fn random_tree(&mut self) -> DraftTree {
        let slots = 4 + self.below(self.max_slots() - 3);
        let last_parents = [2, 3, slots][self.below(3)];
        let mut parents = vec![-1, 0, 0];
        while parents.len() < slots {
            let first = parents.len().saturating_sub(last_parents);
            parents.push((first + self.below(parents.len() - first)) as i32);
        }
        self.tree(&parents)
    }

    /// A tree of many slots, or a chain if there can be no trees; `None` if other
    /// trees are as large. Its tokens are not distinct.
    pub(super) fn wide_tree(&mut self) -> Option<DraftTree> {
        // A context comes before it.
        let room = self.capabilities.max_len - 8;
        let slots = self.kit.wide_slots.min(self.capabilities.max_slots).min(room);
        if slots <= self.max_slots() {
            return None;
        }
        // Paths are short, and pass through all words of a row of bits.
        let (last_parents, max_depth) =
            if self.trees().is_ok() { (24, 16) } else { (1, usize::MAX) };
        let mut tree = DraftTree::new(self.token(&[]));
        // In a tiny vocabulary a node may have all tokens below it already.
        for _ in 0..slots.saturating_mul(4) {
            if tree.len() == slots {
                break;
            }
            let first = tree.len().saturating_sub(last_parents);
            let parent = first + self.below(tree.len() - first);
            let is_deep = tree.depths()[parent] as usize >= max_depth;
            let token = self.token(&[]);
            // A sibling may have the token.
            let _ = tree.push(if is_deep { 0 } else { parent }, token, 0.0);
        }
        Some(tree)
    }

    /// Some slots of a wide tree: about one in eight, those at the ends of words of
    /// 32 bits, and the last.
    pub(super) fn some_slots(&mut self, tree: &DraftTree) -> Vec<usize> {
        let last = tree.len() - 1;
        let mut is_kept =
            |slot: usize| slot == last || matches!(slot % 32, 0 | 31) || self.below(8) == 0;
        (0..tree.len()).filter(|&slot| is_kept(slot)).collect()
    }

    /// Trees, or chains if there can be none, that show what is committed.
    pub(super) fn probes(&mut self) -> [DraftTree; 2] {
        let second = if self.trees().is_ok() { self.random_tree() } else { self.chain(4) };
        [self.chain(3), second]
    }

    /// Whether trees can be verified; if not, why.
    pub(super) fn trees(&self) -> Result<(), &'static str> {
        if self.capabilities.attention == Attention::Causal {
            Err("the verifier attends causally only")
        } else if self.capabilities.recurrence == Recurrence::Sequential {
            Err("the verifier's recurrent layers run in slot order")
        } else if self.max_slots() < 6 {
            Err("the verifier takes fewer than 6 slots, or has as few tokens")
        } else {
            Ok(())
        }
    }
}

/// The round of `tree` after `start` rows, with its mask in `mask` if the verifier reads one.
pub(super) fn round<'a>(
    capabilities: &Capabilities,
    start: usize,
    tree: &'a DraftTree,
    mask: &'a mut AncestorMask,
) -> Round<'a> {
    if capabilities.mask != MaskForm::Bits || tree.is_chain() {
        return Round::new(start, tree, None);
    }
    mask.build(tree);
    Round::new(start, tree, Some(mask))
}

/// What picks depend on where those off the path are not wanted.
pub(super) fn asking<'a>(
    sampler: &'a mut Sampler,
    tokens: &'a [u32],
    tree: Option<&'a DraftTree>,
    by_id: &'a mut bool,
) -> PickContext<'a> {
    let at_least = PickRule::Argmax;
    PickContext { sampler, tokens, tree, stop_tokens: &[], everywhere: false, at_least, by_id }
}

/// The plan for the path from the root to slot `last`.
pub(super) fn plan_to(start: usize, tree: &DraftTree, last: usize) -> CommitPlan {
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    // Checks choose slots of the tree; the bonus is not in a plan.
    let is_set = outcome.set(tree, last, 0);
    debug_assert!(is_set.is_ok());
    plan.set(start, &outcome);
    plan
}

/// Tokens from the root to a slot.
pub(super) fn path_tokens(tree: &DraftTree, slot: usize) -> Vec<u32> {
    let mut path: Vec<u32> = tree.ancestors(slot).map(|slot| tree.tokens()[slot]).collect();
    path.reverse();
    path
}

/// A tree of parents that come before their children. A token that a sibling has
/// already is left out, which happens in tiny vocabularies only.
pub(super) fn grow(tokens: &[u32], parents: &[i32]) -> DraftTree {
    let mut tree = DraftTree::new(tokens[0]);
    for (&token, &parent) in tokens.iter().zip(parents).skip(1) {
        let _ = tree.push(parent as usize, token, 0.0);
    }
    tree
}

/// A case in words, to be done again.
pub(super) fn describe(context: &[u32], tree: &DraftTree) -> String {
    let (tokens, parents) = (tree.tokens(), tree.parents());
    format!("after {context:?}, tree of tokens {tokens:?} and parents {parents:?}")
}

fn failed(call: &'static str, error: &dyn std::error::Error) -> Box<Finding> {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    Box::new(Finding::Engine { call, error: text })
}
