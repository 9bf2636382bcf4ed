//! The kit passes on verifiers that are right, and names the fault of those that are not.

#[path = "../examples/custom_verifier.rs"]
mod custom_verifier;

use ddtree::{
    Attention, Capabilities, CommitPlan, DraftTree, Picks, Prefill, Recurrence, Round, Stage,
    Verifier,
    conformance::{Check, Failure, Finding, Kit, Report, Verdict, arrays},
};

/// What can be wrong with the toy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    // The ten that integrations are known for; the two that a verifier cannot show are in the tests of arrays.
    SlotIndexPositions,
    MaskBySlotOrder,
    PrefixCommit,
    BonusKept,
    StaleStateAfterZeroAcceptance,
    FeaturesBySlotOrder,
    ZeroIsPadding,
    NodesByDepthAndToken,
    PicksOfThePreviousRound,
    // One for every other check.
    NotDeterministic,
    ResetKeepsTheLength,
    SplitPositions,
    RootOnePositionLate,
    ChainNotCausal,
    ThreeAncestors,
    CommitForgetsState,
    CommitOfTheFirstTree,
    PrefillSeesRejected,
    ResetToPrefixKeepsARow,
    ErrorDropsARow,
    TreePositionsWrap,
    OneMaskWord,
    WrongFromSlot33,
    CommitsSlotsModulo64,
    CacheOneRowShort,
    // These show only where logits are handed over.
    SkippedRowsKeepTheCursor,
    RefusedPrefillIsCommitted,
}

/// A row of the cache: what it holds depends on everything that it has seen.
#[derive(Clone, Copy)]
struct Row {
    key: u64,
    position: u64,
}

/// A model of one attention layer with relative positions and one recurrent layer.
struct Toy {
    fault: Fault,
    logits: bool,
    // What is added to every logit of a verification at most: batch-dependent arithmetic.
    noise: f32,
    capabilities: Capabilities,
    rows: Vec<Row>,
    committed: usize,
    // What was committed before the last reset.
    stale: Vec<Row>,
    state: u64,
    // Of the last verification: the states and features of its slots.
    states: Vec<u64>,
    features: Vec<u64>,
    verified: Option<usize>,
    first_rows: Option<Vec<Row>>,
    previous: Option<Vec<u64>>,
    calls: u64,
    fail: Option<Stage>,
}

#[derive(Debug, thiserror::Error)]
#[error("injected")]
struct Injected;

const VOCAB: u64 = 61;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Toy {
    fn new(fault: Fault) -> Self {
        Self {
            fault,
            logits: false,
            noise: 0.0,
            capabilities: Capabilities::new(VOCAB as usize, 512),
            rows: Vec::new(),
            committed: 0,
            stale: Vec::new(),
            state: 0,
            states: Vec::new(),
            features: Vec::new(),
            verified: None,
            first_rows: None,
            previous: None,
            calls: 0,
            fail: None,
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// Appends the row of a token; gives what the model makes of it.
    fn forward(
        &mut self,
        token: u32,
        position: usize,
        visible: &[usize],
        state: u64,
    ) -> (u64, u64) {
        let position = position as u64;
        let state = mix(state, u64::from(token) + 1);
        // The last row has no place of its own: it overwrites the one before.
        let last = self.capabilities.max_len - 1;
        let overwrites = self.has(Fault::CacheOneRowShort) && self.rows.len() == last;
        let seen = visible.iter().filter(|&&row| !(overwrites && row + 1 == last));
        let seen = seen.fold(0u64, |sum, &row| {
            let Row { key, position: at } = self.rows[row];
            sum.wrapping_add(mix(key, position.wrapping_sub(at)))
        });
        let hidden = mix(mix(u64::from(token), seen), state);
        self.rows.push(Row { key: hidden, position });
        (hidden, state)
    }

    fn hand_over(&self, hidden: &[u64], picks: &mut Picks<'_>, noise: f32) -> Result<(), Injected> {
        let vocab_size = self.capabilities.vocab_size as u64;
        let mut cursor = 0;
        for &hidden_of_slot in hidden {
            if !self.logits {
                picks.push((hidden_of_slot % vocab_size) as u32);
                continue;
            }
            let hidden = hidden[cursor];
            if !picks.wanted() {
                cursor += usize::from(!self.has(Fault::SkippedRowsKeepTheCursor));
                picks.skip();
                continue;
            }
            cursor += 1;
            let logit = |token| (mix(hidden, token) % 10_000) as f32 / 1_000.0;
            let noisy =
                |token| logit(token) + noise * (mix(hidden, token + 99) % 100) as f32 / 100.0;
            let row: Vec<f32> = (0..vocab_size).map(noisy).collect();
            picks.push_logits(&row).map_err(|_| Injected)?;
        }
        Ok(())
    }

    fn fails(&mut self, stage: Stage) -> Result<(), Injected> {
        if self.fail.take_if(|fail| *fail == stage).is_none() {
            return Ok(());
        }
        if self.has(Fault::ErrorDropsARow) {
            self.rows.remove(0);
            self.committed -= 1;
        }
        Err(Injected)
    }
}

impl Verifier for Toy {
    type Features = Vec<Vec<f32>>;
    type Error = Injected;

    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn reset(&mut self, keep: usize) -> Result<(), Injected> {
        // The state of a prefix is not kept; a toy without one is asked for that check.
        if keep > 0 && self.capabilities.recurrence != Recurrence::None {
            return Err(Injected);
        }
        self.stale = self.rows[..self.committed].to_vec();
        let more = usize::from(self.has(Fault::ResetToPrefixKeepsARow) && keep > 0);
        self.committed = self.committed.min(keep + more);
        self.rows.truncate(self.committed);
        self.state = 0;
        self.verified = None;
        self.first_rows = None;
        Ok(())
    }

    fn prefill(
        &mut self,
        prefill: &Prefill<'_>,
        picks: &mut Picks<'_>,
    ) -> Result<Self::Features, Injected> {
        if !self.has(Fault::PrefillSeesRejected) {
            self.rows.truncate(self.committed);
        }
        let (committed, state) = (self.rows.len(), self.state);
        let start = if self.has(Fault::SplitPositions) { 0 } else { prefill.start() };
        let mut features = Vec::new();
        for (index, &token) in prefill.tokens().iter().enumerate() {
            let visible: Vec<usize> = (0..self.rows.len()).collect();
            let state = self.state;
            let (hidden, state) = self.forward(token, start + index, &visible, state);
            self.state = self.recurrent(state);
            features.push(hidden);
        }
        if let Err(error) = self.fails(Stage::Prefill) {
            self.rows.truncate(committed.min(self.committed));
            self.state = state;
            return Err(error);
        }
        self.calls += 1;
        let noise = if self.has(Fault::NotDeterministic) { self.calls } else { 0 };
        let mut last = features[features.len() - 1].wrapping_add(noise);
        if self.has(Fault::ResetKeepsTheLength) {
            last =
                self.stale.iter().skip(self.rows.len()).fold(last, |last, row| mix(last, row.key));
        }
        if let Err(error) = self.hand_over(&[last], picks, 0.0) {
            if self.has(Fault::RefusedPrefillIsCommitted) {
                self.committed = self.rows.len();
            } else {
                self.rows.truncate(self.committed);
                self.state = state;
            }
            return Err(error);
        }
        self.committed = self.rows.len();
        Ok(features.iter().map(|&hidden| row(hidden)).collect())
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Injected> {
        let tree = round.tree();
        if tree.len() > self.capabilities.max_slots {
            return Err(Injected);
        }
        self.rows.truncate(self.committed);
        self.states.clear();
        self.features.clear();
        let base = self.rows.len();
        let late = usize::from(self.has(Fault::RootOnePositionLate));
        for (slot, position) in round.positions().enumerate() {
            let position = late
                + if self.has(Fault::SlotIndexPositions) { round.start() + slot } else { position };
            let wraps = self.has(Fault::TreePositionsWrap);
            let position = if wraps { position % 64 } else { position };
            let sees = |key: usize| match round.mask() {
                _ if self.has(Fault::MaskBySlotOrder) => key < slot,
                Some(_) if self.has(Fault::OneMaskWord) && key >= 64 => false,
                Some(mask) => mask.is_visible(slot, key) && key != slot,
                None => key < slot,
            };
            let mut visible: Vec<usize> = (0..base).collect();
            visible.extend((0..slot).filter(|&key| sees(key)).map(|key| base + key));
            let deep = round.mask().is_some() && visible.len() > base + 3;
            if self.has(Fault::ThreeAncestors) && deep {
                visible.remove(base);
            }
            let parent = usize::try_from(tree.parents()[slot]);
            let state = parent.map_or(self.state, |parent| self.states[parent]);
            let (mut hidden, state) = self.forward(tree.tokens()[slot], position, &visible, state);
            if self.has(Fault::WrongFromSlot33) && slot >= 33 {
                hidden = mix(hidden, 33);
            }
            if self.has(Fault::ChainNotCausal) && round.mask().is_none() && slot + 1 < tree.len() {
                hidden = mix(hidden, u64::from(tree.tokens()[slot + 1]));
            }
            self.states.push(self.recurrent(state));
            self.features.push(hidden);
        }
        self.verified = Some(base);
        self.first_rows.get_or_insert_with(|| self.rows[base..].to_vec());
        self.fails(Stage::Verify)?;

        let mut hidden = self.features.clone();
        if self.has(Fault::ZeroIsPadding) {
            let size = tree.tokens().iter().filter(|&&token| token != 0).count();
            hidden[size..].fill(0);
        }
        if self.has(Fault::NodesByDepthAndToken) {
            let key = |slot: usize| (tree.depths()[slot], tree.tokens()[slot]);
            for (slot, hidden) in hidden.iter_mut().enumerate() {
                let last = (0..tree.len()).rfind(|&other| key(other) == key(slot));
                *hidden = self.features[last.unwrap()];
            }
        }
        if self.has(Fault::PicksOfThePreviousRound) {
            let mut old = self.previous.replace(hidden.clone()).unwrap_or_else(|| hidden.clone());
            old.resize(hidden.len(), 7);
            hidden = old;
        }
        self.hand_over(&hidden, picks, self.noise)
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Self::Features, Injected> {
        self.fails(Stage::Commit)?;
        let base = self.verified.take().expect("a verification comes first");
        let slots: Vec<usize> = plan.path().iter().map(|&slot| slot as usize).collect();
        let count = slots.len();
        let last = slots[count - 1];
        let wraps = self.has(Fault::CommitsSlotsModulo64);
        let slots = slots.into_iter().map(|slot| if wraps { slot % 64 } else { slot });
        let slots = Vec::from_iter(slots);
        let mut rows: Vec<Row> = slots.iter().map(|&slot| self.rows[base + slot]).collect();
        if self.has(Fault::PrefixCommit) {
            rows = self.rows[base..base + count].to_vec();
        }
        if self.has(Fault::BonusKept) {
            rows.extend(self.rows.get(base + last + 1));
        }
        if self.has(Fault::CommitOfTheFirstTree) {
            let first = self.first_rows.as_ref().unwrap();
            rows = slots.iter().map(|&slot| first[slot.min(first.len() - 1)]).collect();
        }
        self.first_rows = None;
        let zero = count == 1 && self.states.len() > 1;
        self.state = match self.fault {
            Fault::StaleStateAfterZeroAcceptance if zero => self.states[self.states.len() - 1],
            Fault::CommitForgetsState if count > 1 => self.state,
            _ => self.states[last],
        };
        let by_slot = self.has(Fault::FeaturesBySlotOrder);
        let features =
            (0..count).map(|step| self.features[if by_slot { step } else { slots[step] }]);
        let features = features.map(row).collect();
        // Rejected rows stay behind the committed ones, as in a cache that is not cleared.
        let rejected = self.rows.split_off(base);
        self.rows.extend(rows);
        self.committed = self.rows.len();
        if self.has(Fault::PrefillSeesRejected) {
            self.rows.extend(rejected.last());
        }
        Ok(features)
    }
}

impl Toy {
    fn recurrent(&self, state: u64) -> u64 {
        if self.capabilities.recurrence == Recurrence::None { 0 } else { state }
    }
}

fn row(hidden: u64) -> Vec<f32> {
    vec![(hidden % 1_000) as f32, (hidden >> 32 & 0xff) as f32]
}

fn run(toy: &mut Toy) -> Report {
    Kit::new(toy)
        .features(0.0, |features| features.clone())
        .inject(|toy: &mut Toy, stage| toy.fail = Some(stage))
        .run()
}

/// A toy with exact recurrent layers, except where going back to a prefix is asked for.
fn toy(fault: Fault) -> Toy {
    let mut toy = Toy::new(fault);
    if fault != Fault::ResetToPrefixKeepsARow {
        toy.capabilities.recurrence = Recurrence::ExactTrees;
    }
    toy
}

fn verdict(report: &Report, check: Check) -> &Verdict {
    &report.outcome(check).unwrap().verdict
}

#[test]
fn a_verifier_that_is_right_passes() {
    for logits in [false, true] {
        for recurrence in [Recurrence::None, Recurrence::ExactTrees] {
            let mut toy = Toy { logits, ..Toy::new(Fault::None) };
            toy.capabilities.recurrence = recurrence;
            let report = run(&mut toy);
            assert!(report.passed(), "{report}");
            for outcome in report.outcomes() {
                let skipped =
                    recurrence != Recurrence::None && outcome.check == Check::ResetToPrefix;
                assert_eq!(outcome.verdict == Verdict::Passed, !skipped, "{outcome}");
                assert!(outcome.comparisons > 0 || skipped, "{outcome} compared nothing");
                assert_eq!(outcome.near_ties, 0);
            }
        }
    }
}

#[test]
fn the_first_check_that_fails_names_the_fault() {
    for (fault, check) in [
        (Fault::SlotIndexPositions, Check::PositionsFollowDepth),
        (Fault::MaskBySlotOrder, Check::SiblingsDoNotSeeEachOther),
        (Fault::PrefixCommit, Check::CommitScatteredPath),
        (Fault::BonusKept, Check::BonusNotKept),
        (Fault::StaleStateAfterZeroAcceptance, Check::ZeroAcceptance),
        (Fault::FeaturesBySlotOrder, Check::FeaturesByPath),
        (Fault::ZeroIsPadding, Check::TokenZero),
        (Fault::NodesByDepthAndToken, Check::EqualTokens),
        (Fault::PicksOfThePreviousRound, Check::FreshPicks),
        (Fault::NotDeterministic, Check::PrefillRepeats),
        (Fault::ResetKeepsTheLength, Check::Reset),
        (Fault::SplitPositions, Check::PrefillSplit),
        (Fault::RootOnePositionLate, Check::LoneRoot),
        (Fault::ChainNotCausal, Check::ChainEqualsPlain),
        (Fault::ThreeAncestors, Check::TreeEqualsPaths),
        (Fault::CommitForgetsState, Check::CommitPrefix),
        (Fault::CommitOfTheFirstTree, Check::RepeatedVerify),
        (Fault::PrefillSeesRejected, Check::PrefillAfterRounds),
        (Fault::ResetToPrefixKeepsARow, Check::ResetToPrefix),
        (Fault::ErrorDropsARow, Check::ErrorRecovery),
        (Fault::TreePositionsWrap, Check::LongRun),
        (Fault::OneMaskWord, Check::TreeEqualsPaths),
        (Fault::WrongFromSlot33, Check::TreeEqualsPaths),
        (Fault::CommitsSlotsModulo64, Check::CommitScatteredPath),
        (Fault::CacheOneRowShort, Check::FullCache),
        (Fault::SkippedRowsKeepTheCursor, Check::UnwantedSlots),
        (Fault::RefusedPrefillIsCommitted, Check::ErrorRecovery),
    ] {
        let needs_logits =
            matches!(fault, Fault::SkippedRowsKeepTheCursor | Fault::RefusedPrefillIsCommitted);
        for seed in 0..3 {
            for logits in [false, true] {
                if needs_logits && !logits {
                    continue;
                }
                let mut toy = Toy { logits, ..toy(fault) };
                let report = Kit::new(&mut toy)
                    .seed(seed)
                    .features(0.0, |features| features.clone())
                    .inject(|toy: &mut Toy, stage| toy.fail = Some(stage))
                    .run();
                let found = report.first_failure().map(|(check, _)| check);
                assert_eq!(found, Some(check), "{fault:?}, seed {seed}\n{report}");
                assert!(report.to_string().ends_with(check.cause()));
            }
        }
    }
}

#[test]
fn a_fault_that_changes_no_pick_shows_in_the_lead_of_the_logits() {
    // Noise of half a logit flips few picks, and is far above the tolerance.
    let mut noisy = Toy { logits: true, noise: 0.02, ..toy(Fault::None) };
    let report = Kit::new(&mut noisy).run();
    let Some((
        Check::FreshPicks | Check::LoneRoot,
        Finding::Pick { expected_lead, found_lead, .. },
    )) = report.first_failure()
    else {
        panic!("{report}");
    };
    assert!(expected_lead.is_some() && found_lead.is_some());
    // An engine with such arithmetic says so. Picks that flip within it are near-ties.
    let report = Kit::new(&mut noisy).lead_tolerance(0.05).trials(40).run();
    assert!(report.passed(), "{report}");
    assert!(report.outcomes().iter().any(|outcome| outcome.near_ties > 0), "{report}");
}

#[test]
fn picks_note_the_lead_of_the_best_logit() {
    let (mut ids, mut leads) = (vec![9], vec![9.0]);
    let mut picks = Picks::with_leads(&mut ids, &mut leads);
    picks.push_logits(&[1.0, 3.5, 3.0]).unwrap();
    picks.push(4);
    picks.skip();
    picks.push_logits(&[2.0, 2.0]).unwrap();
    picks.push_logits(&[f32::NEG_INFINITY, 1.0]).unwrap();
    picks.push_logits(&[7.0]).unwrap();
    assert!(picks.push_logits(&[f32::NAN]).is_err());
    assert_eq!(ids, [1, 4, Picks::SKIPPED, 0, 1, 0]);
    assert_eq!((leads[0], leads[3]), (0.5, 0.0));
    assert!(leads[1].is_nan() && leads[2].is_nan());
    assert_eq!(leads[4..], [f32::INFINITY; 2]);
}

#[test]
fn what_a_verifier_cannot_do_is_skipped_with_a_reason() {
    let mut causal = toy(Fault::None);
    causal.capabilities.attention = Attention::Causal;
    let mut sequential = toy(Fault::None);
    sequential.capabilities.recurrence = Recurrence::Sequential;
    let mut narrow = toy(Fault::None);
    narrow.capabilities.max_slots = 4;
    for toy in [&mut causal, &mut sequential, &mut narrow] {
        let report = run(toy);
        assert!(report.passed(), "{report}");
        assert!(matches!(verdict(&report, Check::CommitScatteredPath), Verdict::Skipped(_)));
        assert_eq!(verdict(&report, Check::CommitPrefix), &Verdict::Passed);
        assert_eq!(verdict(&report, Check::LongRun), &Verdict::Passed);
    }
    // Also as many slots as the smallest tree has, and as a wide one has.
    for slots in [1, 2, 3, 6, 13, 33] {
        let mut few = toy(Fault::None);
        few.capabilities.max_slots = slots;
        let report = run(&mut few);
        assert!(report.passed(), "{report}");
    }
    // As few tokens as slots.
    for (vocab_size, seed) in (8..15).flat_map(|size| [(size, 1), (size, 2), (size, 3)]) {
        let mut few = toy(Fault::None);
        few.capabilities.vocab_size = vocab_size;
        let report = Kit::new(&mut few).seed(seed).run();
        assert!(report.passed(), "{vocab_size} tokens, seed {seed}: {report}");
        assert_eq!(verdict(&report, Check::TreeEqualsPaths), &Verdict::Passed);
    }
    let mut tiny = toy(Fault::None);
    tiny.capabilities.max_len = 30;
    let report = run(&mut tiny);
    assert!(report.outcomes().iter().all(|o| matches!(o.verdict, Verdict::Skipped(_))), "{report}");
    assert!(!report.passed() && report.to_string().ends_with("nothing could be checked"));
    let mut no_slots = toy(Fault::None);
    no_slots.capabilities.max_slots = 0;
    let report = run(&mut no_slots);
    assert!(report.outcomes().iter().all(|o| matches!(o.verdict, Verdict::Skipped(_))), "{report}");
    // Without a single random case, one is run nevertheless.
    let report = Kit::new(&mut toy(Fault::MaskBySlotOrder)).trials(0).run();
    assert!(!report.passed(), "{report}");
    // A cache that is larger than what is filled is not said to be right.
    let report = Kit::new(&mut toy(Fault::CacheOneRowShort)).fill(511).run();
    assert!(matches!(verdict(&report, Check::FullCache), Verdict::Skipped(_)), "{report}");
    assert!(report.passed(), "{report}");
    // Wide trees can be left out.
    let report = Kit::new(&mut toy(Fault::WrongFromSlot33)).wide_slots(33).run();
    assert!(report.passed(), "{report}");
    // A verifier of chains is asked for a long one.
    let mut causal = toy(Fault::WrongFromSlot33);
    causal.capabilities.attention = Attention::Causal;
    let report = run(&mut causal);
    assert_eq!(report.first_failure().map(|(check, _)| check), Some(Check::ChainEqualsPlain));
    // Logits let the kit refuse a pick, whatever is injected.
    let mut commits = Toy { logits: true, ..toy(Fault::RefusedPrefillIsCommitted) };
    let report = Kit::new(&mut commits).run();
    assert_eq!(report.first_failure().map(|(check, _)| check), Some(Check::ErrorRecovery));
    // Without closures, features and errors are not checked.
    let report = Kit::new(&mut toy(Fault::FeaturesBySlotOrder)).run();
    assert!(matches!(verdict(&report, Check::FeaturesByPath), Verdict::Skipped(_)), "{report}");
    assert!(matches!(verdict(&report, Check::ErrorRecovery), Verdict::Skipped(_)), "{report}");
}

#[test]
fn engine_errors_and_wrong_counts_are_findings() {
    struct Broken(bool);
    impl Verifier for Broken {
        type Features = ();
        type Error = Injected;
        fn capabilities(&self) -> Capabilities {
            Capabilities::new(50, 100)
        }
        fn reset(&mut self, _: usize) -> Result<(), Injected> {
            Ok(())
        }
        fn prefill(&mut self, _: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Injected> {
            picks.push(if self.0 { 50 } else { 49 });
            Ok(())
        }
        fn verify(&mut self, _: &Round<'_>, _: &mut Picks<'_>) -> Result<(), Injected> {
            Err(Injected)
        }
        fn commit(&mut self, _: &CommitPlan) -> Result<(), Injected> {
            Err(Injected)
        }
    }
    let report = Kit::new(&mut Broken(true)).run();
    let Some((Check::PrefillRepeats, Finding::Picks { found, accepted: 1, .. })) =
        report.first_failure()
    else {
        panic!("{report}");
    };
    assert_eq!(found, &[50]);
    let report = Kit::new(&mut Broken(false)).run();
    let Some((Check::Reset, Finding::Engine { call: "verify", error })) = report.first_failure()
    else {
        panic!("{report}");
    };
    assert_eq!(error, "injected");
    // The text of an error is that of its sources too, each once.
    struct Nan;
    impl Verifier for Nan {
        type Features = ();
        type Error = ddtree::Error;
        fn capabilities(&self) -> Capabilities {
            Capabilities::new(50, 100)
        }
        fn reset(&mut self, _: usize) -> Result<(), ddtree::Error> {
            Ok(())
        }
        fn prefill(&mut self, _: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), ddtree::Error> {
            picks.push_logits(&[f32::NAN; 50])
        }
        fn verify(&mut self, _: &Round<'_>, _: &mut Picks<'_>) -> Result<(), ddtree::Error> {
            Ok(())
        }
        fn commit(&mut self, _: &CommitPlan) -> Result<(), ddtree::Error> {
            Ok(())
        }
    }
    let report = Kit::new(&mut Nan).run();
    let Some((Check::PrefillRepeats, Finding::Engine { call: "prefill", error })) =
        report.first_failure()
    else {
        panic!("{report}");
    };
    assert_eq!(
        error,
        "logits of row 0 are refused: logits[0] is NaN, every entry must be finite or -inf"
    );
    // A verifier that never fails cannot be one whose errors were injected.
    let report = Kit::new(&mut toy(Fault::None)).inject(|_, _| ()).run();
    let failure = report.first_failure();
    assert_eq!(failure, Some((Check::ErrorRecovery, &Finding::NoError { call: "verify" })));
}

#[test]
fn arrays_of_kernels() {
    let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 2]).unwrap();
    let failed = |result: Result<(), Failure>| result.map_err(|f| f.check);

    assert_eq!(failed(arrays::positions(&tree, 9, [9u32, 10, 10, 11])), Ok(()));
    assert_eq!(
        failed(arrays::positions(&tree, 9, [9, 10, 11, 12])),
        Err(Check::PositionsFollowDepth)
    );
    assert_eq!(failed(arrays::positions(&tree, 9, [9])), Err(Check::PositionsFollowDepth));
    let wrapped = arrays::positions(&tree, usize::MAX, [-1, 0, 0, 1]);
    assert_eq!(failed(wrapped), Err(Check::PositionsFollowDepth));

    let right = |slot: usize, column: usize| {
        let key = column as isize - 2;
        key < 0 || slot == key as usize || key == 0 || (slot == 3 && key == 2)
    };
    assert_eq!(failed(arrays::mask(&tree, 4, 2, right)), Ok(()));
    assert_eq!(failed(arrays::mask(&tree, 6, 2, right)), Ok(()));
    assert_eq!(failed(arrays::mask(&tree, 3, 2, right)), Err(Check::Padding));
    let causal = |slot: usize, column: usize| column < 2 || column - 2 <= slot;
    assert_eq!(failed(arrays::mask(&tree, 4, 2, causal)), Err(Check::SiblingsDoNotSeeEachOther));
    let no_prefix = |slot: usize, column: usize| column >= 2 && right(slot, column);
    assert_eq!(failed(arrays::mask(&tree, 4, 2, no_prefix)), Err(Check::SiblingsDoNotSeeEachOther));
    let seen = |slot: usize, column: usize| right(slot, column) || column == 7;
    assert_eq!(failed(arrays::mask(&tree, 6, 2, seen)), Err(Check::Padding));
    let blind = |slot: usize, column: usize| slot < 4 && right(slot, column);
    assert_eq!(failed(arrays::mask(&tree, 6, 2, blind)), Err(Check::Padding));

    // A tree that was padded to its width by repeating a node.
    assert_eq!(failed(arrays::siblings(&[7, 4, 9, 9], &[-1, 0, 0, 2])), Ok(()));
    assert_eq!(
        failed(arrays::siblings(&[7, 4, 9, 4], &[-1, 0, 0, 0])),
        Err(Check::DistinctSiblings)
    );
    assert_eq!(failed(arrays::siblings(&[7, 4], &[-1])), Err(Check::DistinctSiblings));

    // Taps of a toy target whose layer i writes i: read at the right layers, one early, one late.
    let outputs: Vec<f32> = (0..9).map(|layer| layer as f32).collect();
    let tap = |ids: &[usize], shift: isize| -> Vec<f32> {
        let columns = ids.iter().flat_map(|&id| [outputs[id.saturating_add_signed(shift)]; 3]);
        columns.collect()
    };
    assert_eq!(failed(arrays::taps(&[1, 4, 7], &tap(&[1, 4, 7], 0))), Ok(()));
    for shift in [-1, 1] {
        let wrong = tap(&[1, 4, 7], shift);
        assert_eq!(failed(arrays::taps(&[1, 4, 7], &wrong)), Err(Check::Taps));
    }
    assert_eq!(failed(arrays::taps(&[1, 4, 7], &outputs[..8])), Err(Check::Taps));
    assert_eq!(failed(arrays::taps(&[], &[])), Err(Check::Taps));
    let failure = arrays::taps(&[8], &[7.0]).unwrap_err();
    assert!(failure.to_string().contains("column 0: found 7, expected 8"), "{failure}");
}

#[test]
fn compaction_of_rows() {
    let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 2]).unwrap();
    let (mut outcome, mut plan) = (ddtree::Acceptance::new(), CommitPlan::new());
    ddtree::walk(&tree, &[9, 0, 5, 1], &mut outcome).unwrap();
    plan.set(3, &outcome);
    let moved = [0, 1, 2, 3, 5, 6, 6];
    assert_eq!(arrays::compaction(&plan, |row| moved[row]), Ok(()));
    // The leading rows instead of the path's; moves in the wrong order; a shifted prefix.
    for wrong in [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 6, 6, 6], [0, 0, 1, 3, 5, 6, 6]] {
        let failure = arrays::compaction(&plan, |row| wrong[row]).unwrap_err();
        assert_eq!(failure.check, Check::CommitScatteredPath);
    }
}

#[test]
fn names_and_causes_are_distinct() {
    let mut names: Vec<&str> = Check::ALL.iter().map(|check| check.name()).collect();
    names.extend(Check::ALL.iter().map(|check| check.cause()));
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 2 * Check::ALL.len());
    for (index, &check) in Check::ALL.iter().enumerate() {
        assert_eq!(check as usize, index);
    }
}

#[test]
fn the_custom_verifier_passes() {
    custom_verifier::main().unwrap();
    let report = Kit::new(&mut custom_verifier::Reciter::default()).run();
    assert!(report.passed(), "{report}");
    assert_eq!(verdict(&report, Check::LongRun), &Verdict::Passed);
}

#[cfg(feature = "candle")]
#[test]
fn the_candle_backend_passes() {
    use candle_core::{DType, Device};
    use ddtree::candle::{CandleTarget, DecoderModel, Taps};

    // The second has recurrent layers, which verify trees exactly.
    for name in ["tiny-qwen3", "tiny-qwen3_5"] {
        let folder = format!("{}/examples/models/{name}/target", env!("CARGO_MANIFEST_DIR"));
        let model = DecoderModel::load(folder, DType::F32, &Device::Cpu).unwrap();
        let mut target = CandleTarget::new(model, 256, &[0, 1]).unwrap();
        let report = Kit::new(&mut target)
            .trials(1)
            .text_len(24)
            .features(1e-3, |taps: &Taps| taps.hidden().unwrap().to_vec2().unwrap())
            .run();
        assert!(report.passed(), "{name}\n{report}");
        for outcome in report.outcomes() {
            let may_skip = matches!(outcome.check, Check::ErrorRecovery | Check::ResetToPrefix);
            assert!(may_skip || outcome.verdict == Verdict::Passed, "{name}: {outcome}");
            assert_eq!(outcome.near_ties, 0, "{name}: {outcome}");
        }
    }
}
