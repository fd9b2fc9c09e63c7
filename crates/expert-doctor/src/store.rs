//! The store on this machine.

use std::fs::File;
use std::sync::Arc;

use expert_store::info::hex128;
use expert_store::{OpenOptions, Store};

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::system::human;

/// What other checks want to know of a sound store.
#[derive(Debug)]
pub(crate) struct Audited {
    /// Bytes of all record images.
    pub(crate) bytes: u64,
    /// A file of it, its length and its name.
    pub(crate) first: Option<(Arc<File>, u64, String)>,
}

/// Opens the store as a peer does, without hashing a bare checkpoint.
pub(crate) fn audit(options: &Options) -> (Option<Audited>, Vec<Finding>) {
    let Some(path) = &options.store else {
        return (None, Vec::new());
    };
    let opened = Store::open(
        path,
        &OpenOptions {
            stack: options.stack.clone(),
            checksums: false,
            ..OpenOptions::default()
        },
    );
    let store = match opened {
        Ok(store) => store,
        Err(error) => {
            let finding = Finding::trouble(
                Level::Failure,
                Check::Store,
                error.to_string(),
                "nothing can be served or read from it",
                format!(
                    "atlas-expert inspect {0}    (and build it again: atlas-expert index CHECKPOINT -o {0})",
                    path.display()
                ),
            );
            return (None, vec![finding]);
        }
    };
    let mut records = 0u64;
    let mut bytes = 0u64;
    for layer in &store.catalogue().layers {
        for position in 0..layer.experts.len() {
            records += 1;
            bytes = bytes.saturating_add(layer.class(position).image_bytes);
        }
    }
    let mut findings = vec![sound(&store, records, bytes)];
    findings.push(checksums(&store));
    let first = store.files().iter().find_map(|f| {
        let file = f.file.try_clone().ok()?;
        let len = file.metadata().ok()?.len();
        (len > 0).then(|| (Arc::new(file), len, f.path.display().to_string()))
    });
    (Some(Audited { bytes, first }), findings)
}

fn sound(store: &Store, records: u64, bytes: u64) -> Finding {
    let path = store.path().display();
    let changed = store.changed_files();
    if let Some((_, why)) = changed.first() {
        return Finding::trouble(
            Level::Failure,
            Check::Store,
            format!(
                "{} of {} files of {path} are not what they were when it was built: {why}",
                changed.len(),
                store.files().len()
            ),
            "a peer refuses their records",
            format!("atlas-expert verify {path}    (then build it again)"),
        );
    }
    let what = format!(
        "{path}: {records} records, {} in {} files, all there and as long as they should be",
        human(bytes),
        store.files().len()
    );
    match store.warnings() {
        [] => Finding::ok(Check::Store, what),
        [first, rest @ ..] => Finding::trouble(
            Level::Warning,
            Check::Store,
            format!("{what}; {first} (and {} more warnings)", rest.len()),
            "it can be served as it is",
            format!("atlas-expert inspect {path}    (lists all of them)"),
        ),
    }
}

fn checksums(store: &Store) -> Finding {
    let path = store.path().display();
    if let Some(id) = store.content_id() {
        let what = format!("content id {}", hex128(id));
        return Finding::ok(Check::StoreChecksums, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::StoreChecksums,
        format!("{path} has no checksums on disk"),
        "a peer hashes a checkpoint each time it starts, and a store without checksums is served unchecked",
        format!("atlas-expert index {path} -o {path}.store    (once; no copy)"),
    )
}
