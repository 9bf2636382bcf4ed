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
