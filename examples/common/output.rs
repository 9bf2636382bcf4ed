//! A file that a program ends with.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Created before the work that it is for, so that none is done in vain.
pub struct OutputFile {
    path: PathBuf,
    file: File,
}

impl OutputFile {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| unwritable(path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub fn write(mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).with_context(|| unwritable(&self.path))
    }
}

fn unwritable(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
