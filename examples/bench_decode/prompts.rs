//! What to continue.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Prompts that the tiny pair does well on.
pub const BUILT_IN: [&str; 12] = [
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

/// Reads prompts: a JSON list of strings, a JSON object whose `cases` have a `prompt`, or lines, of
/// which empty ones are skipped.
pub fn read(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path)?;
    let json = path.extension().is_some_and(|extension| extension == "json");
    let prompts: Vec<String> = if json {
        let prompt = |entry: &Value| -> Option<String> {
            Some(entry.as_str().or_else(|| entry["prompt"].as_str())?.to_owned())
        };
        let file: Value = serde_json::from_str(&text)?;
        let Some(list) = file.as_array().or_else(|| file["cases"].as_array()) else {
            bail!("accepted: a list of strings, or an object with `cases` that have a `prompt`");
        };
        list.iter().map(prompt).collect::<Option<_>>().context("an entry without a prompt")?
    } else {
        text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
    };
    ensure!(!prompts.is_empty(), "the file has no prompts");
    Ok(prompts)
}
