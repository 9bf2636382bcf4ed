//! A grammar on a tree.

use ddtree::{Algorithm, Config, Constraint, Decoder, Error, Request, Sampling, TokenPath};

use crate::toy::{Hands, decode, engine};

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

#[test]
fn a_dead_end_is_an_error_where_the_text_gets_there_and_nowhere_else() {
    let config = Config::new(Algorithm::Tree).budget(16);
    let mut decoder = Decoder::new(engine(16, Hands::Logits), &config).unwrap();
    decoder.set_constraint(Some(Box::new(DeadEnd(10)))).unwrap();
    // Rows beyond ten tokens are verified before that, but not reached.
    decoder.start(&Request::new(&[1, 2]).max_new_tokens(10)).unwrap();
    while decoder.step().unwrap().is_some() {}
    assert_eq!(decoder.session().generated().len(), 10);
    decoder.start(&Request::new(&[1, 2]).max_new_tokens(11)).unwrap();
    let error = loop {
        match decoder.step() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it came to an end"),
            Err(error) => break error,
        }
    };
    let slot = matches!(error, ddtree::DecodeError::Verifier { source: Error::NoToken { .. }, .. });
    assert!(slot, "{error}");
    // Nothing is lost: without the constraint it goes on.
    decoder.set_constraint(None).unwrap();
    while decoder.step().unwrap().is_some() {}
    assert_eq!(decoder.session().generated().len(), 11);
}
