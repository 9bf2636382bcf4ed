//! A grammar on a tree.

use ddtree::{
    Algorithm, Capabilities, Config, Constraint, DecodeError, Decoder, Error, ErrorOf, Plan,
    Request, Sampling, Session, TokenPath,
};

use crate::toy::{Engine, Hands, decode, engine};

/// What tokens stand for; the last one ends the text.
const WORDS: [&str; 16] = [
    "{", "}", "[", "]", ",", ":", "\"a\"", "\"b\"", "1", "23", "true", "null", "]]", "\"c\":",
    "[[", "<end>",
];
const END: u32 = 15;
const DEEPEST: usize = 6;

/// What may come next in a JSON text.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Value,
    ValueOrClose,
    KeyOrClose,
    Key,
    Colon,
    CommaOrClose,
    Done,
    End,
}

/// Whether tokens are the beginning of a JSON text, and what follows.
#[derive(Clone, Debug)]
struct Json {
    state: State,
    // Open brackets, `{` or `[`.
    open: Vec<char>,
}

impl Json {
    fn new() -> Self {
        Self { state: State::Value, open: Vec::new() }
    }

    fn after(tokens: &[u32]) -> Option<Self> {
        let mut json = Self::new();
        tokens.iter().all(|&token| json.push(token)).then_some(json)
    }

    fn push(&mut self, token: u32) -> bool {
        if token == END {
            let complete = self.state == State::Done;
            self.state = State::End;
            return complete;
        }
        let mut rest = WORDS[token as usize];
        while !rest.is_empty() {
            let length = match rest.as_bytes()[0] {
                b'"' => 3,
                b'{' | b'}' | b'[' | b']' | b',' | b':' => 1,
                _ => rest.len(),
            };
            let (piece, tail) = rest.split_at(length);
            if !self.piece(piece) {
                return false;
            }
            rest = tail;
        }
        true
    }

    fn piece(&mut self, piece: &str) -> bool {
        use State::*;
        let value_ended = if self.open.is_empty() { Done } else { CommaOrClose };
        let in_object = self.open.last() == Some(&'{');
        self.state = match (self.state, piece) {
            (Value | ValueOrClose, "{") if self.open.len() < DEEPEST => {
                self.open.push('{');
                KeyOrClose
            }
            (Value | ValueOrClose, "[") if self.open.len() < DEEPEST => {
                self.open.push('[');
                ValueOrClose
            }
            (KeyOrClose | CommaOrClose, "}") if in_object => self.close(),
            (ValueOrClose | CommaOrClose, "]") if !in_object => self.close(),
            (CommaOrClose, ",") => {
                if in_object {
                    Key
                } else {
                    Value
                }
            }
            (Colon, ":") => Value,
            (Key | KeyOrClose, string) if string.starts_with('"') => Colon,
            (Value | ValueOrClose, word) if !"{}[],:".contains(word) => value_ended,
            _ => return false,
        };
        true
    }

    fn close(&mut self) -> State {
        self.open.pop();
        if self.open.is_empty() { State::Done } else { State::CommaOrClose }
    }
}

/// Allows JSON only. `prune` tells whether drafts are checked before they cost budget.
struct Grammar {
    prune: bool,
}

impl Constraint for Grammar {
    fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]) {
        let json = Json::after(path.generated());
        for (token, logit) in logits.iter_mut().enumerate() {
            let fits = json.clone().is_some_and(|mut json| json.push(token as u32));
            if !fits {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn allows(&mut self, path: TokenPath<'_>, token: u32) -> bool {
        !self.prune || Json::after(path.generated()).is_some_and(|mut json| json.push(token))
    }
}

fn requests() -> impl Iterator<Item = Request> {
    (0..30).map(|seed| {
        let temperature = [0.0, 0.7, 1.2][seed as usize % 3];
        let sampling = Sampling::new().temperature(temperature).seed(seed).min_p(0.01);
        let prompt = [seed as u32 % 16, seed as u32 / 3];
        Request::new(&prompt).max_new_tokens(60).stop_tokens(&[END]).sampling(sampling)
    })
}

#[test]
fn a_tree_never_says_what_the_grammar_forbids() {
    let grammar = |prune| -> Option<Box<dyn Constraint>> { Some(Box::new(Grammar { prune })) };
    let (mut complete, mut free_json) = (0, 0);
    for request in requests() {
        let ar = Config::new(Algorithm::Autoregressive);
        let expected = decode(engine(16, Hands::Wanted), &ar, &request, grammar(true)).tokens;
        assert!(Json::after(&expected).is_some(), "{expected:?}");
        if expected.last() == Some(&END) {
            let text: String =
                expected[..expected.len() - 1].iter().map(|&t| WORDS[t as usize]).collect();
            serde_json::from_str::<serde_json::Value>(&text).unwrap();
            complete += 1;
        }
        let free = decode(engine(16, Hands::Wanted), &ar, &request, None).tokens;
        free_json += usize::from(Json::after(&free).is_some());
        for config in [
            Config::new(Algorithm::Chain),
            Config::new(Algorithm::Tree).budget(4),
            Config::new(Algorithm::Tree).budget(16).coupled(false),
            Config::new(Algorithm::Tree).budget(64),
        ] {
            for prune in [true, false] {
                let found = decode(engine(16, Hands::Wanted), &config, &request, grammar(prune));
                assert_eq!(found.tokens, expected, "{config:?} {prune} {request:?}");
            }
        }
    }
    assert!(free_json < 5, "without the grammar it is JSON {free_json} times");
    assert!(complete > 10, "{complete} texts came to an end");
}

#[test]
fn forbidden_drafts_cost_no_budget() {
    let accepted = |config: &Config, prune| {
        let (mut tokens, mut rounds) = (0, 0);
        for request in requests() {
            let mut decoder = Decoder::new(engine(16, Hands::Wanted), config).unwrap();
            decoder.set_constraint(Some(Box::new(Grammar { prune }))).unwrap();
            decoder.start(&request).unwrap();
            while decoder.step().unwrap().is_some() {}
            for round in decoder.session().trace() {
                for slot in 1..round.tokens.len() {
                    let mut path = vec![];
                    let mut at = slot as i32;
                    while at >= 0 {
                        path.push(round.tokens[at as usize]);
                        at = round.parents[at as usize];
                    }
                    path.reverse();
                    let before = decoder.session().generated()[..round.start - 2].to_vec();
                    let legal = Json::after(&[before, path].concat()).is_some();
                    assert!(legal || !prune, "an illegal node at slot {slot} of {round:?}");
                }
            }
            tokens += decoder.session().stats().tokens;
            rounds += decoder.session().stats().rounds;
        }
        tokens as f64 / rounds as f64
    };
    for config in [Config::new(Algorithm::Chain), Config::new(Algorithm::Tree).budget(6)] {
        let config = config.trace(true);
        let (unpruned, pruned) = (accepted(&config, false), accepted(&config, true));
        assert!(pruned > 1.2 * unpruned, "{pruned:.2} against {unpruned:.2}");
    }
}

/// Forbids everything after a certain number of tokens.
struct DeadEnd(usize);

impl Constraint for DeadEnd {
    fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]) {
        if path.generated().len() >= self.0 {
            logits.fill(f32::NEG_INFINITY);
        }
    }
}

/// A row without any logit is the model's fault and an error at once; one of which a constraint leaves nothing ends the text.
#[test]
fn no_logit_is_an_error_and_no_allowed_one_an_end() {
    let config = Config::new(Algorithm::Autoregressive);
    let plan = Plan::resolve(&config, &Capabilities::new(3, 100), 0).unwrap();
    let no_token = Err(Error::NoToken { slot: 0 });
    let (nothing, row) = ([f32::NEG_INFINITY; 3], [1.0, 2.0, 3.0]);
    for constrained in [false, true] {
        let mut session = Session::new(plan.clone());
        session.start(&Request::new(&[1])).unwrap();
        session.prefill().unwrap().1.push_logits(&row).unwrap();
        session.prefilled().unwrap();
        if constrained {
            session.set_constraint(Some(Box::new(DeadEnd(0)))).unwrap();
            session.verification().unwrap().1.push_logits(&row).unwrap();
            assert_eq!(session.verified(), no_token);
        }
        assert_eq!(session.verification().unwrap().1.push_logits(&nothing), no_token);
        session.set_constraint(None).unwrap();
        session.verification().unwrap().1.push_logits(&row).unwrap();
        session.verified().unwrap();
    }
    // After a prompt both are errors, as none of its rows is to be committed then, and a session tells the end.
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1])).unwrap();
    session.set_constraint(Some(Box::new(DeadEnd(0)))).unwrap();
    for row in [nothing, row] {
        assert_eq!(session.prefill().unwrap().1.push_logits(&row), no_token);
    }
    assert_eq!(session.prefilled(), no_token);
}

/// Steps until one fails or the text is complete.
fn run(decoder: &mut Decoder<Engine>) -> Result<(), ErrorOf<Engine>> {
    while decoder.step()?.is_some() {}
    Ok(())
}

// A draft into a dead end threw away the tokens before it, in every round anew.
#[test]
fn a_dead_end_is_an_error_where_the_text_gets_there_and_nowhere_else() {
    for hands in [Hands::Logits, Hands::Wanted] {
        for sampling in [Sampling::new(), Sampling::new().temperature(0.8).seed(3)] {
            for &algorithm in Algorithm::ALL {
                for (end, trace) in [(0, false), (6, false), (7, true), (10, true)] {
                    let request = |limit| {
                        Request::new(&[1, 2]).max_new_tokens(limit).sampling(sampling.clone())
                    };
                    let ar = Config::new(Algorithm::Autoregressive);
                    let free = decode(engine(16, hands), &ar, &request(20), None).tokens;
                    let config = Config::new(algorithm).budget(16).trace(trace);
                    let what = format!("{hands:?} {sampling:?} {config:?} {end}");
                    let mut decoder = Decoder::new(engine(16, hands), &config).unwrap();
                    decoder.set_constraint(Some(Box::new(DeadEnd(end)))).unwrap();
                    // Rows beyond are verified before that, but not reached.
                    decoder.start(&request(end)).unwrap();
                    run(&mut decoder).unwrap();
                    assert_eq!(decoder.session().generated(), &free[..end], "{what}");
                    decoder.start(&request(20)).unwrap();
                    for _ in 0..3 {
                        let error = run(&mut decoder).unwrap_err();
                        let refused =
                            matches!(error, DecodeError::Refused(Error::NoToken { slot: 0 }));
                        assert!(refused, "{error} {what}");
                        assert_eq!(decoder.session().generated(), &free[..end], "{what}");
                    }
                    // Nothing is lost: without the constraint it goes on.
                    decoder.set_constraint(None).unwrap();
                    run(&mut decoder).unwrap();
                    assert_eq!(decoder.session().generated(), free, "{what}");
                    for round in decoder.session().trace() {
                        assert!(round.stats.tokens <= round.path.len(), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn tokens_of_the_host_may_lead_into_a_dead_end() {
    let ar = Config::new(Algorithm::Autoregressive);
    for &algorithm in Algorithm::ALL {
        let config = Config::new(algorithm).budget(16);
        let mut decoder = Decoder::new(engine(16, Hands::Logits), &config).unwrap();
        decoder.set_constraint(Some(Box::new(DeadEnd(4)))).unwrap();
        decoder.start(&Request::new(&[1, 2]).max_new_tokens(20)).unwrap();
        decoder.step().unwrap();
        decoder.append(&[5, 6, 7]).unwrap();
        let before = decoder.session().tokens().to_vec();
        for _ in 0..2 {
            let error = decoder.step().unwrap_err();
            let refused = matches!(error, DecodeError::Refused(Error::NoToken { slot: 0 }));
            assert!(refused, "{error}");
            assert_eq!(decoder.session().tokens(), before);
        }
        decoder.set_constraint(None).unwrap();
        run(&mut decoder).unwrap();
        let rest = Request::new(&before).max_new_tokens(16);
        let expected = decode(engine(16, Hands::Logits), &ar, &rest, None).tokens;
        assert_eq!(decoder.session().tokens(), [before, expected].concat());
    }
}

/// Ends texts early and insists on never being asked what follows their end.
struct Strict;

impl Strict {
    fn check(path: TokenPath<'_>) {
        assert!(!path.generated().contains(&END), "asked after the end: {:?}", path.generated());
    }
}

impl Constraint for Strict {
    fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]) {
        Self::check(path);
        if path.generated().len() >= 5 {
            logits[END as usize] += 1.5;
        }
    }

    fn allows(&mut self, path: TokenPath<'_>, _: u32) -> bool {
        Self::check(path);
        true
    }
}

// The default drafts below stop tokens, and a trace picks there.
#[test]
fn a_constraint_is_never_asked_what_follows_the_end() {
    let (mut ended, mut drafted) = (0, 0);
    for request in requests() {
        let strict = || -> Option<Box<dyn Constraint>> { Some(Box::new(Strict)) };
        let ar = Config::new(Algorithm::Autoregressive);
        let expected = decode(engine(16, Hands::Wanted), &ar, &request, strict()).tokens;
        ended += usize::from(expected.last() == Some(&END));
        for config in [
            Config::new(Algorithm::Chain),
            Config::new(Algorithm::Chain).shadow(true).budget(30),
            Config::new(Algorithm::Tree).budget(64),
            Config::new(Algorithm::Tree).budget(64).trace(true),
        ] {
            let mut decoder = Decoder::new(engine(16, Hands::Logits), &config).unwrap();
            decoder.set_constraint(strict()).unwrap();
            decoder.start(&request).unwrap();
            run(&mut decoder).unwrap();
            assert_eq!(decoder.session().generated(), expected, "{config:?} {request:?}");
            for round in decoder.session().trace() {
                drafted += round.tokens[1..].iter().filter(|&&token| token == END).count();
            }
        }
    }
    assert!(ended > 10 && drafted > 10, "{ended} {drafted}");
}

/// One that is attached while a tree with nodes below a stop token waits for its picks.
#[test]
fn a_constraint_that_comes_late_is_not_asked_either() {
    let config = Config::new(Algorithm::Chain).trace(true);
    let plan = Plan::resolve(&config, &Capabilities::new(16, 100), 3).unwrap();
    let mut session = Session::new(plan);
    session.start(&Request::new(&[1]).stop_tokens(&[END])).unwrap();
    session.prefill().unwrap().1.push(2);
    session.prefilled().unwrap();
    let (_, proposal) = session.proposal().unwrap();
    for token in [3, END, 4] {
        proposal.push(&[token], &[-0.5]).unwrap();
    }
    session.proposed().unwrap();
    session.set_constraint(Some(Box::new(Strict))).unwrap();
    let (_, mut picks) = session.verification().unwrap();
    for next in [3, END as usize, 4, 5] {
        let mut row = [0.0; 16];
        row[next] = 9.0;
        picks.push_logits(&row).unwrap();
    }
    session.verified().unwrap();
    assert_eq!(session.outcome().unwrap().tokens(), [3, END]);
}

// With a trace, every slot is picked at.
#[test]
fn logits_that_are_no_numbers_do_no_harm_off_the_path() {
    let config = Config::new(Algorithm::Tree).budget(2).trace(true);
    let plan = Plan::resolve(&config, &Capabilities::new(3, 100), 1).unwrap();
    for sampling in [Sampling::new(), Sampling::new().temperature(1.0)] {
        let mut session = Session::new(plan.clone());
        session.start(&Request::new(&[1]).sampling(sampling)).unwrap();
        session.prefill().unwrap().1.push_logits(&[-99.0, -99.0, 0.0]).unwrap();
        session.prefilled().unwrap();
        session.proposal().unwrap().1.push(&[0, 1], &[-0.5, -1.5]).unwrap();
        session.proposed().unwrap();
        let (round, mut picks) = session.verification().unwrap();
        let tokens = round.tree().tokens().to_vec();
        for token in tokens {
            let row = if token == 1 { [f32::NAN; 3] } else { [0.0, -99.0, -99.0] };
            picks.push_logits(&row).unwrap();
        }
        session.verified().unwrap();
        assert_eq!(session.outcome().unwrap().tokens(), [0, 0]);
        // On it they are an error.
        session.committed().unwrap();
        session.skip_proposal().unwrap();
        let error = session.verification().unwrap().1.push_logits(&[f32::NAN; 3]).unwrap_err();
        assert!(matches!(error, Error::Logits { row: 0, .. }), "{error}");
    }
}
