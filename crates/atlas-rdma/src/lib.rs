//! One-sided verbs: libibverbs bound at run time, owned handles, registered memory, queues of READs.
//!
//! The library is looked for when the first device is asked for: a binary with this crate in it starts on machines
//! without RDMA, and is told by [`RdmaError`] what is missing there. Start at [`devices`] or [`Context::open`]:
//!
//! * The end that reads registers an arena as [`LandingRegions`] and makes [`ReadQueue`]s on it.
//! * The end that is read from registers memory as [`Mr`]s (`publish` does it for files) and makes [`Responder`]s.
//! * Both exchange [`LocalEndpoint`]s by other means and connect with a [`Path`].
//!
//! | file | concept |
//! |---|---|
//! | `sys` | the library: generated types, functions found at run time |
//! | `device`, `context`, `gid_table`, `interfaces`, `event` | devices, what they and their ports say, what happens to them |
//! | `attributes`, `memory` | plain values; memory that may be registered |
//! | `pd`, `mr`, `completion`, `qp`, `path`, `timers` | owned handles, and the steps of a connection |
//! | `explain`, `error`, `leak` | why something failed; what could not be released |
//! | `landing`, `read_options`, `read_chain`, `in_flight`, `read_queue` | READs into an arena |
//! | `responder` | the other end |
//! | `choose`, `sysfs` | which ports to use; what they carried |
//! | `mapping`, `publish` | files as memory to be read |
//!
//! **Not here:** experts, handshakes over TCP, and when to post what.
//!
//! **Threads.** Handles are `Send` and `Sync`; nothing waits but what says so. Posting and polling allocate nothing.
//!
//! **Cleanup.** Each handle keeps what it was made from. A queue of READs destroys its queue pair before it lets ranges
//! go, and a region is deregistered before its memory goes; what fails to be released is leaked and counted
//! ([`leaks`]). No `Drop` panics, and only that of a queue waits, for half a second at most.
//!
//! *Invariant:* a device writes only to ranges that a [`ReadQueue`] owns. *Boundary:* no other module than `sys` knows
//! how the library is found.

pub mod attributes;
mod completion;
mod context;
mod device;
mod error;
mod event;
mod explain;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod fake_tests;
mod gid_table;
mod in_flight;
mod interfaces;
mod landing;
mod leak;
mod mr;
mod path;
mod pd;
mod qp;
mod read_chain;
mod read_options;
mod read_queue;
mod responder;
mod sys;
#[cfg(test)]
mod test_arena;
mod timers;
mod wait;

pub use completion::{Completion, CompletionChannel, CompletionStatus, Cq};
pub use context::Context;
pub use device::{DeviceName, Transport, devices};
pub use error::RdmaError;
pub use event::AsyncEvent;
pub use in_flight::{CompletionError, ReadDone};
pub use landing::{DEFAULT_SLICE_MAX_BYTES, LandingRegions};
pub use leak::leaks;
pub use mr::{Access, LocalKey, Mr, RemoteKey, registered_bytes};
pub use path::{LocalEndpoint, Path, RemoteEndpoint, Step, random_psn};
pub use pd::Pd;
pub use qp::{QpCapabilities, QpState, QueuePair, RemoteAccess};
pub use read_chain::{LocalPart, RemoteRead};
pub use read_options::{PostRefused, ReadQueueOptions, Refusal};
pub use read_queue::{Closed, ReadQueue, WAIT_QUEUES_MAX};
pub use responder::Responder;

pub mod choose;
pub mod mapping;
pub mod memory;
pub mod publish;
pub mod sysfs;
