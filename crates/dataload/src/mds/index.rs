//! The index of a folder: its shards, and the columns of their samples.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;

use super::encoding::Encoding;
use super::sample::Column;
use crate::DataError;
use crate::read::{is_url, read_file, require_regular};
use crate::shards::require;

pub(super) const FILE: &str = "index.json";
/// The most bytes of an index: those of 300,000 shards.
const MAX_BYTES: u64 = 1 << 28;
pub(super) const VERSION: u64 = 2;
/// How much of what was found an error shows, in characters: a text in an index may be of any length.
const SHOWN: usize = 200;
/// The most samples of a shard. Where it is compressed, a table of very many takes next to no bytes of it.
pub(super) const MAX_SAMPLES: u64 = 1 << 26;

/// A shard that was found.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: Arc<Path>,
    pub(super) columns: Arc<[Column]>,
    pub(super) samples: u64,
    /// The length of its content.
    pub(super) bytes: u64,
    pub(super) is_packed: bool,
}

#[derive(Deserialize)]
struct Index {
    version: u64,
    shards: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    version: u64,
    format: String,
    samples: u64,
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u64>>,
    compression: Option<String>,
    raw_data: File,
    zip_data: Option<File>,
}

#[derive(Deserialize)]
struct File {
    basename: String,
    bytes: u64,
}

/// Reads the index of a folder, and looks for the shards.
pub(super) fn read(folder: &Path) -> Result<Vec<Shard>, DataError> {
    let path = folder.join(FILE);
    let text = read_file(&path, None, MAX_BYTES)?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| DataError::Line {
        path: path.clone(),
        line: error.line() as u64,
        problem: format!("expected the index of an MDS dataset, found {}", shortened(&error.to_string())),
    })?;
    if index.version != VERSION {
        return Err(DataError::layout(&path, format!("version {VERSION}"), format!("version {}", index.version)));
    }
    // Shards usually have the same columns: they are kept once.
    let mut known = HashMap::new();
    let shards = index.shards.into_iter().enumerate().map(|(number, entry)| {
        let bad = |expected: &str, found: String| {
            DataError::layout(&path, format!("{expected} in shard {number}"), shortened(&found))
        };
        found(folder, entry, &mut known).map_err(|error| match error {
            Bad::Entry(expected, found) => bad(expected, found),
            Bad::Shard(error) => error,
        })
    });
    let shards: Vec<Shard> = shards.collect::<Result<_, _>>()?;
    let mut files = HashSet::new();
    if let Some(number) = shards.iter().position(|shard| !files.insert(&shard.path)) {
        let found = shards[number].path.file_name().unwrap_or_default().display();
        return Err(DataError::layout(&path, format!("each shard once in shard {number}"), format!("{found} again")));
    }
    if shards.is_empty() {
        return Err(DataError::layout(&path, "at least one shard", "none"));
    }
    if is_url(folder) {
        require(&shards.iter().map(|shard| shard.path.to_path_buf()).collect::<Vec<_>>())?;
    }
    Ok(shards)
}

fn shortened(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

/// What is wrong with an entry, or with its shard.
enum Bad {
    Entry(&'static str, String),
    Shard(DataError),
}

type Columns = HashMap<(Vec<String>, Vec<String>, Vec<Option<u64>>), Arc<[Column]>>;

fn found(folder: &Path, entry: Entry, known: &mut Columns) -> Result<Shard, Bad> {
    let Entry { version, format, samples, raw_data, zip_data, compression, .. } = &entry;
    if (*version, format.as_str()) != (VERSION, "mds") {
        return Err(Bad::Entry("version 2 of the format mds", format!("version {version} of {format:?}")));
    }
    // Offsets in a shard have 32 bits, and there is one more of them than samples, and their number.
    let bytes = raw_data.bytes;
    if bytes > u64::from(u32::MAX) || *samples > MAX_SAMPLES || samples.saturating_add(2).saturating_mul(4) > bytes {
        let found = format!("{samples} samples in {bytes} bytes");
        return Err(Bad::Entry("at most 4 GiB and 2^26 samples, and 4 bytes for each sample and 8 more", found));
    }
    let file = |file: &File| {
        let name = Path::new(&file.basename);
        // A merged index names files in folders; nothing may lead out of the dataset's.
        let is_inside = name.components().all(|part| matches!(part, Component::Normal(_)));
        match is_inside && !file.basename.is_empty() && !is_url(name) {
            true => Ok(folder.join(name)),
            false => Err(Bad::Entry("the name of a file in the folder", format!("{:?}", file.basename))),
        }
    };
    let raw = file(raw_data)?;
    let (path, length, is_packed) = match zip_data {
        Some(zip_data) if is_url(folder) || !raw.is_file() => {
            supported(compression.as_deref())?;
            (file(zip_data)?, zip_data.bytes, true)
        }
        _ => (raw, bytes, false),
    };
    if !is_url(&path) {
        require_regular(&path).map_err(Bad::Shard)?;
        let found = std::fs::metadata(&path).map_err(DataError::io(&path)).map_err(Bad::Shard)?.len();
        if found != length {
            let expected = format!("{length} bytes, as {FILE} says");
            return Err(Bad::Shard(DataError::layout(&path, expected, format!("{found} bytes"))));
        }
    }
    let (path, samples) = (path.into(), *samples);
    let columns = (entry.column_names, entry.column_encodings, entry.column_sizes);
    let columns = match known.get(&columns) {
        Some(columns) => columns.clone(),
        None => {
            let made = columns_of(&columns.0, &columns.1, &columns.2)?;
            known.entry(columns).or_insert(made).clone()
        }
    };
    Ok(Shard { path, columns, samples, bytes, is_packed })
}

fn columns_of(names: &[String], encodings: &[String], sizes: &[Option<u64>]) -> Result<Arc<[Column]>, Bad> {
    if names.len() != encodings.len() || names.len() != sizes.len() || names.is_empty() {
        let found = format!("{} names, {} encodings, {} sizes", names.len(), encodings.len(), sizes.len());
        return Err(Bad::Entry("a name, an encoding and a size for each column", found));
    }
    let column = |((name, encoding), size): ((&String, &String), &Option<u64>)| {
        let size = size.filter(|&size| size > 0).map(u32::try_from).transpose();
        let size = size.map_err(|_| Bad::Entry("columns of less than 4 GiB", format!("{name:?}")))?;
        Ok(Column::new(name, Encoding::parse(encoding), size))
    };
    names.iter().zip(encodings).zip(sizes).map(column).collect()
}

/// Compressions are recognised by a shard's first bytes, which some of Mosaic's do not have.
fn supported(compression: Option<&str>) -> Result<(), Bad> {
    let name = compression.and_then(|compression| compression.split(':').next()).unwrap_or_default();
    match name {
        "gz" => Ok(()),
        "zstd" if cfg!(feature = "zstd") => Ok(()),
        "zstd" => Err(Bad::Entry("a build with the feature `zstd`", "zstd-compressed data".to_owned())),
        _ => Err(Bad::Entry("no compression, zstd or gz", format!("{:?}", compression.unwrap_or("none")))),
    }
}
