//! What to continue.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::common::text::Text;

/// Prompts that the tiny pair does well on.
const BUILT_IN: [&str; 12] = [
    "Question: Tom has 3 boxes with 12 apples each. He gives away 7 apples. How many apples are left?\nAnswer:",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "{\n  \"name\": \"example\",\n  \"version\": \"1.0.0\",\n",
    "import os\nimport sys\n\ndef main():\n",
    "Question: A train travels 60 miles per hour for 3 hours. How far does it go?\nAnswer:",
    "class Stack:\n    def __init__(self):\n",
    "The quick brown fox",
    "## Installation\n\n",
    "for i in range(10):\n    print(i",
    "{\"users\": [{\"id\": 1, \"name\": \"Ann\"}, {\"id\": 2,",
    "try:\n    with open(path) as f:\n        data = f.read()\nexcept",
    "Question: Lily buys 4 pens at $2 each and 3 books at $5 each. How much does she spend?\nAnswer:",
];

/// A prompt as tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    /// How a reference continues it greedily.
    pub expected: Option<Vec<u32>>,
}

/// The built-in prompts.
pub fn built_in(text: &Text, chat: bool) -> Result<Vec<Prompt>> {
    BUILT_IN.iter().map(|prompt| encode(text, chat, prompt)).collect()
}

/// Reads prompts: a JSON list, a JSON object with a list of `cases`, or lines, of which empty ones are skipped.
/// Entries of a list are strings, or objects with a `prompt`, its tokens as `prompt_ids`, or both, and perhaps with
/// the tokens of a continuation as `autoregressive`. Tokens come before text unless the text goes into a chat
/// template.
pub fn read(path: &Path, text: &Text, chat: bool) -> Result<Vec<Prompt>> {
    let file = std::fs::read_to_string(path)?;
    let json = path.extension().is_some_and(|extension| extension == "json");
    let prompts: Vec<Prompt> = if json {
        let file: Value = serde_json::from_str(&file)?;
        let Some(list) = file.as_array().or_else(|| file["cases"].as_array()) else {
            bail!("accepted: a list of prompts, or an object with such a list as `cases`");
        };
        let entry = |(index, entry): (usize, &Value)| {
            from_json(entry, text, chat).with_context(|| format!("entry {}", index + 1))
        };
        list.iter().enumerate().map(entry).collect::<Result<_>>()?
    } else {
        let lines = file.lines().filter(|line| !line.trim().is_empty());
        lines.map(|line| encode(text, chat, line)).collect::<Result<_>>()?
    };
    ensure!(!prompts.is_empty(), "the file has no prompts");
    Ok(prompts)
}

fn from_json(entry: &Value, text: &Text, chat: bool) -> Result<Prompt> {
    let given = token_ids(entry, "prompt_ids")?;
    let prompt = entry.as_str().or_else(|| entry["prompt"].as_str());
    let ids = match (prompt, &given) {
        (_, Some(ids)) if !chat => ids.clone(),
        (Some(prompt), _) => text.encode(prompt, chat)?,
        (None, Some(_)) => bail!("--chat: found tokens, accepted: text"),
        (None, None) => bail!("accepted: a string, or an object with `prompt` or `prompt_ids`"),
    };
    // What continues other tokens is no reference for these.
    let expected = token_ids(entry, "autoregressive")?.filter(|_| given.as_ref() == Some(&ids));
    Ok(Prompt { ids, expected })
}

fn token_ids(entry: &Value, key: &str) -> Result<Option<Vec<u32>>> {
    let Some(list) = entry.get(key) else { return Ok(None) };
    serde_json::from_value(list.clone()).map(Some).context(key.to_owned())
}

fn encode(text: &Text, chat: bool, prompt: &str) -> Result<Prompt> {
    Ok(Prompt { ids: text.encode(prompt, chat)?, expected: None })
}
