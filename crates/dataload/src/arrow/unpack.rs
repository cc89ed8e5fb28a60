//! Decompresses buffers. Does not trust their declared lengths when it allocates memory.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

use super::file::Backing;
use super::message::{Codec, Messages};
use super::node::{Bytes, Piece};
use crate::DataError;
#[cfg(feature = "zstd")]
use crate::content::seekable::ZSTD_WINDOW_LOG;

/// A compressed buffer begins with its length after decompression, or with -1 if it was stored uncompressed.
const LENGTH_BYTES: usize = 8;

/// The decompressed buffers, by their indices.
#[derive(Default)]
pub(super) struct Unpacked(BTreeMap<usize, Vec<u8>>);

/// Reads from a file's content.
struct Packed<'a> {
    content: &'a Backing,
    range: Range<usize>,
}

impl Read for Packed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = out.len().min(self.range.len());
        match self.content.copy(self.range.start, &mut out[..count]) {
            true => self.range.start += count,
            false => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        Ok(count)
    }
}

impl Unpacked {
    pub(super) fn get(&self, buffer: usize) -> Option<Piece<'_>> {
        self.0.get(&buffer).map(|bytes| Piece { bytes, range: 0..bytes.len() })
    }

    pub(super) fn add(
        &mut self,
        buffer: usize,
        range: Range<usize>,
        codec: Codec,
        messages: &Messages<'_>,
        limit: u64,
    ) -> Result<(), DataError> {
        if self.0.contains_key(&buffer) {
            return Ok(());
        }
        let mut bytes = Vec::new();
        if !range.is_empty() {
            let mut length = [0; LENGTH_BYTES];
            if range.len() < LENGTH_BYTES || !messages.content.copy(range.start, &mut length) {
                return Err(messages.corrupt(
                    range.start,
                    "the length of a compressed buffer",
                    format!("{} bytes", range.len()),
                ));
            }
            let packed = Packed { content: messages.content, range: range.start + LENGTH_BYTES..range.end };
            let (length, is_packed) = match i64::from_le_bytes(length) {
                -1 => (packed.range.len() as u64, false),
                length => match u64::try_from(length) {
                    Ok(length) => (length, true),
                    Err(_) => return Err(messages.corrupt(range.start, "the length of a buffer", length.to_string())),
                },
            };
            DataError::check_bytes(limit, length, "a decompressed buffer", messages.path)?;
            let read = match (is_packed, codec) {
                (false, _) => packed.take(length).read_to_end(&mut bytes),
                (true, Codec::Lz4) => {
                    lz4_flex::frame::FrameDecoder::new(packed).take(length + 1).read_to_end(&mut bytes)
                }
                (true, Codec::Zstd) => zstd_decoder(packed, messages)?.take(length + 1).read_to_end(&mut bytes),
            };
            let found = match read {
                Ok(read) if read as u64 == length => None,
                Ok(_) => Some("another length".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(found) = found {
                let expected = format!("{length} bytes compressed by {codec:?}");
                return Err(messages.corrupt(range.start, expected, found));
            }
        }
        self.0.insert(buffer, bytes);
        Ok(())
    }
}

#[cfg(feature = "zstd")]
fn zstd_decoder<'a>(packed: Packed<'a>, messages: &Messages<'_>) -> Result<impl Read + use<'a>, DataError> {
    let mut decoder = zstd::Decoder::new(packed).map_err(DataError::io(messages.path))?;
    decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(DataError::io(messages.path))?;
    Ok(decoder)
}

#[cfg(not(feature = "zstd"))]
fn zstd_decoder<'a>(_: Packed<'a>, messages: &Messages<'_>) -> Result<io::Empty, DataError> {
    Err(DataError::layout(messages.path, "a build with the feature `zstd`", "zstd-compressed data"))
}
