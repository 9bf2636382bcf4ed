//! A target and its drafter, from wherever they are.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use ddtree::candle::{CandleTarget, DecoderModel, dflash::DFlash};
use indicatif::{ProgressBar, ProgressStyle};

use super::text::Text;

/// The pair that comes with the repository.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3");

/// Options that choose the models.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct ModelArgs {
    /// Target: a checkpoint folder, a .gguf file, or a hub repository such as Qwen/Qwen3-4B (needs
    /// `--features hub`) [default: the tiny pair of this repository]
    #[arg(long, value_name = "PATH|ID")]
    pub target: Option<String>,

    /// DFlash drafter made for the target: a checkpoint folder or a hub repository [default: the tiny
    /// pair's, if the target is]
    #[arg(long, value_name = "PATH|ID")]
    pub drafter: Option<String>,
}

/// What the options name, found but for the weights not read.
#[derive(Debug)]
pub struct Checkpoints {
    pub target: PathBuf,
    /// `None` if none was asked for.
    pub drafter: Option<PathBuf>,
    pub text: Text,
    /// For people: where the target comes from.
    pub name: String,
    progress: bool,
}

impl ModelArgs {
    /// Finds what is named, the drafter only if `drafting`. `progress` shows that something is going on,
    /// then and later, if stderr is a terminal.
    pub fn find(&self, drafting: bool, progress: bool) -> Result<Checkpoints> {
        let tiny = |part| Path::new(TINY).join(part);
        let spinner = spinner(progress);
        let target = match &self.target {
            Some(name) => resolve("--target", name, &spinner)?,
            None => tiny("target"),
        };
        let drafter = match (&self.drafter, &self.target) {
            _ if !drafting => None,
            (Some(name), _) => Some(resolve("--drafter", name, &spinner)?),
            (None, None) => Some(tiny("drafter")),
            (None, Some(target)) => {
                bail!("chain and tree need a drafter made for {target}: name it with --drafter")
            }
        };
        let text = Text::load(&target).with_context(|| cannot_load(&target))?;
        spinner.finish_and_clear();
        let name = self.target.clone().unwrap_or_else(|| "tiny-qwen3".to_owned());
        Ok(Checkpoints { target, drafter, text, name, progress })
    }
}

impl Checkpoints {
    /// Runs `load` under a sign of life. Its error says what cannot be loaded.
    pub fn load<T>(&self, target: impl FnOnce(&Path) -> ddtree::candle::Result<T>) -> Result<T> {
        let spinner = spinner(self.progress);
        spinner.set_message(format!("loading {}", self.target.display()));
        let loaded = target(&self.target).with_context(|| cannot_load(&self.target));
        spinner.finish_and_clear();
        loaded
    }

    /// Loads the drafter, if there is one.
    pub fn load_drafter<T>(
        &self,
        drafter: impl FnOnce(&Path) -> ddtree::candle::Result<T>,
    ) -> Result<Option<T>> {
        let Some(path) = &self.drafter else { return Ok(None) };
        let context =
            || format!("{} as the drafter of {}", cannot_load(path), self.target.display());
        drafter(path).map(Some).with_context(context)
    }
}

fn cannot_load(path: &Path) -> String {
    format!("cannot load {}", path.display())
}

/// Models on the CPU.
#[derive(Debug)]
pub struct Models {
    pub model: DecoderModel,
    /// `None` if none was asked for.
    pub drafter: Option<DFlash>,
}

impl Models {
    /// Loads checkpoints.
    pub fn load(checkpoints: &Checkpoints, dtype: DType) -> Result<Self> {
        let model = checkpoints.load(|target| DecoderModel::load(target, dtype, &Device::Cpu))?;
        let drafter = checkpoints.load_drafter(|drafter| DFlash::load(drafter, &model))?;
        Ok(Self { model, drafter })
    }

    /// An empty cache for the target, as long as the model allows. It captures what the drafter reads
    /// if `drafting`.
    pub fn target(&self, drafting: bool) -> Result<CandleTarget> {
        let taps = match &self.drafter {
            Some(drafter) if drafting => drafter.config().target_layer_ids(),
            _ => &[],
        };
        let max_len = self.model.config().max_positions;
        Ok(CandleTarget::new(self.model.clone(), max_len, taps)?)
    }

    /// Tokens after which a text ends.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.model.config().eos_token_ids
    }
}

/// A sign of life for what may take longer than a second; nothing where stderr is no terminal.
fn spinner(visible: bool) -> ProgressBar {
    if !visible {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner().with_style(ProgressStyle::default_spinner());
    spinner.enable_steady_tick(std::time::Duration::from_millis(120));
    spinner
}

/// The local path of what an option names.
fn resolve(option: &str, name: &str, spinner: &ProgressBar) -> Result<PathBuf> {
    let path = PathBuf::from(name);
    if path.is_dir() {
        let config = path.join("config.json");
        ensure!(
            config.is_file(),
            "{option}: the folder {name} holds no checkpoint (no config.json)"
        );
        return Ok(path);
    }
    if path.is_file() {
        let gguf = path.extension().is_some_and(|extension| extension == "gguf");
        ensure!(
            gguf && option == "--target",
            "{option}: {name} is a file; accepted: a checkpoint folder{}",
            if option == "--target" { " or a .gguf file" } else { "" }
        );
        return Ok(path);
    }
    let is_id = name.split('/').filter(|part| !part.is_empty() && !part.starts_with('.')).count()
        == 2
        && name.matches('/').count() == 1
        && !name.ends_with(".gguf");
    if !is_id {
        bail!("{option}: {name} does not exist");
    }
    fetch(option, name, spinner)
}

#[cfg(feature = "hub")]
fn fetch(option: &str, id: &str, spinner: &ProgressBar) -> Result<PathBuf> {
    spinner.set_message(format!("fetching {id}"));
    super::hub::fetch(id).with_context(|| {
        format!("{option}: {id} is no local path and could not be fetched from the hub")
    })
}

#[cfg(not(feature = "hub"))]
fn fetch(option: &str, id: &str, _: &ProgressBar) -> Result<PathBuf> {
    bail!(
        "{option}: {id} does not exist; if it is a repository of the Hugging Face hub, build with \
         `--features hub`"
    )
}
