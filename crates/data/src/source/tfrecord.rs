//! Records of `tf.train.Example`.

use std::path::Path;

use anyhow::{Context, Result};
use overdrive_dataload::TfRecordDataset;

use super::{Source, all, open_shards};
use crate::example;
use crate::sample::Sample;

pub fn open(path: &Path) -> Result<Source> {
    let dataset = open_shards(path, TfRecordDataset::from_files, TfRecordDataset::open)?;
    let samples = all(dataset).enumerate().map(|(number, record)| {
        let record = record?;
        let place = || format!("{}: record at byte {}", record.path().display(), record.offset());
        let (key, fields) = example::fields(&record.example()?).with_context(place)?;
        // Records without a key are numbered.
        Ok(Sample { key: key.unwrap_or_else(|| format!("{number:09}")), fields })
    });
    Ok(Source { total: None, samples: Box::new(samples) })
}
