//! Lines of JSON, and tables of comma-separated values.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use csv::{Writer, WriterBuilder};
use serde_json::{Map, Value};

use super::columns::{Column, Rules, Table, TableFile};
use super::staged::Staged;
use super::{Refused, Target};
use crate::cli::ConvertOptions;
use crate::sample::{KEY, LABEL, Sample, number};

struct Csv(Writer<Staged>);

/// A table of text.
pub fn create_table(options: &ConvertOptions) -> Table {
    let path = options.dst.clone();
    Table::new(Rules { text_alone: Some("csv"), ..Rules::default() }, move |columns| {
        let tabs = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tsv"));
        let mut writer =
            WriterBuilder::new().delimiter(if tabs { b'\t' } else { b',' }).from_writer(Staged::create(&path)?);
        writer.write_record(columns.iter().map(|column| &column.name))?;
        Ok(Box::new(Csv(writer)))
    })
}

impl TableFile for Csv {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()> {
        for sample in samples {
            self.0.write_record(columns.iter().map(|column| column.of(sample).unwrap_or_default()))?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.into_inner().map_err(|error| anyhow!(error.to_string()))?.finish()
    }
}

/// A JSON object on every line.
pub struct JsonLines(Staged);

impl JsonLines {
    pub fn create(path: &Path) -> Result<Self> {
        Ok(Self(Staged::create(path)?))
    }
}

impl Target for JsonLines {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let object = object(&sample).map_err(Refused::Sample)?;
        let written = writeln!(self.0, "{}", Value::Object(object));
        written.context("cannot write").map_err(Refused::All)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.finish()
    }
}

fn object(sample: &Sample) -> Result<Map<String, Value>> {
    Rules { text_alone: Some("jsonl"), json: true, ..Rules::default() }.check(None, sample)?;
    let mut object = Map::new();
    object.insert(KEY.to_owned(), Value::String(sample.key.clone()));
    for (name, content) in &sample.fields {
        let text = std::str::from_utf8(content)?;
        // `box.json` is the column `box`, unless the sample has both.
        let stem = name.strip_suffix(".json").filter(|stem| !sample.fields.iter().any(|(name, _)| name == stem));
        let parsed =
            || serde_json::from_str(text).with_context(|| format!("{}: field {name:?} is no JSON", sample.key));
        let (column, value) = match (name.as_str(), stem) {
            ("json", _) => ("json", parsed()?),
            (_, Some(stem)) => (stem, parsed()?),
            (LABEL, _) => (LABEL, number(content).map_or_else(|| text.into(), Value::from)),
            (name, _) => (name, text.into()),
        };
        object.insert(column.to_owned(), value);
    }
    Ok(object)
}
