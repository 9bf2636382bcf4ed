use super::{Constraint, Sampler, Sampling, TokenPath};
use crate::Error;

/// Picks tokens from rows of logits as a session does: for engines without a
/// [`Session`](crate::Session) whose own sampler is not a function of seed, position and token.
///
/// The pick after a path is a function of the settings, the logits and the path: penalties count
/// the path's tokens, and the [noise](crate::sample#noise) is that of its length. So one picker
/// serves any number of sequences with the same settings, in any order, and each token of a tree is
/// what the text would have had without a draft. It reuses its memory.
///
/// ```
/// use ddtree::{Acceptance, DraftTree, Picker, Sampling, TokenPath, walk};
///
/// # fn logits_after(path: &[u32]) -> Vec<f32> {
/// #     (0..10u32).map(|token| (path[path.len() - 1] * 7 + token * 5) as f32 % 4.0).collect()
/// # }
/// let sampling = Sampling::new().temperature(0.8).top_p(0.95).repetition_penalty(1.1).seed(42);
/// let mut picker = Picker::new(&sampling, 10)?;
///
/// // The text, of which two tokens are the prompt and the last one is the root.
/// let text = [3, 1, 4];
/// let tree = DraftTree::from_parents(&[4, 2, 8, 6], &[-1, 0, 0, 1])?;
/// let mut picks = Vec::new();
/// for slot in 0..tree.len() {
///     let mut nodes: Vec<u32> = tree.ancestors(slot).map(|slot| tree.tokens()[slot]).collect();
///     nodes.reverse(); // the root first, which ends the text
///     let path = [&text[..2], &nodes].concat();
///     picks.push(picker.pick(&logits_after(&path), TokenPath::new(&path, 2))?);
/// }
/// let mut outcome = Acceptance::new();
/// walk(&tree, &picks, &mut outcome)?;
/// # assert!(outcome.bonus().is_some());
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Debug)]
pub struct Picker {
    sampler: Sampler,
    vocab_size: usize,
}

impl Picker {
    /// A picker from rows of `vocab_size` logits.
    ///
    /// # Errors
    ///
    /// If a setting is outside its range, or `vocab_size` is not 1 to `u32::MAX`.
    pub fn new(sampling: &Sampling, vocab_size: usize) -> Result<Self, Error> {
        let most = u32::MAX as usize;
        if vocab_size == 0 || vocab_size > most {
            return Err(Error::setting("vocab_size", vocab_size, format_args!("1 to {most}")));
        }
        sampling.check(vocab_size)?;
        let mut sampler = Sampler::default();
        sampler.start(sampling, vocab_size, 0, 0);
        Ok(Self { sampler, vocab_size })
    }

    /// Attaches a rule about which tokens may follow, or removes it.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.sampler.set_constraint(constraint);
    }

    /// Picks the token that follows `path`.
    ///
    /// # Errors
    ///
    /// If there is not one logit per token, one is NaN or +inf, a token of the path is outside the
    /// vocabulary, or every token is forbidden.
    ///
    /// # Complexity
    ///
    /// Linear in the row and in the path.
    pub fn pick(&mut self, logits: &[f32], path: TokenPath<'_>) -> Result<u32, Error> {
        let (tokens, vocab_size) = (path.tokens(), self.vocab_size);
        if logits.len() != vocab_size {
            let (found, accepted) = (logits.len(), vocab_size);
            return Err(Error::Length { field: "logits", found, accepted });
        }
        if let Some(index) = tokens.iter().position(|&token| token as usize >= vocab_size) {
            return Err(Error::Token { field: "path", index, found: tokens[index], vocab_size });
        }
        self.sampler.forget(tokens.len() - path.generated().len());
        self.sampler.pick(logits, tokens, None)
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        self.sampler.memory_usage()
    }
}
