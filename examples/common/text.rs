//! Text to tokens: tokenizers and chat templates, from a checkpoint folder or out of a GGUF file.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use ddtree::candle::Gguf;
use minijinja::{Environment, ErrorKind, context};
use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
    models::bpe::{BPE, Vocab},
    normalizers::unicode::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel, digits::Digits, sequence::Sequence, split::Split,
        split::SplitPattern,
    },
};

/// A checkpoint's tokenizer and chat template.
#[derive(Debug)]
pub struct Text {
    pub tokenizer: Tokenizer,
    /// Token to put before a text that is not a chat, where the tokenizer does not do it itself.
    bos: Option<u32>,
    chat_template: Option<String>,
    /// Variables of the template.
    bos_token: String,
    eos_token: String,
}

impl Text {
    /// Reads them from a checkpoint folder or a `.gguf` file.
    pub fn load(path: &Path) -> Result<Self> {
        if path.is_dir() { Self::from_folder(path) } else { Self::from_gguf(path) }
    }

    fn from_folder(folder: &Path) -> Result<Self> {
        let file = folder.join("tokenizer.json");
        let tokenizer =
            Tokenizer::from_file(&file).map_err(|error| anyhow!("{}: {error}", file.display()))?;
        let read = |name: &str| -> Result<Option<String>> {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(None);
            }
            std::fs::read_to_string(&path).map(Some).with_context(|| path.display().to_string())
        };
        let config: serde_json::Value = match read("tokenizer_config.json")? {
            None => serde_json::Value::Null,
            Some(text) => serde_json::from_str(&text).context("tokenizer_config.json")?,
        };
        // A token is written as a string or as an object with its content.
        let special = |key: &str| {
            let token = &config[key];
            token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default().to_owned()
        };
        // A template is a file of its own or in the configuration: alone, or the one named default.
        let named = |list: &Vec<serde_json::Value>| {
            let default = list.iter().find(|entry| entry["name"] == "default")?;
            Some(default["template"].as_str()?.to_owned())
        };
        let chat_template = match (read("chat_template.jinja")?, &config["chat_template"]) {
            (Some(template), _) => Some(template),
            (None, serde_json::Value::String(template)) => Some(template.clone()),
            (None, serde_json::Value::Array(list)) => named(list),
            _ => None,
        };
        let (bos_token, eos_token) = (special("bos_token"), special("eos_token"));
        Ok(Self { tokenizer, bos: None, chat_template, bos_token, eos_token })
    }

    fn from_gguf(path: &Path) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let metadata = gguf.metadata();
        let get = |key: &str| {
            metadata.get(key).with_context(|| format!("the file has no metadata key {key}"))
        };
        let strings = |key: &str| -> Result<Vec<String>> {
            let list = get(key)?.to_vec()?;
            Ok(list.iter().map(|entry| entry.to_string().cloned()).collect::<Result<_, _>>()?)
        };
        let kind = get("tokenizer.ggml.model")?.to_string()?;
        ensure!(kind == "gpt2", "tokenizer.ggml.model is {kind}; accepted: gpt2 (byte-level BPE)");
        let pre = get("tokenizer.ggml.pre")?.to_string()?;

        let tokens = strings("tokenizer.ggml.tokens")?;
        let merges = strings("tokenizer.ggml.merges")?;
        let merges = merges.iter().map(|merge| {
            let (left, right) =
                merge.split_once(' ').with_context(|| format!("merge {merge:?}"))?;
            Ok((left.to_owned(), right.to_owned()))
        });
        let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges.collect::<Result<Vec<_>>>()?)
            .ignore_merges(pre == "llama-bpe")
            .build()
            .map_err(|error| anyhow!("tokenizer of the file: {error}"))?;
        let mut tokenizer = Tokenizer::new(bpe);
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
        tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
        if pre == "qwen2" {
            tokenizer.with_normalizer(Some(NFC)).map_err(|error| anyhow!(error))?;
        }
        // Control tokens are no text; user-defined ones are, but are never split.
        let (mut control, mut user_defined) = (Vec::new(), Vec::new());
        for (token, kind) in tokens.iter().zip(get("tokenizer.ggml.token_type")?.to_vec()?) {
            match kind.to_i32()? {
                3 => control.push(AddedToken::from(token.clone(), true)),
                4 => user_defined.push(AddedToken::from(token.clone(), false).normalized(false)),
                _ => {}
            }
        }
        tokenizer.add_special_tokens(control).map_err(|error| anyhow!(error))?;
        tokenizer.add_tokens(user_defined).map_err(|error| anyhow!(error))?;

        let id = |key: &str| get(key).ok().and_then(|id| id.to_u32().ok());
        let bos = id("tokenizer.ggml.bos_token_id");
        let name = |id: Option<u32>| {
            id.and_then(|id| tokens.get(id as usize)).cloned().unwrap_or_default()
        };
        // Where the file does not say, llama.cpp decides by the way that text is cut up.
        let adds_bos = match metadata.get("tokenizer.ggml.add_bos_token") {
            None => pre == "llama-bpe",
            Some(adds) => matches!(adds, Value::Bool(true)),
        };
        let chat_template =
            get("tokenizer.chat_template").ok().map(|text| text.to_string().cloned());
        Ok(Self {
            bos: bos.filter(|_| adds_bos),
            chat_template: chat_template.transpose()?,
            bos_token: name(bos),
            eos_token: name(id("tokenizer.ggml.eos_token_id")),
            tokenizer,
        })
    }

    /// The tokens of `prompt`; with `chat`, of the chat template's text for a user who says it.
    pub fn encode(&self, prompt: &str, chat: bool) -> Result<Vec<u32>> {
        ensure!(!prompt.is_empty(), "the prompt is empty");
        let encode = |text: &str, special| {
            let encoding = self.tokenizer.encode(text, special);
            encoding.map_err(|error| anyhow!("cannot tokenise the prompt: {error}"))
        };
        if chat {
            // The template writes all special tokens itself.
            return Ok(encode(&self.chat(prompt)?, false)?.get_ids().to_vec());
        }
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        ids.extend_from_slice(encode(prompt, true)?.get_ids());
        Ok(ids)
    }

    fn chat(&self, prompt: &str) -> Result<String> {
        let Some(template) = &self.chat_template else {
            bail!("the target has no chat template; leave --chat out");
        };
        // As transformers sets Jinja up.
        let mut jinja = Environment::new();
        jinja.set_trim_blocks(true);
        jinja.set_lstrip_blocks(true);
        jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        jinja.add_function("raise_exception", |message: String| -> Result<String, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let text = jinja.render_str(
            template,
            context! {
                messages => [context! { role => "user", content => prompt }],
                add_generation_prompt => true,
                bos_token => self.bos_token,
                eos_token => self.eos_token,
            },
        );
        text.context("the target's chat template")
    }
}

/// How the text is cut up before byte pairs are merged, by the names that llama.cpp gives.
fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper> {
    let split = |pattern: &str| -> Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        let split = split.map_err(|error| anyhow!(error))?;
        let bytes = ByteLevel::new(false, true, false);
        Ok(Sequence::new(vec![split.into(), bytes.into()]).into())
    };
    const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+";
    const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    match name {
        "gpt-2" => Ok(ByteLevel::new(false, true, true).into()),
        "smollm" => {
            let bytes = ByteLevel::new(false, true, true);
            Ok(Sequence::new(vec![Digits::new(true).into(), bytes.into()]).into())
        }
        "qwen2" => split(&format!(r"{WORDS}|\p{{N}}|{REST}")),
        "llama-bpe" => split(&format!(r"{WORDS}|\p{{N}}{{1,3}}|{REST}")),
        _ => bail!("tokenizer.ggml.pre is {name}; accepted: gpt-2, llama-bpe, qwen2, smollm"),
    }
}
