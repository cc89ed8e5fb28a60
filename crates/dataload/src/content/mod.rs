//! Reads a file from front to back, decompressing it where needed, with an offset for every error.

mod limiter;
#[cfg(feature = "zstd")]
pub(crate) mod seekable;

use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
#[cfg(all(
    feature = "zstd",
    any(feature = "lmdb", feature = "mds", feature = "tfrecord", feature = "webdataset")
))]
pub(crate) use seekable::{FOOTER_MAGIC, TABLE_MAGIC};

use self::limiter::ReadLimiter;
use crate::read::{Input, NotFetched, Version};
use crate::{Cancellation, DataError};

/// Large enough to make the cost of system calls negligible, small enough to stay in a core's cache.
const BUFFER_BYTES: usize = 1 << 16;
/// The size of the first read after a skip: when many entries are skipped in a row, only their headers are wanted.
const HEADER_BYTES: usize = 1 << 12;
/// From this size on, an extra system call costs less than a copy.
const DIRECT_BYTES: u64 = 1 << 15;
/// The most memory reserved for a declared length that cannot be checked against the file's size.
const TRUSTED_BYTES: u64 = 1 << 20;
/// With the method, which is deflate: a length in the place of the first two bytes is 0x8b1f.
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b, 8];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// A reader that knows its file's path and its offset in it.
pub(crate) struct Content {
    path: Arc<Path>,
    version: Option<Version>,
    form: Form,
    /// Bytes of (decompressed) content read so far.
    at: u64,
    /// Makes the next read an error.
    cancelled: Cancellation,
}

/// How a file's content is stored.
enum Form {
    /// An uncompressed file and its length in bytes.
    Plain { reader: BufReader<ReadLimiter>, bytes: u64 },
    /// Decompressed as it is read; its length is known only at the end.
    Compressed { reader: Box<dyn Unpack>, format: &'static str },
}

/// Decompresses.
trait Unpack: BufRead + Send {
    /// The length of the content, where the file says where its parts are. It is not to be trusted: it may be wrong.
    fn content_length(&mut self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    /// Moves to an offset of the content or to one before it, which is returned; `None` where the file can only be read
    /// from front to back.
    fn seek(&mut self, _to: u64) -> io::Result<Option<u64>> {
        Ok(None)
    }
}

impl<R: BufRead + Send> Unpack for BufReader<MultiGzDecoder<R>> {}

impl Content {
    /// Opens a regular file; gzip and zstd are recognised by their first bytes, not by the name.
    pub(crate) fn open(path: Arc<Path>) -> Result<Self, DataError> {
        Self::open_version(path, None)
    }

    /// The same; of a file elsewhere this version, or that of today.
    pub(crate) fn open_version(path: Arc<Path>, version: Option<&Version>) -> Result<Self, DataError> {
        let (input, bytes) = Input::open_version(&path, version)?;
        let version = input.version();
        Ok(Self { version, ..Self::new(input, bytes, path)? })
    }

    /// Opens such a version of a regular file that is not compressed, whatever its first bytes.
    #[cfg(feature = "mds")]
    pub(crate) fn open_plain(path: Arc<Path>, version: Option<&Version>) -> Result<Self, DataError> {
        let (input, bytes) = Input::open_version(&path, version)?;
        let version = input.version();
        let reader = BufReader::with_capacity(BUFFER_BYTES, ReadLimiter::new(input));
        let form = Form::Plain { reader, bytes };
        Ok(Self { path, version, form, at: 0, cancelled: Cancellation::default() })
    }

    /// The content of `bytes`; `path` only names them in errors.
    pub(crate) fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        let length = bytes.len() as u64;
        Self::new(io::Cursor::new(bytes), length, path.into())
    }

    fn new<R: Read + Seek + Send + 'static>(input: R, bytes: u64, path: Arc<Path>) -> Result<Self, DataError> {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, ReadLimiter::new(input));
        let start = loop {
            match reader.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(DataError::io(&path))?,
            }
        };
        let form = if start.starts_with(GZIP_MAGIC) {
            let decoder = BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(reader));
            Form::Compressed { reader: Box::new(decoder), format: "gzip" }
        } else if start.starts_with(ZSTD_MAGIC) {
            Form::Compressed { reader: zstd_decoder(reader, &path)?, format: "zstd" }
        } else {
            Form::Plain { reader, bytes }
        };
        Ok(Self { path, version: None, form, at: 0, cancelled: Cancellation::default() })
    }

    /// The same reader, whose reads fail with [`DataError::Cancelled`] once `cancelled` is set.
    pub(crate) fn until(self, cancelled: &Cancellation) -> Self {
        Self { cancelled: cancelled.clone(), ..self }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Which version of the file it is, if that is elsewhere.
    #[cfg_attr(not(any(feature = "mds", feature = "tfrecord", feature = "webdataset")), allow(dead_code))]
    pub(crate) fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// The offset of the next byte, in the decompressed content where the file is compressed.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Fills `buffer` as far as the content goes and returns how many bytes that was.
    pub(crate) fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, DataError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let chunk = self.chunk()?;
            if chunk.is_empty() {
                break;
            }
            let count = chunk.len().min(buffer.len() - filled);
            buffer[filled..filled + count].copy_from_slice(&chunk[..count]);
            self.consume(count);
            filled += count;
        }
        Ok(filled)
    }

    /// Reads `length` bytes; `what` names them in errors.
    ///
    /// For a plain file, `length` is checked against the file's size before memory is allocated; for a compressed one,
    /// memory grows as data arrives.
    pub(crate) fn bytes(&mut self, length: u64, what: &str) -> Result<Vec<u8>, DataError> {
        let start = self.at;
        let reserve = match self.check(length, what)? {
            true => length,
            false => length.min(TRUSTED_BYTES),
        };
        let mut bytes = Vec::new();
        let reserved = usize::try_from(reserve).map(|reserve| bytes.try_reserve_exact(reserve));
        if !matches!(reserved, Ok(Ok(()))) {
            return Err(DataError::io(&self.path)(io::ErrorKind::OutOfMemory.into()));
        }
        while (bytes.len() as u64) < length {
            if self.read_around_buffer(length, &mut bytes)? {
                continue;
            }
            let chunk = self.chunk()?;
            if chunk.is_empty() {
                return Err(self.cut(start, length, what, bytes.len() as u64));
            }
            let count = (length - bytes.len() as u64).min(chunk.len() as u64) as usize;
            bytes.extend_from_slice(&chunk[..count]);
            self.consume(count);
        }
        Ok(bytes)
    }

    /// Reads the rest of `length` bytes of a plain file straight into `bytes`, when nothing is buffered and the rest is
    /// long enough for the saved copy to matter. False when nothing was read this way.
    fn read_around_buffer(&mut self, length: u64, bytes: &mut Vec<u8>) -> Result<bool, DataError> {
        let left = length - bytes.len() as u64;
        match &mut self.form {
            Form::Plain { reader, .. } if left >= DIRECT_BYTES && reader.buffer().is_empty() => {
                let before = bytes.len();
                let outcome = (&mut reader.get_mut().input).take(left).read_to_end(bytes);
                let got = bytes.len() - before;
                self.at += got as u64;
                outcome.map_err(DataError::io(&self.path))?;
                Ok(got > 0)
            }
            _ => Ok(false),
        }
    }

    /// Skips `length` bytes, without reading them where the file is not compressed.
    pub(crate) fn skip(&mut self, length: u64, what: &str) -> Result<(), DataError> {
        let start = self.at;
        let known = self.check(length, what)?;
        if let (Form::Plain { reader, .. }, true) = (&mut self.form, known) {
            if length >= HEADER_BYTES as u64 {
                reader.get_mut().most = HEADER_BYTES;
            }
            // Within the buffer this only moves its position; a file's length fits into an i64.
            let moved = i64::try_from(length).map_err(io::Error::other).and_then(|length| reader.seek_relative(length));
            moved.map_err(DataError::io(&self.path))?;
            self.at += length;
            return Ok(());
        }
        while self.at - start < length {
            let chunk = self.chunk()?.len() as u64;
            if chunk == 0 {
                return Err(self.cut(start, length, what, self.at - start));
            }
            self.consume(chunk.min(length - (self.at - start)) as usize);
        }
        Ok(())
    }

    /// Reads on, byte by byte, until the last bytes, which begin as `window`, are what is looked for; false at the end.
    pub(crate) fn find<const N: usize>(
        &mut self,
        window: &mut [u8; N],
        is_wanted: impl Fn(&[u8; N]) -> bool,
    ) -> Result<bool, DataError> {
        loop {
            let chunk = self.chunk()?;
            let found = chunk.iter().position(|&byte| {
                window.rotate_left(1);
                window[N - 1] = byte;
                is_wanted(window)
            });
            let count = found.map_or(chunk.len(), |position| position + 1);
            if count == 0 {
                return Ok(false);
            }
            self.consume(count);
            if found.is_some() {
                return Ok(true);
            }
        }
    }

    /// Reads zeros up to the end, and returns the offset of the first byte that is not zero, where there is one.
    pub(crate) fn drain_zeros(&mut self) -> Result<Option<u64>, DataError> {
        loop {
            let at = self.at;
            let chunk = self.chunk()?;
            // OR-ing the chunk together is fast (vectorised); the position is looked for only when some byte is not
            // zero.
            if chunk.iter().fold(0, |bits, byte| bits | byte) != 0 {
                return Ok(chunk.iter().position(|&byte| byte != 0).map(|position| at + position as u64));
            }
            match chunk.len() {
                0 => return Ok(None),
                count => self.consume(count),
            }
        }
    }

    /// Moves to an offset; an error for a file that is compressed as a whole.
    pub(crate) fn seek(&mut self, to: u64) -> Result<(), DataError> {
        match &mut self.form {
            Form::Plain { reader, .. } => {
                if to.abs_diff(self.at) >= HEADER_BYTES as u64 {
                    reader.get_mut().most = HEADER_BYTES;
                }
                // Within the buffer this only moves its position; a file's length fits into an i64.
                let by = i64::try_from(i128::from(to) - i128::from(self.at)).map_err(io::Error::other);
                by.and_then(|by| reader.seek_relative(by)).map_err(DataError::io(&self.path))?;
                self.at = to;
                Ok(())
            }
            Form::Compressed { reader, format } => match reader.seek(to) {
                Ok(Some(at)) => {
                    self.at = at;
                    self.skip(to - at, "the content before a sample")
                }
                Ok(None) => Err(DataError::layout(&self.path, "a file that is not compressed as a whole", *format)),
                Err(error) => Err(self.damaged(error)),
            },
        }
    }

    /// The length of the content where it can be read in any order, which for a compressed file may be wrong; an error
    /// where it can only be read from front to back. Moves to the start.
    pub(crate) fn seekable_length(&mut self) -> Result<u64, DataError> {
        let length = match &mut self.form {
            Form::Plain { bytes, .. } => Ok(*bytes),
            Form::Compressed { reader, format } => match reader.content_length() {
                Ok(Some(length)) => Ok(length),
                Ok(None) => {
                    let expected = "a file that is not compressed, or by zstd in frames with a table of them";
                    Err(DataError::layout(&self.path, expected, format!("{format} without one")))
                }
                Err(error) => Err(self.damaged(error)),
            },
        }?;
        self.seek(0)?;
        Ok(length)
    }

    /// The length of the file; `None` where it is compressed.
    pub(crate) fn length(&self) -> Option<u64> {
        match &self.form {
            Form::Plain { bytes, .. } => Some(*bytes),
            Form::Compressed { .. } => None,
        }
    }

    pub(crate) fn corrupt(&self, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        DataError::corrupt(&self.path, offset, expected, found)
    }

    /// True when `length` more bytes are there, false when that is unknown (compressed); an error when they are not.
    fn check(&self, length: u64, what: &str) -> Result<bool, DataError> {
        let Some(bytes) = self.length() else { return Ok(false) };
        match bytes.saturating_sub(self.at) {
            room if room < length => Err(self.cut(self.at, length, what, room)),
            _ => Ok(true),
        }
    }

    fn cut(&self, start: u64, length: u64, what: &str, got: u64) -> DataError {
        self.corrupt(start, format!("{length} bytes of {what}"), format!("the end of the file after {got} of them"))
    }

    /// The buffered bytes, after another read where the buffer is empty; empty at the end of the file.
    fn chunk(&mut self) -> Result<&[u8], DataError> {
        self.cancelled.check()?;
        // `fill_buf` is called twice, since the borrow checker does not see that an error in the loop borrows nothing.
        loop {
            let outcome = match &mut self.form {
                Form::Plain { reader, .. } => reader.fill_buf().map(drop),
                Form::Compressed { reader, .. } => reader.fill_buf().map(drop),
            };
            match outcome {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.damaged(error)),
            }
        }
        let chunk = match &mut self.form {
            Form::Plain { reader, .. } => reader.fill_buf(),
            Form::Compressed { reader, .. } => reader.fill_buf(),
        };
        chunk.map_err(DataError::io(&self.path))
    }

    fn consume(&mut self, count: usize) {
        match &mut self.form {
            Form::Plain { reader, .. } => reader.consume(count),
            Form::Compressed { reader, .. } => reader.consume(count),
        }
        self.at += count as u64;
    }

    fn damaged(&self, error: io::Error) -> DataError {
        use io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
        match (&self.form, error.kind()) {
            _ if NotFetched::is(&error) => DataError::io(&self.path)(error),
            (Form::Compressed { format, .. }, InvalidData | InvalidInput | UnexpectedEof | Other) => {
                self.corrupt(self.at, format!("intact {format} data"), error.to_string())
            }
            _ => DataError::Io { path: self.path.to_path_buf(), error },
        }
    }
}

#[cfg(feature = "zstd")]
fn zstd_decoder(reader: BufReader<ReadLimiter>, path: &Path) -> Result<Box<dyn Unpack>, DataError> {
    Ok(Box::new(seekable::ZstdReader::new(reader).map_err(DataError::io(path))?))
}

#[cfg(not(feature = "zstd"))]
fn zstd_decoder(_: BufReader<ReadLimiter>, path: &Path) -> Result<Box<dyn Unpack>, DataError> {
    Err(DataError::layout(path, "a build with the feature `zstd`", "zstd-compressed data"))
}

#[cfg(test)]
mod tests;
