//! The safetensors format.
//!
//! The readers of the `safetensors` crate need the whole file in memory or mapped. This one uses that crate to parse
//! and check the header, and reads only the header and the tensors that are asked for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ::safetensors::tensor::{Dtype, Metadata};
use tch::{Kind, Tensor};

use super::sizes_of;
use super::widen::{Widen, u16_to_i32, u32_to_i64};
use crate::DataError;
use crate::content::Content;
use crate::tensor::tensor_from_bytes;

const LENGTH_BYTES: u64 = 8;
/// A limit, because parsing takes several times as much memory as the header. Enough for a few hundred thousand
/// tensors.
const MAX_HEADER_BYTES: u64 = 1 << 25;

/// A safetensors file whose header has been read and checked, and whose tensors are read one by one.
///
/// ```no_run
/// use overdrive_dataload::SafeTensorsFile;
///
/// let mut file = SafeTensorsFile::open("model.safetensors")?;
/// let weight = file.tensor("encoder.weight")?;
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `safetensors.safe_open`.
#[doc(alias = "safe_open")]
pub struct SafeTensorsFile {
    content: Content,
    header: Metadata,
    /// Where the tensors' data begins in the file: the header's offsets are relative to it.
    data: u64,
}

impl SafeTensorsFile {
    /// Reads the header and holds the file open.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] for a header that is truncated, is not JSON, has overlapping or missing data ranges, or
    /// disagrees with the file's length; [`DataError::TooLarge`] for a header above 32 MiB; [`DataError::Layout`] for a
    /// compressed file; [`DataError::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::new(Content::open(Arc::from(path.as_ref()))?)
    }

    /// A file that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Self::new(Content::from_bytes(bytes, path)?)
    }

    fn new(mut content: Content) -> Result<Self, DataError> {
        let mut length = [0; LENGTH_BYTES as usize];
        if content.fill(&mut length)? < length.len() {
            return Err(content.corrupt(0, "the eight bytes of the header's length", "the end of the file"));
        }
        let length = u64::from_le_bytes(length);
        DataError::check_bytes(MAX_HEADER_BYTES, length, "the header", content.path())?;
        let header = content.bytes(length, "the header")?;
        let bad = |found: String| content.corrupt(LENGTH_BYTES, "a safetensors header", found);
        let header: Metadata = serde_json::from_slice(&header).map_err(|error| bad(error.to_string()))?;
        let data = LENGTH_BYTES + length;
        let declared = data.saturating_add(header.data_len() as u64);
        match content.length() {
            Some(bytes) if bytes == declared => Ok(Self { content, header, data }),
            Some(bytes) => Err(content.corrupt(data, format!("a file of {declared} bytes"), format!("{bytes} bytes"))),
            None => Err(DataError::layout(content.path(), "a file that is not compressed", "a compressed one")),
        }
    }

    /// The tensors' names, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The shape of a tensor, without reading it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.header.info(name).map(|info| info.shape.as_slice())
    }

    /// The file's free-form metadata (`__metadata__`).
    pub fn metadata(&self) -> BTreeMap<&str, &str> {
        self.header.metadata().iter().flatten().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    /// Reads one tensor.
    ///
    /// `uint16` becomes [`Kind::Int`] and `uint32` [`Kind::Int64`], which hold every value.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a name that is not in the file, or an element type that has no [`Kind`];
    /// [`DataError::Corrupt`] for a bool that is neither 0 nor 1, or a shape of 2^63 elements or more;
    /// [`DataError::Io`].
    pub fn tensor(&mut self, name: &str) -> Result<Tensor, DataError> {
        let path = self.content.path().clone();
        let info = self.header.info(name);
        let info = info.ok_or_else(|| DataError::layout(&path, format!("a tensor {name:?}"), "no such tensor"))?;
        let widen: Option<Widen> = match info.dtype {
            Dtype::U16 => Some(u16_to_i32),
            Dtype::U32 => Some(u32_to_i64),
            _ => None,
        };
        let kind = kind_of(info.dtype).ok_or_else(|| {
            DataError::layout(
                &path,
                format!("an element type for {name:?} that tch knows"),
                format!("{:?}", info.dtype),
            )
        })?;
        let sizes = sizes_of(&info.shape).ok_or_else(|| {
            self.content.corrupt(LENGTH_BYTES, format!("under 2^63 elements in {name:?}"), format!("{:?}", info.shape))
        })?;
        let (start, end) = info.data_offsets;
        let bytes = end.saturating_sub(start) as u64;
        let at = self.data.saturating_add(start as u64);
        self.content.seek(at)?;
        let values = self.content.bytes(bytes, name)?;
        if kind == Kind::Bool
            && let Some(position) = values.iter().position(|&value| value > 1)
        {
            let found = values[position].to_string();
            return Err(self.content.corrupt(at + position as u64, "a bool of 0 or 1", found));
        }
        match widen {
            Some(widen) => tensor_from_bytes(&widen(&values), kind, &sizes),
            None => tensor_from_bytes(&values, kind, &sizes),
        }
    }
}

/// The kind that an element type is read as. No byte swap: safetensors and every machine that libtorch is built for are
/// little-endian.
fn kind_of(dtype: Dtype) -> Option<Kind> {
    Some(match dtype {
        Dtype::BOOL => Kind::Bool,
        Dtype::U8 => Kind::Uint8,
        Dtype::I8 => Kind::Int8,
        Dtype::I16 => Kind::Int16,
        Dtype::U16 | Dtype::I32 => Kind::Int,
        Dtype::U32 | Dtype::I64 => Kind::Int64,
        Dtype::F16 => Kind::Half,
        Dtype::BF16 => Kind::BFloat16,
        Dtype::F32 => Kind::Float,
        Dtype::F64 => Kind::Double,
        Dtype::C64 => Kind::ComplexFloat,
        Dtype::F8_E4M3 => Kind::Float8e4m3fn,
        Dtype::F8_E5M2 => Kind::Float8e5m2,
        _ => return None,
    })
}
