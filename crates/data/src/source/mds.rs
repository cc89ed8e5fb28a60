//! Samples of Mosaic's streaming.

use std::path::Path;

use anyhow::{Result, bail};
use overdrive_dataload::{MdsDataset, MdsSample, MdsValue};
use tch::Kind;

use super::rows::is_label;
use super::{Source, all};
use crate::example::text;
use crate::sample::{Fields, IMAGES, KEY, LABEL, Sample, guess_name};

pub fn open(path: &Path) -> Result<Source> {
    let dataset = MdsDataset::open(path)?;
    let total = Some(dataset.samples());
    let samples = all(dataset).enumerate().map(|(index, found)| sample(&found?, index));
    Ok(Source { total, samples: Box::new(samples) })
}

fn sample(found: &MdsSample, index: usize) -> Result<Sample> {
    let columns: Vec<String> = found.columns().map(str::to_owned).collect();
    let (mut key, mut fields) = (None, Fields::new());
    for column in &columns {
        let content = match found.get(column)? {
            MdsValue::Int(number) => number.to_string().into_bytes(),
            MdsValue::UInt(number) => number.to_string().into_bytes(),
            MdsValue::Float(number) => number.to_string().into_bytes(),
            MdsValue::Tensor(numbers) => match numbers.f_kind()? {
                Kind::Half | Kind::Float | Kind::Double => {
                    text(&Vec::<f64>::try_from(&numbers.f_to_kind(Kind::Double)?.f_flatten(0, -1)?)?)
                }
                _ => text(&Vec::<i64>::try_from(&numbers.f_to_kind(Kind::Int64)?.f_flatten(0, -1)?)?),
            },
            MdsValue::Str(text) if column == KEY => {
                key = Some(text.to_owned());
                continue;
            }
            MdsValue::Image(_) => {
                bail!("sample {index}: column {column:?} has pixels (pil), which no field holds: write jpeg or png")
            }
            // As they are stored, JSON too.
            _ => found.raw(column).unwrap_or_default().to_vec(),
        };
        fields.push((field(column, &columns, &content), content));
    }
    Ok(Sample { key: key.unwrap_or_else(|| format!("{index:09}")), fields })
}

/// The field of a column: of an image its kind, behind the column's name where that says something else.
fn field(column: &str, columns: &[String], content: &[u8]) -> String {
    let name = if is_label(column, columns) { LABEL.to_owned() } else { column.replace('/', ".").to_lowercase() };
    let named = name.rsplit('.').next().is_some_and(|ending| IMAGES.contains(&ending));
    match guess_name(content) {
        kind if kind == "bin" || named => name,
        kind if columns.iter().any(|column| column == kind) => format!("{name}.{kind}"),
        kind if name == "image" => kind.to_owned(),
        kind => format!("{name}.{kind}"),
    }
}
