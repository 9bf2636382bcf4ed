//! Checks that an engine runs on its own integration.
//!
//! Integrations of trees fail in a handful of ways, and most of them still give
//! fluent text: acceptance is a little low, or greedy text differs somewhere. The
//! kit turns each of them into a check with a name, in an order in which the
//! first one that fails names the fault ([`Check::cause`]).
//!
//! * [`Kit`] asks a whole [`Verifier`](crate::Verifier) the questions. Its oracle
//!   is the verifier's own [`prefill`](crate::Verifier::prefill): after a reset, a
//!   prefill of a path's tokens has to give the pick that a tree gives at the end
//!   of that path. No weights are needed that make sense; random ones find more.
//! * [`check_picks`] holds the token ids that a verifier picks on its device against
//!   those that this crate picks from its logits, also sampled.
//! * [`arrays`] takes what an engine hands to its kernels, or gets from them, for
//!   engines that are not behind the trait yet.
//!
//! The faults that integrations are known for, and what names each:
//!
//! | fault | check | where |
//! |---|---|---|
//! | positions from slot indices | [`Check::PositionsFollowDepth`] | [`Kit`], [`arrays::positions`] |
//! | a mask by slot order | [`Check::SiblingsDoNotSeeEachOther`] | [`Kit`], [`arrays::mask`] |
//! | the leading rows kept for a scattered path | [`Check::CommitScatteredPath`] | [`Kit`], [`arrays::compaction`] |
//! | the bonus kept in the cache | [`Check::BonusNotKept`] | [`Kit`] |
//! | a stale state where nothing was accepted | [`Check::ZeroAcceptance`] | [`Kit`] |
//! | features in slot order | [`Check::FeaturesByPath`] | [`Kit`] with [`features`](Kit::features) |
//! | token 0 taken for padding | [`Check::TokenZero`] | [`Kit`] |
//! | a mask row of one word, or any other limit on slots | [`Check::TreeEqualsPaths`] | [`Kit`] |
//! | rows of logits shifted by slots that are skipped | [`Check::UnwantedSlots`] | [`Kit`] |
//! | a cache of fewer rows than it says | [`Check::FullCache`] | [`Kit`] |
//! | picks of the previous round | [`Check::FreshPicks`] | [`Kit`] |
//! | a duplicate sibling | [`Check::DistinctSiblings`] | [`arrays::siblings`] |
//! | taps off by one layer | [`Check::Taps`] | [`arrays::taps`] |
//!
//! The last two do not show behind the trait: a [`DraftTree`](crate::DraftTree) cannot hold the one, and
//! the other is in the features of prefill and commit alike.
//!
//! ```
//! # use std::convert::Infallible;
//! # use ddtree::{Capabilities, CommitPlan, Picks, Prefill, Round, Verifier};
//! # struct MyEngine(Vec<u32>);
//! # impl Verifier for MyEngine {
//! #     type Error = Infallible;
//! #     type Features = ();
//! #     fn capabilities(&self) -> Capabilities { Capabilities::new(100, 1_000) }
//! #     fn reset(&mut self, keep: usize) -> Result<(), Infallible> { self.0.truncate(keep); Ok(()) }
//! #     fn prefill(&mut self, p: &Prefill<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
//! #         self.0.truncate(p.start());
//! #         self.0.extend(p.tokens());
//! #         picks.push((p.tokens().last().unwrap() + 1) % 100);
//! #         Ok(())
//! #     }
//! #     fn verify(&mut self, r: &Round<'_>, picks: &mut Picks<'_>) -> Result<(), Infallible> {
//! #         r.tree().tokens().iter().for_each(|token| picks.push((token + 1) % 100));
//! #         Ok(())
//! #     }
//! #     fn commit(&mut self, _: &CommitPlan) -> Result<(), Infallible> { Ok(()) }
//! # }
//! # let mut engine = MyEngine(Vec::new());
//! use ddtree::conformance::Kit;
//!
//! let report = Kit::new(&mut engine).run();
//! assert!(report.passed(), "{report}");
//! ```

pub mod arrays;

mod check;
mod checks;
mod kit;
mod lab;
mod picks;
mod report;

pub use check::Check;
pub use kit::Kit;
pub use picks::{PickFault, check_picks};
pub use report::{Failure, Finding, Outcome, Report, Verdict};
