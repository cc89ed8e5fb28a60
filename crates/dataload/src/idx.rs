//! The idx format of MNIST: a four-byte magic, big-endian dimensions, then the values in row-major order.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use crate::DataError;
use crate::read::{Input, MAX_DEFLATE_RATIO};

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const UNSIGNED_BYTE: u8 = 0x08;
/// The most values that are read into memory: 4 GiB.
const MAX_VALUES: u64 = 1 << 32;

/// The content of an idx file: unsigned bytes with a shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdxArray {
    /// The dimensions, outermost first: `[images, rows, columns]` or `[labels]`.
    pub shape: Vec<usize>,
    /// The values in row-major order, as many as the product of `shape`.
    pub data: Vec<u8>,
}

/// Reads an idx file of unsigned bytes, raw or gzip-compressed (recognised by its content, not by its name).
///
/// Memory use depends on what the file really holds, whatever its header declares.
///
/// # Errors
/// [`DataError::Io`] when the file cannot be read; [`DataError::Corrupt`] for a bad magic number, another element type,
/// fewer or more values than the header says, or damaged gzip data; [`DataError::TooLarge`] above 4 GiB.
pub fn read_idx(path: impl AsRef<Path>) -> Result<IdxArray, DataError> {
    let path = path.as_ref();
    let (file, file_bytes) = Input::open(path)?;
    let mut file = BufReader::with_capacity(1 << 16, file);
    if file.fill_buf().map_err(DataError::io(path))?.starts_with(&GZIP_MAGIC) {
        let most = file_bytes.saturating_mul(MAX_DEFLATE_RATIO);
        IdxReader { path, content: MultiGzDecoder::new(file), at: 0, most, exact: false }.read()
    } else {
        IdxReader { path, content: file, at: 0, most: file_bytes, exact: true }.read()
    }
}

struct IdxReader<'a, R> {
    path: &'a Path,
    content: R,
    /// Bytes of content read so far.
    at: u64,
    /// The most bytes that the content can have.
    most: u64,
    /// Whether `most` is the exact length of the content; for gzip it is only an upper bound.
    exact: bool,
}

impl<R: Read> IdxReader<'_, R> {
    fn read(mut self) -> Result<IdxArray, DataError> {
        let [zero, also_zero, element, dimensions] = self.word("an idx magic number")?;
        if (zero, also_zero) != (0, 0) {
            return Err(self.corrupt(0, "an idx magic number 00 00 tt dd", format!("{zero:02x} {also_zero:02x}")));
        }
        if element != UNSIGNED_BYTE {
            return Err(self.corrupt(2, "element type 08 (unsigned byte)", format!("{element:02x}")));
        }
        if !(1..=4).contains(&dimensions) {
            return Err(self.corrupt(3, "1 to 4 dimensions", dimensions.to_string()));
        }
        let mut shape = Vec::with_capacity(dimensions.into());
        for _ in 0..dimensions {
            shape.push(u32::from_be_bytes(self.word("a dimension of four bytes")?) as usize);
        }
        let declared = self.check_declared(&shape)?;
        let data = self.values(declared)?;
        Ok(IdxArray { shape, data })
    }

    /// The number of values that the header declares; an impossible number is refused before anything is allocated.
    fn check_declared(&self, shape: &[usize]) -> Result<u64, DataError> {
        let declared = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
        let room = self.most.saturating_sub(self.at);
        match declared {
            Some(declared) if declared == room || (declared < room && !self.exact) => {
                DataError::check_bytes(MAX_VALUES, declared, "the array", self.path).map(|()| declared)
            }
            _ => {
                let declared = declared.map_or("more than 2^64".to_owned(), |declared| declared.to_string());
                let found = if self.exact { format!("{room} bytes") } else { format!("room for at most {room} bytes") };
                Err(self.corrupt(self.at, format!("{declared} values for shape {shape:?}"), found))
            }
        }
    }

    fn values(&mut self, declared: u64) -> Result<Vec<u8>, DataError> {
        let mut values = Vec::new();
        if self.exact {
            // The length has been checked against the file. For gzip, memory grows with the decompressed content
            // instead.
            values.try_reserve_exact(declared as usize).map_err(|error| self.damaged(error.into()))?;
        }
        let outcome = (&mut self.content).take(declared).read_to_end(&mut values);
        let start = self.at;
        self.at += values.len() as u64;
        outcome.map_err(|error| self.damaged(error))?;
        if (values.len() as u64) < declared {
            let found = format!("the end after {} of them", values.len());
            return Err(self.corrupt(start, format!("{declared} values"), found));
        }
        // Reading past the values detects trailing bytes, and makes gzip verify its checksum.
        match self.content.read(&mut [0]) {
            Ok(0) => Ok(values),
            Ok(_) => Err(self.corrupt(self.at, "the end of the file", "more bytes")),
            Err(error) => Err(self.damaged(error)),
        }
    }

    fn word(&mut self, expected: &str) -> Result<[u8; 4], DataError> {
        let mut word = [0; 4];
        match self.content.read_exact(&mut word) {
            Ok(()) => {
                self.at += 4;
                Ok(word)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.corrupt(self.at, expected, "the end of the file"))
            }
            Err(error) => Err(self.damaged(error)),
        }
    }

    fn damaged(&self, error: io::Error) -> DataError {
        use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
        match error.kind() {
            InvalidData | InvalidInput | UnexpectedEof if !self.exact => {
                self.corrupt(self.at, "intact gzip data", error.to_string())
            }
            _ => DataError::Io { path: self.path.to_owned(), error },
        }
    }

    fn corrupt(&self, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        DataError::corrupt(self.path, offset, expected, found)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn idx(shape: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, UNSIGNED_BYTE, shape.len() as u8];
        shape.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<IdxArray, DataError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read_idx(file.path())
    }

    /// The offset of the corruption, after checking that the message names the file.
    fn corrupt_at(bytes: &[u8]) -> u64 {
        match read(bytes) {
            Err(error @ DataError::Corrupt { offset, .. }) => {
                assert!(error.to_string().contains("/.tmp"), "{error}");
                offset
            }
            other => panic!("expected a corrupt file, got {other:?}"),
        }
    }

    #[test]
    fn raw_and_gzip_read_alike() {
        let bytes = idx(&[2, 2, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        let raw = read(&bytes).unwrap();
        assert_eq!((raw.shape.as_slice(), raw.data.len(), raw.data[11]), (&[2, 2, 3][..], 12, 12));
        assert_eq!(read(&gzip(&bytes)).unwrap(), raw);
        let empty = idx(&[0, 28, 28], &[]);
        assert!(read(&empty).unwrap().data.is_empty());
        assert!(read(&gzip(&empty)).unwrap().data.is_empty());
    }

    #[test]
    fn bad_headers_are_named() {
        let good = idx(&[3], &[1, 2, 3]);
        for wrap in [<[u8]>::to_vec as fn(&[u8]) -> Vec<u8>, gzip] {
            assert_eq!(corrupt_at(&wrap(&[])), 0);
            assert_eq!(corrupt_at(&wrap(&good[..3])), 0);
            assert_eq!(corrupt_at(&wrap(&good[..6])), 4);
            assert_eq!(corrupt_at(&wrap(b"not an idx file")), 0);
            assert_eq!(corrupt_at(&wrap(&[0, 0, 0x0d, 1, 0, 0, 0, 0])), 2);
            assert_eq!(corrupt_at(&wrap(&[0, 0, 8, 0])), 3);
            assert_eq!(corrupt_at(&wrap(&[0, 0, 8, 255])), 3);
        }
    }

    #[test]
    fn lengths_must_agree_with_the_header() {
        for wrap in [<[u8]>::to_vec as fn(&[u8]) -> Vec<u8>, gzip] {
            assert_eq!(corrupt_at(&wrap(&idx(&[4], &[1, 2, 3]))), 8);
            assert!(corrupt_at(&wrap(&idx(&[2], &[1, 2, 3]))) >= 8);
            assert_eq!(corrupt_at(&wrap(&idx(&[u32::MAX; 4], &[1, 2, 3]))), 20);
            assert_eq!(corrupt_at(&wrap(&idx(&[u32::MAX, 28, 28], &[1, 2, 3]))), 16);
        }
    }

    #[test]
    fn a_huge_sparse_file_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), idx(&[1 << 31, 4], &[])).unwrap();
        file.as_file().set_len(12 + (1 << 33)).unwrap();
        assert!(matches!(read_idx(file.path()), Err(DataError::TooLarge { bytes: 0x2_0000_0000, .. })));
    }

    #[test]
    fn damaged_gzip_is_found() {
        let values: Vec<u8> = (0..4000).map(|i| (i * i % 251) as u8).collect();
        let whole = gzip(&idx(&[4000], &values));
        for cut in 2..whole.len() {
            assert!(read(&whole[..cut]).is_err(), "cut at {cut}");
        }
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= 0x10;
            // No checksum covers the header's time and the padding after the last block, which carry no data.
            if let Ok(array) = read(&flipped) {
                assert_eq!(array.data, values, "flipped at {position}");
            }
        }
        let mut trailing = whole;
        trailing.extend(b"trailing");
        assert_eq!(corrupt_at(&trailing), 4008);
    }
}
