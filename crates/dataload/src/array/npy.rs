//! The npy format of numpy.
//!
//! tch's own reader trusts the header (with a shape larger than the file, libtorch reads past the end of memory),
//! supports neither Fortran order nor version 3, and rejects big-endian files.

use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::npy_header::{self, Header};
use super::sizes_of;
use super::widen::{Widen, u16_to_i32, u32_to_i64};
use crate::DataError;
use crate::content::Content;
use crate::tensor::tensor_from_bytes;

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The header of a numeric array takes a few hundred bytes.
const MAX_HEADER_BYTES: u64 = 1 << 16;

/// Reads an npy file into a tensor, raw or compressed with gzip or zstd.
///
/// Versions 1 to 3, C and Fortran order, both byte orders; bool, signed integers, `uint8`, halves, floats, doubles and
/// complex numbers keep their type. `uint16` becomes [`Kind::Int`] and `uint32` [`Kind::Int64`], which hold every
/// value; `uint64` has no such kind and is refused, as are strings, objects (pickles) and structured arrays.
///
/// # Shapes
/// The array's; `[]` for a 0-dimensional array.
///
/// # Errors
/// [`DataError::Io`]; [`DataError::Corrupt`] for bad magic bytes or a bad header, or a file shorter or longer than the
/// header says; [`DataError::Layout`] for an element type that has no [`Kind`].
///
/// # Source
/// `numpy.load` for one array; `numpy.lib.format` describes the file.
pub fn read_npy(path: impl AsRef<Path>) -> Result<Tensor, DataError> {
    read(Content::open(Arc::from(path.as_ref()))?)
}

/// Reads an npy file that is already in memory; `path` only names it in errors. See [`read_npy`].
///
/// # Errors
/// As [`read_npy`].
pub fn decode_npy(bytes: &[u8], path: &Path) -> Result<Tensor, DataError> {
    read(Content::from_bytes(bytes.to_vec(), path)?)
}

fn read(mut content: Content) -> Result<Tensor, DataError> {
    let header = read_header(&mut content)?;
    let element = Element::of(&header.descr).ok_or_else(|| {
        let expected = "an array of bool, numbers of up to 64 bits (not uint64) or complex numbers";
        DataError::layout(content.path(), expected, format!("descr {:?}", header.descr))
    })?;
    let count = header.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    let bytes = count.and_then(|count| count.checked_mul(element.bytes as u64));
    let (Some(bytes), Some(mut sizes)) = (bytes, sizes_of(&header.shape)) else {
        let found = format!("shape {:?}", header.shape);
        return Err(content.corrupt(content.at(), "an array of less than 2^63 bytes", found));
    };

    let start = content.at();
    let mut values = content.bytes(bytes, "the array's values")?;
    if content.fill(&mut [0])? > 0 {
        let expected = format!("the end of the file after {bytes} bytes for shape {:?}", header.shape);
        return Err(content.corrupt(start + bytes, expected, "more bytes"));
    }
    if element.swap {
        values.chunks_exact_mut(element.number_bytes).for_each(<[u8]>::reverse);
    }
    if element.kind == Kind::Bool
        && let Some(position) = values.iter().position(|&value| value > 1)
    {
        let found = values[position].to_string();
        return Err(content.corrupt(start + position as u64, "a bool of 0 or 1", found));
    }
    let values =
        element.widen.map_or_else(|| values.as_slice().into(), |widen| std::borrow::Cow::Owned(widen(&values)));
    if !header.fortran_order {
        return tensor_from_bytes(&values, element.kind, &sizes);
    }
    sizes.reverse();
    let axes: Vec<i64> = (0..sizes.len() as i64).rev().collect();
    Ok(tensor_from_bytes(&values, element.kind, &sizes)?.f_permute(axes)?.f_contiguous()?)
}

/// A tensor of values in C order; `None` for an element type that has no [`Kind`], or another number of values.
#[cfg(feature = "mds")]
pub(crate) fn tensor_of(descr: &str, values: &[u8], shape: &[usize]) -> Result<Option<Tensor>, DataError> {
    let (Some(element), Some(sizes)) = (Element::of(descr), sizes_of(shape)) else { return Ok(None) };
    let bytes = shape.iter().try_fold(element.bytes, |product, &size| product.checked_mul(size));
    if bytes != Some(values.len()) || element.swap {
        return Ok(None);
    }
    let values = element.widen.map_or(std::borrow::Cow::Borrowed(values), |widen| widen(values).into());
    tensor_from_bytes(&values, element.kind, &sizes).map(Some)
}

fn read_header(content: &mut Content) -> Result<Header, DataError> {
    let mut start = [0; 8];
    let filled = content.fill(&mut start)?;
    let [magic @ .., major, _minor] = start;
    if filled < start.len() || magic != *MAGIC {
        let found = if filled == 0 { "an empty file".to_owned() } else { start[..filled].escape_ascii().to_string() };
        return Err(content.corrupt(0, "the start of an npy file", found));
    }
    let width = match major {
        1 => 2,
        2 | 3 => 4,
        version => return Err(content.corrupt(6, "version 1, 2 or 3", version.to_string())),
    };
    let mut length = [0; 4];
    if content.fill(&mut length[..width])? < width {
        return Err(content.corrupt(8, "the header's length", "the end of the file"));
    }
    let length = u64::from(u32::from_le_bytes(length));
    DataError::check_bytes(MAX_HEADER_BYTES, length, "the header", content.path())?;
    let at = content.at();
    let header = content.bytes(length, "a header")?;
    // Latin-1 before version 3, but the header of a numeric array is ASCII.
    let text = String::from_utf8_lossy(&header);
    npy_header::parse(&text).map_err(|found| content.corrupt(at, "the header of a numeric array", found))
}

/// How a value is stored and what it becomes.
struct Element {
    kind: Kind,
    bytes: usize,
    /// Half of `bytes` for complex numbers.
    number_bytes: usize,
    swap: bool,
    widen: Option<Widen>,
}

impl Element {
    fn of(descr: &str) -> Option<Self> {
        let mut characters = descr.chars();
        let order = characters.next()?;
        let swap = match order {
            '|' | '=' => false,
            '<' => cfg!(target_endian = "big"),
            '>' => cfg!(target_endian = "little"),
            _ => return None,
        };
        let (kind, bytes) = match characters.as_str() {
            "b1" => (Kind::Bool, 1),
            "i1" => (Kind::Int8, 1),
            "i2" => (Kind::Int16, 2),
            "i4" => (Kind::Int, 4),
            "i8" => (Kind::Int64, 8),
            "u1" => (Kind::Uint8, 1),
            "u2" => (Kind::Int, 2),
            "u4" => (Kind::Int64, 4),
            "f2" => (Kind::Half, 2),
            "f4" => (Kind::Float, 4),
            "f8" => (Kind::Double, 8),
            "c8" => (Kind::ComplexFloat, 8),
            "c16" => (Kind::ComplexDouble, 16),
            _ => return None,
        };
        let widen: Option<Widen> = match characters.as_str() {
            "u2" => Some(u16_to_i32),
            "u4" => Some(u32_to_i64),
            _ => None,
        };
        let complex = matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble);
        let number_bytes = if complex { bytes / 2 } else { bytes };
        Some(Self { kind, bytes, number_bytes, swap: swap && number_bytes > 1, widen })
    }
}
