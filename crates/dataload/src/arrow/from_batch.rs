//! Converts record batches in memory to tensors, without a copy if nothing else shares their buffers.

use std::sync::Arc;

use arrow_array::{Array as _, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_data::ArrayData;
use tch::{Kind, Tensor};

use super::columns::{ArrowColumns, OnNull, Selected};
use super::layout::{Leaf, LevelKind, Stored, leaves};
use super::node::{arrays, nodes};
use super::read::Reader;
use crate::DataError;
use crate::columns::{Array, Column, Element, Table};
use crate::tensor::tensor_from_bytes;

/// A column of numbers whose memory may become a tensor, or columns that were copied.
enum Taken {
    InPlace { buffer: Buffer, kind: Kind, shape: Vec<i64> },
    Copied(Vec<(Arc<str>, Array)>),
}

/// Memory that belongs to one tensor.
struct Owned(MutableBuffer);

impl AsMut<[u8]> for Owned {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_slice_mut()
    }
}

impl ArrowColumns {
    /// Converts the columns of a record batch, which has this schema, to tensors.
    ///
    /// A column of numbers, or of lists of a fixed length of them, is not copied where it has no nulls, is stored as
    /// its [`Kind`] is (not `bool`, `uint16` and `uint32`), and nothing else shares its memory: the batch is given
    /// away, no slice or clone of it is alive, and it was not read by `arrow-ipc`, whose arrays share one buffer. The
    /// tensor then owns the memory. Shared memory is copied, because a tensor can be written to.
    ///
    /// # Shapes
    /// `[N]` for numbers, `[N, M]` for lists of `M` numbers.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a batch of another schema, for a null without a [`fill_null`](Self::fill_null)
    /// or [`mask_null`](Self::mask_null), and for values that have no [`Kind`].
    ///
    /// # Source
    /// `pyarrow.RecordBatch.to_tensor`, `torch.from_numpy`.
    pub fn table(&self, batch: RecordBatch) -> Result<Table, DataError> {
        self.check_schema(&batch)?;
        let rows = batch.num_rows();
        let (_, columns, _) = batch.into_parts();
        // Each array is dropped at once, so that its data alone owns the buffers.
        let data: Vec<ArrayData> = columns.into_iter().map(|column| column.to_data()).collect();
        let taken = self.selected().iter().map(|selected| self.take(selected, &data, rows));
        let taken = taken.collect::<Result<Vec<_>, _>>()?;
        drop(data);
        let mut columns = Vec::with_capacity(taken.len());
        for (selected, taken) in self.selected().iter().zip(taken) {
            match taken {
                Taken::InPlace { buffer, kind, shape } => {
                    columns.push((selected.name.clone(), Column::Tensor(tensor(buffer, kind, &shape)?)));
                    if let Some((name, mask)) = selected.empty_mask(rows)? {
                        columns.push((name, mask.into_values(false)?));
                    }
                }
                Taken::Copied(arrays) => {
                    for (name, array) in arrays {
                        columns.push((name, array.into_values(false)?));
                    }
                }
            }
        }
        Ok(Table::from_columns(columns, rows).with_masks(self.masks()))
    }

    fn check_schema(&self, batch: &RecordBatch) -> Result<(), DataError> {
        if batch.schema_ref().fields() == self.of_fields() {
            return Ok(());
        }
        // Other differences do not matter: which fields may be null, and metadata.
        let is_same = |own: &Leaf, other: &Leaf| own.field.name() == other.field.name() && own.levels == other.levels;
        let found = leaves(&batch.schema());
        let all_same = self.leaves().iter().zip(&found).all(|(own, other)| is_same(own, other));
        match self.leaves().len() == found.len() && all_same {
            true => Ok(()),
            false => {
                let names = |leaves: &[Leaf]| {
                    let described = leaves.iter().map(|leaf| format!("{} {:?}", leaf.field.name(), leaf.field.kind()));
                    described.collect::<Vec<_>>().join(", ")
                };
                Err(DataError::option("batch", format!("the columns {}", names(self.leaves())), names(&found)))
            }
        }
    }

    fn take(&self, selected: &Selected, data: &[ArrayData], rows: usize) -> Result<Taken, DataError> {
        let leaf = self.leaf(selected);
        if let Some(taken) = in_place(leaf, data, rows) {
            return Ok(taken);
        }
        let missing = || DataError::option("batch", format!("the arrays of column {:?}", selected.name), "fewer");
        let nodes = nodes(leaf, data).ok_or_else(missing)?;
        let dictionary = self.dictionary(selected, data)?;
        let read = selected.read(leaf, &nodes, 0..rows, dictionary.as_ref(), u64::MAX);
        read.map(Taken::Copied).map_err(|bad| selected.refused(bad))
    }

    /// The dictionary of a column, if it is dictionary-encoded.
    fn dictionary(&self, selected: &Selected, data: &[ArrayData]) -> Result<Option<Array>, DataError> {
        let leaf = self.leaf(selected);
        let values = arrays(leaf, data).and_then(|arrays| arrays.last().map(|codes| codes.child_data()));
        let (Some(of_values), Some(values @ [_])) = (leaf.of_dictionary(), values) else { return Ok(None) };
        let reader = Reader { leaf: &of_values, nulls: &OnNull::Error, dictionary: None, limit: u64::MAX };
        let nodes = nodes(&of_values, values).unwrap_or_default();
        let read = reader.read(&nodes, 0..values[0].len()).map_err(|bad| selected.refused(bad))?;
        Ok(Some(read.0))
    }
}

/// The buffer of a column that needs no copy, if its memory is not shared.
fn in_place(leaf: &Leaf, data: &[ArrayData], rows: usize) -> Option<Taken> {
    let Stored::Plain(element) = leaf.stored()? else { return None };
    if !leaf.is_flat || matches!(element, Element::Bool | Element::Uint16 | Element::Uint32) {
        return None;
    }
    let arrays = arrays(leaf, data)?;
    if arrays.iter().any(|array| array.offset() > 0 || array.null_count() > 0) {
        return None;
    }
    let mut shape = vec![rows as i64];
    let lengths = leaf.levels.iter().filter_map(|level| match level.kind {
        LevelKind::FixedList(length) => Some(length),
        _ => None,
    });
    let per_row = lengths.clone().try_fold(1usize, usize::checked_mul)?;
    if lengths.count() > 0 {
        shape.push(i64::try_from(per_row).ok()?);
    }
    if let Element::Fixed(bytes) = element {
        shape.push(*bytes as i64);
    }
    Some(Taken::InPlace { buffer: arrays.last()?.buffers().first()?.clone(), kind: element.kind(), shape })
}

fn tensor(buffer: Buffer, kind: Kind, shape: &[i64]) -> Result<Tensor, DataError> {
    let buffer = match buffer.as_ptr().addr().is_multiple_of(kind.elt_size_in_bytes()) {
        true => match buffer.into_mutable() {
            Ok(owned) => return Ok(overdrive_ffi::tensor_from_owner(Owned(owned), kind, shape)?),
            Err(shared) => shared,
        },
        false => buffer,
    };
    let bytes = shape.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
    let values = buffer.get(..bytes).ok_or_else(|| {
        DataError::option("batch", format!("a buffer of {bytes} bytes"), format!("one of {}", buffer.len()))
    })?;
    tensor_from_bytes(values, kind, shape)
}
