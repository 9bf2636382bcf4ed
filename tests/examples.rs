//! The examples as their users see them: what they print, and how they end.
#![cfg(feature = "candle")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");
const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3/target");
const PROMPT: &str = "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n";

/// A built example: `cargo test` puts them beside the tests.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let path = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is missing: build it with `cargo build --examples`", path.display());
    Command::new(path)
}

fn run(name: &str, args: &[&str]) -> Output {
    example(name).args(args).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    str::from_utf8(&output.stderr).unwrap()
}

/// What an example prints if it ends well.
#[track_caller]
fn text(name: &str, args: &[&str]) -> String {
    let output = run(name, args);
    assert!(output.status.success(), "{name} {args:?}: {}", stderr(&output));
    stdout(&output).to_owned()
}

fn golden(name: &str) -> Value {
    let text = fs::read_to_string(Path::new(GOLDENS).join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn write(folder: &tempfile::TempDir, name: &str, content: &Value) -> String {
    let path = folder.path().join(name);
    fs::write(&path, content.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn last_line(output: &Output) -> &str {
    stdout(output).lines().last().unwrap_or_default()
}

#[test]
fn help_explains_options_defaults_and_shows_examples() {
    for name in ["generate", "conformance", "bench_decode"] {
        let help = text(name, &["--help"]);
        for part in
            ["Examples:", "--target", "--drafter", "--device", "[default: cpu]", "[default: f32]"]
        {
            assert!(help.contains(part), "{name} --help says nothing of {part}:\n{help}");
        }
    }
}

#[test]
fn quiet_prints_the_reference_text_alone_whatever_the_algorithm() {
    let golden = golden("decode-tiny-qwen3.json");
    let case =
        golden["cases"].as_array().unwrap().iter().find(|case| case["prompt"] == PROMPT).unwrap();
    let output: Vec<u32> = serde_json::from_value(case["autoregressive"].clone()).unwrap();
    let tokenizer =
        tokenizers::Tokenizer::from_file(Path::new(TARGET).join("tokenizer.json")).unwrap();
    let expected = tokenizer.decode(&output[..40], true).unwrap();
    for algorithm in ["ar", "chain", "tree"] {
        let args = ["--quiet", "--algorithm", algorithm, "--max-new-tokens", "40", PROMPT];
        let output = run("generate", &args);
        assert_eq!((stdout(&output), stderr(&output)), (&*expected, ""), "{algorithm}");
    }
}

#[test]
fn a_text_ends_before_its_stop_token() {
    let golden = golden("decode-tiny-qwen3.json");
    let case = &golden["cases"][0];
    let tokens = case["autoregressive"].as_array().unwrap();
    assert_eq!(tokens.last().unwrap(), 0, "the reference's text ends with the stop token");
    let output = run("generate", &["--prompt", case["prompt"].as_str().unwrap()]);
    assert!(stderr(&output).contains(&format!("{} tokens, then it stopped", tokens.len())));
    assert!(!stdout(&output).contains("<|endoftext|>"));
}

#[test]
fn the_prompt_can_come_from_stdin() {
    let mut child = example("generate")
        .args(["-q", "--max-new-tokens", "12", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{PROMPT}\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let args = ["-q", "--max-new-tokens", "12", "--prompt", PROMPT];
    assert_eq!(stdout(&output), text("generate", &args));
}

#[test]
fn the_summary_says_what_the_drafts_were_worth() {
    let output = run("generate", &["--max-new-tokens", "24", "--budget", "8", PROMPT]);
    for part in
        ["trees of 8 nodes", "tokens/s", "tau ", "ms per round: observe", "accepted at depth 1: "]
    {
        assert!(stderr(&output).contains(part), "no {part:?} in:\n{}", stderr(&output));
    }
    let shadow = ["--max-new-tokens", "24", "--algorithm", "chain", "--shadow", PROMPT];
    assert!(stderr(&run("generate", &shadow)).contains("a tree would have held"));
}

#[test]
fn a_trace_adds_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    text("generate", &["--max-new-tokens", "30", "--trace", path.to_str().unwrap(), PROMPT]);
    let trace: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let list = |value: &Value| -> Vec<i64> { serde_json::from_value(value.clone()).unwrap() };
    let output = list(&trace["output"]);
    let mut emitted = vec![output[0]];
    let mut position = list(&trace["prompt_ids"]).len();
    for round in trace["rounds"].as_array().unwrap() {
        let (tokens, parents, picks) =
            (list(&round["tokens"]), list(&round["parents"]), list(&round["picks"]));
        assert_eq!((tokens[0], parents[0]), (*emitted.last().unwrap(), -1));
        assert_eq!((parents.len(), picks.len()), (tokens.len(), tokens.len()));
        for path in list(&round["path"]).windows(2) {
            assert_eq!(parents[path[1] as usize], path[0]);
            assert_eq!(picks[path[0] as usize], tokens[path[1] as usize]);
        }
        assert_eq!(round["position"], position);
        position += list(&round["emitted"]).len();
        emitted.extend(list(&round["emitted"]));
    }
    assert_eq!(emitted, output);
    assert_eq!(output.len(), 30);
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    for (args, part) in [
        (&["--target", "no/such/folder"][..], "--target: no/such/folder does not exist"),
        (&["--target", empty], "no config.json"),
        (&["--target", TARGET], "name it with --drafter"),
        (&["--drafter", TARGET], "as the drafter of"),
        (&["--device", "tpu"], "accepted: cpu, cuda, cuda:N"),
        (&["--dtype", "f64"], "accepted: f32, bf16, f16"),
        (&["--algorithm", "bush"], "accepted: ar, chain or tree"),
        (&["--prompt", ""], "the prompt is empty"),
        (&["--shadow"], "accepted: chain only"),
        (&["--chat"], "no chat template"),
        (&["--trace", "no/such/folder/trace.json"], "cannot write no/such/folder/trace.json"),
    ] {
        let output = run("generate", args);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    #[cfg(not(feature = "hub"))]
    assert!(stderr(&run("generate", &["--target", "someone/model"])).contains("--features hub"));
    #[cfg(not(feature = "cuda"))]
    for (name, args) in [
        ("generate", ["--device", "cuda"]),
        ("bench_decode", ["--device", "cuda:1"]),
        ("bench_decode", ["--random", "qwen3-8b"]),
    ] {
        assert!(stderr(&run(name, &args)).contains("--features cuda"), "{name} {args:?}");
    }
    #[cfg(feature = "cuda")]
    for (name, args, part) in [
        ("bench_decode", &["--random", "qwen3-8b"][..], "with --device cuda"),
        (
            "bench_decode",
            &["--device", "cuda", "--random", "cube"],
            "qwen3-4b, qwen3-8b, smollm2-135m",
        ),
        ("conformance", &["--device", "cuda", "file.json"], "accepted: cpu"),
    ] {
        assert!(stderr(&run(name, args)).contains(part), "{name} {args:?}");
    }
}

#[test]
fn every_cause_of_an_error_is_printed_once() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(Path::new(TARGET).join(file), folder.path().join(file)).unwrap();
    }
    fs::write(folder.path().join("config.json"), "{").unwrap();
    let output = run("generate", &["--algorithm=ar", "--target", folder.path().to_str().unwrap()]);
    for part in ["cannot load", "cannot parse", "EOF while parsing"] {
        assert_eq!(stderr(&output).matches(part).count(), 1, "{part}: {}", stderr(&output));
    }
}

#[test]
fn conformance_passes_what_the_reference_did() {
    let output = run("conformance", &[&format!("{GOLDENS}/build-trees.json")]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), "80 passed, 0 failed\n"));

    let folder = tempfile::tempdir().unwrap();
    let mut one = golden("decode-tiny-qwen3.json");
    one["cases"].as_array_mut().unwrap().truncate(1);
    let output = run("conformance", &[&write(&folder, "one.json", &one)]);
    assert_eq!((output.status.code(), last_line(&output)), (Some(0), "5 passed, 0 failed"));

    // The other shape: rounds without outputs.
    let case = one["cases"][0].as_object_mut().unwrap();
    let trees = case.remove("trees").unwrap();
    case.remove("chain");
    case.insert("rounds".into(), json!({ "4": trees["4"]["rounds"], "16": trees["16"]["rounds"] }));
    let output = run("conformance", &[&write(&folder, "rounds.json", &one)]);
    assert_eq!((output.status.code(), last_line(&output)), (Some(0), "3 passed, 0 failed"));
}

#[test]
fn conformance_tolerates_near_ties_and_reports_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut one = golden("decode-tiny-qwen3.json");
    one["cases"].as_array_mut().unwrap().truncate(1);
    let case = &mut one["cases"][0];
    case.as_object_mut().unwrap().remove("chain");
    let trees = case["trees"].as_object_mut().unwrap();
    trees.retain(|budget, _| budget == "64");
    // All of these are leaves of the ninth round's tree.
    let swap = |file: &mut Value, one: usize, other: usize| {
        let round = &mut file["cases"][0]["trees"]["64"]["rounds"][8];
        for (list, offset) in [("tokens", 1), ("depths", 1), ("parents", 0)] {
            round[list].as_array_mut().unwrap().swap(one - offset, other - offset);
        }
    };
    swap(&mut one, 61, 62); // path sums 6e-5 apart
    let output = run("conformance", &[&write(&folder, "near.json", &one)]);
    let lines: Vec<&str> = stdout(&output).lines().collect();
    assert_eq!(output.status.code(), Some(0), "{lines:?}");
    assert!(lines[0].starts_with("near tie") && lines[0].contains("round 9: slot 61"), "{lines:?}");
    assert_eq!(
        lines[1..],
        ["near ties tolerated: 1 (path sums within 1e-4)", "2 passed, 0 failed"]
    );

    swap(&mut one, 60, 64); // 6e-2 apart
    let output = run("conformance", &[&write(&folder, "far.json", &one)]);
    assert_eq!((output.status.code(), last_line(&output)), (Some(1), "1 passed, 1 failed"));
    assert!(stdout(&output).contains("no near tie"), "{}", stdout(&output));
}

#[test]
fn conformance_finds_every_planted_difference() {
    let folder = tempfile::tempdir().unwrap();
    let mut builds = golden("build-trees.json");
    builds["cases"][7]["tokens"][0] = json!(31_999);
    let output = run("conformance", &[&write(&folder, "builds.json", &builds)]);
    assert_eq!((output.status.code(), last_line(&output)), (Some(1), "79 passed, 1 failed"));
    assert!(stdout(&output).contains("case 8"), "{}", stdout(&output));

    let mut one = golden("decode-tiny-qwen3.json");
    one["cases"].as_array_mut().unwrap().truncate(1);
    type Plant = fn(&mut Value);
    let plants: [(&str, &str, Plant); 6] = [
        ("ar", "token 5", |case| case["autoregressive"][4] = json!(9)),
        ("chain", "round 3: acceptance length", |case| {
            case["chain"]["acceptance_lengths"][2] = json!(7)
        }),
        ("chain", "token 5", |case| case["chain"]["output"][4] = json!(9)),
        ("tree 4", "round 2: slot 3", |case| {
            case["trees"]["4"]["rounds"][1]["tokens"][2] = json!(9)
        }),
        ("tree 16", "round 1: accepted", |case| {
            case["trees"]["16"]["rounds"][0]["accepted"] = json!([0, 1]);
        }),
        ("tree 64", "the reference's after 17", |case| {
            let tree = &mut case["trees"]["64"];
            tree["acceptance_lengths"].as_array_mut().unwrap().push(json!(1));
            let round = tree["rounds"][0].clone();
            tree["rounds"].as_array_mut().unwrap().push(round);
        }),
    ];
    let mut planted = one.clone();
    planted["cases"].as_array_mut().unwrap().clear();
    for (mode, _, plant) in plants {
        let mut case = one["cases"][0].clone();
        plant(&mut case);
        // Only what the plant concerns, besides ar: the rest takes its time.
        if mode != "chain" {
            case.as_object_mut().unwrap().remove("chain");
        }
        let trees = case["trees"].as_object_mut().unwrap();
        trees.retain(|budget, _| mode == format!("tree {budget}"));
        planted["cases"].as_array_mut().unwrap().push(case);
    }
    let output = run("conformance", &[&write(&folder, "planted.json", &planted)]);
    assert_eq!((output.status.code(), last_line(&output)), (Some(1), "5 passed, 6 failed"));
    let failed: Vec<&str> =
        stdout(&output).lines().filter(|line| line.starts_with("FAILED")).collect();
    for ((mode, difference, _), line) in plants.iter().zip(failed) {
        assert!(line.contains(&format!(", {mode}: ")) && line.contains(difference), "{line}");
    }
}

#[test]
fn conformance_refuses_what_it_cannot_read() {
    let folder = tempfile::tempdir().unwrap();
    let whole = golden("build-trees.json");
    let mut ill = whole.clone();
    ill["cases"][3].as_object_mut().unwrap().remove("parents");
    let good = format!("{GOLDENS}/build-trees.json");
    for (args, part) in [
        (vec![], "FILE"),
        (vec!["no-such-file.json".to_owned()], "cannot read no-such-file.json"),
        (vec![good.clone(), "no-such-file.json".to_owned()], "cannot read"),
        (vec![write(&folder, "object.json", &json!({}))], "unknown shape"),
        (vec![write(&folder, "other.json", &json!({ "cases": [{ "a": 1 }] }))], "unknown shape"),
        (vec![write(&folder, "empty.json", &json!({ "cases": [] }))], "no cases"),
        (vec![write(&folder, "ill.json", &ill)], "case 4: missing field `parents`"),
        (
            vec![format!("{GOLDENS}/decode-tiny-qwen3.json"), "--target=no/where".into()],
            "does not exist",
        ),
    ] {
        let output = example("conformance").args(&args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}

#[test]
fn bench_decode_measures_all_and_compares_texts() {
    let folder = tempfile::tempdir().unwrap();
    let case = &golden("decode-tiny-qwen3.json")["cases"][0];
    let tokens =
        json!({ "prompt_ids": case["prompt_ids"], "autoregressive": case["autoregressive"] });
    let prompts = write(&folder, "prompts.json", &json!({ "cases": [PROMPT, tokens] }));
    let json: PathBuf = folder.path().join("result.json");
    let args =
        ["--repeat", "2", "--budgets", "4,8", "--max-new-tokens", "8", "--prompts", &prompts];
    let table = text("bench_decode", &[&args[..], &["--json", json.to_str().unwrap()]].concat());
    assert!(table.contains("All texts are equal."), "{table}");
    let result: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((&result["prompts"], &result["texts_equal"]), (&json!(2), &json!(true)));
    assert_eq!(result["references"], json!({ "prompts": 1, "equal": 1 }));
    let arms = result["arms"].as_array().unwrap();
    let names: Vec<&str> = arms.iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ar", "chain", "tree 4", "tree 8"]);
    for arm in arms {
        // 7 tokens of each text come from rounds.
        assert_eq!(arm["tokens"], 2 * 2 * 7, "{arm}");
        let tau = arm["tokens"].as_f64().unwrap() / arm["rounds"].as_f64().unwrap();
        assert_eq!(arm["tau"].as_f64().unwrap(), tau);
        let stages = arm["ms_per_round"].as_object().unwrap();
        let sum: f64 = stages
            .iter()
            .filter(|(name, _)| *name != "total")
            .map(|(_, ms)| ms.as_f64().unwrap())
            .sum();
        let total = stages["total"].as_f64().unwrap();
        assert!(sum > 0.0 && sum <= total, "stages {sum}, total {total}");
        let outside = arm["percent_outside_models"]["median"].as_f64().unwrap();
        assert!((0.0..100.0).contains(&outside), "{outside}");
    }
    assert_eq!(arms[0]["vs_ar"], json!({ "median": 1.0, "min": 1.0, "max": 1.0 }));
    assert_eq!(arms[0]["tau"], 1.0);
    assert_eq!(arms[0]["drafted_by_depth"], json!([]));
    for arm in &arms[1..] {
        let list = |key: &str| -> Vec<u64> { serde_json::from_value(arm[key].clone()).unwrap() };
        let (accepted, drafted) = (list("accepted_by_depth"), list("drafted_by_depth"));
        assert!(accepted.len() == drafted.len() && drafted[0] <= arm["rounds"].as_u64().unwrap());
        assert!(accepted.iter().zip(&drafted).all(|(accepted, drafted)| accepted <= drafted));
        // Every round emits what it accepts and one more.
        let emitted = accepted.iter().sum::<u64>() + arm["rounds"].as_u64().unwrap();
        assert_eq!(arm["tokens"], emitted, "{arm}");
        let first = format!("{:.1}", 100.0 * accepted[0] as f64 / drafted[0] as f64);
        let name = arm["name"].as_str().unwrap();
        let (_, rates) = table.split_once("% accepted at depth").unwrap();
        let line = rates.lines().find(|line| line.starts_with(name)).unwrap();
        assert_eq!(line[name.len()..].split_whitespace().next(), Some(&*first), "{table}");
    }

    let nothing = write(&folder, "nothing.json", &json!([{ "text": "a" }]));
    let chat = write(&folder, "chat.json", &json!([{ "prompt_ids": [5] }]));
    for option in ["--temperature=1", "--seed=1", "--seeds=2", "--uncoupled", "--max-new-tokens=9"]
    {
        let output = run("bench_decode", &["--random", "qwen3-8b", option]);
        assert!(stderr(&output).contains("cannot be used with"), "{option}: {}", stderr(&output));
    }
    for (args, part) in [
        (["--prompts", &nothing, "--repeat=1"], "accepted: a string, or an object"),
        (["--prompts", &chat, "--chat"], "--chat: found tokens"),
    ] {
        let output = run("bench_decode", &args);
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn custom_verifier_says_the_same_whatever_the_algorithm() {
    let output = text("custom_verifier", &[]);
    let mut texts = Vec::new();
    let mut taus = Vec::new();
    for line in output.lines() {
        let (head, text) = line.split_once(": ").unwrap();
        let (_, head) = head.split_once(", ").unwrap();
        taus.push(head.split(' ').next().unwrap().parse::<f64>().unwrap());
        texts.push(text);
    }
    assert_eq!(texts.len(), 3, "{output}");
    assert!(texts[0].starts_with("This is the cat that killed the rat"), "{output}");
    assert!(texts.iter().all(|text| *text == texts[0]), "{output}");
    assert!(taus[0] == 1.0 && taus[0] < taus[1] && taus[1] < taus[2], "{output}");
}
