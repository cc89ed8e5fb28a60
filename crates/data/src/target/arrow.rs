//! An Arrow file.

use std::sync::Arc;

use anyhow::Result;
use arrow_array::builder::{BinaryBuilder, Int64Builder, StringBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use overdrive_dataload::ArrowWriter;

use super::columns::{Column, Kind, Rules, Table, TableFile};
use crate::cli::ConvertOptions;
use crate::sample::{KEY, Sample, number};

struct File {
    writer: ArrowWriter,
    schema: SchemaRef,
}

pub fn create(options: &ConvertOptions) -> Table {
    let path = options.dst.clone();
    Table::new(Rules::default(), move |columns| {
        let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
        Ok(Box::new(File { writer: ArrowWriter::create(&path, schema.clone())?, schema }))
    })
}

pub fn field(column: &Column) -> Field {
    let kind = match column.kind {
        Kind::Number => DataType::Int64,
        Kind::Text => DataType::Utf8,
        Kind::Bytes => DataType::Binary,
    };
    Field::new(&column.name, kind, column.name != KEY)
}

impl TableFile for File {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()> {
        let arrays = columns.iter().map(|column| array(column, samples)).collect::<Result<_>>()?;
        Ok(self.writer.write(&RecordBatch::try_new(self.schema.clone(), arrays)?)?)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.writer.finish()?;
        Ok(())
    }
}

pub fn array(column: &Column, samples: &[Sample]) -> Result<ArrayRef> {
    Ok(match column.kind {
        Kind::Number => {
            let mut numbers = Int64Builder::new();
            samples.iter().for_each(|sample| numbers.append_option(column.of(sample).and_then(number)));
            Arc::new(numbers.finish())
        }
        Kind::Text => {
            let mut texts = StringBuilder::new();
            for sample in samples {
                texts.append_option(column.text_of(sample)?);
            }
            Arc::new(texts.finish())
        }
        Kind::Bytes => {
            let mut values = BinaryBuilder::new();
            samples.iter().for_each(|sample| values.append_option(column.of(sample)));
            Arc::new(values.finish())
        }
    })
}
