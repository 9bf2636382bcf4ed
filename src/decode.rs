use std::{ops::ControlFlow, time::Instant};

use crate::{
    Config, Constraint, Drafter, Error, Finish, Need, NoDrafter, Plan, Request, RunStats, Session,
    Stage, Verifier,
};

/// A verifier and its drafter.
///
/// Two objects are a pair `(verifier, drafter)`; one object that is both is a
/// [`Joint`]. Either can be borrowed.
pub trait Engine {
    /// The target.
    type Verifier: Verifier;
    /// A drafter that reads the target's features.
    type Drafter: Drafter<<Self::Verifier as Verifier>::Features>;

    /// The target.
    fn verifier(&self) -> &Self::Verifier;
    /// The target.
    fn verifier_mut(&mut self) -> &mut Self::Verifier;
    /// The drafter.
    fn drafter(&self) -> &Self::Drafter;
    /// The drafter.
    fn drafter_mut(&mut self) -> &mut Self::Drafter;
}

impl<V: Verifier, D: Drafter<V::Features>> Engine for (V, D) {
    type Verifier = V;
    type Drafter = D;

    fn verifier(&self) -> &V {
        &self.0
    }

    fn verifier_mut(&mut self) -> &mut V {
        &mut self.0
    }

    fn drafter(&self) -> &D {
        &self.1
    }

    fn drafter_mut(&mut self) -> &mut D {
        &mut self.1
    }
}

/// One object that is verifier and drafter at once.
#[derive(Clone, Copy, Debug)]
pub struct Joint<E>(pub E);

impl<E: Verifier + Drafter<<E as Verifier>::Features>> Engine for Joint<E> {
    type Verifier = E;
    type Drafter = E;

    fn verifier(&self) -> &E {
        &self.0
    }

    fn verifier_mut(&mut self) -> &mut E {
        &mut self.0
    }

    fn drafter(&self) -> &E {
        &self.0
    }

    fn drafter_mut(&mut self) -> &mut E {
        &mut self.0
    }
}

/// What can go wrong while decoding.
///
/// The session is at its last committed token then, and what was emitted stays
/// emitted. The caller can [step](Decoder::step) again, take
/// [plain steps](Decoder::step_plain), or stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError<V: std::error::Error + 'static, D: std::error::Error + 'static> {
    /// This crate refused a setting, a proposal or picks.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The verifier failed.
    #[error("the verifier failed ({stage})")]
    Verifier {
        /// What it was asked for.
        stage: Stage,
        /// Its error.
        source: V,
    },
    /// The drafter failed.
    #[error("the drafter failed ({stage})")]
    Drafter {
        /// What it was asked for.
        stage: Stage,
        /// Its error.
        source: D,
    },
}

type VerifierOf<E> = <E as Engine>::Verifier;
type FeaturesOf<E> = <VerifierOf<E> as Verifier>::Features;

/// [`DecodeError`] of an [`Engine`].
pub type ErrorOf<E> = DecodeError<
    <VerifierOf<E> as Verifier>::Error,
    <<E as Engine>::Drafter as Drafter<FeaturesOf<E>>>::Error,
>;

/// Decodes one sequence after another with one engine: the thin loop over a
/// [`Session`].
///
/// Use [`generate`](Self::generate) for a whole text with a callback,
/// [`start`](Self::start) and [`step`](Self::step) to hold the reins, and a
/// [`Session`] of your own where the engine has its own scheduler or batches.
///
/// ```
/// # use std::convert::Infallible;
/// # use ddtree::{Capabilities, CommitPlan, Committed, Drafter, Picks, Prefill, Proposal, ProposalRequest, Round, Verifier};
/// # struct Counter;
/// # impl Verifier for Counter {
/// #     type Error = Infallible;
/// #     type Features = ();
/// #     fn capabilities(&self) -> Capabilities { Capabilities::new(100, 1_000) }
/// #     fn reset(&mut self, _: usize) -> Result<(), Infallible> { Ok(()) }
/// #     fn prefill(&mut self, p: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
/// #         picks.push((p.tokens().last().unwrap() + 1) % 100);
/// #         Ok(())
/// #     }
/// #     fn verify(&mut self, r: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
/// #         r.tree().tokens().iter().for_each(|token| picks.push((token + 1) % 100));
/// #         Ok(())
/// #     }
/// #     fn commit(&mut self, _: &CommitPlan) -> Result<(), Infallible> { Ok(()) }
/// # }
/// # struct Successor;
/// # impl<F> Drafter<F> for Successor {
/// #     type Error = Infallible;
/// #     fn horizon(&self) -> usize { 3 }
/// #     fn reset(&mut self, _: usize) -> Result<(), Infallible> { Ok(()) }
/// #     fn observe(&mut self, _: &Committed<'_>, _: &F) -> Result<(), Infallible> { Ok(()) }
/// #     fn propose(&mut self, r: &ProposalRequest, p: &mut Proposal) -> Result<(), Infallible> {
/// #         (1..=3).for_each(|d| p.push(&[(r.root() + d) % 100, 0], &[-0.1, -3.0]).unwrap());
/// #         Ok(())
/// #     }
/// # }
/// use ddtree::{Algorithm, Config, Decoder, Request};
///
/// // `Counter` and `Successor` are the examples of `Verifier` and `Drafter`.
/// let mut decoder = Decoder::new((Counter, Successor), &Config::new(Algorithm::Tree))?;
///
/// decoder.start(&Request::new(&[5, 6, 7]).max_new_tokens(8))?;
/// let mut text = Vec::new();
/// while let Some(tokens) = decoder.step()? {
///     text.extend_from_slice(tokens);
/// }
/// assert_eq!(text, [8, 9, 10, 11, 12, 13, 14, 15]);
/// assert_eq!(decoder.session().stats().rounds, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Decoder<E: Engine> {
    engine: E,
    session: Session,
    // Committed tokens that the drafter has not observed yet, with their
    // features: at most those of one step, unless steps are taken without it.
    unobserved: Vec<(std::ops::Range<usize>, FeaturesOf<E>)>,
    // Whether the verifier is to be reset before it goes on: once per request, and after a prefill
    // that failed, of which it may hold rows.
    verifier_reset: bool,
    // The rows whose features the drafter may keep, until it is reset: once per request, when it
    // is first needed.
    drafter_reset: Option<usize>,
    // Whether the verifier's rows are known to be those of the session's committed tokens.
    rows_known: bool,
    // Whether the engine was lent out since the request began.
    lent: bool,
}

impl<E: Engine> std::fmt::Debug for Decoder<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("session", &self.session).finish_non_exhaustive()
    }
}

impl<V: Verifier> Decoder<(V, NoDrafter)> {
    /// A decoder without a draft: one token per step.
    ///
    /// # Errors
    ///
    /// If the verifier's capabilities make no sense.
    pub fn autoregressive(verifier: V) -> Result<Self, Error> {
        Self::new((verifier, NoDrafter), &Config::new(crate::Algorithm::Autoregressive))
    }
}

impl<E: Engine> Decoder<E> {
    /// Resolves `config` against the engine.
    ///
    /// # Errors
    ///
    /// As [`Plan::resolve`].
    pub fn new(engine: E, config: &Config) -> Result<Self, Error> {
        let capabilities = engine.verifier().capabilities();
        let plan = Plan::resolve(config, &capabilities, engine.drafter().horizon())?;
        Ok(Self {
            engine,
            session: Session::new(plan),
            unobserved: Vec::with_capacity(1),
            verifier_reset: true,
            drafter_reset: None,
            rows_known: false,
            lent: false,
        })
    }

    /// Starts a request, whatever came before. The verifier is reset by the first
    /// step, the drafter by the first that drafts.
    ///
    /// With a [cached prefix](Request::cached_prefix) the drafter is first shown
    /// what it has not seen of the request before, whose last round may be part of
    /// the prefix. Should it fail at that, which is no error, its context begins
    /// after the prefix.
    ///
    /// # Errors
    ///
    /// As [`Session::start`], or if the cached prefix is not what the verifier
    /// holds of the request before, which is not checked after a call of
    /// [`engine_mut`](Self::engine_mut) or before the first step. The session
    /// is unchanged then.
    pub fn start(&mut self, request: &Request) -> Result<(), Error> {
        let cached = request.cached_prefix;
        if self.rows_known && cached < request.prompt.len() {
            let held = self.session.reusable_prefix(&request.prompt);
            if cached > held {
                let accepted = format_args!("at most {held}, what the verifier holds of it");
                return Err(Error::setting("cached_prefix", cached, accepted));
            }
        }
        if cached > 0 && !self.lent {
            let _ = self.observe();
        }
        self.session.start(request)?;
        self.unobserved.clear();
        // The drafter has not seen what was put into the caches meanwhile.
        let cached = if std::mem::take(&mut self.lent) { 0 } else { cached };
        self.verifier_reset = true;
        self.rows_known = false;
        // One that is still to be reset holds what was before the last request.
        self.drafter_reset = Some(self.drafter_reset.map_or(cached, |keep| keep.min(cached)));
        Ok(())
    }

    /// Runs to the next tokens and returns them: the first one from the prompt,
    /// then those of one round. `None` if the text is complete.
    ///
    /// # Errors
    ///
    /// If the verifier or the drafter fails or hands over something impossible.
    /// The session is then where it was before the step; call again to retry.
    pub fn step(&mut self) -> Result<Option<&[u32]>, ErrorOf<E>> {
        self.advance(true)
    }

    /// As [`step`](Self::step), but without a draft: one token. For steps after
    /// the drafter failed; the round carries [`Reason::Skipped`](crate::Reason::Skipped).
    ///
    /// # Errors
    ///
    /// If the verifier fails or hands over something impossible.
    pub fn step_plain(&mut self) -> Result<Option<&[u32]>, ErrorOf<E>> {
        self.advance(false)
    }

    /// Generates a whole text. `on_tokens` gets the tokens of every step as they
    /// come, and can stop the text there.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start) and [`step`](Self::step). After a failed step
    /// the text can be continued with [`step`](Self::step).
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_tokens: impl FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<Generated<'_>, ErrorOf<E>> {
        self.start(request)?;
        while let Some(tokens) = self.step()? {
            if on_tokens(tokens).is_break() {
                self.session.stop();
            }
        }
        Ok(Generated {
            tokens: self.session.generated(),
            finish: self.session.finish().unwrap_or(Finish::Stopped),
            stats: self.session.stats(),
        })
    }

    fn advance(&mut self, draft: bool) -> Result<Option<&[u32]>, ErrorOf<E>> {
        match self.run(draft) {
            Ok(true) => Ok(Some(self.session.new_tokens())),
            Ok(false) => Ok(None),
            Err(error) => {
                self.session.abandon();
                Err(error)
            }
        }
    }

    /// Runs until tokens are emitted; false if there are none to come.
    fn run(&mut self, draft: bool) -> Result<bool, ErrorOf<E>> {
        loop {
            match self.session.need() {
                Need::Prefill => {
                    let start = self.session.committed_len();
                    let (prefill, mut picks) = self.session.prefill()?;
                    let verifier = self.engine.verifier_mut();
                    let failed = |source| verifier_failed(Stage::Prefill, source);
                    if self.verifier_reset {
                        self.rows_known = false;
                        verifier.reset(start).map_err(failed)?;
                    }
                    // Unless all goes well, it may hold rows whose pick was refused.
                    self.verifier_reset = true;
                    let result = verifier.prefill(&prefill, &mut picks);
                    // What the verifier passes on is the session's.
                    if let Some(refusal) = self.session.refusal() {
                        return Err(refusal.into());
                    }
                    let features = result.map_err(failed)?;
                    self.session.prefilled()?;
                    self.verifier_reset = false;
                    self.rows_known = true;
                    self.keep(start, features);
                    return Ok(true);
                }
                Need::Proposal if draft => {
                    self.observe()?;
                    self.reset_drafter()?;
                    let (request, proposal) = self.session.proposal()?;
                    let drafter = self.engine.drafter_mut();
                    drafter
                        .propose(&request, proposal)
                        .map_err(|source| drafter_failed(Stage::Propose, source))?;
                    self.session.proposed()?;
                }
                Need::Proposal => self.session.skip_proposal()?,
                Need::Verification => {
                    let (round, mut picks) = self.session.verification()?;
                    let verifier = self.engine.verifier_mut();
                    verifier
                        .verify(&round, &mut picks)
                        .map_err(|source| verifier_failed(Stage::Verify, source))?;
                    self.session.verified()?;
                }
                Need::Commit => {
                    let start = self.session.committed_len();
                    let features = self
                        .engine
                        .verifier_mut()
                        .commit(self.session.commit()?)
                        .map_err(|source| verifier_failed(Stage::Commit, source))?;
                    self.session.committed()?;
                    self.keep(start, features);
                    return Ok(true);
                }
                Need::Nothing => return Ok(false),
            }
        }
    }

    /// Resets the drafter if the request has not done so. Not before it is needed, so that one
    /// that fails cannot hold back plain steps.
    fn reset_drafter(&mut self) -> Result<(), ErrorOf<E>> {
        if let Some(keep) = self.drafter_reset {
            let drafter = self.engine.drafter_mut();
            drafter.reset(keep).map_err(|source| drafter_failed(Stage::Observe, source))?;
            self.drafter_reset = None;
        }
        Ok(())
    }

    fn keep(&mut self, start: usize, features: FeaturesOf<E>) {
        if self.session.plan().algorithm().needs_drafter() {
            self.unobserved.push((start..self.session.committed_len(), features));
        }
    }

    /// Shows the drafter what it has not seen. Comes before drafting and not
    /// after committing, so that a drafter that fails cannot hold back tokens
    /// that are committed, and so that the last round's features are not worked
    /// through for nothing.
    fn observe(&mut self) -> Result<(), ErrorOf<E>> {
        if self.unobserved.is_empty() {
            return Ok(());
        }
        self.reset_drafter()?;
        let since = Instant::now();
        let mut observed = 0;
        let mut result = Ok(());
        for (range, features) in &self.unobserved {
            let committed = self.session.committed_tokens(range.clone())?;
            result = self.engine.drafter_mut().observe(&committed, features);
            if result.is_err() {
                break;
            }
            observed += 1;
        }
        self.unobserved.drain(..observed);
        self.session.add_time(Stage::Observe, since.elapsed());
        result.map_err(|source| drafter_failed(Stage::Observe, source))
    }

    /// The session: its tokens, figures and trace.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Adds tokens that the host chose, between steps; see [`Session::append`].
    ///
    /// # Errors
    ///
    /// As [`Session::append`].
    pub fn append(&mut self, tokens: &[u32]) -> Result<(), Error> {
        self.session.append(tokens)
    }

    /// Attaches a rule about which tokens may follow, or removes it; see
    /// [`Session::set_constraint`].
    ///
    /// # Errors
    ///
    /// As [`Session::set_constraint`].
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) -> Result<(), Error> {
        self.session.set_constraint(constraint)
    }

    /// Ends the text where it is.
    pub fn stop(&mut self) {
        self.session.stop();
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine, for instance to load other rows into its caches between requests. What the
    /// request in progress has committed must stay. The drafter begins the next request anew.
    pub fn engine_mut(&mut self) -> &mut E {
        self.rows_known = false;
        self.lent = true;
        &mut self.engine
    }

    /// Gives the engine back.
    pub fn into_engine(self) -> E {
        self.engine
    }
}

/// A text that is complete.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Generated<'a> {
    /// The tokens after the prompt.
    pub tokens: &'a [u32],
    /// Why it ends there.
    pub finish: Finish,
    /// Figures of the run.
    pub stats: &'a RunStats,
}

fn verifier_failed<V: std::error::Error, D: std::error::Error>(
    stage: Stage,
    source: V,
) -> DecodeError<V, D> {
    DecodeError::Verifier { stage, source }
}

fn drafter_failed<V: std::error::Error, D: std::error::Error>(
    stage: Stage,
    source: D,
) -> DecodeError<V, D> {
    DecodeError::Drafter { stage, source }
}
