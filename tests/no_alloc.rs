//! Rounds allocate nothing after warm-up, proved by an allocator that counts.
//! A binary of its own: there is one global allocator per program.

#[path = "../benches/common/counting.rs"]
mod counting;

use counting::allocations;
use ddtree::{
    Acceptance, Algorithm, AncestorMask, BestFirst, Capabilities, CommitPlan, Config, Constraint,
    DraftTree, Need, PickRule, Plan, Proposal, Request, Sampling, Session, StatePlan, TokenPath,
    TreeSettings, tree::chain, walk,
};

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| ()), 0);
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8]))), 1);
}

const VOCAB: u32 = 101;
const WIDTH: usize = 8;
const HORIZON: usize = 7;

/// The target: any function of token and position will do.
fn pick(token: u32, position: usize) -> u32 {
    (token * 7 + position as u32 * 3 + 1) % VOCAB
}

/// The target's choices with others around them, so that trees branch and paths
/// are accepted to some depth, skipping slots.
fn draft(root: u32, position: usize, horizon: usize, top_k: usize, proposal: &mut Proposal) {
    let mut token = root;
    for depth in 1..=horizon {
        token = pick(token, position + depth - 1);
        let mut tokens = [0; WIDTH];
        let mut log_probs = [0.0; WIDTH];
        // The truth comes later in the list at every third position.
        let truth = if (position + depth).is_multiple_of(3) { 2 } else { 0 };
        for rank in 0..WIDTH {
            let other = (rank + WIDTH - truth) % WIDTH;
            tokens[rank] = (token + other as u32) % VOCAB;
            log_probs[rank] = -0.5 - 0.4 * rank as f32;
        }
        let entries = top_k.min(WIDTH);
        proposal.push(&tokens[..entries], &log_probs[..entries]).unwrap();
    }
}

/// A row in which `token` is the likeliest.
fn logits(token: u32) -> [f32; VOCAB as usize] {
    let mut row = [0.0; VOCAB as usize];
    row[token as usize] = 9.0;
    row
}

/// Runs the session to its next commit. Returns the tokens emitted.
fn round(session: &mut Session) -> usize {
    loop {
        match session.need() {
            Need::Proposal => {
                let (request, proposal) = session.proposal().unwrap();
                // As wide whatever is asked for, so that the proposal's size stays.
                draft(request.root(), request.position(), request.horizon(), WIDTH, proposal);
                session.proposed().unwrap();
            }
            Need::Verification => {
                let (round, mut picks) = session.verification().unwrap();
                for (&token, position) in round.tree().tokens().iter().zip(round.positions()) {
                    let token = pick(token, position);
                    if picks.rule() == PickRule::Argmax {
                        picks.push(token);
                    } else {
                        picks.push_logits(&logits(token)).unwrap();
                    }
                }
                session.verified().unwrap();
            }
            Need::Commit => {
                std::hint::black_box(session.commit().unwrap().moves().count());
                session.committed().unwrap();
                return session.new_tokens().len();
            }
            _ => panic!("out of rounds"),
        }
    }
}

fn prefill(session: &mut Session, sampling: &Sampling) {
    let request = Request::new(&[5, 6, 7]).stop_tokens(&[VOCAB - 1]).sampling(sampling.clone());
    session.start(&request).unwrap();
    let (_, mut picks) = session.prefill().unwrap();
    picks.push_logits(&logits(1)).unwrap();
    session.prefilled().unwrap();
}

/// Allocations of the first round, of the later ones, and whether any accepted
/// a draft.
fn session_rounds(config: &Config, sampling: &Sampling) -> (u64, u64, bool) {
    let capabilities = Capabilities::new(VOCAB as usize, 2_000);
    let mut session = Session::new(Plan::resolve(config, &capabilities, HORIZON).unwrap());
    prefill(&mut session, sampling);
    let mut accepted = 0;
    let first = allocations(|| accepted += round(&mut session) - 1);
    let rounds = 30;
    let later = allocations(|| {
        for _ in 0..rounds {
            if session.need() == Need::Nothing {
                break;
            }
            accepted += round(&mut session) - 1;
        }
    });
    // Nor is memory lost from one request to the next.
    prefill(&mut session, sampling);
    let again = allocations(|| {
        for _ in 0..10 {
            round(&mut session);
        }
    });
    (first, later + again, accepted > 0)
}

#[test]
fn rounds_of_a_session_allocate_nothing_after_the_first() {
    let tree = |budget| Config::new(Algorithm::Tree).budget(budget);
    for (config, drafts) in [
        (Config::new(Algorithm::Autoregressive), false),
        (Config::new(Algorithm::Chain), true),
        (Config::new(Algorithm::Chain).shadow(true).budget(64), true),
        (tree(1), true),
        (tree(64), true),
        (tree(300), true),
        (tree(64).spine(true), true),
        (tree(64).expand_below_stop(false), true),
        (tree(64).log_prob_cutoff(-3.0), true),
    ] {
        let (first, later, accepted) = session_rounds(&config, &Sampling::new());
        assert_eq!(later, 0, "{config:?}");
        assert_eq!(accepted, drafts, "{config:?}");
        // The first round makes room for the proposal, whose size is the
        // drafter's choice, and for nothing else.
        assert_eq!(first > 0, drafts, "{config:?}: {first}");
    }
}

#[test]
fn nor_do_sampled_rounds() {
    let warm = || Sampling::new().temperature(0.6).seed(2);
    for sampling in [warm(), warm().top_k(5).top_p(0.9), warm().repetition_penalty(1.1)] {
        for &algorithm in Algorithm::ALL {
            let config = Config::new(algorithm).budget(64);
            let (_, later, accepted) = session_rounds(&config, &sampling);
            assert_eq!(later, 0, "{config:?} {sampling:?}");
            assert_eq!(accepted, algorithm.needs_drafter(), "{config:?} {sampling:?}");
        }
    }
}

/// Allows some tokens only, and drafts of them only.
struct Even;

impl Constraint for Even {
    fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]) {
        let odd = path.tokens().len() / 5 % 2;
        logits.iter_mut().skip(odd).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
        // The text is not to end.
        logits[VOCAB as usize - 1] = f32::NEG_INFINITY;
    }

    fn allows(&mut self, path: TokenPath<'_>, token: u32) -> bool {
        token as usize % 2 != path.tokens().len() / 5 % 2
    }
}

#[test]
fn nor_do_constrained_rounds() {
    for sampling in [Sampling::new(), Sampling::new().temperature(0.6).seed(2)] {
        for config in [
            Config::new(Algorithm::Autoregressive),
            Config::new(Algorithm::Chain),
            Config::new(Algorithm::Chain).shadow(true).budget(3),
            Config::new(Algorithm::Tree).budget(64),
        ] {
            for when in 0..3 {
                let capabilities = Capabilities::new(VOCAB as usize, 2_000);
                let plan = Plan::resolve(&config, &capabilities, HORIZON).unwrap();
                let mut session = Session::new(plan);
                let attach = |session: &mut Session, now| {
                    if when == now {
                        session.set_constraint(Some(Box::new(Even))).unwrap();
                    }
                };
                attach(&mut session, 0);
                prefill(&mut session, &sampling);
                attach(&mut session, 1);
                round(&mut session);
                attach(&mut session, 2);
                let rounds = allocations(|| {
                    for _ in 0..30 {
                        round(&mut session);
                    }
                });
                assert_eq!(rounds, 0, "{config:?} {sampling:?} {when}");
            }
        }
    }
}

/// Every part of the vocabulary is looked into for a flat row, hardly any for a peaked one.
#[test]
fn nor_does_a_flat_row_after_peaked_ones() {
    let mut peaked = vec![-20.0f32; 20_000];
    peaked[7] = 20.0;
    let flat = vec![0.0f32; 20_000];
    for sampling in [Sampling::new().temperature(1.0), Sampling::new().temperature(1.0).min_p(0.05)]
    {
        let config = Config::new(Algorithm::Autoregressive);
        let plan = Plan::resolve(&config, &Capabilities::new(flat.len(), 100), 0).unwrap();
        let mut session = Session::new(plan);
        session.start(&Request::new(&[1]).max_new_tokens(90).sampling(sampling)).unwrap();
        let (_, mut picks) = session.prefill().unwrap();
        picks.push_logits(&peaked).unwrap();
        session.prefilled().unwrap();
        let mut round = |row: &[f32]| {
            if session.need() == Need::Proposal {
                session.skip_proposal().unwrap();
            }
            let (_, mut picks) = session.verification().unwrap();
            picks.push_logits(row).unwrap();
            session.verified().unwrap();
            session.commit().unwrap();
            session.committed().unwrap();
        };
        (0..8).for_each(|_| round(&peaked));
        assert_eq!(allocations(|| round(&flat)), 0);
    }
}

#[test]
fn parts_that_are_reused_allocate_nothing() {
    let mut proposal = Proposal::new();
    let mut builder = BestFirst::new();
    let mut tree = DraftTree::new(1);
    let mut mask = AncestorMask::new();
    let mut outcome = Acceptance::new();
    let mut plan = CommitPlan::new();
    let mut states = StatePlan::new(3);
    let mut picks = Vec::new();
    let mut run = |budget: usize, start: usize| {
        proposal.clear();
        draft(start as u32 % VOCAB, start, HORIZON, WIDTH, &mut proposal);
        tree.reset(start as u32 % VOCAB);
        let settings = TreeSettings { budget, ..TreeSettings::default() };
        builder.build(&proposal, settings, &mut tree).unwrap();
        mask.build(&tree);
        picks.clear();
        let slots = tree.tokens().iter().zip(tree.depths());
        picks.extend(slots.map(|(&token, &depth)| pick(token, start + depth as usize)));
        walk(&tree, &picks, &mut outcome).unwrap();
        plan.set(start, &outcome);
        std::hint::black_box(plan.moves().count());
        states.set(&tree);
        states.accept(plan.path()).unwrap();
        chain::build(&proposal, HORIZON, &mut tree);
        outcome.accepted()
    };
    // The largest first, and one whose draft is accepted as deep as can be.
    for start in 0..3 {
        run(1024, start);
    }
    let mut accepted = 0;
    let later = allocations(|| {
        for start in 3..60 {
            for budget in [1024, 1, 64, 300, 1023] {
                accepted += run(budget, start);
            }
        }
    });
    assert_eq!(later, 0);
    assert!(accepted > 0);
}

#[test]
fn room_made_ahead_saves_the_first_round_its_allocations() {
    let mut proposal = Proposal::new();
    draft(1, 0, HORIZON, WIDTH, &mut proposal);
    let budget = 500;
    let mut builder = BestFirst::new();
    let mut tree = DraftTree::new(1);
    let mut mask = AncestorMask::new();
    let mut outcome = Acceptance::new();
    let mut plan = CommitPlan::new();
    let mut states = StatePlan::new(3);
    builder.reserve(budget);
    tree.reserve(budget + 1);
    mask.reserve(budget + 1);
    outcome.reserve(HORIZON);
    plan.reserve(HORIZON);
    states.reserve(budget + 1);
    let mut picks = vec![0; budget + 1];
    let first = allocations(|| {
        for spine in [false, true] {
            let settings = TreeSettings { budget, spine, ..TreeSettings::default() };
            builder.build(&proposal, settings, &mut tree).unwrap();
            mask.build(&tree);
            let slots = tree.tokens().iter().zip(tree.depths());
            for (out, (&token, &depth)) in picks.iter_mut().zip(slots) {
                *out = pick(token, depth as usize);
            }
            walk(&tree, &picks, &mut outcome).unwrap();
            plan.set(9, &outcome);
            states.set(&tree);
            states.accept(plan.path()).unwrap();
        }
    });
    assert_eq!(first, 0);
    assert_eq!(tree.nodes(), budget);
    assert!(outcome.accepted() > 0);
}
