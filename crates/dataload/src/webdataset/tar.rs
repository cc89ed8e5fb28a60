//! Reads the regular files of a tar archive, front to back.
//!
//! The `tar` crate parses the header's fields. Its own archive reader is not used: its entries borrow it, so an
//! iterator cannot own both; it allocates as much memory as an extended header declares; and its errors have no offset.

use std::sync::Arc;

use ::tar::{EntryType, Header};

use crate::DataError;
use crate::bad::{Bad, noting};
use crate::content::Content;
use crate::read::Version;

pub(super) const BLOCK: u64 = 512;
/// The longest name in a header; longer ones are in an extended header before it.
const NAME_BYTES: usize = 100;
/// The largest extended header, which holds a name or a few attributes.
const MAX_EXTENDED_BYTES: u64 = 1 << 20;

/// Reads headers and, on request, the files' content.
pub(super) struct TarReader {
    content: Content,
    /// Unread bytes up to the next header.
    unread: u64,
    /// Whether the end mark has been seen.
    ended: bool,
    /// The next header, which has been read: it was found behind a bad one.
    found: Option<Box<Header>>,
    /// Where a sample ends, if an index says so: neither a header nor the end mark is looked for beyond.
    stop: Option<u64>,
}

/// A regular file, whose content follows.
pub(super) struct TarFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// The offset of its header.
    pub(super) offset: u64,
    /// Whether the name fills the header's field, so that it is the start of a longer one if an extended header is
    /// missing.
    pub(super) may_be_cut: bool,
}

/// The fields that extended headers set for the next file.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    bytes: Option<u64>,
}

impl TarReader {
    pub(super) fn new(content: Content) -> Self {
        Self { content, unread: 0, ended: false, found: None, stop: None }
    }

    pub(super) fn path(&self) -> &Arc<std::path::Path> {
        self.content.path()
    }

    /// Which version of it this is, if it is elsewhere.
    pub(super) fn version(&self) -> Option<&Version> {
        self.content.version()
    }

    /// The length of the archive, if it can be read in any order.
    pub(super) fn seekable_length(&mut self) -> Result<u64, DataError> {
        self.content.seekable_length()
    }

    /// Moves to a header, which an index names, and reads no further than to `stop`.
    pub(super) fn seek(&mut self, at: u64, stop: Option<u64>) -> Result<(), DataError> {
        (self.unread, self.ended, self.found, self.stop) = (0, false, None, stop);
        self.content.seek(at)
    }

    /// The offset of the content of the file that [`next_file`](Self::next_file) returned last, if it has not been
    /// read.
    pub(super) fn at(&self) -> u64 {
        self.content.at()
    }

    /// The offset of the next header.
    pub(super) fn next_at(&self) -> u64 {
        self.content.at().saturating_add(self.unread)
    }

    /// The next regular file; `None` at the archive's end mark. Other bytes than zeros after the mark are an error.
    ///
    /// After a bad header, the next one is looked for. It belongs to another file, whose name an extended header may
    /// have set that was lost.
    pub(super) fn next_file(&mut self) -> Result<Option<TarFile>, Bad> {
        let mut extended = Extended::default();
        while !self.ended {
            if self.unread > 0 {
                self.content.skip(self.unread, "a file in the archive")?;
                self.unread = 0;
            }
            let Some((header, offset)) = self.header()? else { break };
            let kind = header.entry_type();
            if kind.is_gnu_longname() {
                let mut name = self.extension(&header, offset)?;
                name.truncate(name.iter().position(|&byte| byte == 0).unwrap_or(name.len()));
                extended.name = Some(name);
            } else if kind.is_pax_local_extensions() {
                let records = self.extension(&header, offset)?;
                let read = self.read_pax(&records, offset, &mut extended);
                read.map_err(|error| Bad { error, more: true })?;
            } else {
                let extended = std::mem::take(&mut extended);
                let bytes = match (kind, extended.bytes) {
                    (kind, _) if has_no_content(kind) => 0,
                    (_, Some(bytes)) => bytes,
                    (_, None) => self.size(&header, offset)?,
                };
                self.unread = self.padded(bytes, offset)?;
                if kind.is_gnu_sparse() {
                    let found = "a sparse one, which is not supported";
                    return Err(Bad { error: self.content.corrupt(offset, "a plain file", found), more: true });
                }
                if kind.is_file() || kind.is_contiguous() {
                    let may_be_cut = extended.name.is_none() && !header.as_bytes()[..NAME_BYTES].contains(&0);
                    let name = extended.name.unwrap_or_else(|| header.path_bytes().into_owned());
                    let name = String::from_utf8(name).map_err(|error| {
                        let found = error.into_bytes().escape_ascii().to_string();
                        Bad { error: self.content.corrupt(offset, "a file name in UTF-8", found), more: true }
                    })?;
                    // Archives older than POSIX mark folders by a trailing slash.
                    if !name.ends_with('/') {
                        return Ok(Some(TarFile { name, bytes, offset, may_be_cut }));
                    }
                }
            }
        }
        self.ended = true;
        match extended.name.is_some() || extended.bytes.is_some() {
            true => {
                let at = self.content.at();
                Err(self.content.corrupt(at, "the file that an extended header is for", "the end").into())
            }
            false => Ok(None),
        }
    }

    /// The content of the file that [`next_file`](Self::next_file) returned last.
    pub(super) fn read(&mut self, file: &TarFile) -> Result<Vec<u8>, DataError> {
        let bytes = self.content.bytes(file.bytes, &file.name)?;
        self.unread = self.unread.saturating_sub(file.bytes);
        Ok(bytes)
    }

    pub(super) fn corrupt(&self, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        self.content.corrupt(offset, expected, found)
    }

    /// The next header and its offset; `None` at the end mark.
    fn header(&mut self) -> Result<Option<(Header, u64)>, Bad> {
        let offset = self.content.at();
        if let Some(header) = self.found.take() {
            return Ok(Some((*header, offset - BLOCK)));
        }
        let mut header = Header::new_old();
        let filled = self.content.fill(header.as_mut_bytes())?;
        if (filled as u64) < BLOCK {
            let found = format!("the end of the file after {filled} bytes");
            return Err(self.content.corrupt(offset, "a tar header or the archive's end mark", found).into());
        }
        let is_zero = header.as_bytes().iter().all(|&byte| byte == 0);
        if is_zero && self.stop.is_some() {
            return Ok(None);
        }
        if is_zero {
            return match self.content.drain_zeros()? {
                None => Ok(None),
                Some(at) => {
                    let error = self.content.corrupt(at, "only zeros after the archive's end mark", "other bytes");
                    // The bytes may be a header behind one that was lost, or another archive's. A block of which zeros
                    // were read before is no header, so the search begins behind it.
                    let block = (at - at % BLOCK).max(self.content.at().next_multiple_of(BLOCK));
                    match self.content.skip(block - self.content.at(), "zeros") {
                        Ok(()) => Err(self.search(offset, error)),
                        Err(DataError::Cancelled) => Err(DataError::Cancelled.into()),
                        Err(_) => Err(error.into()),
                    }
                }
            };
        }
        let total = checksum(&header);
        let error = match header.cksum() {
            Ok(declared) if declared == total => return Ok(Some((header, offset))),
            Ok(declared) => {
                let expected = format!("a tar header with the checksum {total}");
                self.content.corrupt(offset, expected, declared.to_string())
            }
            Err(_) => self.content.corrupt(offset, "a tar header", "a checksum that is not a number"),
        };
        Err(self.search(offset, error))
    }

    /// Looks for the next header behind the bad one at `offset`.
    fn search(&mut self, offset: u64, error: DataError) -> Bad {
        let mut header = Header::new_old();
        loop {
            if self.stop.is_some_and(|stop| self.content.at() >= stop) {
                return error.into();
            }
            match self.content.fill(header.as_mut_bytes()) {
                Ok(filled) if filled as u64 == BLOCK => {}
                Err(DataError::Cancelled) => return DataError::Cancelled.into(),
                Ok(_) | Err(_) => return error.into(),
            }
            // In archives older than POSIX, too many contents could be taken for a header.
            let is_marked = header.as_bytes()[257..262] == *b"ustar";
            if is_marked && header.cksum().is_ok_and(|declared| declared == checksum(&header)) {
                let at = self.content.at() - BLOCK;
                self.found = Some(Box::new(header));
                let note = format!("the next header is at byte {at}, and the {} bytes before it are lost", at - offset);
                return Bad { error: noting(error, &note), more: true };
            }
        }
    }

    /// Reads the content of an extended header.
    fn extension(&mut self, header: &Header, offset: u64) -> Result<Vec<u8>, Bad> {
        let bytes = self.size(header, offset)?;
        self.unread = self.padded(bytes, offset)?;
        let fits = DataError::check_bytes(MAX_EXTENDED_BYTES, bytes, "an extended tar header", self.path());
        fits.map_err(|error| Bad { error, more: true })?;
        self.unread -= bytes;
        Ok(self.content.bytes(bytes, "an extended tar header")?)
    }

    /// Parses records of the form `<length> <key>=<value>\n`.
    fn read_pax(&self, mut records: &[u8], offset: u64, extended: &mut Extended) -> Result<(), DataError> {
        let bad = |found: &str| self.content.corrupt(offset, "records of an extended tar header", found);
        while !records.is_empty() {
            let space = records.iter().take(20).position(|&byte| byte == b' ').ok_or_else(|| bad("no length"))?;
            let length = number(&records[..space]).ok_or_else(|| bad("a length that is not a number"))?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (record, rest) = records.split_at_checked(length).ok_or_else(|| bad("a length beyond their end"))?;
            let record = record.get(space + 1..).and_then(|record| record.strip_suffix(b"\n"));
            let record = record.ok_or_else(|| bad("a record without its end"))?;
            let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(|| bad("a record without a value"))?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => extended.name = Some(value.to_owned()),
                b"size" => extended.bytes = Some(number(value).ok_or_else(|| bad("a size that is not a number"))?),
                _ if key.starts_with(b"GNU.sparse.") => {
                    return Err(bad("those of a sparse file, which is not supported"));
                }
                _ => {}
            }
            records = rest;
        }
        Ok(())
    }

    fn size(&mut self, header: &Header, offset: u64) -> Result<u64, Bad> {
        header.entry_size().map_err(|error| {
            let error = self.content.corrupt(offset, "a file size", error.to_string());
            self.search(offset, error)
        })
    }

    /// The size with its padding; an error when the archive is too short for it.
    fn padded(&self, bytes: u64, offset: u64) -> Result<u64, DataError> {
        let room = self.content.length().map_or(u64::MAX, |length| length.saturating_sub(self.content.at()));
        match padded(bytes) {
            Some(padded) if padded <= room => Ok(padded),
            _ => {
                let expected = format!("room for the {bytes} bytes of a file");
                Err(self.content.corrupt(offset, expected, format!("{room} bytes to the end")))
            }
        }
    }
}

/// Links, devices, folders and pipes may state a size, but have no content.
fn has_no_content(kind: EntryType) -> bool {
    use EntryType::{Block, Char, Directory, Fifo, Link, Symlink};
    matches!(kind, Link | Symlink | Char | Block | Directory | Fifo)
}

/// The size of a file with its padding.
pub(super) fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK)
}

/// The checksum that a header should have: the sum of its bytes, with the field of the checksum as spaces.
fn checksum(header: &Header) -> u32 {
    let bytes = header.as_bytes();
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
    sum(&bytes[..148]) + sum(&bytes[156..]) + 8 * u32::from(b' ')
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}
