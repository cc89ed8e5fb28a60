//! Writes a file that appears complete or not at all.

#[cfg(feature = "zstd")]
mod frames;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::DataError;
use crate::read::{require_local, with_ending};

const BUFFER_BYTES: usize = 1 << 18;

/// Writes to `<path>.part` and renames it at the end, so that an interrupted run leaves no file that looks complete.
///
/// A name that ends in `.gz` or `.tgz` is compressed with gzip, one in `.zst` with zstd, in frames that can be read
/// without each other.
pub(crate) struct Output {
    path: PathBuf,
    part: PathBuf,
    /// `None` after `sync`.
    encoder: Option<Encoder>,
    /// The bytes of content so far.
    written: u64,
    renamed: bool,
}

enum Encoder {
    Plain(BufWriter<File>),
    Gzip(GzEncoder<BufWriter<File>>),
    #[cfg(feature = "zstd")]
    Zstd(frames::FrameWriter<BufWriter<File>>),
}

impl Output {
    pub(crate) fn create(path: &Path) -> Result<Self, DataError> {
        require_local(path)?;
        let part = with_ending(path, ".part");
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        #[cfg(not(feature = "zstd"))]
        if ending == "zst" {
            return Err(DataError::layout(path, "a build with the feature `zstd`", "a name that asks for it"));
        }
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create(&part).map_err(DataError::io(&part))?);
        let encoder = match ending.as_str() {
            "gz" | "tgz" => Encoder::Gzip(GzEncoder::new(file, Compression::default())),
            #[cfg(feature = "zstd")]
            "zst" => Encoder::Zstd(frames::FrameWriter::new(file).map_err(DataError::io(&part))?),
            _ => Encoder::Plain(file),
        };
        Ok(Self { path: path.to_owned(), part, encoder: Some(encoder), written: 0, renamed: false })
    }

    /// The final path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// How many bytes were written, before compression.
    #[cfg(any(feature = "tfrecord", feature = "webdataset"))]
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Flushes, syncs the file to disk, and renames it to its final path.
    pub(crate) fn finish(mut self) -> Result<PathBuf, DataError> {
        self.sync()?;
        self.rename()
    }

    /// Finishes two files that are of no use without each other: both appear, or none.
    pub(crate) fn finish_both(mut first: Self, mut second: Self) -> Result<[PathBuf; 2], DataError> {
        first.sync()?;
        second.sync()?;
        let first = first.rename()?;
        match second.rename() {
            Ok(second) => Ok([first, second]),
            Err(error) => {
                _ = fs::remove_file(first);
                Err(error)
            }
        }
    }

    fn sync(&mut self) -> Result<(), DataError> {
        let Some(encoder) = self.encoder.take() else { return Ok(()) };
        encoder.finish().and_then(|file| file.sync_all()).map_err(DataError::io(&self.path))
    }

    fn rename(mut self) -> Result<PathBuf, DataError> {
        fs::rename(&self.part, &self.path).map_err(DataError::io(&self.path))?;
        self.renamed = true;
        Ok(self.path.clone())
    }
}

impl Encoder {
    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Plain(file) => file,
            Self::Gzip(encoder) => encoder,
            #[cfg(feature = "zstd")]
            Self::Zstd(encoder) => encoder,
        }
    }

    fn finish(self) -> io::Result<File> {
        let buffered = match self {
            Self::Plain(file) => file,
            Self::Gzip(encoder) => encoder.finish()?,
            #[cfg(feature = "zstd")]
            Self::Zstd(encoder) => encoder.finish()?,
        };
        buffered.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.encoder.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.writer().write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.encoder.as_mut().map_or(Ok(()), |encoder| encoder.writer().flush())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        drop(self.encoder.take());
        if !self.renamed {
            _ = fs::remove_file(&self.part);
        }
    }
}
