//! An Arrow file with a column for the key and one for each field.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use arrow_array::builder::{BinaryBuilder, Int64Builder, StringBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use overdrive_dataload::ArrowWriter;

use super::{Refused, Target};
use crate::cli::ConvertOptions;
use crate::sample::{KEY, LABEL, Sample, number};

/// The first record batch's samples decide which columns there are.
const BATCH_SAMPLES: usize = 1000;
const BATCH_BYTES: usize = 1 << 26;
/// Fields of text, beside the label, which is a number where it can be.
const TEXTS: [&str; 2] = ["json", "txt"];

pub struct Table {
    path: PathBuf,
    writer: Option<ArrowWriter>,
    schema: Option<SchemaRef>,
    samples: Vec<Sample>,
    bytes: usize,
}

impl Table {
    pub fn create(options: &ConvertOptions) -> Self {
        Self { path: options.dst.clone(), writer: None, schema: None, samples: Vec::new(), bytes: 0 }
    }

    fn flush(&mut self) -> Result<()> {
        let samples = std::mem::take(&mut self.samples);
        self.bytes = 0;
        let schema = self.schema.get_or_insert_with(|| Arc::new(schema_of(&samples))).clone();
        let columns = schema.fields().iter().map(|field| column(field, &samples));
        let batch = RecordBatch::try_new(schema.clone(), columns.collect::<Result<_>>()?)?;
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => self.writer.insert(ArrowWriter::create(&self.path, schema)?),
        };
        Ok(writer.write(&batch)?)
    }
}

impl Target for Table {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        check(self.schema.as_deref(), &sample).map_err(Refused::Sample)?;
        self.bytes += sample.bytes();
        self.samples.push(sample);
        if self.samples.len() == BATCH_SAMPLES || self.bytes >= BATCH_BYTES {
            self.flush().map_err(Refused::All)?;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if !self.samples.is_empty() {
            self.flush()?;
        }
        self.writer.context("no sample was written")?.finish()?;
        Ok(())
    }
}

/// Checks that a sample fits the columns, where they are known.
fn check(schema: Option<&Schema>, sample: &Sample) -> Result<()> {
    let mut seen = BTreeSet::new();
    for (name, content) in &sample.fields {
        let bad = |problem: &str| anyhow!("{}: field {name:?} {problem}", sample.key);
        if name == KEY || !seen.insert(name) {
            return Err(bad("is there twice"));
        }
        let kind = match schema.map(|schema| schema.field_with_name(name)) {
            None if TEXTS.contains(&&**name) => &DataType::Utf8,
            None => continue,
            Some(Err(_)) => return Err(bad("is not one of the first samples' fields, which are the columns")),
            Some(Ok(field)) => field.data_type(),
        };
        match kind {
            DataType::Utf8 if std::str::from_utf8(content).is_err() => return Err(bad("is not text")),
            DataType::Int64 if number(content).is_none() => return Err(bad("is no number, as the first samples' are")),
            _ => {}
        }
    }
    Ok(())
}

fn schema_of(samples: &[Sample]) -> Schema {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in samples.iter().flat_map(|sample| &sample.fields) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    let contents = |of: &str| {
        let of = of.to_owned();
        samples
            .iter()
            .flat_map(|sample| &sample.fields)
            .filter(move |(name, _)| *name == of)
            .map(|(_, content)| content)
    };
    let kind = |name: &str| match name {
        LABEL if contents(name).all(|content| number(content).is_some()) => DataType::Int64,
        name if TEXTS.contains(&name) => DataType::Utf8,
        _ => DataType::Binary,
    };
    let fields = names.into_iter().map(|name| Field::new(name, kind(name), true));
    Schema::new([Field::new(KEY, DataType::Utf8, false)].into_iter().chain(fields).collect::<Vec<_>>())
}

fn column(field: &Field, samples: &[Sample]) -> Result<ArrayRef> {
    let content = |sample: &Sample| match field.name() == KEY {
        true => Some(sample.key.clone().into_bytes()),
        false => sample.fields.iter().find(|(name, _)| name == field.name()).map(|(_, content)| content.clone()),
    };
    let contents = samples.iter().map(content);
    Ok(match field.data_type() {
        DataType::Int64 => {
            let mut numbers = Int64Builder::new();
            contents.for_each(|content| numbers.append_option(content.as_deref().and_then(number)));
            Arc::new(numbers.finish())
        }
        DataType::Utf8 => {
            let mut texts = StringBuilder::new();
            for content in contents {
                texts.append_option(content.map(String::from_utf8).transpose()?);
            }
            Arc::new(texts.finish())
        }
        _ => {
            let mut values = BinaryBuilder::new();
            contents.for_each(|content| values.append_option(content));
            Arc::new(values.finish())
        }
    })
}
