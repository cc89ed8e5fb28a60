//! Writes the indexes of shards.

use anyhow::{Result, bail};
use overdrive_dataload::{DataError, IterableDataset, TfRecordDataset, WebDataset};

use crate::cli::IndexOptions;
use crate::format::Format;
use crate::source::open_shards;

/// Writes the index of every shard, and returns what to say of them.
///
/// # Errors
/// That of the first shard that has none: a damaged one, or one that is compressed as a whole. The indexes of those
/// before it stay.
pub fn run(options: &IndexOptions) -> Result<String> {
    let (mut shards, mut samples) = (0, 0);
    for path in &options.shards {
        let counts = match options.from.map_or_else(|| Format::of_source(path), Ok)? {
            Format::WebDataset => {
                let dataset = open_shards(path, WebDataset::from_files, WebDataset::open)?;
                all(&dataset, |shard| dataset.write_index(shard))?
            }
            Format::TfRecord => {
                let dataset = open_shards(path, TfRecordDataset::from_files, TfRecordDataset::open)?;
                all(&dataset, |shard| dataset.write_index(shard))?
            }
            _ => {
                bail!("{}: only webdataset and tfrecord have indexes; state the format with --from", path.display());
            }
        };
        shards += counts.len();
        samples += counts.iter().sum::<u64>();
    }
    Ok(format!("{shards} shards with {samples} samples"))
}

fn all(dataset: &impl IterableDataset, index: impl Fn(usize) -> Result<u64, DataError>) -> Result<Vec<u64>, DataError> {
    (0..dataset.shards()).map(index).collect()
}
