//! The end of a connection that is read from.

use crate::error::RdmaError;
use crate::path::{LocalEndpoint, Path, random_psn};
use crate::pd::Pd;
use crate::qp::{QpCapabilities, QpState, QueuePair, RemoteAccess};
use std::sync::Arc;

/// A queue pair through which the other end READs the regions of its domain. It posts nothing and costs no CPU time.
/// Dropping it destroys the queue pair; what the other end has posted then fails after its retries.
#[derive(Debug)]
pub struct Responder {
    qp: QueuePair,
    psn: u32,
}

impl Responder {
    /// A queue pair in INIT that allows READs, with a random PSN.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Create`], [`RdmaError::Transition`].
    pub fn new(pd: &Arc<Pd>, port: u8, pkey_index: u16) -> Result<Self, RdmaError> {
        let qp = QueuePair::create(pd, &pd.idle_cq()?, QpCapabilities::IDLE)?;
        qp.to_init(port, pkey_index, RemoteAccess::Read)?;
        Ok(Self {
            qp,
            psn: random_psn(),
        })
    }

    /// This end, for the other one.
    pub fn local(&self) -> LocalEndpoint {
        LocalEndpoint {
            qpn: self.qp.number(),
            psn: self.psn,
        }
    }

    /// Connects it: to RTR, where it answers, then to RTS. The path's `local_psn` is replaced by its own.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] says which attribute exceeds which limit.
    pub fn connect(&self, path: &Path) -> Result<(), RdmaError> {
        let path = Path {
            local_psn: self.psn,
            ..path.clone()
        };
        self.qp.to_rtr(&path)?;
        self.qp.to_rts(&path)
    }

    /// Moves it to ERR: it answers nothing any more.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] where the device is going away.
    pub fn to_error(&self) -> Result<(), RdmaError> {
        self.qp.to_error()
    }

    /// Its state now.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Query`].
    pub fn state(&self) -> Result<QpState, RdmaError> {
        self.qp.state()
    }
}
