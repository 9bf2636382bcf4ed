//! Recurrent (hybrid) targets verify trees exactly.

mod common;
mod golden;
mod oracle;
mod rounds;
