//! How tokens are chosen.

use ddtree::Sampling;

/// Options for sampling; without any, the target's best token is always picked.
#[derive(Clone, Debug, clap::Args)]
pub struct SamplingArgs {
    /// Divides the logits; 0 always picks the best token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,

    /// Sample from the K most probable tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,

    /// Sample from the most probable tokens whose probabilities sum up to P
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,

    /// Sample from tokens at least P times as probable as the best one
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f32,

    /// The same seed and options give the same text, with every algorithm
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Makes tokens of the prompt and of the text so far less probable; 1 does not
    #[arg(long, value_name = "PENALTY", default_value_t = 1.0)]
    pub repetition_penalty: f32,
}

impl SamplingArgs {
    pub fn sampling(&self) -> Sampling {
        let sampling = Sampling::new()
            .temperature(self.temperature)
            .top_p(self.top_p)
            .min_p(self.min_p)
            .seed(self.seed)
            .repetition_penalty(self.repetition_penalty);
        match self.top_k {
            Some(k) => sampling.top_k(k),
            None => sampling,
        }
    }
}
