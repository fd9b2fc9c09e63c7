//! One store as it is served, from its start or reload to the end of its last reply.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use expert_store::stamp::FileStamp;
use expert_wire::limits;
use expert_wire::message::{ErrorCode, Welcome};
use expert_wire::v1::{Greeting, V2Offer};
use tracing::warn;

use crate::stats::{Counters, add};
use crate::unreadable::{Unreadable, Verdict};
use crate::verbs::{self, Served};
use crate::{FilePiece, PeerError, Source, SourceError};

/// Blobs that connections are sending now, by layer and sections.
type Blobs = HashMap<(u32, u32), Weak<Vec<u8>>>;

pub(crate) struct Epoch {
    pub(crate) number: u32,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) welcome: Welcome,
    pub(crate) greeting: Greeting,
    /// Files that are not what they were when the store was opened: never read again.
    revoked: Vec<AtomicBool>,
    /// What a disk did not deliver.
    unreadable: Unreadable,
    /// Its registered memory; none without verbs, and while it is withdrawn for another store.
    served: Mutex<Option<Arc<Served>>>,
    /// Whether v1 clients can read it by address.
    pub(crate) serves_v1_verbs: bool,
    /// Files whose times registering has set anew, and what they are since.
    restamped: HashMap<u32, FileStamp>,
    info: OnceLock<Result<Arc<Vec<u8>>, SourceError>>,
    blobs: Mutex<Blobs>,
}

impl Epoch {
    pub(crate) fn new(
        number: u32,
        instance_id: u64,
        source: Arc<dyn Source>,
    ) -> Result<Self, PeerError> {
        let manifest = source.v1_manifest().cloned();
        if let Some(manifest) = &manifest {
            manifest
                .check()
                .map_err(|e| PeerError::Store(e.to_string()))?;
        }
        let greeting = Greeting {
            manifest,
            v2: Some(V2Offer {
                versions: vec![expert_wire::message::VERSION],
                instance_id,
                capabilities: vec!["tcp".into()],
                refused: None,
            }),
        };
        let welcome = Welcome {
            instance_id,
            epoch: number,
            read_max_bytes: limits::READ_MAX_BYTES,
            generation: source.generation(),
            content_id: source.content_id(),
            layout_id: source.layout_id(),
        };
        Ok(Self {
            number,
            welcome,
            greeting,
            revoked: (0..source.file_count())
                .map(|_| AtomicBool::new(false))
                .collect(),
            unreadable: Unreadable::default(),
            served: Mutex::new(None),
            serves_v1_verbs: false,
            restamped: HashMap::new(),
            info: OnceLock::new(),
            blobs: Mutex::new(HashMap::new()),
            source,
        })
    }

    /// Offers the store over verbs, too.
    pub(crate) fn with_verbs(mut self, served: Arc<Served>, rails: usize) -> Self {
        if let Some(v2) = &mut self.greeting.v2 {
            v2.capabilities.push("verbs".into());
        }
        self.serves_v1_verbs = self.greeting.manifest.as_ref().is_some_and(|manifest| {
            (0..rails).all(|rail| {
                verbs::v1_layers(&*self.source, manifest, &served.regions(rail)).is_some()
            })
        });
        for file in 0..self.revoked.len() as u32 {
            let stamp = || Some(FileStamp::of(&self.source.file(file)?.metadata().ok()?));
            if served.touches(file) {
                if let Some(stamp) = stamp() {
                    self.restamped.insert(file, stamp);
                }
            }
        }
        self.serve(Some(served));
        self
    }

    /// Its registered memory.
    pub(crate) fn served(&self) -> Option<Arc<Served>> {
        self.lock_served().clone()
    }

    /// Replaces it, and gives back what was there.
    pub(crate) fn serve(&self, served: Option<Arc<Served>>) -> Option<Arc<Served>> {
        let old = std::mem::replace(&mut *self.lock_served(), served.clone());
        // Whoever found a file changed before may have found nothing to revoke.
        for (file, revoked) in self.revoked.iter().enumerate() {
            if let (true, Some(served)) = (revoked.load(Ordering::SeqCst), &served) {
                served.revoke(file as u32);
            }
        }
        old
    }

    fn lock_served(&self) -> MutexGuard<'_, Option<Arc<Served>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How an open file differs from what it was when it was opened, or registered.
    fn file_change(&self, file: u32) -> Option<String> {
        let Some(stamp) = self.restamped.get(&file) else {
            return self.source.file_change(file);
        };
        match self.source.file(file).map(|f| f.metadata()) {
            Some(Ok(now)) => stamp.change(&FileStamp::of(&now)),
            _ => Some("its state cannot be read".into()),
        }
    }

    /// Files whose records are refused now.
    pub(crate) fn refused_files(&self) -> usize {
        self.revoked
            .iter()
            .filter(|revoked| revoked.load(Ordering::SeqCst))
            .count()
    }

    /// Looks at all files, by path too, and refuses those that changed.
    pub(crate) fn check_files(&self, counters: &Counters) {
        for (file, why) in self.source.changed_files() {
            let Ok(file) = u32::try_from(file) else {
                continue;
            };
            let path = self.source.file_path(file);
            let is_own_doing = self.restamped.get(&file).is_some_and(|stamp| {
                let now = path.and_then(|p| std::fs::metadata(p).ok());
                now.is_some_and(|now| stamp.change(&FileStamp::of(&now)).is_none())
            });
            if !is_own_doing {
                self.revoke(file, &why, counters);
            }
        }
    }

    /// The answer to `StoreInfo`, the same memory for all connections.
    pub(crate) fn info(&self) -> Result<Arc<Vec<u8>>, SourceError> {
        let info = || {
            bounded(
                "the store's description",
                Arc::new(self.source.info_json()?),
            )
        };
        self.info.get_or_init(info).clone()
    }

    /// A layer's blob. Connections that ask for the same one at a time share its memory, so that
    /// slow clients cannot make the peer hold more than one copy of the catalogue per choice of
    /// sections.
    pub(crate) fn blob(&self, layer: u32, sections: u32) -> Result<Arc<Vec<u8>>, SourceError> {
        let mut blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (layer, sections);
        if let Some(blob) = blobs.get(&key).and_then(Weak::upgrade) {
            return Ok(blob);
        }
        let blob = Arc::new(self.source.layer_blob(layer, sections)?);
        blobs.retain(|_, blob| blob.strong_count() > 0);
        blobs.insert(key, Arc::downgrade(&blob));
        bounded("the layer's description", blob)
    }

    /// Refuses a file from now on; says so once.
    pub(crate) fn revoke(&self, file: u32, why: &str, counters: &Counters) {
        let Some(revoked) = self.revoked.get(file as usize) else {
            return;
        };
        if !revoked.swap(true, Ordering::SeqCst) {
            add(&counters.store_changes, 1);
            let path = self.source.file_path(file).unwrap_or("?".as_ref());
            warn!(
                "{} changed while it was served ({why}): its records are refused until the store is loaded again",
                path.display()
            );
            // One-sided READs ask nobody: the memory itself must go.
            if let Some(served) = self.served() {
                served.revoke(file);
            }
        }
    }

    /// Whether a file may be read. Looks at the file itself, so that a change is noticed with the
    /// first answer after it, not only by the watcher.
    pub(crate) fn check_file(&self, file: u32, counters: &Counters) -> Result<(), SourceError> {
        let revoked = self.revoked.get(file as usize);
        if revoked.is_some_and(|r| !r.load(Ordering::SeqCst)) {
            match self.file_change(file) {
                None => return Ok(()),
                Some(why) => self.revoke(file, &why, counters),
            }
        }
        Err(file_changed())
    }

    /// Remembers a range that could not be read, so that it is refused instead of tried, and the
    /// connection of whoever asks for it stays.
    pub(crate) fn note_unreadable(&self, file: u32, offset: u64, bytes: u64) {
        self.unreadable.note(file, offset, bytes, Instant::now());
    }

    /// Refuses pieces that could not be read a short while ago; those of a longer while are tried.
    pub(crate) fn check_readable(&self, pieces: &[FilePiece]) -> Result<(), SourceError> {
        for piece in pieces {
            let FilePiece::File {
                file,
                offset,
                bytes,
            } = *piece
            else {
                continue;
            };
            loop {
                let bad = match self.unreadable.verdict(file, offset, bytes, Instant::now()) {
                    Verdict::Fine => break,
                    Verdict::Refused => true,
                    Verdict::Try { offset } => {
                        let read = self
                            .source
                            .file(file)
                            .ok_or_else(|| io::ErrorKind::NotFound.into())
                            .and_then(|f| f.read_exact_at(&mut [0], offset));
                        if read.is_ok() {
                            self.unreadable.forget(file, offset);
                        }
                        read.is_err()
                    }
                };
                if bad {
                    return Err(file_unreadable());
                }
            }
        }
        Ok(())
    }
}

/// What a client is told whose record lies in a file that changed.
pub(crate) fn file_changed() -> SourceError {
    SourceError::new(
        ErrorCode::StoreUnreadable,
        "the file below this record changed on the peer; load the store there again",
    )
}

/// ... and in one that the disk does not deliver.
pub(crate) fn file_unreadable() -> SourceError {
    SourceError::new(
        ErrorCode::StoreUnreadable,
        "the file below this record could not be read on the peer; its log names the file",
    )
}

fn bounded(what: &str, bytes: Arc<Vec<u8>>) -> Result<Arc<Vec<u8>>, SourceError> {
    if bytes.len() > limits::FRAME_MAX_BYTES as usize {
        return Err(SourceError::new(
            ErrorCode::Internal,
            format!(
                "{what} has {} bytes, the limit is {}",
                bytes.len(),
                limits::FRAME_MAX_BYTES
            ),
        ));
    }
    Ok(bytes)
}
