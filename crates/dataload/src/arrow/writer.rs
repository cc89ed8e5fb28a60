//! Writes record batches to an IPC file.

use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, SchemaRef};

use crate::DataError;
use crate::output::Output;

/// Writes record batches of one schema to a file in Arrow's IPC file format, which appears when it is complete.
///
/// ```
/// use arrow_array::{ArrayRef, Int64Array, RecordBatch};
/// use overdrive_dataload::{ArrowDataset, ArrowWriter, Dataset};
/// # use std::sync::Arc;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("labels.arrow");
///
/// let labels: ArrayRef = Arc::new(Int64Array::from(vec![3, 7]));
/// let batch = RecordBatch::try_from_iter([("label", labels)])?;
/// let mut writer = ArrowWriter::create(&path, batch.schema())?;
/// writer.write(&batch)?;
/// writer.finish()?;
/// assert_eq!(ArrowDataset::from_files([&path])?.get(1)?.int("label"), Some(7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Table::to_record_batch`](crate::Table::to_record_batch) makes record batches of tensors. Python reads the file
/// with `datasets.load_dataset("arrow", data_files=..)` and `pyarrow.ipc.open_file`. A row is read in any order,
/// whatever the size of its record batch; a record batch of some thousand rows keeps headers small beside the values.
///
/// # Source
/// `pyarrow.ipc.new_file`.
#[doc(alias = "new_file")]
pub struct ArrowWriter {
    path: PathBuf,
    schema: SchemaRef,
    writer: FileWriter<Output>,
}

impl ArrowWriter {
    /// Starts a file; until [`finish`](Self::finish) it has the name `<path>.part`.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a schema that cannot be written.
    pub fn create(path: impl AsRef<Path>, schema: SchemaRef) -> Result<Self, DataError> {
        let path = path.as_ref();
        let output = Output::create(path)?;
        let writer = FileWriter::try_new(output, &schema).map_err(refused(path))?;
        Ok(Self { path: path.to_owned(), schema, writer })
    }

    /// Appends a record batch.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a batch of another schema; [`DataError::Io`]; [`DataError::Layout`] for what
    /// the format cannot hold, a dictionary that changes.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<(), DataError> {
        let schema = batch.schema();
        if schema.fields() != self.schema.fields() {
            let fields =
                |schema: &SchemaRef| schema.fields().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(DataError::option("batch", format!("the fields {}", fields(&self.schema)), fields(&schema)));
        }
        self.writer.write(batch).map_err(refused(&self.path))
    }

    /// Completes the file, syncs it to disk, and renames it to its final path.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn finish(self) -> Result<PathBuf, DataError> {
        self.writer.into_inner().map_err(refused(&self.path))?.finish()
    }
}

fn refused(path: &Path) -> impl FnOnce(ArrowError) -> DataError {
    move |error| match error {
        ArrowError::IoError(_, error) => DataError::io(path)(error),
        error => DataError::layout(path, "record batches that the IPC format can hold", error.to_string()),
    }
}
