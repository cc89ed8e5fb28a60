//! The records of a file; each is a length, its checksum, the bytes, and their checksum.

use std::path::Path;
use std::sync::Arc;

use super::crc::masked_crc;
use super::{Example, Options};
use crate::content::Content;
use crate::{Cancellation, DataError};

const LENGTH_BYTES: usize = 8;
const HEADER_BYTES: usize = 12;
const FOOTER_BYTES: usize = 4;

/// One record, and its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TfRecord {
    bytes: Vec<u8>,
    path: Arc<Path>,
    offset: u64,
}

impl TfRecord {
    /// The record's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The record's bytes, owned.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The file that contains the record.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The offset of its bytes in the file; in a compressed file, in the decompressed content.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Parses the record as a `tf.train.Example`, whose bytes are borrowed from the record.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] with file and offset, when it is not one.
    pub fn example(&self) -> Result<Example<'_>, DataError> {
        Example::parse(&self.bytes).map_err(|malformed| {
            let found = format!("{} in the record at byte {}", malformed.found, self.offset);
            DataError::corrupt(&self.path, self.offset + malformed.offset as u64, malformed.expected, found)
        })
    }
}

/// The records of one file, in order; see [`TfRecordDataset`](super::TfRecordDataset) for the handling of errors.
pub struct TfRecords {
    content: Content,
    options: Options,
    done: bool,
}

impl TfRecords {
    pub(super) fn open(path: Arc<Path>, options: Options, cancelled: &Cancellation) -> Result<Self, DataError> {
        Ok(Self { content: Content::open(path)?.until(cancelled), options, done: false })
    }

    /// The records of a file that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a compression that this build does not support.
    pub fn from_bytes(file: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Ok(Self { content: Content::from_bytes(file, path)?, options: Options::default(), done: false })
    }

    /// Whether checksums are verified; on unless set.
    pub fn verify_crc(mut self, verify: bool) -> Self {
        self.options.verify_crc = verify;
        self
    }

    /// Skips the `count` items that an earlier reader of this file returned. If the last of them was an error other
    /// than a record's wrong checksum, the file ends here, as it did then.
    pub(super) fn skip_items(&mut self, count: u64) {
        for _ in 0..count {
            let skipped = self.length().and_then(|length| match length {
                Some(length) => self.content.skip(length + FOOTER_BYTES as u64, "a record").map(|()| true),
                None => Ok(false),
            });
            if !matches!(skipped, Ok(true)) {
                self.done = true;
                break;
            }
        }
    }

    /// The length of the next record; `None` at the end of the file.
    fn length(&mut self) -> Result<Option<u64>, DataError> {
        let start = self.content.at();
        let mut header = [0; HEADER_BYTES];
        let filled = self.content.fill(&mut header)?;
        if filled == 0 {
            return Ok(None);
        }
        if filled < HEADER_BYTES {
            let found = format!("the end of the file after {filled} of them");
            return Err(self.content.corrupt(start, format!("{HEADER_BYTES} bytes of a record's header"), found));
        }
        let [length @ .., a, b, c, d] = header;
        let length: [u8; LENGTH_BYTES] = length;
        self.check(&length, u32::from_le_bytes([a, b, c, d]), start, "a record's length")?;
        let bytes = u64::from_le_bytes(length);
        let limit = self.options.max_record_bytes;
        if self.content.length().is_some_and(|file| bytes > file) {
            let found = format!("a length of {bytes} bytes");
            return Err(self.content.corrupt(start, "a record that fits into the file", found));
        }
        if bytes > limit {
            let path = self.content.path().to_path_buf();
            return Err(DataError::TooLarge { path, what: "a record", bytes, limit });
        }
        Ok(Some(bytes))
    }

    /// Reads a record after its header. The inner error is a wrong checksum, after which reading can continue.
    fn record(&mut self, length: u64) -> Result<Result<TfRecord, DataError>, DataError> {
        let offset = self.content.at();
        let bytes = self.content.bytes(length, "a record")?;
        let mut footer = [0; FOOTER_BYTES];
        let at = self.content.at();
        let filled = self.content.fill(&mut footer)?;
        if filled < FOOTER_BYTES {
            let found = format!("the end of the file after {filled} bytes");
            return Err(self.content.corrupt(at, "a record's checksum", found));
        }
        let intact = self.check(&bytes, u32::from_le_bytes(footer), offset, "a record");
        Ok(intact.map(|()| TfRecord { bytes, path: self.content.path().clone(), offset }))
    }

    fn check(&self, bytes: &[u8], declared: u32, offset: u64, what: &str) -> Result<(), DataError> {
        if !self.options.verify_crc {
            return Ok(());
        }
        match masked_crc(bytes) {
            actual if actual == declared => Ok(()),
            actual => {
                let expected = format!("{what} with the checksum {declared:08x}");
                Err(self.content.corrupt(offset, expected, format!("{actual:08x}")))
            }
        }
    }
}

impl Iterator for TfRecords {
    type Item = Result<TfRecord, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = match self.length() {
            Ok(Some(length)) => self.record(length),
            Ok(None) => {
                self.done = true;
                return None;
            }
            Err(error) => Err(error),
        };
        self.done = item.is_err();
        Some(item.unwrap_or_else(Err))
    }
}
