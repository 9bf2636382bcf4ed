//! Events that tell an operator what the figures would.

use std::{
    fmt::Debug,
    sync::{Arc, Mutex},
};

use ddtree::{Algorithm, Attention, Capabilities, Config, Decoder, Plan, Request};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::toy::{Guesser, Target, VOCAB, decode};

/// Keeps the events of the tests of this module.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!("{field}={value:?} ");
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push((*event.metadata().level(), text.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The events of a certain message and level.
fn events(level: Level, message: &str, run: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), run);
    let mut events = log.0.lock().unwrap().clone();
    events.retain(|(found, text)| *found == level && text.contains(message));
    events.into_iter().map(|(_, text)| text).collect()
}

#[test]
fn a_plan_that_is_not_what_was_asked_for_is_a_warning() {
    let resolve = |attention| {
        let mut capabilities = Capabilities::new(VOCAB as usize, 99);
        capabilities.attention = attention;
        let config = Config::new(Algorithm::Tree);
        events(Level::WARN, "ddtree plan", || drop(Plan::resolve(&config, &capabilities, 4)))
    };
    assert_eq!(resolve(Attention::Tree), [""; 0]);
    let [event] = &resolve(Attention::Causal)[..] else { panic!("not one event") };
    for part in ["asked=tree", "running=chain", "reason=causal_attention"] {
        assert!(event.contains(part), "{event}");
    }
}

#[test]
fn a_round_that_is_not_what_was_asked_for_is_an_event() {
    let run = || {
        let engine = (Target::new(99), Guesser::new(4, 60));
        let mut decoder = Decoder::new(engine, &Config::new(Algorithm::Tree)).unwrap();
        decoder.start(&Request::new(&[2, 7, 1]).max_new_tokens(20)).unwrap();
        decoder.step().unwrap();
        decoder.step_plain().unwrap();
    };
    let events = events(Level::DEBUG, "ddtree round", run);
    assert_eq!(events.len(), 1);
    assert!(events[0].contains("reason=skipped"), "{events:?}");
}

#[test]
fn rounds_that_accept_nothing_are_a_warning_once() {
    for (skill, tokens, plain, warnings) in
        [(0, 90, 0, 1), (0, 32, 0, 0), (0, 33, 0, 1), (0, 90, 33, 1), (100, 90, 0, 0)]
    {
        let run = || {
            let engine = (Target::new(200), Guesser::new(1, skill));
            let mut decoder = Decoder::new(engine, &Config::new(Algorithm::Chain)).unwrap();
            if plain == 0 {
                // The last of them has no draft.
                decode(&mut decoder, &Request::new(&[2, 7, 1]).max_new_tokens(tokens + 1));
                return;
            }
            // Rounds without a draft neither end the run nor warn again.
            decoder.start(&Request::new(&[2, 7, 1]).max_new_tokens(tokens)).unwrap();
            for _ in 0..plain {
                decoder.step().unwrap();
            }
            while decoder.step_plain().unwrap().is_some() {}
        };
        let events = events(Level::WARN, "ddtree accepts nothing", run);
        assert_eq!(events.len(), warnings, "{skill} {tokens} {plain}: {events:?}");
    }
}
