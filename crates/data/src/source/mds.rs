//! Samples of Mosaic's streaming.

use std::path::Path;

use anyhow::{Context, Result, bail};
use overdrive_dataload::{MdsDataset, MdsSample, MdsValue};

use super::rows::{array, field_of, float};
use super::{Source, all};
use crate::sample::{Draft, KEY, Sample, guess_name, is_image};

pub fn open(path: &Path) -> Result<Source> {
    let dataset = MdsDataset::open(path)?;
    let total = Some(dataset.samples());
    let samples = all(dataset).enumerate().map(|(index, found)| sample(&found?, index));
    Ok(Source { total, samples: Box::new(samples) })
}

fn sample(found: &MdsSample, index: usize) -> Result<Sample> {
    let columns: Vec<String> = found.columns().map(str::to_owned).collect();
    let mut draft = Draft::default();
    for column in &columns {
        let place = || format!("sample {index}: column {column:?}");
        let stored = found.raw(column).unwrap_or_default();
        let (name, content) = match found.get(column)? {
            MdsValue::Int(number) => (field_of(column, &columns).to_owned(), number.to_string().into_bytes()),
            MdsValue::UInt(number) => (field_of(column, &columns).to_owned(), number.to_string().into_bytes()),
            MdsValue::Float(number) => (field_of(column, &columns).to_owned(), float(number, stored.len() <= 4)),
            MdsValue::Tensor(numbers) => array(field_of(column, &columns), &numbers).with_context(place)?,
            MdsValue::Image(_) => bail!("{} has pixels (pil), which no field holds: write jpeg or png", place()),
            // As they are stored, JSON too.
            _ => (field(column, &columns, stored), stored.to_vec()),
        };
        draft.add(name, content).with_context(place)?;
    }
    Ok(draft.finish(index))
}

/// The field of stored bytes: of an image its kind, behind the column's name where that says something else.
fn field(column: &str, columns: &[String], content: &[u8]) -> String {
    let name = field_of(column, columns);
    let named = is_image(name);
    match guess_name(content) {
        kind if kind == "bin" || named || name == KEY => name.to_owned(),
        kind if name == "image" && !columns.iter().any(|column| column == kind) => kind.to_owned(),
        kind => format!("{name}.{kind}"),
    }
}
