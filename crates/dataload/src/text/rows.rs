//! Where the rows of a text file begin.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::read::Input;

/// A row may be as long as a sample of a shard.
const MAX_ROW_BYTES: u64 = 1 << 30;
const BUFFER_BYTES: usize = 1 << 18;
const COMPRESSED: [&[u8]; 3] = [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"];

/// A text file, here or elsewhere, and where each of its rows begins: 8 bytes of memory per row, and 16 more for each row
/// after which lines and rows count differently (a line break in quotes, an empty line).
pub(super) struct Rows {
    file: Input,
    path: PathBuf,
    bytes: u64,
    found: Found,
}

/// The rows that were found.
#[derive(Debug, Default)]
pub(super) struct Found {
    starts: Vec<u64>,
    /// From which row on the line's number exceeds the row's by how much.
    ahead: Vec<(usize, u64)>,
}

impl Found {
    /// A row that begins at byte `start`, which is in line number `line`, counted from 1.
    pub(super) fn row(&mut self, start: u64, line: u64) {
        // Below 0 where a lone carriage return ends a row and not a line.
        let ahead = line.wrapping_sub(self.starts.len() as u64);
        if self.ahead.last().is_none_or(|&(_, before)| before != ahead) {
            self.ahead.push((self.starts.len(), ahead));
        }
        self.starts.push(start);
    }
}

impl Rows {
    /// Reads the whole file once, and gives it to `scan` piece by piece, at its end an empty one.
    pub(super) fn open(path: &Path, mut scan: impl FnMut(&[u8], &mut Found)) -> Result<Self, DataError> {
        let (mut file, _) = Input::open(path)?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, &mut file);
        // What is scanned: the file may grow meanwhile.
        let (mut found, mut first, mut bytes) = (Found::default(), true, 0);
        loop {
            let piece = reader.fill_buf().map_err(DataError::io(path))?;
            if first && COMPRESSED.iter().any(|magic| piece.starts_with(magic)) {
                let expected = "a file that is not compressed, since its rows are read in any order";
                return Err(DataError::layout(path, expected, "a compressed one"));
            }
            scan(piece, &mut found);
            first = false;
            match piece.len() {
                0 => break,
                read => {
                    bytes += read as u64;
                    reader.consume(read);
                }
            }
        }
        drop(reader);
        Ok(Self { file, path: path.to_owned(), bytes, found })
    }

    pub(super) fn len(&self) -> usize {
        self.found.starts.len()
    }

    /// A row's bytes, with the end of its line and empty lines after it.
    pub(super) fn read(&self, row: usize) -> Result<Vec<u8>, DataError> {
        let starts = &self.found.starts;
        let start = *starts.get(row).ok_or(DataError::IndexOutOfRange { index: row, len: starts.len() })?;
        let end = starts.get(row + 1).copied().unwrap_or(self.bytes);
        let bytes = end.saturating_sub(start);
        DataError::check_bytes(MAX_ROW_BYTES, bytes, "a row", &self.path)?;
        let mut content = vec![0; bytes as usize];
        self.file.read_exact_at(start, &mut content).map_err(DataError::io(&self.path))?;
        Ok(content)
    }

    /// An error in a row, `lines` lines after its first one.
    pub(super) fn error(&self, row: usize, lines: u64, problem: impl Into<String>) -> DataError {
        let ahead = &self.found.ahead;
        let stretch = ahead.partition_point(|&(first, _)| first <= row).checked_sub(1);
        let line = (row as u64).wrapping_add(stretch.map_or(1, |stretch| ahead[stretch].1)) + lines;
        DataError::Line { path: self.path.clone(), line, problem: problem.into() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
