//! Reads the pages of a column chunk, and checks them before the `parquet` crate decodes their values.
//!
//! That crate's reader and decoders allocate memory for whatever sizes a header or page declares. Here every number is
//! first compared with the size of the file or page.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ::parquet::basic::{Encoding, Type};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::schema::types::ColumnDescPtr;
use bytes::Bytes;

use super::buffers::{Buffer, Buffers};
use super::codec::Codec;
use super::delta;
use super::file::OpenFile;
use super::levels;
use super::page_header::{PageHeader, PageKind};
use crate::DataError;

/// Most headers take tens of bytes; one with statistics of long strings may take more.
const HEADER_BYTES: usize = 256;
const MAX_HEADER_BYTES: usize = 1 << 24;

/// Locates a column chunk for error messages.
#[derive(Clone)]
pub(super) struct ChunkPlace {
    pub(super) source: Arc<OpenFile>,
    pub(super) column: Arc<str>,
    pub(super) row_group: usize,
    /// The offset of the page that is being read.
    at: Arc<AtomicU64>,
}

impl ChunkPlace {
    pub(super) fn new(source: Arc<OpenFile>, column: Arc<str>, row_group: usize) -> Self {
        Self { source, column, row_group, at: Arc::default() }
    }

    /// An error for damage in the page that is being read.
    pub(super) fn corrupt(&self, expected: &str, found: impl Into<String>) -> DataError {
        self.corrupt_at(self.at.load(Ordering::Relaxed), expected, found)
    }

    fn corrupt_at(&self, offset: u64, expected: &str, found: impl Into<String>) -> DataError {
        let expected = format!("{expected} in column {:?} of row group {}", self.column, self.row_group);
        DataError::corrupt(self.source.path(), offset, expected, found)
    }
}

/// Gives the pages of one column chunk.
pub(super) struct Pages {
    place: ChunkPlace,
    descriptor: ColumnDescPtr,
    codec: Codec,
    verify_crc: bool,
    buffers: Buffers,
    /// The part of the chunk that has not been read.
    left: Range<u64>,
    /// How many values the remaining data pages must have.
    values_left: u64,
    has_dictionary: bool,
    next: Option<PageHeader>,
}

impl Pages {
    pub(super) fn new(
        place: ChunkPlace,
        descriptor: ColumnDescPtr,
        codec: Codec,
        range: Range<u64>,
        values: u64,
        verify_crc: bool,
        buffers: Buffers,
    ) -> Self {
        place.at.store(range.start, Ordering::Relaxed);
        let (has_dictionary, next) = (false, None);
        Self { place, descriptor, codec, verify_crc, buffers, left: range, values_left: values, has_dictionary, next }
    }

    /// The header of the next page, without consuming it; `None` after the last.
    fn peek(&mut self) -> Result<Option<&PageHeader>, DataError> {
        while self.next.is_none() && self.values_left > 0 {
            let header = self.read_header()?;
            self.left.start += header.header_bytes as u64;
            if header.packed_bytes as u64 > self.left.end - self.left.start {
                let found = format!("a length of {} bytes", header.packed_bytes);
                return Err(self.place.corrupt("a page that fits into its chunk", found));
            }
            // Skip index pages, and pages without values, at which the decoders would stop.
            if header.page == PageKind::Other || header.values() == Some(0) {
                self.left.start += header.packed_bytes as u64;
                continue;
            }
            self.values_left = match self.values_left.checked_sub(header.values().unwrap_or(0).into()) {
                Some(left) => left,
                None => return Err(self.place.corrupt("as many values as the footer says", "more")),
            };
            self.next = Some(header);
        }
        Ok(self.next.as_ref())
    }

    fn read_header(&self) -> Result<PageHeader, DataError> {
        self.place.at.store(self.left.start, Ordering::Relaxed);
        let room = self.left.end - self.left.start;
        if room == 0 {
            let found = format!("the chunk's end with {} missing", self.values_left);
            return Err(self.place.corrupt("as many values as the footer says", found));
        }
        let mut bytes = vec![0; HEADER_BYTES.min(room as usize)];
        loop {
            self.place.source.read_at(self.left.start, &mut bytes)?;
            match PageHeader::parse(&bytes) {
                Ok(header) => return Ok(header),
                Err((_, true)) if (bytes.len() as u64) < room && bytes.len() < MAX_HEADER_BYTES => {
                    let length = bytes.len() as u64 * 8;
                    bytes.resize(length.min(room) as usize, 0);
                }
                Err((malformed, _)) => {
                    let offset = self.left.start + malformed.offset as u64;
                    return Err(self.place.corrupt_at(offset, malformed.expected, malformed.found));
                }
            }
        }
    }

    fn next_page(&mut self) -> Result<Option<Page>, DataError> {
        self.peek()?;
        let Some(header) = self.next.take() else { return Ok(None) };
        let mut packed = self.buffers.take();
        self.place.source.read_at(self.left.start, packed.resize(header.packed_bytes))?;
        self.left.start += header.packed_bytes as u64;
        if self.verify_crc
            && let Some(declared) = header.crc
        {
            let mut crc = flate2::Crc::new();
            crc.update(packed.as_ref());
            if crc.sum() != declared {
                let expected = format!("a page with the checksum {declared:08x}");
                return Err(self.place.corrupt(&expected, format!("{:08x}", crc.sum())));
            }
        }
        let buffer = self.unpack(&header, packed)?.freeze();
        self.page(&header, buffer).map(Some)
    }

    /// Decompresses a page.
    fn unpack(&mut self, header: &PageHeader, packed: Buffer) -> Result<Buffer, DataError> {
        // In version 2, levels are never compressed, and values need not be.
        let (levels, is_packed) = match header.page {
            PageKind::DataV2 { def_bytes, rep_bytes, packed, .. } => (def_bytes as usize + rep_bytes as usize, packed),
            _ => (0, true),
        };
        if levels > header.bytes || levels > header.packed_bytes {
            return Err(self.place.corrupt("levels that fit into their page", format!("{levels} bytes of them")));
        }
        if self.codec.is_none() || !is_packed {
            return match header.bytes == header.packed_bytes {
                true => Ok(packed),
                false => {
                    let expected = format!("a page of {} bytes", header.bytes);
                    Err(self.place.corrupt(&expected, format!("{} bytes", header.packed_bytes)))
                }
            };
        }
        let mut buffer = self.buffers.take();
        let values = header.bytes - levels;
        // No values: some writers "compress" them to zero bytes, which decoders refuse.
        if values == 0 {
            buffer.resize(levels).copy_from_slice(&packed.as_ref()[..levels]);
            return Ok(buffer);
        }
        let outcome = match levels {
            0 => self.codec.decompress(packed.as_ref(), &mut buffer, values),
            _ => {
                let mut alone = self.buffers.take();
                let outcome = self.codec.decompress(&packed.as_ref()[levels..], &mut alone, values);
                if outcome.is_ok() {
                    let whole = buffer.resize(header.bytes);
                    whole[..levels].copy_from_slice(&packed.as_ref()[..levels]);
                    whole[levels..].copy_from_slice(alone.as_ref());
                }
                outcome
            }
        };
        outcome.map_err(|found| self.place.corrupt(&format!("a compressed page of {} bytes", header.bytes), found))?;
        Ok(buffer)
    }

    fn page(&mut self, header: &PageHeader, buf: Bytes) -> Result<Page, DataError> {
        let statistics = None;
        match header.page {
            PageKind::Dictionary { values, encoding } => {
                if u64::from(values) * self.least_bytes() > buf.len() as u64 {
                    let found = format!("{values} values in {} bytes", buf.len());
                    return Err(self.place.corrupt("a dictionary that fits into its page", found));
                }
                if std::mem::replace(&mut self.has_dictionary, true) {
                    return Err(self.place.corrupt("one dictionary", "a second one"));
                }
                Ok(Page::DictionaryPage { buf, num_values: values, encoding, is_sorted: false })
            }
            PageKind::Data { values: num_values, encoding, def_encoding, rep_encoding } => {
                let (levels, values) = self.after_levels(&buf, num_values, [rep_encoding, def_encoding])?;
                self.check_values(encoding, values, num_values)?;
                if encoding == Encoding::BYTE_STREAM_SPLIT {
                    self.check_streams(values, self.present(levels, num_values, def_encoding)?)?;
                }
                let (def_level_encoding, rep_level_encoding) = (def_encoding, rep_encoding);
                Ok(Page::DataPage { buf, num_values, encoding, def_level_encoding, rep_level_encoding, statistics })
            }
            PageKind::DataV2 { values: num_values, encoding, nulls, rows, def_bytes, rep_bytes, packed } => {
                let values = &buf[def_bytes as usize + rep_bytes as usize..];
                self.check_values(encoding, values, num_values)?;
                if encoding == Encoding::BYTE_STREAM_SPLIT {
                    self.check_streams(values, num_values.saturating_sub(nulls).into())?;
                }
                Ok(Page::DataPageV2 {
                    buf,
                    num_values,
                    encoding,
                    num_nulls: nulls,
                    num_rows: rows,
                    def_levels_byte_len: def_bytes,
                    rep_levels_byte_len: rep_bytes,
                    is_compressed: packed,
                    statistics,
                })
            }
            PageKind::Other => Err(self.place.corrupt("a page of values", "another one")),
        }
    }

    /// The definition levels of a version 1 page, whose lengths are in the page itself, and the values after them.
    fn after_levels<'a>(
        &self,
        page: &'a [u8],
        values: u32,
        encodings: [Encoding; 2],
    ) -> Result<(&'a [u8], &'a [u8]), DataError> {
        let (mut last, mut rest): (&[u8], _) = (&[], page);
        let levels = [self.descriptor.max_rep_level(), self.descriptor.max_def_level()];
        for (max_level, encoding) in levels.into_iter().zip(encodings).filter(|(max_level, _)| *max_level > 0) {
            let length = match encoding {
                Encoding::RLE => {
                    let Some((&length, tail)) = rest.split_first_chunk() else {
                        return Err(self.place.corrupt("a length of levels", "the page's end"));
                    };
                    rest = tail;
                    u64::from(u32::from_le_bytes(length))
                }
                #[expect(deprecated, reason = "old files have it")]
                Encoding::BIT_PACKED => {
                    (u64::from(values) * u64::from(i16::BITS - max_level.leading_zeros())).div_ceil(8)
                }
                other => return Err(self.place.corrupt("an encoding of levels", other.to_string())),
            };
            let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
            (last, rest) = split
                .ok_or_else(|| self.place.corrupt("levels that fit into their page", format!("{length} bytes")))?;
        }
        Ok((last, rest))
    }

    /// How many of a page's values are present, that is, not null or in an empty list.
    fn present(&self, levels: &[u8], count: u32, encoding: Encoding) -> Result<u64, DataError> {
        let max_level = self.descriptor.max_def_level();
        let counted = match encoding {
            _ if max_level == 0 => Ok(count.into()),
            Encoding::RLE => levels::count(levels, i16::BITS - max_level.leading_zeros(), max_level, count),
            // The older encoding was abandoned before split streams existed.
            other => Err(format!("{other} levels before split streams")),
        };
        counted.map_err(|found| self.place.corrupt("definition levels", found))
    }

    /// Checks BYTE_STREAM_SPLIT data (the first bytes of all values, then the second ones, and so on): the decoder
    /// takes their number from the levels.
    fn check_streams(&self, values: &[u8], present: u64) -> Result<(), DataError> {
        let bytes = present.saturating_mul(self.least_bytes());
        match bytes == values.len() as u64 {
            true => Ok(()),
            false => {
                let expected = format!("{bytes} bytes in the split streams of {present} values");
                Err(self.place.corrupt(&expected, values.len().to_string()))
            }
        }
    }

    /// Checks what the decoders of the `parquet` crate do not.
    fn check_values(&self, encoding: Encoding, values: &[u8], count: u32) -> Result<(), DataError> {
        let outcome = match encoding {
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY if !self.has_dictionary => {
                Err("one that refers to a dictionary, without a dictionary page".to_owned())
            }
            // Some writers store no values at all for a page of only nulls.
            _ if values.is_empty() => Ok(()),
            Encoding::DELTA_BINARY_PACKED | Encoding::DELTA_LENGTH_BYTE_ARRAY => delta::check(values, count, 1),
            Encoding::DELTA_BYTE_ARRAY => delta::check(values, count, 2),
            Encoding::PLAIN | Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => Ok(()),
            Encoding::RLE | Encoding::BYTE_STREAM_SPLIT => Ok(()),
            other => Err(other.to_string()),
        };
        outcome.map_err(|found| self.place.corrupt("an encoding of values", found))
    }

    /// The fewest bytes that a value takes in a dictionary; for types of fixed length, the bytes of every value.
    fn least_bytes(&self) -> u64 {
        match self.descriptor.physical_type() {
            Type::BOOLEAN => u64::MAX >> 32,
            Type::INT32 | Type::FLOAT | Type::BYTE_ARRAY => 4,
            Type::INT64 | Type::DOUBLE => 8,
            Type::INT96 => 12,
            Type::FIXED_LEN_BYTE_ARRAY => self.descriptor.type_length().max(1) as u64,
        }
    }
}

impl Iterator for Pages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        self.next_page().map_err(|error| ParquetError::External(Box::new(error)))
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        let header = self.peek().map_err(|error| ParquetError::External(Box::new(error)))?;
        Ok(header.map(|header| match header.page {
            PageKind::DataV2 { values, rows, .. } => {
                PageMetadata { num_rows: Some(rows as usize), num_levels: Some(values as usize), is_dict: false }
            }
            PageKind::Dictionary { .. } => PageMetadata { num_rows: None, num_levels: None, is_dict: true },
            _ => PageMetadata { num_rows: None, num_levels: header.values().map(|v| v as usize), is_dict: false },
        }))
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        // The decoders never skip rows here, and a dictionary must not be skipped: just read the page.
        self.get_next_page().map(drop)
    }
}
