//! The records of a file; each is a length, its checksum, the bytes, and their checksum.

use std::path::Path;
use std::sync::Arc;

use super::crc::masked_crc;
use super::{Example, Options, index};
use crate::bad::{Bad, noting};
use crate::content::Content;
use crate::read::Version;
use crate::shards::index::{ShardIndex, Span, find, misfit, misplaced, read};
use crate::{Cancellation, DataError};

const LENGTH_BYTES: usize = 8;
pub(super) const HEADER_BYTES: usize = 12;
pub(super) const FOOTER_BYTES: usize = 4;

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
    /// The length of the next record, whose header has been read: it was found behind a bad one.
    found: Option<u64>,
    /// The index, if records are read by it, and the number of the next one.
    index: Option<(Arc<ShardIndex>, usize)>,
    done: bool,
}

impl TfRecords {
    pub(super) fn open(
        path: Arc<Path>,
        version: Option<&Version>,
        options: Options,
        cancelled: &Cancellation,
    ) -> Result<Self, DataError> {
        Ok(Self::new(Content::open_version(path, version)?.until(cancelled), options))
    }

    fn new(content: Content, options: Options) -> Self {
        Self { content, options, found: None, index: None, done: false }
    }

    /// The records of a file that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a compression that this build does not support.
    pub fn from_bytes(file: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Ok(Self::new(Content::from_bytes(file, path)?, Options::default()))
    }

    /// Whether checksums are verified; on unless set.
    pub fn verify_crc(mut self, verify: bool) -> Self {
        self.options.verify_crc = verify;
        self
    }

    /// Skips the `count` items that an earlier reader of this file returned. If the last of them was an error that no
    /// record follows, the file ends here, as it did then.
    pub(super) fn skip_items(&mut self, count: u64) {
        for _ in 0..count {
            let skipped = self.length().and_then(|length| match length {
                Some(length) => Ok(self.skip_record(length).map(|()| true)?),
                None => Ok(false),
            });
            if !matches!(skipped, Ok(true) | Err(Bad { more: true, .. })) {
                self.done = true;
                break;
            }
        }
    }

    /// Skips a record after its header.
    fn skip_record(&mut self, length: u64) -> Result<(), DataError> {
        self.content.skip(length.saturating_add(FOOTER_BYTES as u64), "a record")
    }

    /// The length of the next record; `None` at the end of the file.
    fn length(&mut self) -> Result<Option<u64>, Bad> {
        if let Some(length) = self.found.take() {
            return Ok(Some(length));
        }
        let start = self.content.at();
        let mut header = [0; HEADER_BYTES];
        let filled = self.content.fill(&mut header)?;
        if filled == 0 {
            return Ok(None);
        }
        if filled < HEADER_BYTES {
            let found = format!("the end of the file after {filled} of them");
            return Err(self
                .content
                .corrupt(start, format!("{HEADER_BYTES} bytes of a record's header"), found)
                .into());
        }
        let (length, crc) = parts(header);
        let bytes = u64::from_le_bytes(length);
        match self.check(&length, crc, start, "a record's length") {
            // The index says where the next record is.
            checked if self.index.is_some() => return Ok(checked.map(|()| Some(bytes))?),
            Err(error) => return Err(self.search(header, error)),
            Ok(()) => {}
        }
        if self.content.length().is_some_and(|file| bytes > file) {
            let found = format!("a length of {bytes} bytes");
            return Err(self.content.corrupt(start, "a record that fits into the file", found).into());
        }
        match DataError::check_bytes(self.options.max_record_bytes, bytes, "a record", self.content.path()) {
            Ok(()) => Ok(Some(bytes)),
            Err(error) => Err(Bad { error, more: self.skip_record(bytes).is_ok() }),
        }
    }

    /// Looks for the next header behind a bad one, by its checksum.
    fn search(&mut self, mut header: [u8; HEADER_BYTES], error: DataError) -> Bad {
        let start = self.content.at() - HEADER_BYTES as u64;
        let limit = self.options.max_record_bytes;
        let is_header = |header: &[u8; HEADER_BYTES]| {
            let (length, crc) = parts(*header);
            u64::from_le_bytes(length) <= limit && masked_crc(&length) == crc
        };
        match self.content.find(&mut header, is_header) {
            Err(DataError::Cancelled) => DataError::Cancelled.into(),
            Ok(true) => {
                let (at, (length, _)) = (self.content.at() - HEADER_BYTES as u64, parts(header));
                self.found = Some(u64::from_le_bytes(length));
                let lost = at - start;
                let note = format!("the next record is at byte {at}, and the {lost} bytes before it are lost");
                Bad { error: noting(error, &note), more: true }
            }
            Ok(false) | Err(_) => error.into(),
        }
    }

    /// Reads a record after its header.
    fn record(&mut self, length: u64) -> Result<TfRecord, Bad> {
        let offset = self.content.at();
        let bytes = self.content.bytes(length, "a record")?;
        let mut footer = [0; FOOTER_BYTES];
        let at = self.content.at();
        let filled = self.content.fill(&mut footer)?;
        if filled < FOOTER_BYTES {
            let found = format!("the end of the file after {filled} bytes");
            return Err(self.content.corrupt(at, "a record's checksum", found).into());
        }
        let intact = self.check(&bytes, u32::from_le_bytes(footer), offset, "a record");
        // The length was right, so the next record is in its place.
        intact.map_err(|error| Bad { error, more: true })?;
        Ok(TfRecord { bytes, path: self.content.path().clone(), offset })
    }

    /// Reads on by an index, from the record with this number.
    pub(super) fn by_index(mut self, index: Arc<ShardIndex>, item: usize) -> Self {
        self.index = Some((index, item));
        self
    }

    /// The index beside the file, if there is one, after a check that its records are all that the file has.
    pub(super) fn load_index(&mut self) -> Result<Option<ShardIndex>, DataError> {
        let Some(path) = find(self.content.path())? else { return Ok(None) };
        let length = self.content.seekable_length()?;
        let (index, end) = index::parse(&path, &read(&path)?)?;
        match end == length {
            true => Ok(Some(index.of_version(self.content.version()))),
            false => Err(misfit(
                &path,
                self.content.path(),
                format!("an index that ends at byte {end}, of a file of {length} bytes"),
            )),
        }
    }

    /// The text of an index of the whole file, and how many records it has.
    pub(super) fn list(mut self) -> Result<(String, u64), DataError> {
        self.content.seekable_length()?;
        let (mut text, mut records, mut start) = (String::new(), 0, 0);
        while let Some(length) = self.length().map_err(|bad| bad.error)? {
            self.skip_record(length)?;
            index::add(&mut text, start, self.content.at() - start);
            (records, start) = (records + 1, self.content.at());
        }
        Ok((text, records))
    }

    /// The record that an index has at a place.
    fn record_at(&mut self, span: Span) -> Result<TfRecord, Bad> {
        self.content.seek(span.start)?;
        let length = self.length()?.unwrap_or_default();
        let end = self.content.at().saturating_add(length).saturating_add(FOOTER_BYTES as u64);
        if end != span.end {
            let found = format!("a length of {length} bytes, up to byte {end}");
            return Err(misplaced(self.content.path(), span, found).into());
        }
        DataError::check_bytes(self.options.max_record_bytes, length, "a record", self.content.path())?;
        self.record(length)
    }

    /// The next record of the index.
    fn next_of_index(&mut self) -> Option<Result<TfRecord, DataError>> {
        let (index, item) = self.index.as_mut()?;
        let span = index.span(*item)?;
        *item += 1;
        let record = self.record_at(span).map_err(|bad| bad.error);
        // After an error in a record, the next one is where the index has it.
        self.done = matches!(record, Err(DataError::Cancelled | DataError::Io { .. } | DataError::Remote { .. }));
        Some(record)
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
        if self.index.is_some() {
            return self.next_of_index();
        }
        let item = self.length().and_then(|length| length.map(|length| self.record(length)).transpose());
        self.done = !matches!(item, Ok(Some(_)) | Err(Bad { more: true, .. }));
        let unknown = "no record follows that could be found: how many are lost is unknown";
        item.map_err(|bad| if bad.more { bad.error } else { noting(bad.error, unknown) }).transpose()
    }
}

/// A record's length, and the checksum of it.
fn parts([length @ .., a, b, c, d]: [u8; HEADER_BYTES]) -> ([u8; LENGTH_BYTES], u32) {
    (length, u32::from_le_bytes([a, b, c, d]))
}
