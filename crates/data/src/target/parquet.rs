//! A Parquet file, with a row group for every batch of samples.

use std::sync::Arc;

use anyhow::{Context, Result};
use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use super::columns::{Column, Kind, Rules, Table, TableFile};
use super::staged::Staged;
use crate::cli::ConvertOptions;
use crate::sample::{KEY, Sample, number};

struct File(SerializedFileWriter<Staged>);

pub fn create(options: &ConvertOptions) -> Table {
    let path = options.dst.clone();
    Table::new(Rules::default(), move |columns| {
        let field = |column: &Column| {
            let (physical, logical) = match column.kind {
                Kind::Number => (Physical::INT64, None),
                Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
                Kind::Bytes => (Physical::BYTE_ARRAY, None),
            };
            let repetition = if column.name == KEY { Repetition::REQUIRED } else { Repetition::OPTIONAL };
            let field = Type::primitive_type_builder(&column.name, physical);
            Ok(Arc::new(field.with_repetition(repetition).with_logical_type(logical).build()?))
        };
        let fields = columns.iter().map(field).collect::<Result<Vec<_>>>()?;
        let schema = Arc::new(Type::group_type_builder("schema").with_fields(fields).build()?);
        let properties = Arc::new(WriterProperties::builder().build());
        Ok(Box::new(File(SerializedFileWriter::new(Staged::create(&path)?, schema, properties)?)))
    })
}

impl TableFile for File {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()> {
        let mut group = self.0.next_row_group()?;
        for column in columns {
            let mut writer = group.next_column()?.context("as many columns as the schema has")?;
            let present = samples.iter().map(|sample| column.of(sample));
            let levels: Vec<i16> = present.clone().map(|content| i16::from(content.is_some())).collect();
            let levels = (column.name != KEY).then_some(levels.as_slice());
            match column.kind {
                Kind::Number => {
                    let numbers: Vec<i64> = present.flatten().filter_map(number).collect();
                    writer.typed::<Int64Type>().write_batch(&numbers, levels, None)?;
                }
                Kind::Text | Kind::Bytes => {
                    let values: Vec<ByteArray> = present.flatten().map(|content| content.to_vec().into()).collect();
                    writer.typed::<ByteArrayType>().write_batch(&values, levels, None)?;
                }
            }
            writer.close()?;
        }
        group.close()?;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.into_inner()?.finish()
    }
}
