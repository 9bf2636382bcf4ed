//! Recurrent (hybrid) targets verify trees exactly.

mod common;
mod golden;
mod loading;
mod oracle;
mod rounds;
