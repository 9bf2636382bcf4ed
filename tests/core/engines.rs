//! Ways to hand over models, and what types promise.

use std::convert::Infallible;

use ddtree::{
    Acceptance, Algorithm, AncestorMask, BestFirst, CommitPlan, Config, Decoder, DraftTree,
    Drafter, Error, Joint, NoDrafter, Picker, Plan, Proposal, ProposalRequest, Request, RunStats,
    Session, TopK, Verifier,
};

use crate::toy::{Both, By, Fault, Guesser, Row, Target, Text, VOCAB, decode, plain};

const PROMPT: [u32; 3] = [2, 7, 1];

fn config() -> Config {
    Config::new(Algorithm::Tree).budget(12)
}

fn request() -> Request {
    Request::new(&PROMPT).max_new_tokens(30)
}

fn wanted() -> Vec<u32> {
    plain(&PROMPT, 30, &[], usize::MAX).0
}

#[test]
fn types_can_be_sent_and_shared() {
    fn all<T: Send + Sync>() {}
    all::<Session>();
    all::<Plan>();
    all::<Config>();
    all::<Request>();
    all::<Error>();
    all::<RunStats>();
    all::<Proposal>();
    all::<DraftTree>();
    all::<BestFirst>();
    all::<AncestorMask>();
    all::<Acceptance>();
    all::<CommitPlan>();
    all::<TopK>();
    all::<Picker>();
    all::<Decoder<(Target, Guesser)>>();
    all::<ddtree::DecodeError<Fault, Infallible>>();
}

#[test]
fn models_can_be_borrowed_boxed_and_of_unknown_type() {
    type AnyTarget = dyn Verifier<Features = Vec<Row>, Error = Fault>;
    type AnyDrafter = dyn Drafter<Vec<Row>, Error = Fault>;

    let (mut target, mut guesser) = (Target::new(99), Guesser::new(4, 60));
    let mut borrowed = Decoder::new((&mut target, &mut guesser), &config()).unwrap();
    assert_eq!(decode(&mut borrowed, &request()).0, wanted());

    let target: &mut AnyTarget = &mut target;
    let guesser: &mut AnyDrafter = &mut guesser;
    let mut unknown = Decoder::new((target, guesser), &config()).unwrap();
    assert_eq!(decode(&mut unknown, &request()).0, wanted());

    let target: Box<AnyTarget> = Box::new(Target::new(99));
    let guesser: Box<AnyDrafter> = Box::new(Guesser::new(4, 60));
    let mut boxed = Decoder::new((target, guesser), &config()).unwrap();
    assert_eq!(decode(&mut boxed, &request()).0, wanted());

    let mut both = Both { target: Target::new(99), guesser: Guesser::new(4, 60) };
    let mut joint = Decoder::new(Joint(&mut both), &config()).unwrap();
    assert_eq!(decode(&mut joint, &request()).0, wanted());
    assert!(joint.session().stats().tau() > 1.2);
}

#[test]
fn a_drafter_that_reads_nothing_goes_with_any_verifier() {
    let mut decoder = Decoder::autoregressive(Target::new(99)).unwrap();
    assert_eq!(decode(&mut decoder, &request()).0, wanted());
    let mut decoder = Decoder::new((Target::new(99), NoDrafter), &config()).unwrap();
    assert_eq!(decode(&mut decoder, &request()).0, wanted());
}

#[test]
fn errors_have_sources_and_convert() {
    let mut target = Target::new(99);
    target.faults.always = Some(crate::toy::Call::Verify);
    let mut decoder = Decoder::new((target, Guesser::new(4, 60)), &config()).unwrap();
    decoder.start(&request()).unwrap();
    decoder.step().unwrap();
    let error = decoder.step().unwrap_err();
    assert_eq!(error.to_string(), "the verifier failed (verify)");
    let source = std::error::Error::source(&error).unwrap();
    assert_eq!(source.to_string(), "Verify was told to fail");
    let _: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
}

/// Many sessions over one verifier's weights are one session each: nothing is
/// shared, not even a mask.
#[test]
fn sessions_in_turn_do_not_disturb_one_another() {
    let prompts = [&[1, 2][..], &[3, 4, 5], &[6]];
    let mut decoders: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let engine = (Target::new(99), Guesser::new(4, 60));
            let mut decoder = Decoder::new(engine, &config()).unwrap();
            decoder.start(&Request::new(prompt).max_new_tokens(30)).unwrap();
            decoder
        })
        .collect();
    for _ in 0..40 {
        for decoder in &mut decoders {
            decoder.step().unwrap();
        }
    }
    for (decoder, prompt) in decoders.iter().zip(prompts) {
        assert_eq!(decoder.session().generated(), plain(prompt, 30, &[], usize::MAX).0);
    }
}

/// Knows the whole text, and is wrong about every third token.
fn oracle<F>(text: Vec<u32>) -> impl Drafter<F, Error = Error> {
    By(move |request: &ProposalRequest, out: &mut Proposal| {
        for at in (request.position() + 1..).take(request.horizon()) {
            let truth = text[at];
            let mut tokens = [truth, (truth + 1) % VOCAB, (truth + 2) % VOCAB];
            if at % 3 == 0 {
                tokens.swap(0, 1);
            }
            out.push(&tokens, &[-0.5, -1.2, -3.0])?;
        }
        Ok(())
    })
}

/// As after an image, whose rows are many and whose positions are few.
#[test]
fn positions_can_be_behind_rows() {
    let prompt = [1, 1, 1, 1, 2, 7];
    let mut naive = Text::new(&[]);
    naive.behind = 3;
    prompt.iter().for_each(|&token| naive.push(token));
    let mut all = prompt.to_vec();
    for _ in 0..30 {
        all.push(naive.next());
        naive.push(naive.next());
    }
    let expected = &all[prompt.len()..];
    assert_ne!(expected, plain(&prompt, 30, &[], usize::MAX).0);
    for &algorithm in Algorithm::ALL {
        let mut target = Target::new(99);
        target.behind = 3;
        let config = Config::new(algorithm).budget(12);
        let mut decoder = Decoder::new((target, oracle(all.clone())), &config).unwrap();
        let request = Request::new(&prompt).max_new_tokens(30);
        assert_eq!(decode(&mut decoder, &request).0, expected, "{algorithm}");
        let rows = decoder.engine().0.committed_rows();
        assert_eq!(rows, &naive.rows()[..rows.len()]);
        let drafts = algorithm.needs_drafter();
        assert_eq!(decoder.session().stats().tau() > 1.5, drafts, "{algorithm}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn settings_figures_and_traces_survive_a_round_trip() {
    use ddtree::{Reason, RoundTrace, Sampling, Stage};

    let settings = config().block_size(4).top_k(3).log_prob_cutoff(-2.5).spine(true).trace(true);
    let text = serde_json::to_string(&settings).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), settings);
    // What is not given is the default; what does not exist is refused.
    let given: Config = serde_json::from_str(r#"{"algorithm":"chain","shadow":true}"#).unwrap();
    assert_eq!(given, Config::new(Algorithm::Chain).shadow(true));
    let named: Config = serde_json::from_str(r#"{"algorithm":"ar"}"#).unwrap();
    assert_eq!(named, Config::new("autoregressive".parse().unwrap()));
    let sampling = Sampling::new().logit_bias(&[(5, f32::NEG_INFINITY), (7, -1.5)]);
    let text = serde_json::to_string(&sampling).unwrap();
    assert_eq!(serde_json::from_str::<Sampling>(&text).unwrap(), sampling, "{text}");
    let asked = request().stop_tokens(&[4]).cached_prefix(2).sampling(sampling);
    let text = serde_json::to_string(&asked).unwrap();
    assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), asked, "{text}");
    let given: Request = serde_json::from_str(r#"{"prompt":[2,7,1]}"#).unwrap();
    assert_eq!(given, Request::new(&PROMPT));
    assert!(serde_json::from_str::<Request>(r#"{"prompt":[1],"stop":[2]}"#).is_err());
    let error = serde_json::from_str::<Config>(r#"{"budgett":3}"#).unwrap_err();
    assert!(error.to_string().contains("budgett"), "{error}");

    let mut decoder =
        Decoder::new((Target::new(99), Guesser::new(4, 60)), &config().trace(true)).unwrap();
    decode(&mut decoder, &request());
    let text = serde_json::to_string(decoder.session().stats()).unwrap();
    let stats: RunStats = serde_json::from_str(&text).unwrap();
    assert_eq!(&stats, decoder.session().stats());
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["rounds_by_algorithm"]["tree"], stats.rounds_as(Algorithm::Tree));
    // What came later is zero in older figures.
    let older: RunStats = serde_json::from_str(r#"{"rounds":3,"reasons":{}}"#).unwrap();
    assert_eq!((older.rounds, older.reasons().count()), (3, 0));
    assert!(serde_json::from_str::<RunStats>(r#"{"reasons":{"tired":1}}"#).is_err());
    let text = serde_json::to_string(decoder.session().trace()).unwrap();
    let mut trace: Vec<RoundTrace> = serde_json::from_str(&text).unwrap();
    assert_eq!(trace.len(), decoder.session().trace().len());
    for (read, kept) in trace.iter_mut().zip(decoder.session().trace()) {
        // serde_json reads f64 to the last bit or the one before.
        assert!(read.scores.iter().zip(&kept.scores).all(|(a, b)| (a - b).abs() < 1e-12));
        read.scores.clone_from(&kept.scores);
        assert_eq!(read, kept);
    }

    for &reason in Reason::ALL {
        assert_eq!(serde_json::to_string(&reason).unwrap(), format!("\"{reason}\""));
    }
    for &stage in Stage::ALL {
        assert_eq!(serde_json::to_string(&stage).unwrap(), format!("\"{stage}\""));
    }
}
