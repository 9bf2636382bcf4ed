//! Settings of a JSON object.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Error, Result};

/// Typed reading of a JSON object, with errors that name the field. `null` counts as absent.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, path: String::new() }
    }

    /// All keys and values, null ones too.
    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// The name of `key` in messages.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        accepted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::config(self.name(key), value, accepted)),
        }
    }

    fn required<T>(&self, key: &str, accepted: &str, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| Error::config(self.name(key), "nothing", accepted))
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { map, path: format!("{}.", self.name(key)) }))
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn bool(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.opt_bool(key)?.unwrap_or(default))
    }

    pub(crate) fn opt_usizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.typed(key, "a list of whole numbers", |v| {
            v.as_array()?.iter().map(|v| usize::try_from(v.as_u64()?).ok()).collect()
        })
    }

    pub(crate) fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |v| usize::try_from(v.as_u64()?).ok())
    }

    const FACTORS: &'static str = "a positive whole number up to 65536";

    pub(crate) fn opt_positive(&self, key: &str) -> Result<Option<usize>> {
        self.opt_up_to(key, u32::MAX, "a positive whole number")
    }

    /// A size that others are multiplied with, several at a time; real ones are far below the limit.
    pub(crate) fn opt_factor(&self, key: &str) -> Result<Option<usize>> {
        self.opt_up_to(key, 1 << 16, Self::FACTORS)
    }

    pub(crate) fn factor(&self, key: &str) -> Result<usize> {
        self.required(key, Self::FACTORS, self.opt_factor(key)?)
    }

    fn opt_up_to(&self, key: &str, most: u32, accepted: &str) -> Result<Option<usize>> {
        self.typed(key, accepted, |v| {
            v.as_u64().filter(|n| (1..=u64::from(most)).contains(n)).map(|n| n as usize)
        })
    }

    pub(crate) fn positive(&self, key: &str) -> Result<usize> {
        self.required(key, "a positive whole number", self.opt_positive(key)?)
    }

    pub(crate) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn opt_positive_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a positive number", |v| v.as_f64().filter(|v| *v > 0.0))
    }

    pub(crate) fn positive_f64(&self, key: &str) -> Result<f64> {
        self.required(key, "a positive number", self.opt_positive_f64(key)?)
    }

    /// One token id or a list of them.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| u32::try_from(v.as_u64()?).ok();
        let ids = self.typed(key, "a token id or a list of them", |v| match v.as_array() {
            Some(list) => list.iter().map(id).collect(),
            None => id(v).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    pub(crate) fn must_be_absent(&self, key: &str, accepted: &str) -> Result<()> {
        match self.value(key) {
            None => Ok(()),
            Some(found) => Err(Error::config(self.name(key), found, accepted)),
        }
    }
}

/// Reads a JSON file whose root is an object.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    parse_object(&text, path)
}

/// The object that `text` is, from a file or what stands for one.
pub(crate) fn parse_object(text: &str, path: &Path) -> Result<Map<String, Value>> {
    serde_json::from_str(text).map_err(|source| Error::Json { path: path.to_owned(), source })
}

/// A string as it stands in JSON.
pub(crate) fn quoted(text: &str) -> String {
    format!("{text:?}")
}
