//! Rows of Arrow files, or of a dataset that Hugging Face's `datasets` has saved.

use std::path::Path;

use anyhow::Result;
use overdrive_dataload::{ArrowDataset, Dataset};

use super::rows::{names, sample};
use super::{Source, open_shards};

pub fn open(path: &Path) -> Result<Source> {
    let dataset = match path.is_dir() {
        true => ArrowDataset::load_from_disk(path)?,
        false => open_shards(path, ArrowDataset::from_files, ArrowDataset::open)?,
    };
    let columns: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
    let named = names(&columns);
    // A null is a field that a sample does not have.
    let dataset = columns.iter().try_fold(dataset, |dataset, column| dataset.mask_null(column))?;
    let total = Some(dataset.len() as u64);
    let samples = (0..dataset.len()).map(move |index| {
        let row = dataset.get(index)?;
        sample(&row, index, &named, |column| row.int(&format!("{column}.is_null")) == Some(1))
    });
    Ok(Source { total, samples: Box::new(samples) })
}
