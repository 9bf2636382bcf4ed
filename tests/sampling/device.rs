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
    let mut target = faulty(Fault::IgnoresSettings);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert!(matches!(fault, PickFault::Ids { rule: PickRule::Pipeline }), "{fault}");
    let wrong = Sampling::new().temperature(-1.0);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &wrong).unwrap_err();
    assert!(matches!(fault, PickFault::Refused(_)), "{fault}");
    let fault = conformance::check_picks(&mut target, &[], &tree(), &warm()).unwrap_err();
    assert!(matches!(fault, PickFault::Refused(Error::Setting { field: "prompt", .. })), "{fault}");
}

#[test]
fn conformance_finds_a_pick_that_differs() {
    let mut target = faulty(Fault::ForgetsDepths);
    let fault = conformance::check_picks(&mut target, &[5], &tree(), &warm()).unwrap_err();
    assert!(matches!(fault, PickFault::Differs { slot: Some(1..), .. }), "{fault}");
}

#[test]
fn conformance_finds_a_device_that_reads_no_seed_or_half_of_one() {
    for of_seed in [|_| 0, |seed| seed & 0xffff_ffff, |seed| seed >> 32, |seed: u64| seed | 1 << 63]
    {
        for seed in [0, 42, 7 << 33] {
            let mut target = faulty(Fault::Seed(of_seed));
            let sampling = warm().seed(seed);
            let fault = conformance::check_picks(&mut target, &[5], &tree(), &sampling);
            assert!(matches!(fault, Err(PickFault::Differs { .. })), "seed {seed}");
        }
    }
    let mut right = faulty(Fault::Seed(|seed| seed));
    conformance::check_picks(&mut right, &[5], &tree(), &warm()).unwrap();
}

#[test]
fn conformance_finds_rows_that_are_shifted_by_skipped_slots() {
    let mut target = faulty(Fault::SkippedRowsKeepTheCursor);
    let next = ddtree::top_k::argmax(&target.target.language.row(5, 3)).unwrap().0;
    // Slot 1 is not wanted, slot 2 is.
    let tree = DraftTree::from_parents(&[3, (next + 1) % 300, next], &[-1, 0, 0]).unwrap();
    let fault = conformance::check_picks(&mut target, &[5], &tree, &Sampling::new()).unwrap_err();
    assert!(matches!(fault, PickFault::Skipping { slot: Some(2), .. }), "{fault}");
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    IgnoresSettings,
    /// Every slot is treated as the root.
    ForgetsDepths,
    /// Noise of another seed.
    Seed(fn(u64) -> u64),
    SkippedRowsKeepTheCursor,
}

/// Says that its token ids honour temperatures.
struct Faulty {
    target: Target,
    fault: Fault,
}

fn faulty(fault: Fault) -> Faulty {
    let hands = match fault {
        Fault::IgnoresSettings => Hands::Ignorant,
        _ => Hands::Logits,
    };
    Faulty { target: Target::new(Language::new(300), hands), fault }
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
        if matches!(self.fault, Fault::ForgetsDepths | Fault::Seed(_)) {
            self.target.hands = Hands::Device(PickRule::Noise);
        }
        self.target.prefill(p, picks)
    }

    fn verify(
        &mut self,
        r: &ddtree::Round<'_>,
        picks: &mut ddtree::Picks<'_>,
    ) -> Result<(), Error> {
        let tree = r.tree();
        let row_of = |slot: usize| {
            let mut path = vec![5];
            let nodes: Vec<usize> = tree.ancestors(slot).collect();
            path.extend(nodes.iter().rev().map(|&s| tree.tokens()[s]));
            self.target.language.row_after(&path)
        };
        let of_seed = match self.fault {
            Fault::SkippedRowsKeepTheCursor => {
                let mut rows = (0..tree.len()).map(row_of);
                for _ in 0..tree.len() {
                    match picks.wanted() {
                        true => picks.push_logits(&rows.next().unwrap())?,
                        false => picks.skip(),
                    }
                }
                return Ok(());
            }
            _ if picks.rule() == PickRule::Pipeline => return self.target.verify(r, picks),
            Fault::IgnoresSettings => return self.target.verify(r, picks),
            Fault::ForgetsDepths => |seed| seed,
            Fault::Seed(of_seed) => of_seed,
        };
        let forgets_depths = matches!(self.fault, Fault::ForgetsDepths);
        let key = picks.noise().unwrap();
        for slot in 0..tree.len() {
            let row = row_of(slot);
            let depth = if forgets_depths { 0 } else { tree.depths()[slot] as usize };
            let sum = |token: u32| {
                f64::from(row[token as usize]) / f64::from(key.temperature)
                    + ddtree::sample::gumbel(of_seed(key.seed), key.position + depth, token)
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

// Logits after an empty list of ids were refused.
#[test]
fn no_ids_are_no_ids() {
    let plan = Plan::resolve(&Config::default(), &Capabilities::new(3, 100), 3).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1]).sampling(warm())).unwrap();
    let (_, mut picks) = session.prefill().unwrap();
    picks.extend(&[]);
    picks.push_logits(&[0.0, 99.0, 0.0]).unwrap();
    session.prefilled().unwrap();
    assert_eq!(session.generated(), [1]);
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
