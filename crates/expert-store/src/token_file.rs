//! The file that a token is in: nobody but its owner may read it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use expert_wire::auth::{TOKEN_MAX_BYTES, Token, TokenError};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use thiserror::Error;

/// Bits of the mode that let others than the owner read or write.
const OTHERS: u32 = 0o077;

/// Why there is no token.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenFileError {
    /// The system refuses.
    #[error("token file {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's words.
        #[source]
        source: io::Error,
    },
    /// A folder, a pipe, a device.
    #[error("token file {path} is no regular file")]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Others can read it.
    #[error(
        "token file {path} has mode {mode:04o}, so others can read or change it; chmod 600 {path}"
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Somebody else's.
    #[error(
        "token file {path} belongs to user {owner}, this program runs as user {user}; chown it, or use one of your own"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who runs this.
        user: u32,
    },
    /// Longer than any token.
    #[error(
        "token file {path} has {bytes} bytes, the limit is {TOKEN_MAX_BYTES}; is it the right file?"
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// What is in it is no token.
    #[error("token file {path}: {source}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: TokenError,
    },
}

/// Reads a token from a file. A link is followed; what is looked at is the file that was opened.
///
/// *Errors*: [`TokenFileError`]. The file must be a regular one, of this user or of root, with no
/// rights for group and others, and of at most [`TOKEN_MAX_BYTES`] bytes.
pub fn read(path: &Path) -> Result<Token, TokenFileError> {
    let failed = |source| TokenFileError::Io {
        path: path.to_owned(),
        source,
    };
    // A pipe without a writer would never open.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let mut file = File::from(opened.map_err(|e| failed(e.into()))?);
    check(path, &file)?;
    let mut text = Vec::with_capacity(TOKEN_MAX_BYTES + 1);
    Read::by_ref(&mut file)
        .take(TOKEN_MAX_BYTES as u64 + 1)
        .read_to_end(&mut text)
        .map_err(failed)?;
    Token::from_text(text).map_err(|source| TokenFileError::Token {
        path: path.to_owned(),
        source,
    })
}

fn check(path: &Path, file: &File) -> Result<(), TokenFileError> {
    let path = path.to_owned();
    let meta = match file.metadata() {
        Ok(meta) => meta,
        Err(source) => return Err(TokenFileError::Io { path, source }),
    };
    if !meta.is_file() {
        return Err(TokenFileError::NotAFile { path });
    }
    let mode = meta.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(TokenFileError::Mode { path, mode });
    }
    let user = rustix::process::geteuid().as_raw();
    let owner = meta.uid();
    if owner != user && owner != 0 {
        return Err(TokenFileError::Owner { path, owner, user });
    }
    let bytes = meta.len();
    if bytes > TOKEN_MAX_BYTES as u64 {
        return Err(TokenFileError::TooLong { path, bytes });
    }
    Ok(())
}

/// Writes a new token file, readable by this user alone: the digits of `random`, which come from
/// the system's random numbers. Says whether it did; a file that is there stays as it is, but for an
/// empty one of this user, which a process left that was killed before it could write.
///
/// *Errors*: [`TokenFileError::Io`].
pub fn create(path: &Path, random: &[u8; 32]) -> Result<bool, TokenFileError> {
    write_new(path, random).map_err(|source| TokenFileError::Io {
        path: path.to_owned(),
        source,
    })
}

fn write_new(path: &Path, random: &[u8; 32]) -> io::Result<bool> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let mut file = match options.clone().create_new(true).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let user = rustix::process::geteuid().as_raw();
            let is_left = |m: &Metadata| m.is_file() && m.len() == 0 && m.uid() == user;
            // What it is and whether it can be read is for `read` to say.
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
            match options.custom_flags(flags).open(path) {
                Ok(file) if is_left(&file.metadata()?) => file,
                _ => return Ok(false),
            }
        }
        Err(e) => return Err(e),
    };
    wait_for_lock(&file);
    if file.metadata()?.len() > 0 {
        return Ok(false);
    }
    let mut text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    text.push('\n');
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    Ok(true)
}

/// Two processes may have found the file empty: one writes, which takes a moment. Where there are no
/// locks, or whoever has this one keeps it, nothing is gained by waiting.
fn wait_for_lock(file: &File) {
    for _ in 0..100 {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(10)),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(mode: u32, text: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn created_file_is_its_owners_alone_and_is_not_written_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(create(&path, &[0xab; 32]).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_to_string(&path).unwrap(), "ab".repeat(32) + "\n");
        assert!(!create(&path, &[0xcd; 32]).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "ab".repeat(32) + "\n");
        read(&path).unwrap();
    }

    #[test]
    fn empty_file_that_a_killed_process_left_is_written_to_and_somebody_elses_words_are_not() {
        let (_dir, path) = file(0o600, b"");
        assert!(create(&path, &[0xab; 32]).unwrap());
        read(&path).unwrap();
        let (_dir, path) = file(0o600, b"x");
        assert!(!create(&path, &[0xab; 32]).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"x");
        let dir = tempfile::tempdir().unwrap();
        assert!(!create(dir.path(), &[0xab; 32]).unwrap());
    }

    #[test]
    fn file_that_others_can_read_or_write_is_refused_with_the_command_that_helps() {
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666] {
            let (_dir, path) = file(mode, &[b'x'; 32]);
            let error = read(&path).unwrap_err();
            assert!(matches!(error, TokenFileError::Mode { mode: m, .. } if m == mode));
            let text = error.to_string();
            let help = format!("chmod 600 {}", path.display());
            assert!(
                text.contains(&help) && text.contains(&format!("{mode:04o}")),
                "{text}"
            );
        }
        for mode in [0o600, 0o400] {
            let (_dir, path) = file(mode, &[b'x'; 32]);
            read(&path).unwrap();
        }
    }

    #[test]
    fn what_is_no_token_is_refused_and_never_shown() {
        let (_dir, path) = file(0o600, b"hunter2\n");
        let text = read(&path).unwrap_err().to_string();
        assert!(
            text.contains("7 bytes") && !text.contains("hunter2"),
            "{text}"
        );
        let (_dir, path) = file(0o600, &[b'x'; 4097]);
        assert!(matches!(
            read(&path),
            Err(TokenFileError::TooLong { bytes: 4097, .. })
        ));
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            read(dir.path()),
            Err(TokenFileError::NotAFile { .. })
        ));
        let missing = dir.path().join("missing");
        assert!(matches!(read(&missing), Err(TokenFileError::Io { .. })));
        let pipe = dir.path().join("pipe");
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(read(&pipe), Err(TokenFileError::NotAFile { .. })));
    }
}
