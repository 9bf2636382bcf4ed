use crate::Error;

/// How tokens are chosen from the target's logits: temperature, truncation, penalties, bias and
/// seed.
///
/// The default is greedy: temperature 0, and nothing else.
///
/// # Order
///
/// A row of logits goes through these steps, in this order (that of Hugging Face transformers;
/// vLLM applies min-p before top-k and top-p, llama.cpp truncates before it applies the
/// temperature):
///
/// 1. [`logit_bias`](Self::logit_bias) is added.
/// 2. [`repetition_penalty`](Self::repetition_penalty), then
///    [`frequency_penalty`](Self::frequency_penalty) and
///    [`presence_penalty`](Self::presence_penalty), over the path that leads to the row.
/// 3. The session's [`Constraint`](crate::Constraint), if it has one.
/// 4. [`temperature`](Self::temperature) divides. At 0, the greatest logit is picked here.
/// 5. [`top_k`](Self::top_k), [`top_p`](Self::top_p) and [`min_p`](Self::min_p) leave out tokens,
///    each among those that the one before left, with probabilities renormalised over these.
/// 6. A token is drawn from what is left, with [noise](crate::sample#noise) keyed by seed, position
///    and token.
///
/// Of tokens with equal logits, the one with the lower id counts as the more probable one
/// throughout.
///
/// ```
/// use ddtree::{Request, Sampling};
///
/// let sampling = Sampling::new().temperature(0.7).top_p(0.95).seed(42);
/// let request = Request::new(&[12, 7, 99]).sampling(sampling);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct Sampling {
    pub(crate) temperature: f32,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) penalty_window: Option<usize>,
    pub(crate) penalize_prompt: bool,
    #[cfg_attr(feature = "serde", serde(with = "bias"))]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: None,
            penalize_prompt: true,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// The least that has to be done to pick as a request asks. Each level includes the ones before.
///
/// A verifier that picks on its device hands over token ids as long as this is not above what its
/// device does ([`Capabilities::device_picks`](crate::Capabilities::device_picks)), and logits
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PickRule {
    /// The greatest logit; of equal ones, that with the lowest id.
    Argmax,
    /// The greatest sum of `logit / temperature` and [noise](crate::sample#noise); of equal ones,
    /// that with the lowest id.
    Noise,
    /// Whatever else a request can ask for: the row goes through this crate's pipeline.
    Pipeline,
}

impl std::fmt::Display for PickRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Argmax => "greedy picking",
            Self::Noise => "sampling with a temperature alone",
            Self::Pipeline => "sampling with truncation, penalties, bias or a constraint",
        })
    }
}

impl Sampling {
    /// Greedy picking.
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides the logits; 0 picks the greatest. Default: 0.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Keeps exactly the `k` most probable tokens, or all if there are fewer. Default: all.
    pub fn top_k(mut self, k: usize) -> Self {
        self.top_k = Some(k);
        self
    }

    /// Keeps the most probable tokens up to the one at which their probabilities sum up to `p` or
    /// more. Default: 1, all tokens.
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = p;
        self
    }

    /// Keeps the tokens that are at least `p` times as probable as the most probable one. Default:
    /// 0, all.
    pub fn min_p(mut self, p: f32) -> Self {
        self.min_p = p;
        self
    }

    /// Divides the positive logits of the path's tokens by this and multiplies the negative ones
    /// (Keskar et al., *CTRL*, 2019). Default: 1, no penalty; above 1 discourages repetition.
    pub fn repetition_penalty(mut self, penalty: f32) -> Self {
        self.repetition_penalty = penalty;
        self
    }

    /// Subtracts this from a token's logit once for each time that it is on the path. Default: 0.
    pub fn frequency_penalty(mut self, penalty: f32) -> Self {
        self.frequency_penalty = penalty;
        self
    }

    /// Subtracts this from the logits of the path's tokens. Default: 0.
    pub fn presence_penalty(mut self, penalty: f32) -> Self {
        self.presence_penalty = penalty;
        self
    }

    /// Tokens at the end of the path that the three penalties look at. Default: the whole path, as
    /// in transformers and vLLM; llama.cpp's default is 64.
    pub fn penalty_window(mut self, tokens: usize) -> Self {
        self.penalty_window = Some(tokens);
        self
    }

    /// Whether the prompt counts as part of the path for the three penalties. Default: yes, as
    /// transformers and vLLM have it for repetition; the frequency and presence penalties of the
    /// OpenAI interface are without the prompt.
    pub fn penalize_prompt(mut self, penalize: bool) -> Self {
        self.penalize_prompt = penalize;
        self
    }

    /// Adds to the logits of some tokens; `-inf` forbids one. Default: none.
    pub fn logit_bias(mut self, bias: &[(u32, f32)]) -> Self {
        self.logit_bias = bias.to_vec();
        self
    }

    /// Chooses the noise. Default: 0. The same seed, prompt and settings give the same text, on
    /// every platform on which the logits are the same; this crate has no other source of
    /// randomness.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether the greatest logit is picked, after bias, penalties and constraint.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The rule that these settings need, for a session without a constraint.
    pub fn rule(&self) -> PickRule {
        let truncates = self.top_k.is_some() || self.top_p < 1.0 || self.min_p > 0.0;
        if self.edits() || (truncates && !self.is_greedy()) {
            PickRule::Pipeline
        } else if self.is_greedy() {
            PickRule::Argmax
        } else {
            PickRule::Noise
        }
    }

    /// Whether logits change before the temperature.
    pub(crate) fn edits(&self) -> bool {
        self.penalizes() || !self.logit_bias.is_empty()
    }

    pub(crate) fn penalizes(&self) -> bool {
        (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
            && self.penalty_window != Some(0)
    }

    /// # Errors
    ///
    /// If a setting is outside its range.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<(), Error> {
        let check = |field, found: f32, valid: bool, accepted: &str| {
            if valid { Ok(()) } else { Err(Error::setting(field, found, accepted)) }
        };
        let t = self.temperature;
        // Below that, quotients of f32 logits lose their meaning.
        let valid = t == 0.0 || (1e-6..=1e6).contains(&t);
        check("temperature", t, valid, "0 (greedy) or 1e-6 to 1e6")?;
        if self.top_k == Some(0) {
            return Err(Error::setting("top_k", 0, "at least 1"));
        }
        let p = self.top_p;
        check("top_p", p, p > 0.0 && p <= 1.0, "above 0, at most 1")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1")?;
        let p = self.repetition_penalty;
        check("repetition_penalty", p, p > 0.0 && p.is_finite(), "a finite number above 0")?;
        for (field, p) in [
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ] {
            check(field, p, p.is_finite(), "a finite number")?;
        }
        for (index, &(token, bias)) in self.logit_bias.iter().enumerate() {
            if token as usize >= vocab_size {
                return Err(Error::Token { field: "logit_bias", index, found: token, vocab_size });
            }
            check("logit_bias", bias, bias < f32::INFINITY, "a finite number or -inf")?;
        }
        Ok(())
    }
}

/// JSON has no number for -inf: it is written as nothing.
#[cfg(feature = "serde")]
mod bias {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(bias: &[(u32, f32)], to: S) -> Result<S::Ok, S::Error> {
        let finite =
            |&(token, bias): &(u32, f32)| (token, Some(bias).filter(|bias| bias.is_finite()));
        bias.iter().map(finite).collect::<Vec<_>>().serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(
        from: D,
    ) -> Result<Vec<(u32, f32)>, D::Error> {
        let bias = Vec::<(u32, Option<f32>)>::deserialize(from)?;
        Ok(bias
            .into_iter()
            .map(|(token, bias)| (token, bias.unwrap_or(f32::NEG_INFINITY)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let field = |sampling: Sampling| match sampling.check(10).unwrap_err() {
            Error::Setting { field, .. } | Error::Token { field, .. } => field,
            other => panic!("{other}"),
        };
        let new = Sampling::new;
        for t in [-1.0, f32::NAN, f32::INFINITY, 1e-7] {
            assert_eq!(field(new().temperature(t)), "temperature");
        }
        assert_eq!(field(new().top_k(0)), "top_k");
        for p in [0.0, -0.1, 1.1, f32::NAN] {
            assert_eq!(field(new().top_p(p)), "top_p");
        }
        for p in [-0.1, 1.1, f32::NAN] {
            assert_eq!(field(new().min_p(p)), "min_p");
        }
        for p in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(field(new().repetition_penalty(p)), "repetition_penalty");
        }
        assert_eq!(field(new().frequency_penalty(f32::NAN)), "frequency_penalty");
        assert_eq!(field(new().presence_penalty(f32::INFINITY)), "presence_penalty");
        assert_eq!(field(new().logit_bias(&[(10, 1.0)])), "logit_bias");
        assert_eq!(field(new().logit_bias(&[(1, f32::NAN)])), "logit_bias");
        assert_eq!(field(new().logit_bias(&[(1, f32::INFINITY)])), "logit_bias");
        let extreme = new().temperature(1e-6).top_k(1).top_p(1.0).min_p(1.0);
        extreme.logit_bias(&[(9, f32::NEG_INFINITY)]).check(10).unwrap();
    }

    #[test]
    fn a_rule_is_no_more_than_is_asked_for() {
        let new = Sampling::new;
        assert_eq!(new().rule(), PickRule::Argmax);
        assert_eq!(new().top_k(5).top_p(0.5).seed(7).rule(), PickRule::Argmax);
        assert_eq!(new().temperature(0.5).rule(), PickRule::Noise);
        assert_eq!(new().temperature(0.5).min_p(0.1).rule(), PickRule::Pipeline);
        assert_eq!(new().repetition_penalty(1.1).rule(), PickRule::Pipeline);
        assert_eq!(new().repetition_penalty(1.1).penalty_window(0).rule(), PickRule::Argmax);
        assert_eq!(new().logit_bias(&[(1, 0.5)]).rule(), PickRule::Pipeline);
    }
}
