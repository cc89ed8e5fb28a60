//! Converts tables to record batches.

use std::sync::Arc;

use arrow_array::{RecordBatch, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, MutableBuffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field, Schema};
use tch::{Kind, Tensor};

use crate::DataError;
use crate::columns::{Array, Column, Element, Table, mask_name};

impl Table {
    /// Converts the columns to a record batch in new memory. `texts` are the columns of strings; other columns of
    /// [`Bytes`](Column::Bytes) become binary values.
    ///
    /// Tensors become primitive arrays or fixed-size lists, and [`Ragged`](crate::Ragged) columns lists with 64-bit
    /// offsets. A column `name.is_null`, as [`mask_null`](crate::ArrowColumns::mask_null) and `ParquetDataset`'s method make it, becomes the nulls
    /// of the column `name`.
    ///
    /// ```
    /// use arrow_array::{ArrayRef, Float32Array, RecordBatch, StringArray};
    /// use overdrive_dataload::ArrowColumns;
    /// # use std::sync::Arc;
    ///
    /// let names: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
    /// let batch = RecordBatch::try_from_iter([("name", names)])?;
    /// let table = ArrowColumns::new(&batch.schema()).mask_null("name")?.table(batch)?;
    /// let back = table.to_record_batch(&["name"])?;
    /// assert_eq!((back.num_columns(), back.column(0).null_count()), (1, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a kind that Arrow does not have (`bfloat16`, complex numbers), a column of
    /// `texts` that does not exist or is not UTF-8, and tensors with another number of rows; [`DataError::Tensor`].
    ///
    /// # Syncs
    /// Waits for tensors on a GPU, and copies them to the host.
    ///
    /// # Source
    /// `pyarrow.RecordBatch.from_arrays`.
    pub fn to_record_batch(&self, texts: &[&str]) -> Result<RecordBatch, DataError> {
        if let Some(name) =
            texts.iter().find(|name| !matches!(self.get(name), Some(Column::Bytes(_) | Column::Ragged(_))))
        {
            return Err(DataError::option("texts", "names of columns of strings", format!("{name:?}")));
        }
        let mask_of = |name: &str| {
            let mask = mask_name(name);
            self.get(&mask).filter(|_| self.is_mask(&mask))
        };
        let (mut fields, mut arrays) = (Vec::new(), Vec::new());
        for (name, column) in self.columns().filter(|(name, _)| !self.is_mask(name)) {
            let refused = |error: ArrowError| DataError::option("column", format!("{name:?} as an array"), error);
            let data = match column {
                Column::Tensor(tensor) => of_tensor(tensor, name)?,
                Column::Ragged(ragged) => {
                    let (element, offsets, values) = ragged.parts();
                    of_lists(
                        element,
                        offsets,
                        bytes_of(&values.f_to_kind(element.kind())?)?.into(),
                        texts.contains(&name),
                    )
                    .map_err(refused)?
                }
                Column::Bytes(bytes) => {
                    let Array { element, offsets, values, .. } = &*bytes.0;
                    let bytes = Buffer::from(values.bytes());
                    of_lists(*element, offsets, bytes, texts.contains(&name)).map_err(refused)?
                }
            };
            let nulls = match mask_of(name) {
                Some(Column::Tensor(mask)) => {
                    let is_null = bytes_of(mask)?;
                    Some(NullBuffer::new(BooleanBuffer::collect_bool(is_null.len(), |row| is_null[row] == 0)))
                }
                _ => None,
            };
            let nullable = nulls.is_some();
            let data = data.into_builder().nulls(nulls).build().map_err(refused)?;
            fields.push(Field::new(name, data.data_type().clone(), nullable));
            arrays.push(make_array(data));
        }
        let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(self.rows()));
        let batch = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), arrays, &options);
        batch.map_err(|error| DataError::option("columns", format!("{} rows each", self.rows()), error))
    }
}

fn bytes_of(tensor: &Tensor) -> Result<MutableBuffer, DataError> {
    let elements = tensor.numel();
    let mut bytes = MutableBuffer::from_len_zeroed(elements * tensor.f_kind()?.elt_size_in_bytes());
    tensor.f_copy_data_u8(bytes.as_slice_mut(), elements)?;
    Ok(bytes)
}

fn of_tensor(tensor: &Tensor, name: &str) -> Result<ArrayData, DataError> {
    let refused = |error: ArrowError| DataError::option("column", format!("{name:?} as an array"), error);
    let kind = tensor.f_kind()?;
    let data_type = data_type(kind)
        .ok_or_else(|| DataError::option("column", format!("a kind of Arrow in {name:?}"), format!("{kind:?}")))?;
    let mut data = of_numbers(data_type, bytes_of(tensor)?.into(), tensor.numel()).map_err(refused)?;
    let sizes = tensor.size();
    for axis in (1..sizes.len()).rev() {
        let length = sizes[axis];
        let list =
            i32::try_from(length).map_err(|_| DataError::option("column", "lists of less than 2^31 values", length))?;
        let count = sizes[..axis].iter().product::<i64>() as usize;
        let item = Arc::new(Field::new("item", data.data_type().clone(), false));
        let lists = ArrayData::builder(DataType::FixedSizeList(item, list)).len(count).add_child_data(data);
        data = lists.build().map_err(refused)?;
    }
    Ok(data)
}

/// Numbers of a byte or more each, or bools.
fn of_numbers(data_type: DataType, bytes: Buffer, count: usize) -> Result<ArrayData, ArrowError> {
    let buffer = match data_type {
        DataType::Boolean => BooleanBuffer::collect_bool(count, |element| bytes[element] != 0).into_inner(),
        _ => bytes,
    };
    ArrayData::builder(data_type).len(count).add_buffer(buffer).build()
}

/// Lists, or strings and binary values.
fn of_lists(element: Element, offsets: &[Vec<i64>], bytes: Buffer, is_text: bool) -> Result<ArrayData, ArrowError> {
    let mut levels: Vec<&Vec<i64>> = offsets.iter().collect();
    let count = bytes.len() / element.bytes();
    let mut data = match element {
        Element::Bytes => {
            let ends = levels.pop().cloned().unwrap_or_else(|| vec![0]);
            let data_type = if is_text { DataType::LargeUtf8 } else { DataType::LargeBinary };
            let builder = ArrayData::builder(data_type).len(ends.len() - 1);
            builder.add_buffer(Buffer::from_vec(ends)).add_buffer(bytes).build()?
        }
        Element::Fixed(width) => {
            let width = i32::try_from(width).map_err(|error| ArrowError::InvalidArgumentError(error.to_string()))?;
            ArrayData::builder(DataType::FixedSizeBinary(width)).len(count).add_buffer(bytes).build()?
        }
        element => {
            let data_type = data_type(element.kind()).unwrap_or(DataType::UInt8);
            of_numbers(data_type, bytes, count)?
        }
    };
    for offsets in levels.into_iter().rev() {
        let item = Arc::new(Field::new("item", data.data_type().clone(), false));
        let lists = ArrayData::builder(DataType::LargeList(item)).len(offsets.len() - 1);
        data = lists.add_buffer(Buffer::from_vec(offsets.clone())).add_child_data(data).build()?;
    }
    Ok(data)
}

fn data_type(kind: Kind) -> Option<DataType> {
    Some(match kind {
        Kind::Bool => DataType::Boolean,
        Kind::Uint8 => DataType::UInt8,
        Kind::Int8 => DataType::Int8,
        Kind::Int16 => DataType::Int16,
        Kind::Int => DataType::Int32,
        Kind::Int64 => DataType::Int64,
        Kind::Half => DataType::Float16,
        Kind::Float => DataType::Float32,
        Kind::Double => DataType::Float64,
        _ => return None,
    })
}
