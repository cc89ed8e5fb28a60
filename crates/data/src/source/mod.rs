//! Reads a source, sample by sample.

mod arrow;
mod folder;
mod lmdb;
mod mds;
mod parquet;
mod rows;
mod text;
mod tfrecord;
mod tokens;
mod webdataset;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
pub use lmdb::fields as lmdb_fields;
use overdrive_dataload::{DataError, IterableDataset};

use crate::cli::ConvertOptions;
use crate::format::Format;
use crate::sample::Sample;

/// Samples in order; an error takes the place of a bad one.
pub struct Source {
    /// The number of samples, where it is known.
    pub total: Option<u64>,
    pub samples: Box<dyn Iterator<Item = Result<Sample>>>,
}

/// Opens the source of a conversion.
pub fn open(options: &ConvertOptions, format: Format) -> Result<Source> {
    let path = &*options.src;
    match format {
        Format::Folder => folder::open(path),
        Format::WebDataset => webdataset::open(path),
        Format::TfRecord => tfrecord::open(path),
        Format::Lmdb => lmdb::open(path),
        Format::Arrow if !path.is_dir() => arrow::open(path),
        Format::Arrow | Format::HuggingFace => arrow::open_folder(path),
        Format::Parquet => parquet::open(path),
        Format::Jsonl => text::open_json_lines(path),
        Format::Csv => text::open_table(path),
        Format::Mds => mds::open(path),
        Format::Megatron => tokens::open_indexed(path),
        Format::Tokens => tokens::open(options),
    }
}

/// Opens the file with exactly this name if it exists, and otherwise the name as a pattern.
pub fn open_shards<D>(
    path: &Path,
    files: impl FnOnce([PathBuf; 1]) -> Result<D, DataError>,
    pattern: impl FnOnce(&str) -> Result<D, DataError>,
) -> Result<D> {
    if path.exists() {
        return Ok(files([path.to_owned()])?);
    }
    Ok(pattern(path.to_str().context("a pattern must be UTF-8")?)?)
}

/// All samples of all shards.
fn all<D: IterableDataset + 'static>(dataset: D) -> impl Iterator<Item = Result<D::Sample, DataError>>
where
    D::Sample: 'static,
{
    (0..dataset.shards()).flat_map(move |shard| match dataset.open_shard(shard, 0) {
        Ok(samples) => samples,
        Err(error) => Box::new(std::iter::once(Err(error))),
    })
}
