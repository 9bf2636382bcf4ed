//! Writers into the arrays that engines and kernels take.
//!
//! Every writer fills memory of the caller, allocates nothing, and refuses a
//! buffer that is too small before it writes anything.
//!
//! * [`dense`]: one element per query and key, additive or boolean.

pub mod dense;
