/// The tokens that lead to a slot: the prompt, what was generated since, and the drafted tokens on
/// the way from the root to the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPath<'a> {
    tokens: &'a [u32],
    prompt_len: usize,
}

impl<'a> TokenPath<'a> {
    /// A path of which the first `prompt_len` tokens are the prompt, or all if there are fewer.
    pub fn new(tokens: &'a [u32], prompt_len: usize) -> Self {
        Self { tokens, prompt_len: prompt_len.min(tokens.len()) }
    }

    /// All tokens, the prompt first. Their number is the absolute position of the token that
    /// follows.
    pub fn tokens(&self) -> &'a [u32] {
        self.tokens
    }

    /// The tokens after the prompt.
    pub fn generated(&self) -> &'a [u32] {
        &self.tokens[self.prompt_len..]
    }
}

/// A rule about which tokens may follow: a grammar, a list of words, or any edit of the logits.
///
/// It is asked about *paths*, not about the text so far: every slot of a tree has its own, and one
/// of them becomes the text. A constraint with state of its own should therefore derive it from the
/// path, for instance through a cache keyed by the path's length and last tokens. The text is that
/// of decoding without a draft under the same constraint.
///
/// It is never asked what follows a stop token, unless the prompt or the host
/// ([`Session::append`](crate::Session::append)) put it there.
///
/// If after some path every token is forbidden, the text goes on to there, as it would without a
/// draft. The step after that fails with [`Error::NoToken`](crate::Error::NoToken), which comes
/// from the session and not from the verifier, and nothing is lost: once the rule is removed or
/// another is attached, decoding goes on. Let a grammar allow a stop token where it ends.
///
/// Attach one with [`Session::set_constraint`](crate::Session::set_constraint).
///
/// ```
/// use ddtree::{Constraint, TokenPath};
///
/// /// Never the same token twice in a row.
/// struct NoRepeats;
///
/// impl Constraint for NoRepeats {
///     fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]) {
///         if let Some(&last) = path.tokens().last() {
///             logits[last as usize] = f32::NEG_INFINITY;
///         }
///     }
///
///     fn allows(&mut self, path: TokenPath<'_>, token: u32) -> bool {
///         path.tokens().last() != Some(&token)
///     }
/// }
/// ```
pub trait Constraint: Send + Sync {
    /// Edits the logits of the token after `path`, one per token of the vocabulary; `-inf` forbids
    /// a token. Bias and penalties have been applied before, the temperature has not. The result
    /// must be a function of the path and the logits alone.
    ///
    /// It is called for the slots that the text reaches, root first, and for other slots of a tree
    /// too while a [trace](crate::Config::trace) is kept.
    fn constrain(&mut self, path: TokenPath<'_>, logits: &mut [f32]);

    /// Whether `token` may follow `path`. Drafted tokens for which this is false are left out of
    /// the tree before they use any of its budget, and what they would have led to with them.
    /// Default: yes, which costs nodes and never changes the text.
    fn allows(&mut self, path: TokenPath<'_>, token: u32) -> bool {
        let _ = (path, token);
        true
    }
}

impl std::fmt::Debug for dyn Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Constraint")
    }
}
