//! The idx format of MNIST: a four-byte magic, big-endian dimensions, then the values in row-major order.

use std::path::Path;
use std::sync::Arc;

use crate::DataError;
use crate::content::Content;

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

/// Reads an idx file of unsigned bytes, raw or compressed with gzip or zstd (recognised by its content, not by its name).
///
/// Memory use depends on what the file really holds, whatever its header declares.
///
/// # Errors
/// [`DataError::Io`] when the file cannot be read; [`DataError::Corrupt`] for a bad magic number, another element type,
/// fewer or more values than the header says, or damaged compressed data; [`DataError::TooLarge`] above 4 GiB.
pub fn read_idx(path: impl AsRef<Path>) -> Result<IdxArray, DataError> {
    let mut content = Content::open(Arc::from(path.as_ref()))?;
    let [zero, also_zero, element, dimensions] = word(&mut content, "an idx magic number")?;
    if (zero, also_zero) != (0, 0) {
        return Err(content.corrupt(0, "an idx magic number 00 00 tt dd", format!("{zero:02x} {also_zero:02x}")));
    }
    if element != UNSIGNED_BYTE {
        return Err(content.corrupt(2, "element type 08 (unsigned byte)", format!("{element:02x}")));
    }
    if !(1..=4).contains(&dimensions) {
        return Err(content.corrupt(3, "1 to 4 dimensions", dimensions.to_string()));
    }
    let mut shape = Vec::with_capacity(dimensions.into());
    for _ in 0..dimensions {
        shape.push(u32::from_be_bytes(word(&mut content, "a dimension of four bytes")?) as usize);
    }
    let start = content.at();
    let declared = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    let declared =
        declared.ok_or_else(|| content.corrupt(start, "less than 2^64 values", format!("the shape {shape:?}")))?;
    if declared > MAX_VALUES {
        // A file without so many values is damaged.
        content.skip(declared, "values")?;
    }
    DataError::check_bytes(MAX_VALUES, declared, "the array", content.path())?;
    let data = content.bytes(declared, "values")?;
    // Reading past the values makes gzip verify its checksum.
    match content.fill(&mut [0])? {
        0 => Ok(IdxArray { shape, data }),
        _ => Err(content.corrupt(start + declared, "the end of the file", "more bytes")),
    }
}

fn word(content: &mut Content, expected: &str) -> Result<[u8; 4], DataError> {
    let (start, mut word) = (content.at(), [0; 4]);
    match content.fill(&mut word)? {
        4 => Ok(word),
        _ => Err(content.corrupt(start, expected, "the end of the file")),
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
