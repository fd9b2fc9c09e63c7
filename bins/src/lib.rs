//! The programs of the Atlas expert tier, as a library for the two binaries.
//!
//! * [`cli`] is `atlas-expert`: one module per subcommand. Start at [`cli::main`].
//!
//! Not here: logic. What a program does lies in the libraries; here it is read from arguments and
//! shown to people (tables) or programs (`--json`).
#![forbid(unsafe_code)]

pub mod cli;
