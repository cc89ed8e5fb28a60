//! A folder that Hugging Face's `load_from_disk` reads: a stream of record batches, and what `datasets` notes beside it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use arrow_array::{ArrayRef, RecordBatch, StringArray, StructArray};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::columns::{Column, Kind, Rules, Table, TableFile};
use super::{arrow, move_folder, staging_folder};
use crate::cli::ConvertOptions;
use crate::sample::{Sample, is_image};

/// As `save_to_disk` calls the only file of a dataset.
const DATA: &str = "data-00000-of-00001.arrow";

struct Dataset {
    path: PathBuf,
    staging: TempDir,
    features: Value,
    schema: SchemaRef,
    writer: StreamWriter<BufWriter<File>>,
    /// `datasets` tells datasets apart by it, and what it has computed of them.
    fingerprint: DefaultHasher,
}

pub fn create(options: &ConvertOptions, parent: &Path, name: &OsStr) -> Result<Table> {
    let path = options.dst.clone();
    let staging = staging_folder(parent, name)?;
    Ok(Table::new(Rules::default(), move |columns| {
        let features: Value = columns.iter().map(|column| (column.name.clone(), feature(column))).collect();
        let note = json!({ "info": { "features": features } }).to_string();
        let fields: Vec<Field> = columns.iter().map(field).collect();
        let schema = Arc::new(Schema::new_with_metadata(fields, [("huggingface".to_owned(), note)]));
        let file = staging.path().join(DATA);
        let file = File::create(&file).with_context(|| format!("cannot write {}", file.display()))?;
        let writer = StreamWriter::try_new(BufWriter::with_capacity(1 << 18, file), &schema)?;
        Ok(Box::new(Dataset { path, staging, features, schema, writer, fingerprint: DefaultHasher::new() }))
    }))
}

/// Whether `datasets` is told that a column has images.
fn has_images(column: &Column) -> bool {
    column.kind == Kind::Bytes && is_image(&column.name)
}

fn feature(column: &Column) -> Value {
    let dtype = match column.kind {
        Kind::Bytes if has_images(column) => return json!({ "_type": "Image" }),
        Kind::Number => "int64",
        Kind::Text => "string",
        Kind::Bytes => "binary",
    };
    json!({ "dtype": dtype, "_type": "Value" })
}

/// As `datasets` stores an image.
fn image_fields() -> Fields {
    [Field::new("bytes", DataType::Binary, true), Field::new("path", DataType::Utf8, true)].into_iter().collect()
}

fn field(column: &Column) -> Field {
    match has_images(column) {
        true => Field::new(&column.name, DataType::Struct(image_fields()), true),
        false => arrow::field(column),
    }
}

fn array(column: &Column, samples: &[Sample]) -> Result<ArrayRef> {
    let values = arrow::array(column, samples)?;
    if !has_images(column) {
        return Ok(values);
    }
    let (nulls, paths) = (values.nulls().cloned(), Arc::new(StringArray::new_null(samples.len())));
    Ok(Arc::new(StructArray::try_new(image_fields(), vec![values, paths], nulls)?))
}

impl TableFile for Dataset {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()> {
        samples.hash(&mut self.fingerprint);
        let arrays = columns.iter().map(|column| array(column, samples)).collect::<Result<_>>()?;
        Ok(self.writer.write(&RecordBatch::try_new(self.schema.clone(), arrays)?)?)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { path, staging, features, writer, fingerprint, .. } = *self;
        writer.into_inner()?.into_inner()?.sync_all()?;
        let info = json!({ "citation": "", "description": "", "features": features, "homepage": "", "license": "" });
        let state = json!({
            "_data_files": [{ "filename": DATA }],
            "_fingerprint": format!("{:016x}", fingerprint.finish()),
            "_format_columns": null,
            "_format_kwargs": {},
            "_format_type": null,
            "_output_all_columns": false,
            "_split": null,
        });
        for (name, content) in [("dataset_info.json", info), ("state.json", state)] {
            let file = staging.path().join(name);
            fs::write(&file, format!("{content:#}")).with_context(|| format!("cannot write {}", file.display()))?;
        }
        move_folder(staging, &path)
    }
}
