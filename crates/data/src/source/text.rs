//! Lines of JSON, and tables of comma-separated values.

use std::path::Path;

use anyhow::{Result, bail};
use overdrive_dataload::{CsvDataset, Dataset, JsonLines};
use serde_json::{Map, Value};

use super::Source;
use super::rows::is_label;
use crate::sample::{Fields, KEY, LABEL, Sample};

/// The ending of fields that hold JSON, other than `json` itself.
const JSON: &str = ".json";

pub fn open_json_lines(path: &Path) -> Result<Source> {
    let lines = JsonLines::open(path)?;
    let (total, path) = (Some(lines.len() as u64), path.to_owned());
    let samples = (0..lines.len()).map(move |index| match lines.get(index)? {
        Value::Object(object) => Ok(of_object(object, index)),
        other => bail!("{}: object {index}: expected an object, found {other}", path.display()),
    });
    Ok(Source { total, samples: Box::new(samples) })
}

fn of_object(object: Map<String, Value>, index: usize) -> Sample {
    let columns: Vec<String> = object.keys().cloned().collect();
    let (mut key, mut fields) = (None, Fields::new());
    for (column, value) in object {
        let (name, content) = match value {
            // A field that the sample does not have.
            Value::Null => continue,
            Value::String(text) if column == KEY => {
                key = Some(text);
                continue;
            }
            Value::String(text) => (name(&column, &columns), text),
            // Lists and objects are JSON, which their names say.
            value @ (Value::Array(_) | Value::Object(_)) if column == "json" => (column, value.to_string()),
            value @ (Value::Array(_) | Value::Object(_)) => {
                (format!("{}{JSON}", name(&column, &columns)), value.to_string())
            }
            number => (name(&column, &columns), number.to_string()),
        };
        fields.push((name, content.into_bytes()));
    }
    Sample { key: key.unwrap_or_else(|| format!("{index:09}")), fields }
}

pub fn open_table(path: &Path) -> Result<Source> {
    let tabs = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tsv"));
    let rows = CsvDataset::builder(path).delimiter(if tabs { b'\t' } else { b',' }).open()?;
    let total = Some(rows.len() as u64);
    let samples = (0..rows.len()).map(move |index| {
        let row = rows.get(index)?;
        let columns: Vec<String> = row.keys().cloned().collect();
        let (mut key, mut fields) = (None, Fields::new());
        // An empty cell is a field that the sample does not have.
        for (column, text) in row.into_iter().filter(|(_, text)| !text.is_empty()) {
            match column == KEY {
                true => key = Some(text),
                false => fields.push((name(&column, &columns), text.into_bytes())),
            }
        }
        Ok(Sample { key: key.unwrap_or_else(|| format!("{index:09}")), fields })
    });
    Ok(Source { total, samples: Box::new(samples) })
}

/// The field of a column. A name with a slash cannot be a file's extension.
fn name(column: &str, columns: &[String]) -> String {
    if is_label(column, columns) { LABEL.to_owned() } else { column.replace('/', ".").to_lowercase() }
}
