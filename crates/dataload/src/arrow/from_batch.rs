//! Converts record batches in memory to tensors, without a copy if nothing else shares their buffers.

use arrow_array::{Array as _, RecordBatch};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;

use super::columns::{ArrowColumns, refused};
use super::layout::{Leaf, leaves};
use super::node::{Node, arrays};
use super::read::{ReadError, Reader};
use crate::DataError;
use crate::columns::{Array, Leaf as _, OnNull, Selected, Table, Words};

/// A column, and the buffer whose first bytes are its values where those were not copied.
type Taken = (Array, Option<(Buffer, usize)>);

impl ArrowColumns {
    /// Converts the columns of a record batch, which has this schema, to tensors.
    ///
    /// The values of a column of numbers, or of lists of them, are not copied where none of them is null, they are stored
    /// as their [`Kind`](tch::Kind) is (not `bool`, `uint16` and `uint32`), and nothing else shares their memory: the
    /// batch is given away, no slice or clone of it is alive, and it was not read by `arrow-ipc`, whose arrays share one
    /// buffer. The tensor then owns the memory. Shared memory is copied, because a tensor can be written to.
    ///
    /// # Shapes
    /// `[N]` for numbers, `[N, M]` for lists of `M` numbers.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a batch of another schema, for a null without a [`fill_null`](Self::fill_null)
    /// or [`mask_null`](Self::mask_null), and for values that have no [`Kind`](tch::Kind).
    ///
    /// # Source
    /// `pyarrow.RecordBatch.to_tensor`, `torch.from_numpy`.
    pub fn table(&self, batch: RecordBatch) -> Result<Table, DataError> {
        self.check_schema(&batch)?;
        let rows = batch.num_rows();
        let (_, columns, _) = batch.into_parts();
        // Each array is dropped at once, so that its data alone owns the buffers.
        let data: Vec<ArrayData> = columns.into_iter().map(|column| column.to_data()).collect();
        let taken = self.selection.selected().iter().map(|selected| self.take(selected, &data, rows));
        let taken = taken.collect::<Result<Vec<Taken>, _>>()?;
        drop(data);
        let arrays = taken.into_iter().map(|(array, in_place)| match in_place {
            None => Ok(array),
            Some((buffer, bytes)) => {
                Ok(Array { values: Words::of_arrow(buffer, bytes, array.element.kind())?, ..array })
            }
        });
        let arrays = arrays.collect::<Result<_, DataError>>()?;
        Table::new(self.selection.names(), arrays, rows, false)
    }

    fn check_schema(&self, batch: &RecordBatch) -> Result<(), DataError> {
        if batch.schema_ref().fields() == self.of_fields() {
            return Ok(());
        }
        // Other differences do not matter: which fields may be null, and metadata.
        let (own, found) = (self.selection.leaves(), leaves(&batch.schema()));
        match own.len() == found.len() && own.iter().zip(&found).all(|(own, found)| own.is_like(found)) {
            true => Ok(()),
            false => {
                let names = |leaves: &[Leaf]| leaves.iter().map(Leaf::describe).collect::<Vec<_>>().join(", ");
                Err(DataError::option("batch", format!("the columns {}", names(own)), names(&found)))
            }
        }
    }

    fn take(&self, selected: &Selected, data: &[ArrayData], rows: usize) -> Result<Taken, DataError> {
        let leaf = self.selection.leaf(selected);
        let missing = || DataError::option("batch", format!("the arrays of column {:?}", selected.name), "fewer");
        let arrays = arrays(leaf, data).ok_or_else(missing)?;
        let nodes: Vec<Node<'_>> = arrays.iter().map(|array| Node::of(array)).collect();
        let dictionary = dictionary(leaf, &arrays).transpose().map_err(|bad| refused(&selected.name, bad))?;
        let reader = Reader { leaf, nulls: &selected.nulls, dictionary: dictionary.as_ref(), limit: u64::MAX };
        let (array, in_place) =
            reader.read_beside(&nodes, 0..rows, true).map_err(|bad| refused(&selected.name, bad))?;
        let buffer = || arrays.last()?.buffers().first().cloned();
        Ok((array, in_place.and_then(|bytes| Some((buffer()?, bytes)))))
    }
}

/// The dictionary of a column with these arrays, if it is dictionary-encoded.
fn dictionary(leaf: &Leaf, arrays: &[&ArrayData]) -> Option<Result<Array, ReadError>> {
    let of_values = leaf.of_dictionary()?;
    let [values] = arrays.last()?.child_data() else { return None };
    let reader = Reader { leaf: &of_values, nulls: &OnNull::Error, dictionary: None, limit: u64::MAX };
    Some(reader.read(&[Node::of(values)], 0..values.len()))
}
