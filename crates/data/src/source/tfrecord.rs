//! Records of `tf.train.Example`.

use std::path::Path;

use anyhow::{Context, Result};
use overdrive_dataload::TfRecordDataset;

use super::{Source, all, open_shards};
use crate::example;

pub fn open(path: &Path) -> Result<Source> {
    let dataset = open_shards(path, TfRecordDataset::from_files, TfRecordDataset::open)?;
    let samples = all(dataset).enumerate().map(|(number, record)| {
        let record = record?;
        let place = || format!("{}: record at byte {}", record.path().display(), record.offset());
        Ok(example::draft(&record.example()?).with_context(place)?.finish(number))
    });
    Ok(Source { total: None, samples: Box::new(samples) })
}
