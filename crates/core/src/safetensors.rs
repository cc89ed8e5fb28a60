//! The safetensors format, for the crates that read or write it: the header, and which dtypes there are. Behind the
//! feature `safetensors`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use ::safetensors::tensor::{Dtype, Metadata, TensorInfo};
use overdrive_ffi::data_address;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use tch::{Kind, Tensor};

/// The limit of safetensors' own readers.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The key of the metadata that tells Python's libraries that torch may read the file.
pub const FORMAT_KEY: &str = "format";
const METADATA: &str = "__metadata__";

const PAIRS: [(Kind, Dtype); 15] = [
    (Kind::Bool, Dtype::BOOL),
    (Kind::Uint8, Dtype::U8),
    (Kind::Int8, Dtype::I8),
    (Kind::Int16, Dtype::I16),
    (Kind::Int, Dtype::I32),
    (Kind::Int64, Dtype::I64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ),
];

fn dtype_of(kind: Kind) -> Option<Dtype> {
    PAIRS.iter().find(|(own, _)| *own == kind).map(|(_, dtype)| *dtype)
}

/// tch's kind of a dtype, if it has one.
pub fn kind_of(dtype: Dtype) -> Option<Kind> {
    PAIRS.iter().find(|(_, own)| *own == dtype).map(|(kind, _)| *kind)
}

/// An entry that a safetensors file cannot hold.
#[derive(Debug, thiserror::Error)]
#[error("`{key}`: expected {expected}, found {found}")]
pub struct Unsupported {
    /// The entry's name.
    pub key: String,
    /// What was expected.
    pub expected: &'static str,
    /// What was found.
    pub found: String,
}

/// Where tensors will be in a file.
#[derive(Debug)]
pub struct Layout<'a> {
    /// The beginning of the file: the length of its JSON, and the JSON.
    pub header: Vec<u8>,
    /// The tensors in the order of the file, without gaps.
    pub tensors: Vec<(&'a str, &'a Tensor)>,
    /// The sum of the tensors' sizes.
    pub bytes: usize,
}

impl<'a> Layout<'a> {
    /// The layout of a file with these tensors and this metadata.
    ///
    /// # Errors
    /// When a tensor is undefined, sparse or of a dtype that the format lacks, or the header is too long.
    pub fn of(mut tensors: Vec<(&'a str, &'a Tensor)>, metadata: &BTreeMap<&str, &str>) -> Result<Self, Unsupported> {
        let unsupported = |key: &str, expected, found: String| Unsupported { key: key.to_owned(), expected, found };
        if let Some((key, _)) = tensors.iter().find(|(_, tensor)| !tensor.defined()) {
            return Err(unsupported(key, "a tensor", "an undefined one".to_owned()));
        }
        // The widest elements first, so that each tensor is aligned without gaps; the sort keeps names in order.
        tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.kind().elt_size_in_bytes()));
        let (mut infos, mut bytes) = (Vec::new(), 0);
        for (key, tensor) in &tensors {
            let Some(dtype) = dtype_of(tensor.kind()).filter(|_| !tensor.is_sparse()) else {
                // Not tch's `Debug`, which prints the values of some tensors and panics for others.
                let layout = if tensor.is_sparse() { "a sparse" } else { "a" };
                let found = format!("{layout} {:?} tensor of shape {:?}", tensor.kind(), tensor.size());
                return Err(unsupported(key, "a dense dtype of safetensors", found));
            };
            if *key == METADATA {
                return Err(unsupported(key, "another name: safetensors reserves it", (*key).to_owned()));
            }
            let end = bytes + bytes_of(tensor);
            let shape = tensor.size().into_iter().map(|side| side as usize).collect();
            infos.push((*key, TensorInfo { dtype, shape, data_offsets: (bytes, end) }));
            bytes = end;
        }
        let header = Header { metadata, infos }.bytes();
        let header = header.map_err(|error| unsupported("*", "a safetensors header", error.to_string()))?;
        if header.len() as u64 > MAX_HEADER_BYTES {
            let expected = "names and shapes of at most 100 MB, which is what safetensors' readers take";
            return Err(unsupported("*", expected, format!("{} bytes", header.len())));
        }
        Ok(Self { header, tensors, bytes })
    }
}

/// The size of a tensor in a file.
pub fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// A header with names in a deterministic order.
struct Header<'a> {
    metadata: &'a BTreeMap<&'a str, &'a str>,
    infos: Vec<(&'a str, TensorInfo)>,
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.infos.len() + 1))?;
        map.serialize_entry(METADATA, self.metadata)?;
        for (key, info) in &self.infos {
            map.serialize_entry(key, info)?;
        }
        map.end()
    }
}

impl Header<'_> {
    fn bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut json = serde_json::to_vec(self)?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}

/// Removes tensors with the same memory as an earlier one, and returns their names, each with the earlier name.
pub fn take_tied<'a>(tensors: &mut Vec<(&'a str, &'a Tensor)>) -> BTreeMap<&'a str, &'a str> {
    let mut seen: HashMap<usize, Vec<(&str, &Tensor)>> = HashMap::new();
    let mut tied = BTreeMap::new();
    tensors.retain(|&(key, tensor)| {
        // Scalars are not worth it, and an optimizer's step counts share one scalar only as long as they are equal.
        let is_alone = !tensor.defined() || tensor.is_sparse() || tensor.dim() == 0 || tensor.numel() == 0;
        if key == FORMAT_KEY || is_alone {
            return true;
        }
        let there = seen.entry(data_address(tensor)).or_default();
        // A view of the same bytes with another shape or dtype is not a tied tensor.
        let same = |other: &Tensor| tensor.kind() == other.kind() && tensor.f_is_set_to(other).unwrap_or(false);
        if let Some((kept, _)) = there.iter().find(|(_, other)| same(other)) {
            tied.insert(key, *kept);
            return false;
        }
        there.push((key, tensor));
        true
    });
    tied
}

/// Parses and checks a header's JSON: the tensors have to fill the `body` bytes after it without gaps or overlaps, and
/// each name has to be there once.
///
/// # Errors
/// What is wrong.
pub fn parse_header(json: &[u8], body: u64) -> Result<Metadata, String> {
    let _: Names = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    match header.data_len() as u64 {
        bytes if bytes == body => Ok(header),
        bytes => Err(format!("its tensors need {bytes} bytes, but {body} bytes follow")),
    }
}

/// A tensor's shape; none when its number of elements, counting sizes of 0 as 1, is beyond an `i64`.
pub fn sizes_of(info: &TensorInfo) -> Option<Vec<i64>> {
    let sizes: Option<Vec<i64>> = info.shape.iter().map(|&side| i64::try_from(side).ok()).collect();
    sizes.filter(|sizes| sizes.iter().try_fold(1i64, |product, &side| product.checked_mul(side.max(1))).is_some())
}

/// The keys of a JSON object, each once.
struct Names;

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut seen = HashSet::new();
                while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if let Some(key) = seen.replace(key) {
                        return Err(A::Error::custom(format!("`{key}` is there twice")));
                    }
                }
                Ok(Names)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}
