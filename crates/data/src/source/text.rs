//! Lines of JSON, and tables of comma-separated values.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use overdrive_dataload::{CsvDataset, Dataset, JsonLines};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::Source;
use super::rows::field_of;
use crate::sample::{Draft, KEY, Sample};

/// The ending of fields that hold JSON, other than `json` itself.
const JSON: &str = ".json";

/// A JSON object as it is written: with its order, and with its numbers to the digit.
struct Object(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Object(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

pub fn open_json_lines(path: &Path) -> Result<Source> {
    let lines = JsonLines::open(path)?.typed::<Object>();
    let total = Some(lines.len() as u64);
    let samples = (0..lines.len())
        .map(move |index| of_object(lines.get(index)?, index).with_context(|| format!("object {index}")));
    Ok(Source { total, samples: Box::new(samples) })
}

fn of_object(Object(entries): Object, index: usize) -> Result<Sample> {
    let columns: Vec<String> = entries.iter().map(|(column, _)| column.clone()).collect();
    let mut draft = Draft::default();
    for (column, value) in entries {
        let (field, json) = (field_of(&column, &columns), value.get());
        match json.as_bytes() {
            // A field that the sample does not have.
            b"null" => {}
            [b'[' | b'{', ..] if column == KEY => bail!("the key is no text, but {json}"),
            // What its name calls JSON stays as it is written.
            _ if column == "json" || column.ends_with(JSON) => draft.add(column, json.into())?,
            // Lists and objects are JSON, which their names say.
            [b'[' | b'{', ..] => draft.add(format!("{field}{JSON}"), json.into())?,
            [b'"', ..] => draft.add(field, serde_json::from_str::<String>(json)?.into_bytes())?,
            _ => draft.add(field, json.into())?,
        }
    }
    Ok(draft.finish(index))
}

pub fn open_table(path: &Path) -> Result<Source> {
    let tabs = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tsv"));
    let rows = CsvDataset::builder(path).delimiter(if tabs { b'\t' } else { b',' }).open()?;
    let total = Some(rows.len() as u64);
    let samples = (0..rows.len()).map(move |index| {
        let row = rows.get(index)?;
        let columns: Vec<String> = row.keys().cloned().collect();
        let mut draft = Draft::default();
        // An empty cell is a field that the sample does not have.
        for (column, text) in row.into_iter().filter(|(_, text)| !text.is_empty()) {
            draft.add(field_of(&column, &columns), text.into_bytes())?;
        }
        Ok(draft.finish(index))
    });
    Ok(Source { total, samples: Box::new(samples) })
}
