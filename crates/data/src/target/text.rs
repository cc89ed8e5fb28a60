//! Lines of JSON, and tables of comma-separated values.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use csv::{Writer, WriterBuilder};
use serde_json::value::RawValue;

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
        let written = writeln!(self.0, "{object}");
        written.context("cannot write").map_err(Refused::All)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.finish()
    }
}

/// The object of a sample, whose JSON stays as it is written, but for line breaks.
fn object(sample: &Sample) -> Result<String> {
    Rules { text_alone: Some("jsonl"), json: true, ..Rules::default() }.check(None, sample)?;
    let quoted = |text: &str| serde_json::to_string(text);
    let mut object = format!("{{{}:{}", quoted(KEY)?, quoted(&sample.key)?);
    for (name, content) in &sample.fields {
        let text = std::str::from_utf8(content)?;
        let value = match name == "json" || name.ends_with(".json") {
            true => json(text).with_context(|| format!("{}: field {name:?}", sample.key))?,
            false if name == LABEL && number(content).is_some() => text.to_owned(),
            false => quoted(text)?,
        };
        let column = if value.starts_with(['[', '{']) { column(name, sample) } else { name };
        write!(object, ",{}:{value}", quoted(column)?)?;
    }
    Ok(object + "}")
}

/// JSON on one line: there are no line breaks in its texts, and between its parts they mean nothing.
fn json(text: &str) -> Result<String> {
    let json: &RawValue = serde_json::from_str(text).context("is no JSON")?;
    ensure!(json.get() != "null", "is null, which in jsonl stands for a field that is not there");
    Ok(json.get().replace(['\n', '\r'], ""))
}

/// `box.json` with a list or an object is the column `box`, unless the sample has both, or `box` would be read otherwise.
fn column<'a>(name: &'a str, sample: &Sample) -> &'a str {
    let stem = name.strip_suffix(".json").filter(|stem| {
        let taken = sample.get(stem).is_some() || [KEY, "json", ""].contains(stem);
        !taken && !stem.ends_with(".json")
    });
    stem.unwrap_or(name)
}
