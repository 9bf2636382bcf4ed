//! Bad input has a defined result: an error that names the field, what was
//! found and what is accepted, or a documented meaning.

use ddtree::{
    Acceptance, Algorithm, Capabilities, CommitPlan, Committed, Config, DecodeError, Decoder,
    DraftTree, Drafter, Error, Expand, Finish, Picks, Plan, Prefill, Proposal, ProposalRequest,
    Request, Round, Session, TopK, Verifier, top_k::LogitsError, walk,
};

use crate::toy::{Guesser, Row, Target, VOCAB, decode, plain};

fn toys(max_len: usize) -> Decoder<(Target, Guesser)> {
    let config = Config::new(Algorithm::Tree).budget(9);
    Decoder::new((Target::new(max_len), Guesser::new(4, 50)), &config).unwrap()
}

/// The message and those of its sources say all of this, and nothing twice.
fn says(error: impl std::error::Error, parts: &[&str]) {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_says = cause.to_string();
        assert!(!message.contains(&cause_says), "{message:?} says {cause_says:?} already");
        message = format!("{message}: {cause_says}");
        source = cause.source();
    }
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn an_empty_proposal_gives_the_bonus_alone() {
    struct Silent;
    impl<F> Drafter<F> for Silent {
        type Error = std::convert::Infallible;
        fn horizon(&self) -> usize {
            4
        }
        fn reset(&mut self, _: usize) -> Result<(), Self::Error> {
            Ok(())
        }
        fn observe(&mut self, _: &Committed<'_>, _: &F) -> Result<(), Self::Error> {
            Ok(())
        }
        fn propose(&mut self, _: &ProposalRequest, _: &mut Proposal) -> Result<(), Self::Error> {
            Ok(())
        }
    }
    let config = Config::new(Algorithm::Tree);
    let mut decoder = Decoder::new((Target::new(50), Silent), &config).unwrap();
    let ended = decode(&mut decoder, &Request::new(&[1]).max_new_tokens(9));
    assert_eq!(ended, plain(&[1], 9, &[], 50));
}

#[test]
fn budget_zero_and_horizon_zero_decode_plainly() {
    for (budget, horizon) in [(0, 4), (9, 0), (0, 0)] {
        let config = Config::new(Algorithm::Tree).budget(budget);
        let engine = (Target::new(50), Guesser::new(horizon, 50));
        let mut decoder = Decoder::new(engine, &config).unwrap();
        assert_eq!(decoder.session().plan().algorithm(), Algorithm::Autoregressive);
        let ended = decode(&mut decoder, &Request::new(&[1]).max_new_tokens(9));
        assert_eq!(ended, plain(&[1], 9, &[], 50));
    }
}

// Rows were read beyond the vocabulary elsewhere.
#[test]
fn k_above_the_vocabulary_is_the_vocabulary() {
    let mut proposal = Proposal::new();
    proposal.push_logits(&[0.0, 1.0, 2.0], 50, &mut TopK::new()).unwrap();
    assert_eq!(proposal.depth(1).0, [2, 1, 0]);
    let config = Config::new(Algorithm::Tree).budget(500).top_k(400);
    let plan = Plan::resolve(&config, &Capabilities::new(100, 9999), 4).unwrap();
    assert_eq!(plan.tree().top_k, 100);
}

#[test]
fn fewer_entries_than_k_are_fine() {
    // The toy gives as many as its vocabulary has.
    let config = Config::new(Algorithm::Tree).budget(60).top_k(60);
    let mut capabilities = Capabilities::new(1000, 99);
    capabilities.max_slots = 61;
    let engine = (Target::with(capabilities), Guesser::new(4, 50));
    let mut decoder = Decoder::new(engine, &config).unwrap();
    assert_eq!(decoder.session().plan().tree().top_k, 60);
    let ended = decode(&mut decoder, &Request::new(&[1]).max_new_tokens(30));
    assert_eq!(ended, plain(&[1], 30, &[], 99));
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let error = Proposal::new().push(&[1, 2, 3], &[-0.1, -0.2]).unwrap_err();
    says(error, &["log_probs", "2 entries", "exactly 3"]);
}

#[test]
fn scores_that_cannot_rank_are_refused() {
    for (log_probs, found) in [
        ([f32::NAN, -1.0], "rank 0: found log-probability NaN"),
        ([f32::INFINITY, -1.0], "rank 0: found log-probability inf"),
        ([4.2, -1.0], "rank 0: found log-probability 4.2"),
        ([-1.0, -0.5], "rank 1: found log-probability -0.5 after -1"),
        ([-1.0, f32::NAN], "rank 1: found log-probability NaN"),
    ] {
        let mut proposal = Proposal::new();
        proposal.push(&[7], &[-0.1]).unwrap();
        let error = proposal.push(&[1, 2], &log_probs).unwrap_err();
        says(error, &["depth 2", found, "accepted"]);
    }
}

#[test]
fn duplicate_tokens_of_a_depth_are_refused() {
    let error = Proposal::new().push(&[4, 9, 4], &[-0.1, -0.2, -0.3]).unwrap_err();
    says(error, &["depth 1", "rank 2", "token 4 a second time", "distinct tokens"]);
}

// Padding made duplicate siblings, of which only one could ever be walked.
#[test]
fn duplicate_siblings_are_refused() {
    let error = DraftTree::from_parents(&[9, 4, 4], &[-1, 0, 0]).unwrap_err();
    says(error, &["slot 2", "token 4 a second time below slot 0", "distinct"]);
    let mut tree = DraftTree::from_parents(&[9, 4], &[-1, 0]).unwrap();
    says(tree.push(0, 4, 0.0).unwrap_err(), &["slot 2", "token 4"]);

    struct Twins;
    impl Expand for Twins {
        fn child(&mut self, _: &DraftTree, parent: usize, _: usize) -> Option<(u32, f32)> {
            (parent == 0).then_some((4, -0.5))
        }
    }
    let settings = ddtree::TreeSettings::default();
    let mut tree = DraftTree::new(1);
    let error = ddtree::BestFirst::new().build_with(&mut Twins, settings, &mut tree).unwrap_err();
    says(error, &["depth 1", "rank 1", "token 4 a second time below slot 0"]);
    assert_eq!(tree.tokens(), [1, 4], "what is left is a tree");
}

#[test]
fn parents_that_are_no_tree_are_refused() {
    for (parents, slot) in [(&[0, 0][..], 0), (&[-1, 1], 1), (&[-1, 5], 1), (&[-1, -1], 1)] {
        let error = DraftTree::from_parents(&[1, 2], parents).unwrap_err();
        says(error, &[&format!("slot {slot}"), &format!("parent {}", parents[slot]), "accepted"]);
    }
    says(DraftTree::from_parents(&[], &[]).unwrap_err(), &["no slots", "at least the root"]);
    says(DraftTree::from_parents(&[1], &[-1, 0]).unwrap_err(), &["parents", "2 entries", "1"]);
}

#[test]
fn logits_that_are_no_numbers_are_refused() {
    let mut ids = Vec::new();
    let mut picks = Picks::new(&mut ids);
    picks.push_logits(&[0.0, 2.0, 2.0]).unwrap();
    let error = picks.push_logits(&[0.0, f32::NAN]).unwrap_err();
    assert!(matches!(
        error,
        Error::Logits { row: 1, source: LogitsError::NotANumber { index: 1 } }
    ));
    says(error, &["row 1", "logits[1]", "NaN"]);
    assert!(picks.push_logits(&[]).is_err());
    assert_eq!(picks.ids(), [1], "ties go to the lowest id, and nothing else was added");
    let error = Proposal::new().push_logits(&[f32::INFINITY], 1, &mut TopK::new()).unwrap_err();
    says(error, &["row 0", "+inf"]);
}

#[test]
fn tokens_outside_the_vocabulary_are_refused_wherever_they_come_in() {
    let mut decoder = toys(50);
    for (request, field) in [
        (Request::new(&[1, 2, VOCAB]), "prompt[2]"),
        (Request::new(&[1]).stop_tokens(&[0, u32::MAX]), "stop_tokens[1]"),
    ] {
        says(decoder.start(&request).unwrap_err(), &[field, "found token", "below 13"]);
    }
    decoder.start(&Request::new(&[1, 2])).unwrap();
    decoder.step().unwrap();
    let before = decoder.session().tokens().to_vec();
    says(decoder.append(&[1, 13]).unwrap_err(), &["tokens[1]", "token 13"]);
    assert_eq!(decoder.session().tokens(), before);

    let plan =
        Plan::resolve(&Config::new(Algorithm::Tree), &Capabilities::new(VOCAB as usize, 50), 2);
    let mut session = Session::new(plan.unwrap());
    session.start(&Request::new(&[1])).unwrap();
    session.prefill().unwrap().1.push(VOCAB);
    says(session.prefilled().unwrap_err(), &["picks[0]", "token 13", "below 13"]);
    session.prefill().unwrap().1.push(3);
    session.prefilled().unwrap();
    // A drafter with a vocabulary of its own, whose map was forgotten.
    let (_, proposal) = session.proposal().unwrap();
    proposal.push(&[1, 2], &[-0.1, -0.2]).unwrap();
    proposal.push(&[40], &[-0.1]).unwrap();
    says(session.proposed().unwrap_err(), &["proposal.tokens[2]", "token 40", "below 13"]);
    let (_, proposal) = session.proposal().unwrap();
    proposal.push(&[1, 2], &[-0.1, -0.2]).unwrap();
    session.proposed().unwrap();
    session.verification().unwrap().1.extend(&[1, 2, 77]);
    says(session.verified().unwrap_err(), &["picks[2]", "token 77", "below 13"]);
    session.verification().unwrap().1.extend(&[1, 2, 3]);
    session.verified().unwrap();
}

#[test]
fn picks_of_the_wrong_length_are_refused() {
    let tree = DraftTree::from_parents(&[1, 2, 3], &[-1, 0, 0]).unwrap();
    let mut outcome = Acceptance::new();
    for picks in [&[][..], &[2], &[2, 3], &[2, 3, 4, 5]] {
        let found = format!("{} entries", picks.len());
        says(walk(&tree, picks, &mut outcome).unwrap_err(), &["picks", &found, "exactly 3"]);
    }
    let mut out = [0u32; 2];
    let error = Round::new(0, &tree, None).positions_into(&mut out).unwrap_err();
    says(error, &["positions", "2 entries", "exactly 3"]);
    let mut out = [0u8; 3];
    let error = Round::new(300, &tree, None).positions_into(&mut out).unwrap_err();
    says(error, &["position", "300"]);
}

/// A target that gives too few or too many picks, once.
struct Miscounting {
    target: Target,
    extra: bool,
    /// Whether it does so in a prefill, after so many others.
    after_prefills: Option<usize>,
    done: bool,
}

impl Verifier for Miscounting {
    type Features = Vec<Row>;
    type Error = crate::toy::Fault;

    fn capabilities(&self) -> Capabilities {
        self.target.capabilities()
    }

    fn reset(&mut self, keep: usize) -> Result<(), Self::Error> {
        self.target.reset(keep)
    }

    fn prefill(
        &mut self,
        prefill: &Prefill<'_>,
        picks: &mut Picks<'_>,
    ) -> Result<Vec<Row>, Self::Error> {
        let miscounts = self.after_prefills == Some(0) && !self.done;
        self.after_prefills = self.after_prefills.map(|left| left.saturating_sub(1));
        if miscounts {
            self.done = true;
            let rows = self.target.prefill(prefill, &mut Picks::new(&mut Vec::new()))?;
            picks.extend(if self.extra { &[1, 2] } else { &[] });
            return Ok(rows);
        }
        self.target.prefill(prefill, picks)
    }

    fn verify(&mut self, round: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Self::Error> {
        if self.done || self.after_prefills.is_some() {
            return self.target.verify(round, picks);
        }
        self.done = true;
        if self.extra {
            self.target.verify(round, picks)?;
            picks.push(0);
        }
        Ok(())
    }

    fn commit(&mut self, plan: &CommitPlan) -> Result<Vec<Row>, Self::Error> {
        self.target.commit(plan)
    }
}

#[test]
fn a_verifier_that_miscounts_once_loses_its_round_only() {
    for extra in [false, true] {
        let target = Target::new(50);
        let verifier = Miscounting { target, extra, after_prefills: None, done: false };
        let config = Config::new(Algorithm::Tree).budget(9);
        let mut decoder = Decoder::new((verifier, Guesser::new(3, 50)), &config).unwrap();
        decoder.start(&Request::new(&[1]).max_new_tokens(20)).unwrap();
        decoder.step().unwrap();
        let error = decoder.step().unwrap_err();
        assert!(matches!(error, DecodeError::Refused(Error::Length { field: "picks", .. })));
        while decoder.step().unwrap().is_some() {}
        assert_eq!(decoder.session().generated(), plain(&[1], 20, &[], 50).0);
    }
}

/// The rows of the prompt are in its cache by then.
#[test]
fn a_verifier_that_miscounts_after_the_prompt_starts_anew() {
    for (extra, append) in [(false, false), (true, false), (false, true)] {
        let (target, after_prefills) = (Target::new(50), Some(usize::from(append)));
        let verifier = Miscounting { target, extra, after_prefills, done: false };
        let config = Config::new(Algorithm::Tree).budget(9);
        let mut decoder = Decoder::new((verifier, Guesser::new(3, 50)), &config).unwrap();
        decoder.start(&Request::new(&[1, 2]).max_new_tokens(20)).unwrap();
        let mut prompt = vec![1, 2];
        if append {
            prompt.extend(decoder.step().unwrap().unwrap());
            decoder.append(&[7]).unwrap();
            prompt.push(7);
        }
        let error = decoder.step().unwrap_err();
        assert!(matches!(error, DecodeError::Refused(Error::Length { field: "picks", .. })));
        let before = decoder.session().generated().len();
        while decoder.step().unwrap().is_some() {}
        let expected = plain(&prompt, 20 - before, &[], 50).0;
        assert_eq!(decoder.session().generated()[before..], expected);
    }
}

#[test]
fn prompts_that_are_empty_or_do_not_fit_are_refused() {
    let mut decoder = toys(5);
    says(decoder.start(&Request::new(&[])).unwrap_err(), &["prompt", "0 tokens", "1 to 5 tokens"]);
    let error = decoder.start(&Request::new(&[1; 6])).unwrap_err();
    says(error, &["prompt", "6 tokens", "1 to 5 tokens"]);
    decoder.start(&Request::new(&[1; 5])).unwrap();
}

#[test]
fn a_cached_prefix_leaves_at_least_one_token_to_forward() {
    let mut decoder = toys(50);
    for rows in [3, 4, usize::MAX] {
        let error = decoder.start(&Request::new(&[1, 2, 3]).cached_prefix(rows)).unwrap_err();
        says(error, &["cached_prefix", &rows.to_string(), "less than the prompt's 3 tokens"]);
    }
}

#[test]
fn a_root_that_is_a_stop_token_is_never_drafted_below() {
    let first = plain(&[1], 1, &[], 50).0[0];
    let mut decoder = toys(50);
    let ended = decode(&mut decoder, &Request::new(&[1]).stop_tokens(&[first]));
    assert_eq!(ended, (vec![first], Finish::StopToken));
    assert_eq!(decoder.engine().1.log.len(), 0);
}

#[test]
fn max_new_tokens_zero_is_a_complete_text() {
    let mut decoder = toys(50);
    let ended = decode(&mut decoder, &Request::new(&[1]).max_new_tokens(0));
    assert_eq!(ended, (vec![], Finish::TokenLimit));
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let resolve =
        |config: Config| Plan::resolve(&config, &Capabilities::new(100, 100), 7).unwrap_err();
    let tree = || Config::new(Algorithm::Tree);
    says(resolve(tree().block_size(0)), &["block_size", "found 0", "at least 1"]);
    says(resolve(tree().block_size(9)), &["block_size", "found 9", "the drafter's, 8"]);
    says(resolve(tree().top_k(0)), &["top_k", "found 0", "at least 1"]);
    says(resolve(tree().log_prob_cutoff(0.5)), &["log_prob_cutoff", "0.5", "at most 0"]);
    says(resolve(tree().log_prob_cutoff(f64::NAN)), &["log_prob_cutoff", "NaN"]);
    says(resolve(tree().shadow(true)), &["shadow", "tree", "chain only"]);
    says("trees".parse::<Algorithm>().unwrap_err(), &["algorithm", "trees", "ar, chain or tree"]);
}

#[test]
fn capabilities_of_nothing_are_refused_by_name() {
    for (field, change) in [
        ("capabilities.vocab_size", (|c| c.vocab_size = 0) as fn(&mut Capabilities)),
        ("capabilities.max_len", |c| c.max_len = 0),
        ("capabilities.max_slots", |c| c.max_slots = 0),
    ] {
        let mut capabilities = Capabilities::new(100, 100);
        change(&mut capabilities);
        let error = Plan::resolve(&Config::default(), &capabilities, 7).unwrap_err();
        says(error, &[field, "found 0", "at least 1"]);
    }
}
