use crate::{Algorithm, Sampling};

/// How to draft: what a user asks for, before it is held against what the
/// verifier and the drafter can do ([`Plan::resolve`](crate::Plan::resolve)).
///
/// ```
/// use ddtree::{Algorithm, Config};
///
/// let config = Config::new(Algorithm::Tree).budget(32).top_k(8);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct Config {
    pub(crate) algorithm: Algorithm,
    // `None` is not the drafter's block size of today, but whatever drafter is
    // paired later.
    pub(crate) block_size: Option<usize>,
    pub(crate) budget: usize,
    // `None` follows the budget.
    pub(crate) top_k: Option<usize>,
    pub(crate) log_prob_cutoff: Option<f64>,
    pub(crate) spine: bool,
    pub(crate) coupled: bool,
    pub(crate) expand_below_stop: bool,
    pub(crate) shadow: bool,
    pub(crate) allow_inexact_recurrent: bool,
    pub(crate) trace: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::default(),
            block_size: None,
            budget: 64,
            top_k: None,
            log_prob_cutoff: None,
            spine: false,
            coupled: true,
            expand_below_stop: true,
            shadow: false,
            allow_inexact_recurrent: false,
            trace: false,
        }
    }
}

impl Config {
    /// Default settings for an algorithm.
    pub fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, ..Self::default() }
    }

    /// Block size: the root and the depths to draft. Default: the drafter's,
    /// which is also the maximum. A drafter trained for one block size drafts
    /// in full and is cut.
    pub fn block_size(mut self, block_size: usize) -> Self {
        self.block_size = Some(block_size);
        self
    }

    /// Nodes of a tree, not counting the root. Default: 64, since a GPU
    /// verifies that many for little more than one token; on a CPU, and in
    /// large batches, fewer are faster. At most 65,536. A chain that runs in
    /// place of a tree has no more nodes either; one that was asked for does not
    /// read it.
    pub fn budget(mut self, budget: usize) -> Self {
        self.budget = budget;
        self
    }

    /// Entries per depth that the drafter is asked for, and children per node.
    /// Default: the budget, beyond which no entry can be in the tree; 8 to 32
    /// rarely lose anything in greedy decoding and cost a drafter on the host
    /// less. Requests with a temperature ask for at least 128 by default, since
    /// the noise that drafts are [coupled](Self::coupled) to lifts tokens from
    /// far down the list.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.top_k = Some(top_k);
        self
    }

    /// Leaves out paths whose log-probability (natural logarithm, summed from
    /// the root) is below this. Default: none. It saves verifying improbable
    /// nodes where verification is not flat in their number. Chains do not read
    /// it.
    pub fn log_prob_cutoff(mut self, log_prob: f64) -> Self {
        self.log_prob_cutoff = Some(log_prob);
        self
    }

    /// Guarantees that the chain of best tokens, or as much of it as the budget
    /// holds, is in the tree. Default: off, the reference's rule. With small
    /// budgets or a quantised target, best-first search gives depth away for
    /// breadth, and this wins it back.
    pub fn spine(mut self, spine: bool) -> Self {
        self.spine = spine;
        self
    }

    /// Whether a request with a temperature is drafted with the noise that it
    /// is sampled with: the tree then holds the tokens that this noise favours,
    /// and more of them are accepted. The text is the same. Default: on. Greedy
    /// requests do not read it.
    pub fn coupled(mut self, coupled: bool) -> Self {
        self.coupled = coupled;
        self
    }

    /// Whether to draft below a stop token. Default: on, the reference's rule;
    /// off saves nodes that can never be emitted. With a
    /// [constraint](crate::Constraint) nothing is drafted there in any case.
    pub fn expand_below_stop(mut self, expand: bool) -> Self {
        self.expand_below_stop = expand;
        self
    }

    /// With [`Algorithm::Chain`]: also build the tree, without verifying it,
    /// and count how often it held the target's pick where the chain was first
    /// rejected. Default: off. It tells what trees would buy before they are
    /// switched on, for a drafter that is asked for [`top_k`](Self::top_k)
    /// entries per depth.
    pub fn shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self
    }

    /// Allows trees on a verifier whose recurrent layers run in slot order
    /// ([`Recurrence::Sequential`](crate::Recurrence::Sequential)). Default:
    /// off, and then asking for a tree there is an error. **Output then differs
    /// from plain decoding.**
    pub fn allow_inexact_recurrent(mut self, allow: bool) -> Self {
        self.allow_inexact_recurrent = allow;
        self
    }

    /// Keeps every round's tree, picks and path
    /// ([`Session::trace`](crate::Session::trace)). Default: off; it allocates.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }
}

/// What to generate: a prompt and where to stop.
///
/// ```
/// use ddtree::Request;
///
/// let request = Request::new(&[12, 7, 99]).max_new_tokens(128).stop_tokens(&[0]);
/// assert_eq!(request.max_new_tokens, Some(128));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct Request {
    /// The tokens to continue.
    pub prompt: Vec<u32>,
    /// See [`max_new_tokens`](Self::max_new_tokens()); `None` for as many as the cache holds.
    pub max_new_tokens: Option<usize>,
    /// See [`stop_tokens`](Self::stop_tokens()).
    pub stop_tokens: Vec<u32>,
    /// See [`cached_prefix`](Self::cached_prefix()).
    pub cached_prefix: usize,
    /// See [`sampling`](Self::sampling()).
    pub sampling: Sampling,
}

impl Request {
    /// Continues `prompt` until the cache is full.
    pub fn new(prompt: &[u32]) -> Self {
        Self { prompt: prompt.to_vec(), ..Self::default() }
    }

    /// Tokens to emit at most. Default: as many as the cache holds. Zero emits
    /// nothing and forwards nothing.
    pub fn max_new_tokens(mut self, max_new_tokens: usize) -> Self {
        self.max_new_tokens = Some(max_new_tokens);
        self
    }

    /// Tokens after which to stop; the stop token itself is emitted. Tokens that
    /// the host [appends](crate::Session::append) do not stop the text. Default:
    /// none.
    pub fn stop_tokens(mut self, stop_tokens: &[u32]) -> Self {
        self.stop_tokens = stop_tokens.to_vec();
        self
    }

    /// How tokens are chosen. Default: greedy.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Leading prompt tokens whose rows the verifier still holds, committed by
    /// the request before ([`Session::reusable_prefix`](crate::Session::reusable_prefix)
    /// tells how many); they are not forwarded again. Default: 0. A drafter
    /// that reads the target's features starts its context where these end
    /// unless it holds them too.
    pub fn cached_prefix(mut self, rows: usize) -> Self {
        self.cached_prefix = rows;
        self
    }
}
