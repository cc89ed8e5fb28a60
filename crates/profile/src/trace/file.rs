//! Chrome traces: written by kineto, then completed with scopes and names that kineto does not record.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use flate2::Compression;
use flate2::write::GzEncoder;
use overdrive_ffi::profiler::{Scope, Trace};
use tempfile::{Builder, NamedTempFile};

use super::{ThreadNames, place, tail};
use crate::ProfileError;
use crate::error::When as _;

/// A trace that kineto writes only once, but that can be exported any number of times.
#[derive(Debug)]
pub(crate) struct TraceFile {
    trace: Trace,
    written: Mutex<Written>,
}

#[derive(Debug)]
enum Written {
    NotYet,
    /// The complete file; it may have been renamed or deleted since.
    Here(File),
    /// kineto could not write it.
    Lost,
}

impl TraceFile {
    pub(crate) fn new(trace: Trace) -> Self {
        Self { trace, written: Mutex::new(Written::NotYet) }
    }

    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Writes a temporary file next to the target and renames it, so that the target is always complete; compressed if
    /// the name ends in `.gz`. Links are followed; only a regular file is replaced.
    pub(crate) fn export(&self, target: &Path, scopes: &[Scope], threads: &ThreadNames) -> Result<(), ProfileError> {
        let mut written = self.lock();
        let place = place::of(target)?;
        let beside = temporary(&place)?;
        let compressed = target.extension() == Some(OsStr::new("gz"));
        let plain = match &*written {
            Written::Here(file) => file,
            Written::Lost => return Err(ProfileError::Incomplete { path: target.to_owned() }),
            Written::NotYet => {
                *written = Written::Lost;
                let file = self.write(beside.path(), target, scopes, threads)?;
                let exported = if compressed {
                    // Deletes the name of kineto's file, which stays open, and writes the compressed one.
                    drop(beside);
                    temporary(&place).and_then(|beside| copy(&file, beside, &place, true))
                } else {
                    persist(beside, &place)
                };
                *written = Written::Here(file);
                return exported;
            }
        };
        copy(plain, beside, &place, compressed)
    }

    /// Lets kineto write to a temporary name, and completes the end of the file.
    fn write(&self, path: &Path, target: &Path, scopes: &[Scope], threads: &ThreadNames) -> Result<File, ProfileError> {
        self.trace.save(path)?;
        let mut file = File::options().read(true).write(true).open(path).when("read the trace", path)?;
        match tail::complete(&mut file, target, scopes, threads) {
            Ok(true) => Ok(file),
            Ok(false) => Err(ProfileError::Incomplete { path: target.to_owned() }),
            Err(error) => Err(error).when("complete the trace", target),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Written> {
        // After a panic the state is `Lost`, which is right.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A temporary file in the target's folder with the usual permissions; deleted when dropped.
pub(crate) fn temporary(target: &Path) -> Result<NamedTempFile, ProfileError> {
    let folder = match target.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut builder = Builder::new();
    // The umask reduces them as usual.
    builder.prefix(".trace-").suffix(".tmp").permissions(Permissions::from_mode(0o666));
    builder.tempfile_in(folder).when("create a file in its folder", target)
}

fn persist(file: NamedTempFile, target: &Path) -> Result<(), ProfileError> {
    file.persist(target).map(drop).map_err(|refused| refused.error).when("move the new file there", target)
}

/// Writes a file with `fill`, compressed if the target's name ends in `.gz`, and renames it to the target. Links are
/// followed; only a regular file is replaced.
pub(crate) fn replace(target: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), ProfileError> {
    let place = place::of(target)?;
    put(temporary(&place)?, &place, target.extension() == Some(OsStr::new("gz")), fill)
}

fn put(
    beside: NamedTempFile,
    target: &Path,
    compressed: bool,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), ProfileError> {
    let filled = if compressed {
        let mut out = GzEncoder::new(BufWriter::new(beside.as_file()), Compression::default());
        fill(&mut out).and_then(|()| out.finish()?.flush())
    } else {
        let mut out = BufWriter::new(beside.as_file());
        fill(&mut out).and_then(|()| out.flush())
    };
    filled.when("write it", target)?;
    persist(beside, target)
}

fn copy(plain: &File, beside: NamedTempFile, target: &Path, compressed: bool) -> Result<(), ProfileError> {
    put(beside, target, compressed, |out| {
        let mut from = plain;
        from.seek(SeekFrom::Start(0))?;
        io::copy(&mut BufReader::new(from).by_ref(), out).map(drop)
    })
}
