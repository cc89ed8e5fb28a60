//! Tar shards.

use std::path::Path;

use anyhow::Result;
use overdrive_dataload::WebDataset;

use super::{Source, all, open_shards};
use crate::sample::Sample;

pub fn open(path: &Path) -> Result<Source> {
    let dataset = open_shards(path, WebDataset::from_files, WebDataset::open)?;
    let samples = all(dataset).map(|sample| {
        let sample = sample?;
        Ok(Sample { key: sample.key().to_owned(), fields: sample.into_files() })
    });
    Ok(Source { total: None, samples: Box::new(samples) })
}
