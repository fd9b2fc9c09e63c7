//! One-sided verbs: libibverbs bound at run time, owned handles, registered memory, queues of READs.

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
