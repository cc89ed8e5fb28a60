//! Opens and reads files without trusting their sizes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::DataError;
#[cfg(feature = "remote")]
pub(crate) use crate::remote::Version;
#[cfg(feature = "remote")]
use crate::remote::{self, RemoteFile};

/// Which one of several files of the same URL is meant. Without URLs there is none.
#[cfg(not(feature = "remote"))]
#[derive(Clone, Debug)]
pub(crate) enum Version {}

/// What can be read, for errors.
pub(crate) const READABLE: &str =
    "`s3://bucket/key`, `gs://bucket/key`, `az://container/key`, `http://..`, `https://..` or a path of this machine";

/// Where the files of a URL are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Those of a store, which lists its files.
    Store,
    /// Those of a web server, which does not.
    Web,
    /// Those of something that is not known here.
    Unknown,
}

impl Scheme {
    /// What a URL begins with, in upper or lower case; `None` for a path.
    ///
    /// # Source
    /// RFC 3986, 3.1: a letter, then letters, digits, `+`, `-` and `.`. One letter alone is a drive of Windows.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let bytes = path.as_os_str().as_encoded_bytes();
        let scheme = &bytes[..bytes.windows(3).position(|three| three == b"://")?];
        let is_scheme = scheme.len() > 1
            && scheme[0].is_ascii_alphabetic()
            && scheme.iter().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte));
        is_scheme.then(|| match &*scheme.to_ascii_lowercase() {
            b"s3" | b"gs" | b"az" => Self::Store,
            b"http" | b"https" => Self::Web,
            _ => Self::Unknown,
        })
    }
}

/// Whether a path is a URL. Not all can be read.
pub(crate) fn is_url(path: &Path) -> bool {
    Scheme::of(path).is_some()
}

/// An error for a URL whose scheme is not known.
pub(crate) fn require_known(path: &Path) -> Result<(), DataError> {
    match Scheme::of(path) {
        Some(Scheme::Unknown) => Err(DataError::option("url", READABLE, path.display())),
        _ => Ok(()),
    }
}

#[cfg(not(feature = "remote"))]
pub(crate) fn no_remote(path: &Path) -> DataError {
    let unknown = require_known(path).err();
    unknown.unwrap_or_else(|| DataError::layout(path, "a build with the feature `remote`", "a URL"))
}

/// Why a remote file could not be fetched: tells its errors from those of the operating system.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotFetched(pub(crate) String);

impl NotFetched {
    pub(crate) fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// A file of this machine or elsewhere.
pub(crate) enum Input {
    File(File),
    #[cfg(feature = "remote")]
    Remote(RemoteFile),
}

impl Input {
    /// Opens it, and returns it with its length in bytes.
    #[cfg(any(feature = "csv", feature = "jsonl", feature = "parquet"))]
    pub(crate) fn open(path: &Path) -> Result<(Self, u64), DataError> {
        Self::open_version(path, None)
    }

    /// The same; of a file elsewhere this version, without a question to its server, or that of today.
    pub(crate) fn open_version(path: &Path, version: Option<&Version>) -> Result<(Self, u64), DataError> {
        if is_url(path) {
            return Self::open_remote(path, version);
        }
        open_regular(path).map(|(file, bytes)| (Self::File(file), bytes))
    }

    #[cfg(feature = "remote")]
    fn open_remote(path: &Path, version: Option<&Version>) -> Result<(Self, u64), DataError> {
        let file = match version {
            Some(version) => RemoteFile::open_version(path, version)?,
            None => RemoteFile::open(path)?,
        };
        let bytes = file.len();
        Ok((Self::Remote(file), bytes))
    }

    #[cfg(not(feature = "remote"))]
    fn open_remote(path: &Path, _version: Option<&Version>) -> Result<(Self, u64), DataError> {
        Err(no_remote(path))
    }

    /// Which version it is, if it is elsewhere: to open it again as the same.
    pub(crate) fn version(&self) -> Option<Version> {
        match self {
            Self::File(_) => None,
            #[cfg(feature = "remote")]
            Self::Remote(file) => Some(file.version().clone()),
        }
    }

    /// Fills `buffer` with the bytes at `offset`.
    #[cfg(any(feature = "csv", feature = "jsonl", feature = "parquet"))]
    pub(crate) fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file) => read_at(file, buffer, offset),
            #[cfg(feature = "remote")]
            Self::Remote(file) => file.read_exact_at(offset, buffer),
        }
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(buffer),
            #[cfg(feature = "remote")]
            Self::Remote(file) => file.read(buffer),
        }
    }
}

impl Seek for Input {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::File(file) => file.seek(to),
            #[cfg(feature = "remote")]
            Self::Remote(file) => file.seek(to),
        }
    }
}

#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A path with one more ending, whatever dots it has.
pub(crate) fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Deflate never expands a byte to more than this many, so a header that declares more is wrong.
pub(crate) const MAX_DEFLATE_RATIO: u64 = 1032;

/// Refuses a URL where only this machine's files can be: taken for a path, it would be a folder named `s3:`.
pub(crate) fn require_local(path: &Path) -> Result<(), DataError> {
    match is_url(path) {
        true => Err(DataError::layout(path, "a path of this machine, as URLs are only read", "a URL")),
        false => Ok(()),
    }
}

/// Checks that a path is a regular file.
///
/// Anything else is refused: opening a pipe could block forever, and a device has no length.
pub(crate) fn require_regular(path: &Path) -> Result<(), DataError> {
    require_local(path)?;
    let kind = std::fs::metadata(path).map_err(DataError::io(path))?;
    if !kind.is_file() {
        let found = if kind.is_dir() { "a folder" } else { "a special file" };
        return Err(DataError::layout(path, "a regular file", found));
    }
    Ok(())
}

/// Opens a [regular](require_regular) file and returns it with its length in bytes.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), DataError> {
    require_regular(path)?;
    let file = File::open(path).map_err(DataError::io(path))?;
    let bytes = file.metadata().map_err(DataError::io(path))?.len();
    Ok((file, bytes))
}

/// The first of these files that is there; all of them are in one place, this machine or another.
///
/// # Errors
/// Where a server does not say, or refuses to: it may also refuse for a file that does not exist.
pub(crate) fn first_of(files: &[PathBuf]) -> Result<Option<&PathBuf>, DataError> {
    match files.first().filter(|file| is_url(file)) {
        #[cfg(feature = "remote")]
        Some(_) => Ok(remote::first_of(files)?.map(|number| &files[number])),
        #[cfg(not(feature = "remote"))]
        Some(url) => Err(no_remote(url)),
        None => Ok(files.iter().find(|file| file.is_file())),
    }
}

/// The files below a folder elsewhere, in no order.
pub(crate) fn list_remote(folder: &Path) -> Result<Vec<(PathBuf, Version)>, DataError> {
    #[cfg(feature = "remote")]
    return remote::below(folder);
    #[cfg(not(feature = "remote"))]
    Err(no_remote(folder))
}

/// Reads a whole file of at most `limit` bytes; of a file elsewhere this version, or that of today.
pub(crate) fn read_file(path: &Path, version: Option<&Version>, limit: u64) -> Result<Vec<u8>, DataError> {
    let (file, bytes) = Input::open_version(path, version)?;
    DataError::check_bytes(limit, bytes, "the file", path)?;
    let mut content = Vec::with_capacity(bytes as usize);
    // If the file grows meanwhile, reading stops at the limit instead of filling memory.
    file.take(limit).read_to_end(&mut content).map_err(DataError::io(path))?;
    Ok(content)
}

/// The content of a file, here or elsewhere (a URL).
///
/// # Errors
/// [`DataError::Io`]; [`DataError::Remote`]; [`DataError::Layout`] for what is no regular file; [`DataError::TooLarge`] above
/// 1 GiB.
///
/// # Source
/// `pathlib.Path.read_bytes`; `torchvision.io.read_file`.
#[doc(alias = "read_file")]
pub fn read_bytes(path: impl AsRef<Path>) -> Result<Vec<u8>, DataError> {
    read_file(path.as_ref(), None, 1 << 30)
}

/// The files below a folder of a store (`s3://bucket/folder`, `gs://`, `az://`) and its sub-folders, sorted by name as those
/// of a folder would be. It asks for one page of the list after another, and waits for them.
///
/// # Errors
/// [`DataError::Remote`]; [`DataError::Layout`] for the address of a web server, which does not list its files, for a list
/// that never ends, and without the feature `remote`; [`DataError::InvalidOption`] for what is no URL;
/// [`DataError::TooLarge`] above 4 GiB of names.
///
/// # Source
/// `fsspec.AbstractFileSystem.find`.
#[doc(alias = "find")]
pub fn list_store(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>, DataError> {
    let folder = folder.as_ref();
    if !is_url(folder) {
        return Err(DataError::option("folder", "`s3://bucket/folder`, `gs://..` or `az://..`", folder.display()));
    }
    let mut files: Vec<PathBuf> = list_remote(folder)?.into_iter().map(|(file, _)| file).collect();
    files.sort_unstable();
    Ok(files)
}

/// Fills `bytes` from an offset of a file on, whatever other threads read.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (bytes, offset) = (&mut bytes[read..], offset + read as u64),
        }
    }
    Ok(())
}

/// Asks the operating system to fetch a file into its cache, without waiting for that.
#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
pub(crate) fn read_ahead(path: &Path) {
    #[cfg(feature = "remote")]
    if is_url(path) {
        return remote::read_ahead(path);
    }
    // Only a hint: any error will show when the file is read.
    #[cfg(target_os = "linux")]
    if let Ok((file, _)) = open_regular(path) {
        _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        let of = |text: &str| Scheme::of(Path::new(text));
        for (text, scheme) in [
            ("s3://bucket/key", Scheme::Store),
            ("S3://bucket/key", Scheme::Store),
            ("Az://container/{0..9}.tar", Scheme::Store),
            ("HTTPS://host/key", Scheme::Web),
            ("gcs://bucket/key", Scheme::Unknown),
            ("abfs://container/key", Scheme::Unknown),
            ("git+ssh://host/key", Scheme::Unknown),
            ("file:///key", Scheme::Unknown),
            ("x-y.z2://", Scheme::Unknown),
        ] {
            assert_eq!(of(text), Some(scheme), "{text}");
            let refused = require_local(Path::new(text)).unwrap_err().to_string();
            assert!(refused.contains("a path of this machine, as URLs are only read"), "{refused}");
        }
        for text in ["s3:/bucket", "s3", "/data/s3://bucket", "C://data", "3s://x", "://x", "a b://x", "é3://x", ""] {
            assert_eq!(of(text), None, "{text}");
            assert!(require_local(Path::new(text)).is_ok(), "{text}");
        }
        #[cfg(unix)]
        {
            let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"s3://bucket/\xff");
            assert_eq!(Scheme::of(Path::new(name)), Some(Scheme::Store));
        }
        let unknown = require_known(Path::new("hdfs://node/key")).unwrap_err();
        assert!(matches!(unknown, DataError::InvalidOption { option: "url", .. }), "{unknown}");
        assert!(unknown.to_string().contains("`gs://bucket/key`"), "{unknown}");
    }

    #[test]
    fn size_kind_and_absence_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ten");
        std::fs::write(&path, [7; 10]).unwrap();
        assert_eq!(read_file(&path, None, 10).unwrap(), [7; 10]);
        assert!(matches!(read_file(&path, None, 9), Err(DataError::TooLarge { bytes: 10, limit: 9, .. })));
        assert!(matches!(read_file(dir.path(), None, 9), Err(DataError::Layout { .. })));
        assert!(matches!(read_file(&dir.path().join("none"), None, 9), Err(DataError::Io { .. })));
    }
}
