//! Writes a report so that a reader sees either all of it or none of it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use thiserror::Error;

/// Why a report was not written. A file that was at its path before is unchanged.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The disk or the quota is full.
    #[error("{}: no space left on its disk; free some, or name a path on another disk", .path.display())]
    Full {
        /// The file that was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The folder does not let this user write.
    #[error("{}: not allowed to write there; name a path in a folder of yours", .path.display())]
    Denied {
        /// The file that was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path names a folder, not a file.
    #[error("{}: this is a folder; name a file in it", .path.display())]
    Folder {
        /// The path that was given.
        path: PathBuf,
    },
    /// Anything else.
    #[error("{}: cannot be written; name another path", .path.display())]
    Other {
        /// The file that was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl WriteError {
    fn new(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path, source },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Self::Denied { path, source },
            io::ErrorKind::IsADirectory => Self::Folder { path },
            _ => Self::Other { path, source },
        }
    }
}

/// Writes `content` to `path`, and makes the folders above it. The content goes to a temporary file in the same folder,
/// which is synced and then renamed, so that neither a reader nor a crash leaves half of it visible.
///
/// A path that is not a regular file (`/dev/stdout`, a pipe) is written to directly: renaming would replace it.
///
/// # Errors
///
/// [`WriteError`]; an older file at `path` is then untouched, and no temporary file is left.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), WriteError> {
    write(path, content).map_err(|source| WriteError::new(path, source))
}

/// Checks, before a long measurement, that [`write_atomically`] will be able to write: makes the folders above `path`
/// and a file there, which is removed again.
///
/// # Errors
///
/// [`WriteError`], as [`write_atomically`] would return it.
pub fn check_writable(path: &Path) -> Result<(), WriteError> {
    let attempt = || match Target::of(path)? {
        Target::File(target) => temporary_beside(&target).map(drop),
        Target::Stream => File::options().append(true).open(path).map(drop),
    };
    attempt().map_err(|source| WriteError::new(path, source))
}

/// What a path leads to.
enum Target {
    /// A file, whether it exists or not, with links resolved: renaming onto a link would replace the link.
    File(PathBuf),
    /// A device or a pipe.
    Stream,
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() => fs::canonicalize(path).map(Self::File),
            Ok(_) => Ok(Self::Stream),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::File(path.to_owned())),
            Err(error) => Err(error),
        }
    }
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    match Target::of(path)? {
        Target::Stream => File::options().append(true).open(path)?.write_all(content),
        Target::File(target) => {
            let mut file = temporary_beside(&target)?;
            file.write_all(content)?;
            file.as_file().sync_all()?;
            file.persist(&target)?;
            Ok(())
        }
    }
}

/// A file beside `target`, so that renaming it stays on one disk; it removes itself unless it is persisted.
fn temporary_beside(target: &Path) -> io::Result<NamedTempFile> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".report-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The usual permissions of a new file; otherwise only its owner could read it.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
