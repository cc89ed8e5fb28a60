//! `manifest.json`: everything in a checkpoint but tensors, and the sizes and checksums of its files.
//!
//! Its first line has the checksum of everything after it, so that every flipped bit is detected; the whole file is
//! JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use overdrive_core::{Entry, Shard, ShardedBy};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{CheckpointError, Context};
use crate::names::check_name;

/// The format that this version writes, and the latest one that it reads.
pub const FORMAT: u32 = 1;

pub(crate) const FILE: &str = "manifest.json";
/// What `torch.distributed.checkpoint` has in its place.
const DCP: &str = ".metadata";
/// The largest manifest that is read: far more than plain values need, but small enough for memory.
const MAX_BYTES: u64 = 1 << 28;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub format: u32,
    pub step: u64,
    pub written_by: String,
    /// With `Writers::Each`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<Rank>,
    /// With `keep_best`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<Metric>,
    pub parts: BTreeMap<String, Part>,
    pub fields: BTreeMap<String, Value>,
    /// The checksum, once it is read.
    #[serde(skip)]
    pub checksum: u32,
}

/// The rank that wrote a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rank {
    pub rank: usize,
    pub world_size: usize,
    /// A number of what all ranks have saved together, by which parts of other runs are told.
    #[serde(default)]
    pub together: u64,
}

impl Rank {
    /// Whether it is the same rank of as many.
    pub fn is(&self, other: &Self) -> bool {
        (self.rank, self.world_size) == (other.rank, other.world_size)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

/// The metric by which the best checkpoints are kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Metric {
    pub name: String,
    #[serde(with = "real")]
    pub value: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    /// None if the part has no tensors.
    pub file: Option<File>,
    pub values: BTreeMap<String, Plain>,
    /// With `Writers::Each`: whether the ranks' states differ.
    #[serde(default, skip_serializing_if = "Sharing::is_same")]
    pub ranks: Sharing,
    /// Of tensors of which there are some rows.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rows: BTreeMap<String, Rows>,
}

/// What ranks have of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sharing {
    /// All have the same.
    #[default]
    Same,
    /// Each has its own.
    Own,
    /// All together have one: this is a part of it.
    Shard { rank: usize, ranks: usize, by: By },
}

/// What is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum By {
    Rows,
    Tensors,
}

impl Part {
    /// The name of an entry that differs from that of another rank.
    pub fn difference<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        let values = differing(&self.values, &other.values);
        values.or_else(|| match (&self.file, &other.file) {
            (Some(own), Some(other)) if own.crc32 == other.crc32 && own.bytes == other.bytes => None,
            (Some(own), Some(other)) => {
                let tensors = |file: &'a File| file.pieces.as_ref().map(|pieces| &pieces.tensors);
                let named = tensors(own).zip(tensors(other)).and_then(|(own, other)| differing(own, other));
                // Their shapes, say, or tied names.
                Some(named.unwrap_or("*"))
            }
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => Some("*"),
        })
    }
}

/// The first name whose values are not the same.
fn differing<'a, V: PartialEq>(own: &'a BTreeMap<String, V>, other: &'a BTreeMap<String, V>) -> Option<&'a str> {
    let names = own.keys().chain(other.keys()).filter(|&name| own.get(name) != other.get(name));
    names.min().map(String::as_str)
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows from {} on of a tensor of shape {:?}", self.first, self.whole)
    }
}

impl Rows {
    /// Whether a tensor of the shape `own` can be these rows.
    pub fn fit(&self, own: &[i64]) -> bool {
        let ([all, whole @ ..], [count, own @ ..]) = (&self.whole[..], own) else { return false };
        let end = self.first.checked_add(*count);
        let elements = self.whole.iter().try_fold(1i64, |product, &side| product.checked_mul(side.max(1)));
        own == whole && self.first >= 0 && end.is_some_and(|end| end <= *all) && elements.is_some()
    }
}

impl Sharing {
    pub fn of(shard: Option<Shard>, is_own: bool) -> Self {
        match (shard, is_own) {
            (Some(Shard { rank, ranks, by: ShardedBy::Rows }), _) => Self::Shard { rank, ranks, by: By::Rows },
            (Some(Shard { rank, ranks, by: ShardedBy::Tensors }), _) => Self::Shard { rank, ranks, by: By::Tensors },
            (None, true) => Self::Own,
            (None, false) => Self::Same,
        }
    }

    pub fn shard(self) -> Option<Shard> {
        match self {
            Self::Shard { rank, ranks, by: By::Rows } => Some(Shard { rank, ranks, by: ShardedBy::Rows }),
            Self::Shard { rank, ranks, by: By::Tensors } => Some(Shard { rank, ranks, by: ShardedBy::Tensors }),
            Self::Same | Self::Own => None,
        }
    }

    fn is_same(&self) -> bool {
        *self == Self::Same
    }
}

/// Which rows of a whole tensor the file has: so many as the tensor there, from `first` on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rows {
    pub first: i64,
    pub whole: Vec<i64>,
}

/// The expected size and checksums of `NAME.safetensors`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct File {
    pub bytes: u64,
    pub crc32: String,
    /// None if another program wrote the file, which is then always read as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pieces: Option<Pieces>,
}

/// Checksums of single tensors, so that some can be read without the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Pieces {
    /// The checksum of the bytes before the tensors.
    pub header: String,
    /// The checksum of each tensor, by name.
    pub tensors: BTreeMap<String, String>,
    /// The checksums of the blocks of [`BLOCK`] bytes of tensors that have several, so that some rows can be read
    /// without the others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blocks: BTreeMap<String, Vec<String>>,
}

/// Bytes of a block.
pub(crate) const BLOCK: usize = 1 << 20;

/// A value that is not a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Plain {
    Bool(bool),
    Int(i64),
    Float(Real),
    Text(String),
}

/// A float; infinities and NaN, which JSON lacks, are strings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Real {
    Finite(f64),
    Other(NonFinite),
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum NonFinite {
    #[serde(rename = "inf")]
    Infinity,
    #[serde(rename = "-inf")]
    NegativeInfinity,
    #[serde(rename = "nan")]
    NaN,
}

impl Plain {
    /// None for a tensor.
    pub fn of(entry: &Entry) -> Option<Self> {
        Some(match entry {
            Entry::Tensor(_) => return None,
            Entry::Bool(value) => Self::Bool(*value),
            Entry::Int(value) => Self::Int(*value),
            Entry::Float(value) => Self::Float(Real::of(*value)),
            Entry::Text(value) => Self::Text(value.clone()),
        })
    }

    pub fn into_entry(self) -> Entry {
        match self {
            Self::Bool(value) => Entry::Bool(value),
            Self::Int(value) => Entry::Int(value),
            Self::Float(value) => Entry::Float(value.value()),
            Self::Text(value) => Entry::Text(value),
        }
    }
}

impl Real {
    fn of(value: f64) -> Self {
        match value {
            value if value.is_finite() => Self::Finite(value),
            f64::INFINITY => Self::Other(NonFinite::Infinity),
            f64::NEG_INFINITY => Self::Other(NonFinite::NegativeInfinity),
            _ => Self::Other(NonFinite::NaN),
        }
    }

    fn value(&self) -> f64 {
        match self {
            Self::Finite(value) => *value,
            Self::Other(NonFinite::Infinity) => f64::INFINITY,
            Self::Other(NonFinite::NegativeInfinity) => f64::NEG_INFINITY,
            Self::Other(NonFinite::NaN) => f64::NAN,
        }
    }
}

/// The checksum of files and of the manifest: CRC-32, which Python's zlib has too.
pub(crate) fn crc32(bytes: &[u8]) -> String {
    checksum(crc32fast::hash(bytes))
}

pub(crate) fn checksum(crc: u32) -> String {
    format!("{crc:08x}")
}

impl Manifest {
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        // Leaves out the opening brace, which is in the first line.
        let rest = &json[1..].trim_start_matches('\n');
        let text = format!("{{\"crc32\": \"{}\",\n{rest}\n", crc32(format!("{rest}\n").as_bytes()));
        match text.len() as u64 {
            bytes if bytes > MAX_BYTES => Err(serde::ser::Error::custom(format!(
                "fields and plain values take {bytes} bytes, but should take at most {MAX_BYTES}: put large data into \
                 tensors"
            ))),
            _ => Ok(text),
        }
    }

    /// Whether some parts are shards of a whole state.
    pub fn has_shards(&self) -> bool {
        self.parts.values().any(|part| part.ranks.shard().is_some())
    }

    /// The number that the checkpoints of all ranks have in common, by which those of other runs are told.
    pub fn together(&self) -> u64 {
        self.ranks.map_or(u64::from(self.checksum), |rank| rank.together)
    }

    /// Reads the manifest of a checkpoint's folder, which has to be of this step.
    pub fn of_step(folder: &Path, step: u64) -> Result<Self, CheckpointError> {
        let manifest = Self::read(folder)?;
        match manifest.step == step {
            true => Ok(manifest),
            false => Err(CheckpointError::damaged(&folder.join(FILE), "step", step, manifest.step)),
        }
    }

    /// Reads and checks the manifest of a checkpoint's folder.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(FILE);
        let damaged_by =
            |field: &str, expected: &str, found: String| CheckpointError::damaged(&path, field, expected, found);
        let damaged = |field: &str, expected: &str, found: String| Err(damaged_by(field, expected, found));
        let bytes = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let found = match folder.join(DCP).exists() {
                    // Python's own checkpoints.
                    true => "a folder of torch.distributed.checkpoint: read it by `load_dcp` of overdrive-nn",
                    false => "none",
                };
                return damaged("the manifest", "a file", found.to_owned());
            }
            Err(error) => return Err(error).when("read its metadata", &path),
        };
        if bytes > MAX_BYTES {
            return damaged("the manifest's size", &format!("at most {MAX_BYTES} bytes"), format!("{bytes} bytes"));
        }
        let text = fs::read(&path).when("read it", &path)?;
        check_format(&text, &path)?;
        let Some(end) = text.iter().position(|&byte| byte == b'\n') else {
            return damaged("the manifest", "several lines", format!("{} bytes without an end of line", text.len()));
        };
        let (first, rest) = text.split_at(end + 1);
        let expected = format!("{{\"crc32\": \"{}\",\n", crc32(rest));
        if first != expected.as_bytes() {
            let found = String::from_utf8_lossy(first).trim_end().to_owned();
            return damaged("crc32 of the manifest", expected.trim_end(), found);
        }
        let parsed: Result<Self, _> = serde_json::from_slice(&text);
        let mut manifest =
            parsed.map_err(|error| damaged_by("the manifest", "the fields of format 1", error.to_string()))?;
        manifest.checksum = crc32fast::hash(rest);
        // Files are named after parts, so a name with a path in it could lead out of the folder.
        for name in manifest.parts.keys() {
            check_name(name).map_err(|expected| damaged_by("a part's name", expected, format!("{name:?}")))?;
        }
        Ok(manifest)
    }
}

/// (De)serializes an `f64` as a [`Real`].
mod real {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Real;

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        Real::of(*value).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Real::deserialize(deserializer)?.value())
    }
}

/// The format is checked before anything else, because a later one may have its checksum elsewhere.
fn check_format(text: &[u8], path: &Path) -> Result<(), CheckpointError> {
    #[derive(Deserialize)]
    struct Format {
        format: Value,
    }
    let Ok(Format { format }) = serde_json::from_slice(text) else { return Ok(()) };
    match format.as_u64() {
        Some(found) if found > u64::from(FORMAT) => {
            Err(CheckpointError::NewerFormat { path: path.to_path_buf(), expected: FORMAT, found })
        }
        Some(found) if found > 0 => Ok(()),
        _ => Err(CheckpointError::damaged(path, "format", format!("1 to {FORMAT}"), format)),
    }
}
