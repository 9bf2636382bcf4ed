use std::time::Instant;

use crate::{
    Acceptance, Algorithm, AncestorMask, BestFirst, CommitPlan, Committed, Constraint, DraftTree,
    Error, Filter, PickRule, Picks, Plan, Prefill, Proposal, ProposalRequest, Reason, Request,
    Round, RoundStats, RoundTrace, RunStats, Stage, TreeSettings,
    picks::{PickContext, leads_to},
    sample::{Coupling, Sampler},
    tree::chain,
    walk,
};

/// What a [`Session`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// Tokens to be forwarded and committed: [`Session::prefill`], then
    /// [`Session::prefilled`].
    Prefill,
    /// A draft: [`Session::proposal`], then [`Session::proposed`]; or
    /// [`Session::skip_proposal`].
    Proposal,
    /// Picks for a tree: [`Session::verification`], then
    /// [`Session::verified`].
    Verification,
    /// The accepted rows to be committed: [`Session::commit`], then
    /// [`Session::committed`].
    Commit,
    /// Nothing: the text is complete, or no request has been started.
    Nothing,
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prefill => "a prefill",
            Self::Proposal => "a proposal",
            Self::Verification => "a verification",
            Self::Commit => "a commit",
            Self::Nothing => "nothing",
        })
    }
}

/// Why a text is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Finish {
    /// The last token is a stop token.
    StopToken,
    /// As many tokens as were asked for.
    TokenLimit,
    /// The verifier's cache is full.
    CacheFull,
    /// The host stopped it ([`Session::stop`]).
    Stopped,
}

/// One sequence being decoded: the round as a state machine that does no I/O.
///
/// A session says what it [needs](Self::need) next, hands out what is to be
/// done, takes the result, and never calls a model itself. An engine with its
/// own scheduler, batches or async runtime drives many of them;
/// [`Decoder`](crate::Decoder) is the driver for one.
///
/// ```text
///   start ─► Prefill ─► Proposal ─► Verification ─► Commit ─┐
///               ▲          ▲                                ├─► Nothing
///               └─ append ─┴────────────────────────────────┘
/// ```
///
/// Between any two steps a session can be dropped, or brought back to the last
/// committed token with [`abandon`](Self::abandon). A proposal or a verification
/// that failed can also simply be done again, and so can a prefill once the verifier
/// is [reset](crate::Verifier::reset) to the committed length; after a commit that
/// failed the rows of the round are void, and only `abandon` is left. Tokens are
/// emitted when their round is committed, each exactly once.
///
/// A session allocates when it is made and when a request starts. Rounds allocate
/// for a proposal that is larger than any before, which usually means the first
/// round alone, for tokens beyond the first million, for logits that top-p keeps
/// more tokens of than of any before, and for a trace if one is kept; otherwise
/// nothing.
///
/// ```
/// use ddtree::{Algorithm, Capabilities, Config, Need, Plan, Request, Session};
///
/// // The "target" counts upwards; the "drafter" guesses right, then wrong.
/// let capabilities = Capabilities::new(100, 1_000);
/// let plan = Plan::resolve(&Config::new(Algorithm::Chain), &capabilities, 2)?;
/// let mut session = Session::new(plan);
/// session.start(&Request::new(&[5, 6, 7]).max_new_tokens(6))?;
/// loop {
///     match session.need() {
///         Need::Prefill => {
///             let (prefill, mut picks) = session.prefill()?;
///             picks.push(prefill.tokens().last().unwrap() + 1);
///             session.prefilled()?;
///         }
///         Need::Proposal => {
///             let (request, proposal) = session.proposal()?;
///             proposal.push(&[request.root() + 1], &[-0.1])?;
///             proposal.push(&[99], &[-0.1])?;
///             session.proposed()?;
///         }
///         Need::Verification => {
///             let (round, mut picks) = session.verification()?;
///             for token in round.tree().tokens() {
///                 picks.push((token + 1) % 100);
///             }
///             session.verified()?;
///         }
///         Need::Commit => {
///             // Here an engine would move KV rows as session.commit()? says.
///             session.committed()?;
///         }
///         _ => break,
///     }
/// }
/// assert_eq!(session.generated(), [8, 9, 10, 11, 12, 13]);
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Debug)]
pub struct Session {
    plan: Plan,
    stop_tokens: Vec<u32>,
    max_new_tokens: usize,
    prompt_len: usize,

    // The prompt and everything after it. Unless tokens wait for a prefill, the
    // last one is the root.
    tokens: Vec<u32>,
    // How many of them have rows in the verifier's cache.
    committed: usize,
    // Where the tokens of the last step begin.
    news: usize,
    need: Need,
    finish: Option<Finish>,

    // The round in progress.
    round: RoundLimits,
    proposal: Proposal,
    tree: DraftTree,
    mask: AncestorMask,
    has_mask: bool,
    picks: Vec<u32>,
    picked_by_id: bool,
    outcome: Acceptance,
    commit: CommitPlan,
    builder: BestFirst,
    filtered: Vec<u32>,
    shadow_tree: DraftTree,

    sampler: Sampler,
    coupling: Coupling,
    // Whether drafts use the request's noise.
    coupled: bool,

    since: Instant,
    stats: RunStats,
    last_round: Option<RoundStats>,
    trace: Vec<RoundTrace>,
    trace_path: Vec<u32>,
}

/// Tokens for which a session makes room ahead at most (4 MiB): a verifier may
/// have no limit of its own.
const RESERVED_TOKENS: usize = 1 << 20;

/// Rounds in a row without an accepted node at which there is a warning.
#[cfg(feature = "tracing")]
const ZERO_RUN: u64 = 32;

/// What the round in progress may draft.
#[derive(Clone, Copy, Debug)]
struct RoundLimits {
    horizon: usize,
    nodes: usize,
    reason: Option<Reason>,
}

impl Session {
    /// A session without a request: it needs nothing until
    /// [started](Self::start).
    pub fn new(plan: Plan) -> Self {
        let slots = plan.max_slots();
        let depth = plan.horizon();
        let mut session = Self {
            stop_tokens: Vec::new(),
            max_new_tokens: 0,
            prompt_len: 0,
            tokens: Vec::new(),
            committed: 0,
            news: 0,
            need: Need::Nothing,
            finish: None,
            round: RoundLimits { horizon: 0, nodes: 0, reason: None },
            proposal: Proposal::new(),
            tree: DraftTree::new(0),
            mask: AncestorMask::new(),
            has_mask: false,
            picks: Vec::new(),
            picked_by_id: false,
            outcome: Acceptance::new(),
            commit: CommitPlan::new(),
            builder: BestFirst::new(),
            filtered: Vec::new(),
            shadow_tree: DraftTree::new(0),
            sampler: Sampler::default(),
            coupling: Coupling::default(),
            coupled: false,
            since: Instant::now(),
            stats: RunStats::default(),
            last_round: None,
            trace: Vec::new(),
            trace_path: Vec::new(),
            plan,
        };
        session.tree.reserve(slots);
        session.picks.reserve(slots);
        session.outcome.reserve(depth);
        session.commit.reserve(depth);
        let trees = session.plan.algorithm().needs_tree_mask();
        // The builder also drafts the chains of a session with a constraint.
        let nodes = if trees || session.plan.shadow() { session.plan.tree().budget } else { depth };
        if nodes > 0 {
            session.builder.reserve(nodes.max(depth));
            session.filtered.reserve(nodes.max(depth) + 1);
        }
        if trees && session.plan.wants_bits() {
            session.mask.reserve(slots);
        }
        if session.plan.shadow() {
            session.shadow_tree.reserve(session.plan.tree().budget + 1);
        }
        session
    }

    /// Starts a request, whatever came before. Statistics and trace begin anew;
    /// memory is kept.
    ///
    /// # Errors
    ///
    /// If the prompt is empty, longer than the verifier's cache or not longer
    /// than its cached prefix, a token is outside the vocabulary, a sampling
    /// setting is outside its range, or the verifier can neither pick as the
    /// request says nor hand over logits. The session is unchanged then.
    pub fn start(&mut self, request: &Request) -> Result<(), Error> {
        let capabilities = self.plan.capabilities();
        let prompt = &request.prompt;
        if prompt.is_empty() || prompt.len() > capabilities.max_len {
            let accepted = format_args!("1 to {} tokens", capabilities.max_len);
            let found = format_args!("{} tokens", prompt.len());
            return Err(Error::setting("prompt", found, accepted));
        }
        if request.cached_prefix >= prompt.len() {
            let accepted = format_args!("less than the prompt's {} tokens", prompt.len());
            return Err(Error::setting("cached_prefix", request.cached_prefix, accepted));
        }
        self.check_tokens("prompt", prompt)?;
        self.check_tokens("stop_tokens", &request.stop_tokens)?;
        request.sampling.check(capabilities.vocab_size)?;
        let constraint = self.sampler.is_constrained();
        let rule = if constraint { PickRule::Pipeline } else { request.sampling.rule() };
        if rule > capabilities.device_picks && !capabilities.logits {
            return Err(Error::Unsupported {
                asked: rule.to_string(),
                found: "the verifier does not pick that way and hands over no logits",
                remedy: "ask for less, or for another verifier",
            });
        }

        self.coupled = self.plan.coupled() && !request.sampling.is_greedy();

        self.stop_tokens.clone_from(&request.stop_tokens);
        // The last token emitted needs no row.
        let room = (capabilities.max_len - prompt.len()).saturating_add(1);
        self.max_new_tokens = request.max_new_tokens.unwrap_or(usize::MAX);
        self.prompt_len = prompt.len();
        self.tokens.clone_from(prompt);
        let more = room.min(self.max_new_tokens).min(RESERVED_TOKENS);
        self.tokens.reserve(more);
        let longest = prompt.len() + more + self.plan.horizon();
        let vocab_size = capabilities.vocab_size;
        self.sampler.start(&request.sampling, vocab_size, prompt.len(), longest);
        self.committed = request.cached_prefix;
        self.news = self.tokens.len();
        self.stats.reset(self.plan.horizon());
        self.last_round = None;
        self.trace.clear();
        self.finish = None;
        self.need_prefill();
        if self.max_new_tokens == 0 {
            self.finish_with(Finish::TokenLimit);
        }
        self.since = Instant::now();
        Ok(())
    }

    /// Attaches a rule about which tokens may follow, or removes it, from the
    /// next pick on. It stays attached when another request starts.
    ///
    /// # Errors
    ///
    /// If the verifier cannot hand over logits. The session is unchanged then.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) -> Result<(), Error> {
        let capabilities = self.plan.capabilities();
        if constraint.is_some() && !capabilities.logits {
            return Err(Error::Unsupported {
                asked: "a constraint".into(),
                found: "the verifier hands over no logits",
                remedy: "use another verifier",
            });
        }
        self.sampler.set_constraint(constraint);
        Ok(())
    }

    /// Adds tokens that the host chose, between rounds: for instance the end of
    /// a thinking section. They follow the last emitted token, count as
    /// generated, and are forwarded by a prefill that comes next.
    ///
    /// # Errors
    ///
    /// If the session is within a round that drafted or finished, a token is
    /// outside the vocabulary, or the cache has no room for them. The session is
    /// unchanged then.
    pub fn append(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let between_rounds = match self.need {
            Need::Prefill | Need::Proposal => true,
            // Nothing is lost with a round that has no draft, and where none
            // can be drafted there is no other step between rounds.
            Need::Verification => self.tree.nodes() == 0,
            _ => false,
        };
        if !between_rounds {
            return Err(self.out_of_turn("append"));
        }
        self.check_tokens("tokens", tokens)?;
        let room = self.plan.capabilities().max_len.saturating_sub(self.tokens.len());
        if tokens.len() > room {
            return Err(Error::setting(
                "tokens",
                format_args!("{} tokens", tokens.len()),
                format_args!("at most {room}, the rows left in the cache"),
            ));
        }
        if !tokens.is_empty() {
            self.tokens.extend_from_slice(tokens);
            self.news = self.tokens.len();
            self.need_prefill();
            if self.generated().len() >= self.max_new_tokens {
                self.finish_with(Finish::TokenLimit);
            }
        }
        Ok(())
    }

    /// What the session waits for.
    pub fn need(&self) -> Need {
        self.need
    }

    /// Tokens to forward and commit, and where their pick goes.
    ///
    /// # Errors
    ///
    /// If the session does not need a prefill.
    pub fn prefill(&mut self) -> Result<(Prefill<'_>, Picks<'_>), Error> {
        self.expect(Need::Prefill, "prefill")?;
        let prefill = Prefill::new(self.committed, &self.tokens[self.committed..]);
        let context = PickContext {
            sampler: &mut self.sampler,
            tokens: &self.tokens,
            tree: None,
            stop_tokens: &self.stop_tokens,
            everywhere: self.plan.trace(),
            at_least: PickRule::Argmax,
            by_id: &mut self.picked_by_id,
        };
        Ok((prefill, Picks::with(&mut self.picks, context)))
    }

    /// Takes note that the tokens are committed and emits the pick after them.
    ///
    /// # Errors
    ///
    /// If the session does not need a prefill, there is not exactly one pick
    /// within the vocabulary, it is a token id where the request needs more
    /// than the verifier's own picks honour, or no token is left to pick. The
    /// session still needs the prefill then, from the same row on.
    pub fn prefilled(&mut self) -> Result<(), Error> {
        self.expect(Need::Prefill, "prefilled")?;
        self.check_picks(None)?;
        self.lap(Stage::Prefill);
        self.committed = self.tokens.len();
        self.news = self.tokens.len();
        self.tokens.push(self.picks[0]);
        self.next_round();
        Ok(())
    }

    /// What is to be drafted, and an empty proposal to fill.
    ///
    /// # Errors
    ///
    /// If the session does not need a proposal.
    pub fn proposal(&mut self) -> Result<(ProposalRequest, &mut Proposal), Error> {
        self.expect(Need::Proposal, "proposal")?;
        self.proposal.clear();
        let reranks = self.coupled || self.sampler.is_constrained();
        let mut request = ProposalRequest::new(
            self.root(),
            self.committed,
            self.round.horizon,
            if reranks { self.plan.candidates() } else { self.plan.tree().top_k },
        );
        if self.coupled {
            request.noise = self.sampler.noise(self.tokens.len());
        }
        Ok((request, &mut self.proposal))
    }

    /// Builds the round's tree from the proposal.
    ///
    /// # Errors
    ///
    /// If the session does not need a proposal, or a drafted token is outside
    /// the vocabulary. The session still needs a proposal then.
    pub fn proposed(&mut self) -> Result<(), Error> {
        self.expect(Need::Proposal, "proposed")?;
        self.proposal.check_vocabulary(self.plan.capabilities().vocab_size)?;
        self.lap(Stage::Propose);
        self.proposal.truncate(self.round.horizon);
        if self.coupled && !self.proposal.is_coupled() {
            let settings = self.sampler.settings();
            self.coupling.apply(&mut self.proposal, settings, self.committed);
        }
        self.tree.reset(self.root());
        let settings = self.plan.tree();
        if self.plan.algorithm().needs_tree_mask() {
            let budget = self.round.nodes;
            self.build(TreeSettings { budget, ..settings }, false)?;
        } else {
            if self.sampler.is_constrained() {
                let budget = self.round.horizon;
                let path = TreeSettings { budget, top_k: 1, ..TreeSettings::default() };
                self.build(path, false)?;
            } else {
                chain::build(&self.proposal, self.chain_horizon(), &mut self.tree);
            }
            if self.plan.shadow() {
                self.shadow_tree.reset(self.root());
                self.build(settings, true)?;
            }
        }
        let reason = if self.tree.nodes() == 0 {
            Some(Reason::EmptyProposal)
        } else if self.plan.algorithm().needs_tree_mask() && self.tree.is_chain() {
            Some(Reason::SinglePath)
        } else {
            None
        };
        // What the proposal leaves undone is the reason even in rounds that were limited, unless
        // the limit is one node.
        match reason {
            Some(Reason::SinglePath) if self.round.nodes == 1 => {
                self.round.reason = self.round.reason.or(reason);
            }
            _ => self.round.reason = reason.or(self.round.reason),
        }
        self.tree_ready();
        self.lap(Stage::Build);
        Ok(())
    }

    fn build(&mut self, settings: TreeSettings, shadow: bool) -> Result<(), Error> {
        let tree = if shadow { &mut self.shadow_tree } else { &mut self.tree };
        let (stops, sampler) = (&self.stop_tokens, &mut self.sampler);
        // A constraint is not asked what follows the end.
        let expand = self.plan.expand_below_stop() && !sampler.is_constrained();
        let stops_end = !expand && !stops.is_empty();
        if !stops_end && !sampler.is_constrained() {
            return self.builder.build(&self.proposal, settings, tree);
        }
        let tokens = &self.tokens;
        let allows = |tree: &DraftTree, parent: usize, token| {
            let ended = stops_end && parent > 0 && stops.contains(&tree.tokens()[parent]);
            !ended && sampler.allows(tokens, tree, parent, token)
        };
        let mut expand = Filter::new(&self.proposal, allows, &mut self.filtered);
        self.builder.build_with(&mut expand, settings, tree)
    }

    /// Depths of the chain: those up to a stop token if nothing is to be drafted
    /// below one.
    fn chain_horizon(&self) -> usize {
        let stops = |&depth: &usize| {
            let best = self.proposal.depth(depth).0.first();
            best.is_some_and(|token| self.stop_tokens.contains(token))
        };
        let horizon = self.round.horizon;
        if self.plan.expand_below_stop() {
            return horizon;
        }
        (1..=horizon).find(stops).unwrap_or(horizon)
    }

    /// Makes the round that comes one without a draft: when the drafter failed,
    /// or is not worth its time.
    ///
    /// # Errors
    ///
    /// If the session does not need a proposal.
    pub fn skip_proposal(&mut self) -> Result<(), Error> {
        self.expect(Need::Proposal, "skip_proposal")?;
        self.round.reason = Some(Reason::Skipped);
        self.tree.reset(self.root());
        self.tree_ready();
        self.since = Instant::now();
        Ok(())
    }

    /// The tree of the round, while it waits for its verification.
    ///
    /// # Errors
    ///
    /// If the session does not need a verification.
    pub fn tree(&self) -> Result<&DraftTree, Error> {
        self.expect(Need::Verification, "tree")?;
        Ok(&self.tree)
    }

    /// Keeps only the first `nodes` nodes of the round's tree: when sequences of
    /// a batch [share a budget](crate::tree::SharedBudget), or the host has less
    /// room than it planned with. No effect if there are no more.
    ///
    /// # Errors
    ///
    /// If the session does not need a verification.
    pub fn truncate_tree(&mut self, nodes: usize) -> Result<(), Error> {
        self.expect(Need::Verification, "truncate_tree")?;
        if nodes < self.tree.nodes() {
            self.tree.truncate(nodes);
            self.round.reason = Some(Reason::Truncated);
            self.tree_ready();
        }
        Ok(())
    }

    /// The tree to verify, and where its picks go.
    ///
    /// # Errors
    ///
    /// If the session does not need a verification.
    pub fn verification(&mut self) -> Result<(Round<'_>, Picks<'_>), Error> {
        self.expect(Need::Verification, "verification")?;
        let mask = self.has_mask.then_some(&self.mask);
        let round = Round::new(self.committed, &self.tree, mask);
        let context = PickContext {
            sampler: &mut self.sampler,
            tokens: &self.tokens,
            tree: Some(&self.tree),
            stop_tokens: &self.stop_tokens,
            everywhere: self.plan.trace(),
            at_least: PickRule::Argmax,
            by_id: &mut self.picked_by_id,
        };
        Ok((round, Picks::with(&mut self.picks, context)))
    }

    /// Walks the tree along the picks and makes the commit plan.
    ///
    /// # Errors
    ///
    /// If the session does not need a verification, there is not exactly one
    /// pick per slot within the vocabulary, they are token ids where the
    /// request needs more than the verifier's own picks honour, or no token is
    /// left to pick at the root. (Where none is left after a drafted token, the
    /// round ends with that token.) The session still needs the verification
    /// then.
    pub fn verified(&mut self) -> Result<(), Error> {
        self.expect(Need::Verification, "verified")?;
        self.check_picks(Some(&self.tree))?;
        self.lap(Stage::Verify);
        walk(&self.tree, &self.picks, &mut self.outcome)?;
        if self.plan.trace() {
            self.trace_path.clear();
            self.trace_path.extend_from_slice(self.outcome.path());
        }
        if self.sampler.dead_end.is_some() {
            // It is where the walk ends, and the token that leads there is the bonus.
            self.outcome.truncate(self.outcome.accepted());
        }
        let tokens = self.outcome.tokens();
        let stop = tokens.iter().position(|token| self.stop_tokens.contains(token));
        let limit = self.max_new_tokens - self.generated().len();
        self.outcome.truncate(stop.map_or(limit, |stop| limit.min(stop + 1)));
        self.commit.set(self.committed, &self.outcome);
        self.need = Need::Commit;
        self.lap(Stage::Walk);
        Ok(())
    }

    /// Shortens the outcome of the round to `tokens` emitted tokens (at least
    /// one), before it is committed: where a host's own rule (a phrase, a
    /// thinking budget) cuts the text.
    ///
    /// # Errors
    ///
    /// If the session does not need a commit.
    pub fn truncate_outcome(&mut self, tokens: usize) -> Result<(), Error> {
        self.expect(Need::Commit, "truncate_outcome")?;
        self.outcome.truncate(tokens);
        self.commit.set(self.committed, &self.outcome);
        Ok(())
    }

    /// The outcome of the round, not emitted yet.
    ///
    /// # Errors
    ///
    /// If the session does not need a commit.
    pub fn outcome(&self) -> Result<&Acceptance, Error> {
        self.expect(Need::Commit, "outcome")?;
        Ok(&self.outcome)
    }

    /// How the verifier's caches are to change.
    ///
    /// # Errors
    ///
    /// If the session does not need a commit.
    pub fn commit(&self) -> Result<&CommitPlan, Error> {
        self.expect(Need::Commit, "commit")?;
        Ok(&self.commit)
    }

    /// Takes note that the round is committed, and emits its tokens.
    ///
    /// # Errors
    ///
    /// If the session does not need a commit.
    pub fn committed(&mut self) -> Result<(), Error> {
        self.expect(Need::Commit, "committed")?;
        self.lap(Stage::Commit);
        self.note_shadow();
        let round = RoundStats {
            algorithm: match (self.tree.nodes(), self.tree.is_chain()) {
                (0, _) => Algorithm::Autoregressive,
                (_, true) => Algorithm::Chain,
                (_, false) => Algorithm::Tree,
            },
            reason: self.round.reason,
            nodes: self.tree.nodes(),
            tokens: self.outcome.tokens().len(),
        };
        #[cfg(feature = "tracing")]
        if let Some(reason) = round.reason {
            tracing::debug!(running = %round.algorithm, %reason, "ddtree round");
        }
        self.stats.add_round(&round, self.tree.max_depth());
        #[cfg(feature = "tracing")]
        if round.nodes > 0 && self.stats.zero_run == ZERO_RUN {
            tracing::warn!(rounds = ZERO_RUN, "ddtree accepts nothing");
        }
        self.last_round = Some(round);
        if self.plan.trace() {
            self.trace.push(RoundTrace {
                start: self.committed,
                stats: round,
                tokens: self.tree.tokens().to_vec(),
                parents: self.tree.parents().to_vec(),
                depths: self.tree.depths().to_vec(),
                scores: self.tree.scores().to_vec(),
                picks: self.picks.clone(),
                path: self.trace_path.clone(),
            });
        }
        self.committed = self.commit.new_len();
        self.news = self.tokens.len();
        self.tokens.extend_from_slice(self.outcome.tokens());
        self.next_round();
        Ok(())
    }

    /// Drops the round in progress: the session is at its last committed token
    /// again, and needs a new proposal. For use after a failure in any of the
    /// round's steps. No effect between rounds.
    pub fn abandon(&mut self) {
        if matches!(self.need, Need::Verification | Need::Commit) {
            self.next_round();
        }
    }

    /// Ends the session where it is. A round in progress is dropped.
    pub fn stop(&mut self) {
        if self.need != Need::Nothing {
            self.finish_with(Finish::Stopped);
        }
    }

    /// Why the text is complete; `None` if it is not.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The plan that rounds follow.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The prompt and everything after it.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Everything after the prompt.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Tokens emitted by the last prefill or commit.
    pub fn new_tokens(&self) -> &[u32] {
        &self.tokens[self.news..]
    }

    /// How many tokens have rows in the verifier's cache.
    pub fn committed_len(&self) -> usize {
        self.committed
    }

    /// How many leading tokens of another prompt have rows in the verifier's
    /// cache, committed by this request: what its
    /// [`cached_prefix`](crate::Request::cached_prefix) can be if the verifier
    /// goes on with it. At most all but the last one, which has to be forwarded.
    ///
    /// # Complexity
    ///
    /// Linear in the result.
    pub fn reusable_prefix(&self, prompt: &[u32]) -> usize {
        let held = self.tokens[..self.committed].iter().zip(prompt);
        let common = held.take_while(|(held, wanted)| held == wanted).count();
        common.min(prompt.len().saturating_sub(1))
    }

    /// Committed tokens in a range of positions: what a drafter observes.
    ///
    /// # Errors
    ///
    /// If `range` is empty or does not lie within the committed tokens.
    pub fn committed_tokens(&self, range: std::ops::Range<usize>) -> Result<Committed<'_>, Error> {
        if range.is_empty() || range.end > self.committed {
            let accepted = format_args!("at least one token within 0..{}", self.committed);
            return Err(Error::setting("range", format_args!("{range:?}"), accepted));
        }
        Ok(Committed::new(range.start, &self.tokens[range]))
    }

    /// Figures since the start.
    pub fn stats(&self) -> &RunStats {
        &self.stats
    }

    /// Figures of the last committed round.
    pub fn last_round(&self) -> Option<&RoundStats> {
        self.last_round.as_ref()
    }

    /// All rounds committed, if [`Config::trace`](crate::Config::trace) is on.
    pub fn trace(&self) -> &[RoundTrace] {
        &self.trace
    }

    /// Adds to the time of a stage that the session cannot see, such as
    /// [`Stage::Observe`].
    pub fn add_time(&mut self, stage: Stage, time: std::time::Duration) {
        self.stats.add_time(stage, time);
        self.since = Instant::now();
    }

    /// Bytes held, used or not, without trace and statistics.
    pub fn memory_usage(&self) -> usize {
        4 * (self.tokens.capacity()
            + self.picks.capacity()
            + self.stop_tokens.capacity()
            + self.filtered.capacity())
            + self.proposal.memory_usage()
            + self.tree.memory_usage()
            + self.shadow_tree.memory_usage()
            + self.mask.memory_usage()
            + self.builder.memory_usage()
            + self.sampler.memory_usage()
            + self.coupling.memory_usage()
            + 4 * 3 * (self.plan.horizon() + 1)
    }

    fn root(&self) -> u32 {
        self.tokens[self.committed]
    }

    /// Decides, after tokens were emitted or a round was dropped, what comes.
    fn next_round(&mut self) {
        let max_len = self.plan.capabilities().max_len;
        let left = self.max_new_tokens - self.generated().len();
        if self.new_tokens().last().is_some_and(|token| self.stop_tokens.contains(token)) {
            self.finish_with(Finish::StopToken);
        } else if left == 0 {
            self.finish_with(Finish::TokenLimit);
        } else if self.committed == max_len {
            self.finish_with(Finish::CacheFull);
        } else {
            self.limit_round(left, max_len - self.committed - 1);
        }
    }

    /// Sets the limits of a round that may emit `left` tokens, with room for
    /// `rows` nodes in the cache.
    fn limit_round(&mut self, left: usize, rows: usize) {
        let plan = &self.plan;
        let wanted = plan.max_slots() - 1;
        self.round = RoundLimits {
            // A node deeper than that could only be accepted to be cut off.
            horizon: plan.horizon().min(left - 1),
            nodes: wanted.min(rows),
            reason: plan.reason(),
        };
        if !plan.algorithm().needs_tree_mask() {
            self.round.horizon = self.round.horizon.min(rows);
        }
        if wanted > 0 {
            if left == 1 {
                self.round.reason = Some(Reason::LastToken);
            } else if wanted > rows {
                self.round.reason = Some(Reason::CacheLimit);
            }
        }
        if self.round.horizon.min(self.round.nodes) > 0 {
            self.proposal.clear();
            self.need = Need::Proposal;
        } else {
            self.tree.reset(self.root());
            self.tree_ready();
        }
        self.since = Instant::now();
    }

    fn tree_ready(&mut self) {
        self.has_mask = !self.tree.is_chain() && self.plan.wants_bits();
        if self.has_mask {
            self.mask.build(&self.tree);
        }
        self.picks.clear();
        self.sampler.dead_end = None;
        self.need = Need::Verification;
    }

    fn need_prefill(&mut self) {
        self.picks.clear();
        self.sampler.dead_end = None;
        self.need = Need::Prefill;
    }

    fn note_shadow(&mut self) {
        if !self.plan.shadow() || self.tree.nodes() == 0 {
            return;
        }
        let emitted = self.outcome.tokens();
        // Nothing was rejected if the whole chain was accepted, nor if the pick
        // was the chain's and the text was cut there.
        let last = emitted.len() - 1;
        if self.tree.tokens().get(last + 1).is_none_or(|drafted| *drafted == emitted[last]) {
            return;
        }
        self.stats.shadow.rejections += 1;
        let path = emitted.iter().try_fold(0, |slot, &token| self.shadow_tree.child(slot, token));
        self.stats.shadow.caught += u64::from(path.is_some());
    }

    fn finish_with(&mut self, finish: Finish) {
        self.need = Need::Nothing;
        self.finish = Some(finish);
    }

    fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        self.stats.add_time(stage, now - self.since);
        self.since = now;
    }

    fn expect(&self, need: Need, call: &'static str) -> Result<(), Error> {
        if self.need == need { Ok(()) } else { Err(self.out_of_turn(call)) }
    }

    fn out_of_turn(&self, call: &'static str) -> Error {
        Error::OutOfTurn { call, needs: self.need }
    }

    /// The error if the round or the prefill cannot have a token.
    pub(crate) fn refusal(&self) -> Option<Error> {
        (self.sampler.dead_end == Some(0)).then_some(Error::NoToken { slot: 0 })
    }

    /// Checks the picks taken for a tree, or the one after a prefill.
    fn check_picks(&self, tree: Option<&DraftTree>) -> Result<(), Error> {
        let capabilities = self.plan.capabilities();
        let rule = self.sampler.rule();
        if self.picked_by_id && rule > capabilities.device_picks {
            return Err(Error::Unsupported {
                asked: rule.to_string(),
                found: "the verifier handed over token ids, which honour less than that",
                remedy: "hand over logits if Picks::rule is above Capabilities::device_picks",
            });
        }
        if let Some(refusal) = self.refusal() {
            return Err(refusal);
        }
        let slots = tree.map_or(1, DraftTree::len);
        if self.picks.len() != slots {
            let (found, accepted) = (self.picks.len(), slots);
            return Err(Error::Length { field: "picks", found, accepted });
        }
        let vocab_size = capabilities.vocab_size;
        let dead_end = self.sampler.dead_end;
        let reached =
            |slot| tree.is_none_or(|tree| leads_to(tree, &self.picks, &self.stop_tokens, slot));
        let wrong = |slot, token: u32| {
            token as usize >= vocab_size
                && (token != Picks::SKIPPED || (reached(slot) && dead_end != Some(slot)))
        };
        match self.picks.iter().enumerate().find(|&(slot, &token)| wrong(slot, token)) {
            None => Ok(()),
            Some((index, &found)) => Err(Error::Token { field: "picks", index, found, vocab_size }),
        }
    }

    fn check_tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), Error> {
        let vocab_size = self.plan.capabilities().vocab_size;
        match tokens.iter().position(|&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(index) => Err(Error::Token { field, index, found: tokens[index], vocab_size }),
        }
    }
}
