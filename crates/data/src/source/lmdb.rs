//! The entries of an LMDB database.

use std::path::Path;

use anyhow::{Context, Result};
use overdrive_dataload::{Dataset, Example, LmdbDataset};

use super::Source;
use crate::example;
use crate::sample::{Fields, Sample, guess_name};

pub fn open(path: &Path) -> Result<Source> {
    let dataset = LmdbDataset::open(path)?;
    // Metadata entries of other writers: `__len__`, `__keys__`.
    let is_note = |key: &[u8]| key.len() > 4 && key.starts_with(b"__") && key.ends_with(b"__");
    let indices: Vec<usize> =
        dataset.keys().enumerate().filter(|(_, key)| !is_note(key)).map(|(index, _)| index).collect();
    let total = Some(indices.len() as u64);
    let path = path.to_owned();
    let samples = indices.into_iter().map(move |index| {
        let entry = dataset.get(index)?;
        let key = name(entry.key());
        let fields = fields(entry.value(), &path).with_context(|| format!("{}: entry {key:?}", path.display()))?;
        Ok(Sample { key, fields })
    });
    Ok(Source { total, samples: Box::new(samples) })
}

/// A key that is not text, such as a packed number, becomes hexadecimal digits.
fn name(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.contains(char::is_control) => text.to_owned(),
        _ => key.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// The fields of a `tf.train.Example`, or a single field for any other value.
pub fn fields(value: &[u8], path: &Path) -> Result<Fields> {
    match Example::decode(value, path) {
        Ok(example) if example.features().len() > 0 => Ok(example::draft(&example)?.fields),
        _ => Ok(vec![(guess_name(value).to_owned(), value.to_vec())]),
    }
}
