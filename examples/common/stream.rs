//! Tokens to text as they come, never half a character.

use anyhow::{Result, anyhow};

use crate::common::text::Text;

/// A character takes at most four bytes, and a token holds at least one: text that ends in the same
/// replacement character after as many tokens is not waiting for the rest of one.
const LONGEST_WAIT: usize = 4;

/// Turns tokens into text piece by piece.
///
/// What a token reads like can depend on the one before it (a leading space, for instance), so the
/// last piece that was given out is decoded again in front of the new one.
#[derive(Debug)]
pub struct TextStream<'a> {
    text: &'a Text,
    tokens: Vec<u32>,
    /// Where the last piece given out begins and ends in `tokens`.
    last: std::ops::Range<usize>,
    /// Bytes of complete characters that wait for the last one to be complete, and for how many tokens.
    waiting: (usize, usize),
}

impl<'a> TextStream<'a> {
    pub fn new(text: &'a Text) -> Self {
        Self { text, tokens: Vec::new(), last: 0..0, waiting: (0, 0) }
    }

    /// The text that is certain with these tokens.
    pub fn push(&mut self, tokens: &[u32]) -> Result<String> {
        let mut certain = String::new();
        for &token in tokens {
            self.tokens.push(token);
            let new = self.pending()?;
            let (complete, waited) = self.waiting;
            let now = new.trim_end_matches('\u{fffd}').len();
            // A token can end one character and begin another.
            let waited = if now > complete { 1 } else { waited + 1 };
            self.waiting = (now, waited);
            if !new.ends_with('\u{fffd}') || waited >= LONGEST_WAIT {
                certain.push_str(&new);
                self.last = self.last.end..self.tokens.len();
                self.waiting = (0, 0);
            }
        }
        Ok(certain)
    }

    /// What is left at the end, if the text ends within a character.
    pub fn rest(&self) -> Result<String> {
        self.pending()
    }

    fn pending(&self) -> Result<String> {
        let old = self.decode(self.last.clone())?;
        let all = self.decode(self.last.start..self.tokens.len())?;
        Ok(all.get(old.len()..).unwrap_or_default().to_owned())
    }

    fn decode(&self, range: std::ops::Range<usize>) -> Result<String> {
        let text = self.text.tokenizer.decode(&self.tokens[range], true);
        text.map_err(|error| anyhow!("cannot turn tokens into text: {error}"))
    }
}
