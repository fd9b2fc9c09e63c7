//! What is asked of libibverbs: behind a trait, so that faults of devices can be planted where there is none.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use atlas_rdma::attributes::DeviceAttributes;
use atlas_rdma::choose::PortView;
use atlas_rdma::mapping::{MappableFile, MappedExtent, MappingError, MappingMode};
use atlas_rdma::{Access, Context, Mr, Pd, RdmaError, Transport};

/// A device, opened if that was possible.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) transport: Transport,
    pub(crate) opened: Result<Opened, RdmaError>,
}

/// What an open device says.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) attributes: DeviceAttributes,
    pub(crate) ports: Vec<Result<PortView, RdmaError>>,
}

/// Why memory was not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

/// The verbs of a machine.
pub(crate) trait Verbs {
    /// All devices.
    fn devices(&self) -> Result<Vec<Device>, RdmaError>;

    /// Registers the first bytes of a file on a device and lets them go again.
    fn register(
        &self,
        device: &str,
        file: &Arc<File>,
        bytes: u64,
        mode: MappingMode,
    ) -> Result<(), Refused>;
}

/// The real ones.
#[derive(Debug)]
pub(crate) struct Libibverbs;

impl Verbs for Libibverbs {
    fn devices(&self) -> Result<Vec<Device>, RdmaError> {
        let devices = atlas_rdma::devices()?.into_iter().map(|device| Device {
            opened: Context::open(&device.name).map(|context| opened(&context)),
            name: device.name,
            transport: device.transport,
        });
        Ok(devices.collect())
    }

    fn register(
        &self,
        device: &str,
        file: &Arc<File>,
        bytes: u64,
        mode: MappingMode,
    ) -> Result<(), Refused> {
        let pd = Pd::new(&Context::open(device)?)?;
        let source = MappableFile::new("the file that is tried", file)?;
        let extent = MappedExtent::map(&source, 0, bytes, mode, &AtomicBool::new(false))?;
        let len = usize::try_from(extent.bytes()).unwrap_or(usize::MAX);
        Mr::register(&pd, Arc::new(extent), 0, len, Access::RemoteRead)?;
        Ok(())
    }
}

fn opened(context: &Context) -> Opened {
    let view = |port| {
        Ok(PortView {
            device: context.name().to_owned(),
            port,
            attributes: context.port(port)?,
            gids: context.gid_table(port)?,
        })
    };
    Opened {
        attributes: context.attributes().clone(),
        ports: (1..=context.attributes().ports).map(view).collect(),
    }
}
