//! The index of a TFRecord file: a line for each record, with its offset and its length, header and checksums included.
//!
//! This is the format of DALI's `tfrecord2idx` and of Python's `tfrecord`.

use std::fmt::Write;
use std::path::Path;

use super::records::{FOOTER_BYTES, HEADER_BYTES};
use crate::DataError;
use crate::shards::index::{ShardIndex, bad_line};

/// What a record of no bytes takes.
const LEAST_BYTES: u64 = (HEADER_BYTES + FOOTER_BYTES) as u64;

/// Adds a line.
pub(super) fn add(text: &mut String, offset: u64, bytes: u64) {
    // Writing to a string does not fail.
    _ = writeln!(text, "{offset} {bytes}");
}

/// Parses an index. Its records follow each other without a gap, so its end and that of the file tell whether all of
/// them are there.
pub(super) fn parse(path: &Path, text: &str) -> Result<(ShardIndex, u64), DataError> {
    let (mut index, mut end) = (ShardIndex::new(true), 0u64);
    for (line, number) in text.lines().zip(1..) {
        let mut words = line.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
        let (Some(Some(offset)), Some(Some(bytes)), None) = (words.next(), words.next(), words.next()) else {
            let found: String = line.chars().take(40).collect();
            return Err(bad_line(
                path,
                number,
                format!("expected the offset and the length of a record, found {found:?}"),
            ));
        };
        let next = offset.checked_add(bytes);
        let (true, Some(next), true) = (offset == end, next, bytes >= LEAST_BYTES) else {
            let expected = format!("expected a record of {LEAST_BYTES} bytes or more at byte {end}");
            return Err(bad_line(path, number, format!("{expected}, found one of {bytes} at byte {offset}")));
        };
        end = next;
        index.push(end, None, true);
    }
    Ok((index, end))
}
