//! Rows of Arrow files, or of a dataset that Hugging Face's `datasets` has saved.

use std::path::Path;

use anyhow::Result;
use arrow_schema::{DataType, Fields};
use overdrive_dataload::{ArrowDataset, Dataset};

use super::rows::{names, sample};
use super::{Source, open_shards};

pub fn open(path: &Path) -> Result<Source> {
    rows(open_shards(path, ArrowDataset::from_files, ArrowDataset::open)?)
}

/// A dataset of Hugging Face.
pub fn open_folder(path: &Path) -> Result<Source> {
    rows(ArrowDataset::load_from_disk(path)?)
}

fn rows(dataset: ArrowDataset) -> Result<Source> {
    let mut named = names(dataset.fields());
    for named in &mut named {
        named.shape = shape(&named.column, dataset.schema().fields());
    }
    // A null is a field that a sample does not have.
    let columns: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
    let dataset = columns.iter().try_fold(dataset, |dataset, column| dataset.mask_null(column))?;
    let total = Some(dataset.len() as u64);
    let samples = (0..dataset.len()).map(move |index| {
        let row = dataset.get(index)?;
        sample(&row, index, &named, |column| row.int(&format!("{column}.is_null")) == Some(1))
    });
    Ok(Source { total, samples: Box::new(samples) })
}

/// The lengths of the lists in a column, where they are fixed and several: its rows are then one list.
fn shape(column: &str, fields: &Fields) -> Option<Vec<i64>> {
    fields.iter().find_map(|field| {
        let rest = column.strip_prefix(field.name().as_str())?;
        match (rest.strip_prefix('.'), field.data_type()) {
            (Some(inner), DataType::Struct(fields)) => shape(inner, fields),
            (None, kind) if rest.is_empty() => {
                let (mut shape, mut kind) = (Vec::new(), kind);
                while let DataType::FixedSizeList(inner, length) = kind {
                    shape.push(i64::from(*length));
                    kind = inner.data_type();
                }
                (shape.len() > 1).then_some(shape)
            }
            _ => None,
        }
    })
}
