//! The keys of a database in an index file, so that the next run need not list them.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;

use super::keys::Keys;
use super::pages::{Pages, u64_at};
use crate::DataError;
use crate::content::Content;
use crate::output::Output;

const MAGIC: &[u8; 8] = b"odlmdb\0\x01";
/// Magic, then length and checksum of the bytes that follow.
const HEADER: usize = 20;

/// Identifies what an index was made from: the file's state, and the name of the database in it.
///
/// An index also replaces the check of the tree, so a file that has changed since needs a new index.
pub(super) struct Stamp(Vec<u8>);

impl Stamp {
    pub(super) fn of(pages: &Pages, database: Option<&str>) -> Self {
        let [bytes, state] = pages.stamp();
        let name = database.unwrap_or_default().as_bytes();
        let numbers = [bytes, state, pages.transaction(), name.len() as u64];
        Self([numbers.map(u64::to_le_bytes).as_flattened(), name].concat())
    }
}

/// The keys of the index at `path`; `None` if it is missing, damaged or of another state; an error when it is not an
/// index at all.
pub(super) fn load(path: &Path, stamp: &Stamp) -> Result<Option<Keys>, DataError> {
    let mut content = match Content::open(Arc::from(path)) {
        Ok(content) => content,
        Err(DataError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut header = [0; HEADER];
    let filled = content.fill(&mut header)?;
    let compressed = content.length().is_none();
    if compressed || !header.starts_with(MAGIC) {
        // An error, so that a mistyped path never overwrites another file. Compressed data is refused as well, since a
        // small file may decompress to a huge one.
        let found = match compressed {
            true => "compressed data".to_owned(),
            false => header[..filled.min(MAGIC.len())].escape_ascii().to_string(),
        };
        return Err(DataError::corrupt(path, 0, "the index of an LMDB database, or no file yet", found));
    }
    let Ok(body) = content.bytes(u64_at(&header, 8), "an index") else { return Ok(None) };
    let whole = crc32c::crc32c(&body).to_le_bytes() == header[16..];
    Ok(body.strip_prefix(&*stamp.0).filter(|_| whole).and_then(parse))
}

fn parse(body: &[u8]) -> Option<Keys> {
    let (count, rest) = body.split_first_chunk()?;
    let lengths = usize::try_from(u64::from_le_bytes(*count)).ok()?.checked_mul(2)?;
    let (lengths, keys) = rest.split_at_checked(lengths)?;
    let (lengths, _) = lengths.as_chunks::<2>();
    Keys::from_parts(keys.to_vec(), lengths.iter().map(|&bytes| u16::from_le_bytes(bytes)))
}

/// Writes an index, which appears under its name once it is complete.
pub(super) fn save(path: &Path, stamp: &Stamp, keys: &Keys) -> Result<(), DataError> {
    let mut body = stamp.0.clone();
    body.extend((keys.len() as u64).to_le_bytes());
    // Two bytes are enough for the length, as in LMDB.
    body.extend(keys.iter().flat_map(|key| (key.len() as u16).to_le_bytes()));
    body.extend_from_slice(keys.bytes());
    let header = [MAGIC, &(body.len() as u64).to_le_bytes()[..], &crc32c::crc32c(&body).to_le_bytes()].concat();
    let mut output = Output::create(path)?;
    let written = output.write_all(&header).and_then(|()| output.write_all(&body));
    let finished = written.map_err(DataError::io(output.path())).and_then(|()| output.finish());
    match finished {
        Ok(_) => Ok(()),
        // Another process may have written it meanwhile: the ranks of one run all start at once.
        Err(error) => load(path, stamp)?.map(drop).ok_or(error),
    }
}
