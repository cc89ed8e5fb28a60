//! The footer of a file: its schema, and where its row groups and columns are.
//!
//! The `parquet` crate parses it, but trusts it: a schema's numbers of children turn into allocations and recursion,
//! whose failure aborts the process. So the footer is first read through here: that checks every length, the types of
//! the schema's fields, and that the schema is a tree of limited depth. After parsing, the result is checked against
//! the file and for consistency.

use ::parquet::file::metadata::{
    ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy::SkipAll,
};

use super::file::OpenFile;
use super::guard::guarded;
use super::thrift::{Malformed, Thrift, Wire};
use crate::DataError;

/// Enough for a few hundred thousand column chunks. Parsing takes several times as much memory.
const MAX_FOOTER_BYTES: u64 = 1 << 26;
const MAGIC: &[u8; 4] = b"PAR1";
const ENCRYPTED_MAGIC: &[u8; 4] = b"PARE";
/// The footer's length and the magic bytes.
const TAIL_BYTES: u64 = 8;
/// No sensible schema nests deeper.
const MAX_SCHEMA_DEPTH: usize = 64;

/// Reads, parses and checks the footer.
pub(super) fn read_footer(source: &OpenFile) -> Result<ParquetMetaData, DataError> {
    let corrupt = |offset, expected: &str, found: String| DataError::corrupt(source.path(), offset, expected, found);
    let mut magic = [0; 4];
    if source.len() < 4 + TAIL_BYTES {
        return Err(corrupt(0, "a Parquet file of 12 bytes at least", format!("{} bytes", source.len())));
    }
    source.read_at(0, &mut magic)?;
    if magic != *MAGIC {
        return Err(corrupt(0, "the start of a Parquet file, PAR1", magic.escape_ascii().to_string()));
    }
    let end = source.len() - TAIL_BYTES;
    let mut tail = [0; TAIL_BYTES as usize];
    source.read_at(end, &mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    if magic == *ENCRYPTED_MAGIC {
        return Err(DataError::layout(source.path(), "a Parquet file that is not encrypted", "an encrypted footer"));
    }
    if magic != *MAGIC {
        return Err(corrupt(end + 4, "the end of a Parquet file, PAR1", magic.escape_ascii().to_string()));
    }
    let bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    DataError::check_bytes(MAX_FOOTER_BYTES, bytes, "the footer", source.path())?;
    let Some(start) = end.checked_sub(bytes).filter(|&start| start >= 4) else {
        return Err(corrupt(end, "a footer that fits into the file", format!("{bytes} bytes")));
    };
    let mut footer = vec![0; bytes as usize];
    source.read_at(start, &mut footer)?;

    walk(&footer).map_err(|malformed| corrupt(start + malformed.offset as u64, malformed.expected, malformed.found))?;
    let options = ParquetMetaDataOptions::new()
        .with_encoding_stats_policy(SkipAll)
        .with_column_stats_policy(SkipAll)
        .with_size_stats_policy(SkipAll);
    let metadata = guarded(
        |found| corrupt(start, "an intact footer", found),
        || ParquetMetaDataReader::decode_metadata_with_options(&footer, Some(&options)),
    )?;
    check(&metadata, start).map_err(|found| corrupt(start, "a footer that agrees with the file", found))?;
    Ok(metadata)
}

/// Checks that every list and string fits into the footer, and that the schema is a tree of limited depth.
fn walk(footer: &[u8]) -> Result<(), Malformed> {
    let mut thrift = Thrift::new(footer);
    let mut children = Vec::new();
    thrift.structure(|thrift, field, wire| match (field, wire) {
        (2, Wire::List) if children.is_empty() => {
            let (element, count) = thrift.list(wire)?;
            if element != Wire::Struct {
                return Err(thrift.malformed("a schema", format!("a list of {element:?}")));
            }
            (0..count).try_for_each(|_| schema_element(thrift).map(|count| children.push(count)))
        }
        (4 | 5 | 7, Wire::List) | (6 | 9, Wire::Binary) | (8, Wire::Struct) => thrift.skip(wire),
        (1 | 3, Wire::Integer) | (10.., _) => thrift.skip(wire),
        _ => Err(thrift.malformed("a footer's fields", format!("field {field} of type {wire:?}"))),
    })?;
    if !thrift.is_at_end() {
        return Err(thrift.malformed("the footer's end", "more bytes"));
    }
    // For the nodes from the root down to the current one, how many children are still missing.
    let mut open: Vec<u64> = Vec::new();
    for (position, &count) in children.iter().enumerate() {
        match open.last_mut() {
            Some(left) => *left -= 1,
            None if position == 0 => {}
            None => return Err(thrift.malformed("a schema of one tree", "a second root")),
        }
        open.push(count);
        if open.len() > MAX_SCHEMA_DEPTH {
            return Err(thrift.malformed("a schema that nests at most 64 deep", "one more"));
        }
        while open.last() == Some(&0) {
            open.pop();
        }
    }
    match open.is_empty() && !children.is_empty() {
        true => Ok(()),
        false => Err(thrift.malformed("a whole schema", "its end, with columns missing")),
    }
}

/// Walks one node of the schema and returns the number of its children.
fn schema_element(thrift: &mut Thrift<'_>) -> Result<u64, Malformed> {
    let mut children = 0;
    thrift.structure(|thrift, field, wire| match (field, wire) {
        (5, Wire::Integer) => {
            let count = thrift.integer(wire)?;
            let malformed = || thrift.malformed("a number of children", count.to_string());
            children = u64::try_from(count).map_err(|_| malformed())?;
            Ok(())
        }
        (1..=3 | 6..=9, Wire::Integer) | (4, Wire::Binary) | (11.., _) => thrift.skip(wire),
        (10, Wire::Struct) => thrift.structure(logical_type),
        _ => Err(thrift.malformed("a schema's fields", format!("field {field} of type {wire:?}"))),
    })?;
    Ok(children)
}

/// Walks one alternative of the union of logical types.
fn logical_type(thrift: &mut Thrift<'_>, which: i64, wire: Wire) -> Result<(), Malformed> {
    if wire != Wire::Struct {
        return Err(thrift.malformed("a logical type", format!("a value of type {wire:?}")));
    }
    thrift.structure(|thrift, field, wire| match (which, field, wire) {
        (5, 1 | 2, Wire::Integer) | (7 | 8, 1, Wire::Bool(_)) | (7 | 8, 2, Wire::Struct) => thrift.skip(wire),
        (10 | 16, 1, Wire::Byte) | (10, 2, Wire::Bool(_)) => thrift.skip(wire),
        (17 | 18, 1, Wire::Binary) | (18, 2, Wire::Integer) | (20.., ..) => thrift.skip(wire),
        _ => Err(thrift.malformed("a logical type's fields", format!("field {field} of type {wire:?} in {which}"))),
    })
}

/// Checks what the rest of this module relies on; `end` is where the footer begins.
fn check(metadata: &ParquetMetaData, end: u64) -> Result<(), String> {
    let leaves = metadata.file_metadata().schema_descr().columns();
    let mut rows = 0i64;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        if group.num_rows() < 0 || group.num_columns() != leaves.len() {
            let (rows, columns) = (group.num_rows(), group.num_columns());
            return Err(format!("{rows} rows of {columns} columns in row group {number}"));
        }
        rows = rows.checked_add(group.num_rows()).ok_or("more than 2^63 rows")?;
        // An empty row group is never read, so its columns may be anywhere.
        for (leaf, chunk) in leaves.iter().zip(group.columns()).filter(|_| group.num_rows() > 0) {
            let name = leaf.path().string();
            let place = || format!("column {name:?} of row group {number}");
            if chunk.file_path().is_some() {
                return Err(format!("{} in another file", place()));
            }
            let range = chunk_range(chunk).filter(|range| range.start >= 4 && range.end <= end);
            if range.is_none() {
                return Err(format!("{} outside of the file", place()));
            }
            let values = chunk.num_values();
            let (lists, rows) = (leaf.max_rep_level() > 0, group.num_rows());
            if values < 0 || (values < rows) || (!lists && values != rows) {
                return Err(format!("{values} values for {rows} rows in {}", place()));
            }
        }
    }
    match metadata.file_metadata().num_rows() {
        declared if declared == rows => Ok(()),
        declared => Err(format!("{declared} rows of which the row groups have {rows}")),
    }
}

/// The byte range of a column chunk in its file, which begins with the dictionary, if there is one.
pub(super) fn chunk_range(chunk: &::parquet::file::metadata::ColumnChunkMetaData) -> Option<std::ops::Range<u64>> {
    let data = chunk.data_page_offset();
    // Some writers store 0 for a chunk without a dictionary.
    let start = chunk.dictionary_page_offset().filter(|&offset| offset > 0).map_or(data, |offset| offset.min(data));
    let start = u64::try_from(start).ok()?;
    Some(start..start.checked_add(u64::try_from(chunk.compressed_size()).ok()?)?)
}
