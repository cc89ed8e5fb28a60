//! A folder of Mosaic's streaming.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::Result;
use overdrive_dataload::{MdsValue, MdsWriter};
use tempfile::TempDir;

use super::columns::{Column, Kind, Rules, Table, TableFile};
use super::{move_folder, staging_folder};
use crate::cli::ConvertOptions;
use crate::sample::{Sample, number};

struct Shards {
    path: std::path::PathBuf,
    writer: MdsWriter,
    staging: TempDir,
}

pub fn create(options: &ConvertOptions, parent: &Path, name: &OsStr) -> Result<Table> {
    let (path, bytes) = (options.dst.clone(), options.shard_size);
    let staging = staging_folder(parent, name)?;
    let rules = Rules { complete: Some("mds"), json: true, ..Rules::default() };
    Ok(Table::new(rules, move |columns| {
        let encodings: Vec<_> = columns.iter().map(|column| (column.name.as_str(), encoding(column))).collect();
        let writer = MdsWriter::create(staging.path(), &encodings)?;
        let writer = bytes
            .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
            .into_iter()
            .fold(writer, MdsWriter::shard_bytes);
        Ok(Box::new(Shards { path, writer, staging }))
    }))
}

/// Mosaic's name of how a column is stored.
fn encoding(column: &Column) -> &'static str {
    match (column.kind, column.name.as_str()) {
        (Kind::Number, _) => "int",
        (Kind::Text, "json") => "json",
        (Kind::Text, _) => "str",
        (Kind::Bytes, "jpg" | "jpeg") => "jpeg",
        (Kind::Bytes, "png") => "png",
        (Kind::Bytes, _) => "bytes",
    }
}

impl TableFile for Shards {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()> {
        for sample in samples {
            let value = |column: &Column| {
                Ok(match column.kind {
                    Kind::Number => MdsValue::Int(column.of(sample).and_then(number).unwrap_or_default()),
                    // The field `json` stays as it is written.
                    Kind::Text => MdsValue::Str(column_text(column, sample)?),
                    Kind::Bytes => MdsValue::Bytes(column.of(sample).unwrap_or_default()),
                })
            };
            self.writer.write(&columns.iter().map(value).collect::<Result<Vec<_>>>()?)?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { path, writer, staging } = *self;
        writer.finish()?;
        move_folder(staging, &path)
    }
}

fn column_text<'a>(column: &Column, sample: &'a Sample) -> Result<&'a str> {
    Ok(column.text_of(sample)?.unwrap_or_default())
}
