//! Checkpoints of the Hugging Face hub, downloaded into its usual cache.

use std::path::PathBuf;

use anyhow::{Context, Result};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};

/// Downloads what a checkpoint needs, unless it is in the cache, and returns its folder there.
pub fn fetch(id: &str) -> Result<PathBuf> {
    // `from_env` honours HF_HOME and HF_ENDPOINT; the token comes from the cache folder.
    let repo = ApiBuilder::from_env().build()?.model(id.to_owned());
    let get = |file: &str| {
        repo.get(file).with_context(|| format!("`{file}` of the hub repository `{id}`"))
    };
    let config = get("config.json")?;
    let files: Vec<String> = repo
        .info()
        .context("list of its files")?
        .siblings
        .into_iter()
        .map(|f| f.rfilename)
        .collect();
    for file in
        ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    {
        if files.iter().any(|found| found == file) {
            get(file)?;
        }
    }
    fetch_weights(&repo, &files)
        .with_context(|| format!("weights of the hub repository `{id}`"))?;
    config.parent().map(PathBuf::from).context("the hub's cache has no folder")
}

fn fetch_weights(repo: &ApiRepo, files: &[String]) -> Result<()> {
    let single = files.iter().any(|file| file == "model.safetensors");
    for file in files.iter().filter(|file| !file.contains('/')) {
        let wanted = if single {
            file == "model.safetensors"
        } else {
            file.ends_with(".safetensors") || file == "model.safetensors.index.json"
        };
        if wanted {
            repo.get(file)?;
        }
    }
    Ok(())
}
