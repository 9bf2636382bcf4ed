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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn text() -> Text {
        let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-qwen3/target");
        Text::load(Path::new(tiny)).unwrap()
    }

    fn tokens(text: &Text, of: &str) -> Vec<u32> {
        text.tokenizer.encode(of, false).unwrap().get_ids().to_vec()
    }

    #[test]
    fn pieces_are_the_text_and_hold_whole_characters() {
        let text = text();
        for whole in
            ["def add(a, b):\n    return a", "na\u{ef}ve \u{6f22}\u{5b57} \u{1f642}\u{1f642}!"]
        {
            let ids = tokens(&text, whole);
            for at_once in [1, 2, 5] {
                let mut stream = TextStream::new(&text);
                let pieces: Vec<_> =
                    ids.chunks(at_once).map(|ids| stream.push(ids).unwrap()).collect();
                assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
                assert_eq!(pieces.concat() + &stream.rest().unwrap(), whole);
            }
        }
    }

    #[test]
    fn what_never_becomes_a_character_is_not_waited_for() {
        let text = text();
        let smile = tokens(&text, "\u{1f642}");
        assert!(smile.len() > 1, "the tokenizer has no token for it: {smile:?}");
        let mut stream = TextStream::new(&text);
        let begun = [smile[0]; LONGEST_WAIT];
        assert_eq!(stream.push(&begun[1..]).unwrap(), "");
        assert!(stream.push(&begun[..1]).unwrap().contains('\u{fffd}'));
        // The text goes on as if nothing had been.
        let after = tokens(&text, "x = 1");
        assert_eq!(stream.push(&after).unwrap() + &stream.rest().unwrap(), "x = 1");
        // What is left at the end is given out as it is.
        stream.push(&smile[..1]).unwrap();
        assert_eq!(stream.rest().unwrap(), "\u{fffd}");
    }
}
