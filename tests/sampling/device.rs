//! Verifiers that pick on their own, and those that only say so.

use ddtree::{
    Algorithm, Capabilities, Config, DecodeError, Decoder, DraftTree, Error, PickRule, Plan,
    Request, Sampling, Session,
    conformance::{self, PickFault},
};

use crate::toy::{Hands, Language, Target, decode, engine};

fn warm() -> Sampling {
    Sampling::new().temperature(0.8).seed(6)
}

fn tree() -> DraftTree {
    DraftTree::from_parents(&[3, 1, 9, 4, 2, 7, 7], &[-1, 0, 0, 1, 1, 2, 5]).unwrap()
}

#[test]
fn picks_on_a_device_are_those_from_logits() {
    for hands in [
        Hands::Logits,
        Hands::Wanted,
        Hands::Device(PickRule::Argmax),
        Hands::Device(PickRule::Noise),
    ] {
        let mut target = Target::new(Language::new(300), hands);
        for sampling in [Sampling::new(), warm(), warm().top_k(4), warm().presence_penalty(0.5)] {
            conformance::check_picks(&mut target, &[5, 1, 2], &tree(), &sampling).unwrap();
        }
    }
    let request = Request::new(&[5, 1]).max_new_tokens(50).sampling(warm());
    let config = Config::new(Algorithm::Tree).budget(16);
    let texts = [Hands::Logits, Hands::Device(PickRule::Noise)]
        .map(|hands| decode(engine(300, hands), &config, &request, None).tokens);
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn conformance_finds_engines_that_ignore_settings() {
    let mut target = Target::new(Language::new(300), Hands::Ignorant);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert_eq!(fault, PickFault::Ids { rule: PickRule::Noise });
    let mut target = Target::new(Language::new(300), Hands::Nothing);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert_eq!(fault, PickFault::Count { found: 0, accepted: 1 });
    // It claims to do what it does not.
    let mut target =
        Faulty { target: Target::new(Language::new(300), Hands::Ignorant), forgets_depths: false };
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert!(matches!(fault, PickFault::Ids { rule: PickRule::Pipeline }), "{fault}");
    let wrong = Sampling::new().temperature(-1.0);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &wrong).unwrap_err();
    assert!(matches!(fault, PickFault::Refused(_)), "{fault}");
}

#[test]
fn conformance_finds_a_pick_that_differs() {
    let mut target =
        Faulty { target: Target::new(Language::new(300), Hands::Logits), forgets_depths: true };
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert!(matches!(fault, PickFault::Differs { slot: Some(1..), .. }), "{fault}");
}

/// Says that its token ids honour temperatures, and either leaves it at that or adds noise of the wrong position.
struct Faulty {
    target: Target,
    forgets_depths: bool,
}

impl ddtree::Verifier for Faulty {
    type Error = Error;
    type Features = ();

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.target.capabilities();
        capabilities.device_picks = PickRule::Noise;
        capabilities
    }

    fn reset(&mut self, keep: usize) -> Result<(), Error> {
        self.target.reset(keep)
    }

    fn prefill(
        &mut self,
        p: &ddtree::Prefill<'_>,
        picks: &mut ddtree::Picks<'_>,
    ) -> Result<(), Error> {
        if self.forgets_depths {
            self.target.hands = Hands::Device(PickRule::Noise);
        }
        self.target.prefill(p, picks)
    }

    fn verify(
        &mut self,
        r: &ddtree::Round<'_>,
        picks: &mut ddtree::Picks<'_>,
    ) -> Result<(), Error> {
        if !self.forgets_depths || picks.rule() == PickRule::Pipeline {
            return self.target.verify(r, picks);
        }
        // Every slot is treated as the root.
        let key = picks.noise().unwrap();
        for slot in 0..r.tree().len() {
            let mut path = vec![5];
            let nodes: Vec<usize> = r.tree().ancestors(slot).collect();
            path.extend(nodes.iter().rev().map(|&s| r.tree().tokens()[s]));
            let row = self.target.language.row_after(&path);
            let sum = |token: u32| {
                f64::from(row[token as usize]) / f64::from(key.temperature)
                    + ddtree::sample::gumbel(key.seed, key.position, token)
            };
            let token = (0..300).max_by(|&a, &b| sum(a).total_cmp(&sum(b))).unwrap();
            picks.push(token);
        }
        Ok(())
    }

    fn commit(&mut self, plan: &ddtree::CommitPlan) -> Result<(), Error> {
        self.target.commit(plan)
    }
}

#[test]
fn token_ids_are_refused_where_they_ignore_the_request() {
    let config = Config::new(Algorithm::Tree).budget(4);
    let mut decoder = Decoder::new(engine(20, Hands::Ignorant), &config).unwrap();
    decoder.start(&Request::new(&[1]).max_new_tokens(5).sampling(warm())).unwrap();
    let error = decoder.step().unwrap_err();
    assert!(matches!(error, DecodeError::Refused(Error::Unsupported { .. })), "{error}");
    assert!(decoder.session().generated().is_empty());
    // Greedy settings are what such an engine honours, and the session is not lost.
    decoder.start(&Request::new(&[1]).max_new_tokens(5)).unwrap();
    decoder.step().unwrap();
    // The same within a round: a penalty needs more than a temperature.
    let mut decoder = Decoder::new(engine(20, Hands::Device(PickRule::Noise)), &config).unwrap();
    let penalised = warm().repetition_penalty(1.1);
    decoder.start(&Request::new(&[1]).max_new_tokens(5).sampling(penalised)).unwrap();
    decoder.step().unwrap();
}

#[test]
fn a_verifier_without_logits_refuses_before_it_starts() {
    let mut capabilities = Capabilities::new(10, 100);
    capabilities.logits = false;
    let plan = Plan::resolve(&Config::default(), &capabilities, 3).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1])).unwrap();
    let error = session.start(&Request::new(&[1]).sampling(warm())).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(session.set_constraint(Some(Box::new(Anything))).is_err());
}

#[test]
fn a_drafter_can_couple_its_proposal_itself() {
    let plan = |coupled| {
        let config = Config::new(Algorithm::Chain).coupled(coupled);
        Plan::resolve(&config, &Capabilities::new(50, 100), 1).unwrap()
    };
    let request = Request::new(&[1, 2, 3]).sampling(warm());
    // Once as the session ranks it, and once as it is.
    let drafted = |coupled_by_drafter| {
        let mut session = Session::new(plan(true));
        session.start(&request).unwrap();
        session.prefill().unwrap().1.push_logits(&[0.0; 50]).unwrap();
        session.prefilled().unwrap();
        let (ask, proposal) = session.proposal().unwrap();
        let key = ask.noise().unwrap();
        assert_eq!((key.seed, key.temperature, key.position), (6, 0.8, ask.position() + 1));
        let tokens: Vec<u32> = (0..50).collect();
        proposal.push(&tokens, &[-3.9; 50]).unwrap();
        proposal.set_coupled(coupled_by_drafter);
        session.proposed().unwrap();
        let first = session.verification().unwrap().0.tree().tokens()[1];
        let noise = |token: u32| ddtree::sample::gumbel(key.seed, key.position, token);
        let noisiest = (0..50).max_by(|&a, &b| noise(a).total_cmp(&noise(b))).unwrap();
        (first, noisiest)
    };
    assert_eq!(drafted(true).0, 0);
    let (first, noisiest) = drafted(false);
    assert_eq!(first, noisiest);
    assert_ne!(first, 0);

    for (request, coupled) in [(Request::new(&[1]), true), (request.clone(), false)] {
        let mut session = Session::new(plan(coupled));
        session.start(&request).unwrap();
        session.prefill().unwrap().1.push_logits(&[0.0; 50]).unwrap();
        session.prefilled().unwrap();
        assert_eq!(session.proposal().unwrap().0.noise(), None);
    }
}

struct Anything;

impl ddtree::Constraint for Anything {
    fn constrain(&mut self, _: ddtree::TokenPath<'_>, _: &mut [f32]) {}
}

#[test]
fn a_skipped_slot_that_the_text_reaches_is_an_error() {
    let plan = Plan::resolve(&Config::default(), &Capabilities::new(10, 100), 3).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1])).unwrap();
    let (_, mut picks) = session.prefill().unwrap();
    picks.skip();
    assert!(matches!(session.prefilled(), Err(Error::Token { field: "picks", index: 0, .. })));
    let (_, mut picks) = session.prefill().unwrap();
    picks.push(2);
    session.prefilled().unwrap();
    let (_, proposal) = session.proposal().unwrap();
    proposal.push(&[4, 5], &[-0.5, -1.0]).unwrap();
    session.proposed().unwrap();
    let (_, mut picks) = session.verification().unwrap();
    picks.push(5);
    assert!(!picks.wanted());
    picks.skip();
    assert!(picks.wanted());
    picks.skip();
    assert!(matches!(session.verified(), Err(Error::Token { field: "picks", index: 2, .. })));
    let (_, mut picks) = session.verification().unwrap();
    picks.extend(&[5, 0]);
    picks.push_logits(&[0.0, 3.0]).unwrap();
    session.verified().unwrap();
    assert_eq!(session.outcome().unwrap().tokens(), [5, 1]);
}
