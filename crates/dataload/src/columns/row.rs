//! Single rows.

use std::sync::Arc;

use tch::Tensor;

use super::array::Array;
use super::element::Element;
use super::table::{Column, mask_name};
use crate::tensor_batch::footprint_of;
use crate::{DataError, Deferred};

/// One row of the selected columns.
#[derive(Debug)]
pub struct Row {
    values: Vec<(Arc<str>, Value)>,
}

/// One value of a row.
#[derive(Debug)]
#[non_exhaustive]
pub enum Value {
    /// An integer, or a bool as 0 or 1.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A string or a binary value.
    Bytes(Vec<u8>),
    /// A list of numbers `[N]`.
    Tensor(Tensor),
    /// Anything else: the column's values in this one row.
    Values(Column),
}

impl Row {
    /// A row of the columns with these names, each an array of one row.
    pub(crate) fn new(names: impl Iterator<Item = Arc<str>>, arrays: Vec<Array>) -> Result<Self, DataError> {
        let mut values = Vec::with_capacity(arrays.len());
        for (name, mut array) in names.zip(arrays) {
            let mask = array.mask.take().map(|mask| Ok::<_, DataError>((mask_name(&name).into(), value(*mask)?)));
            values.push((name, value(array)?));
            values.extend(mask.transpose()?);
        }
        Ok(Self { values })
    }

    /// The values with the names of their columns, in the selected order.
    pub fn values(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.values.iter().map(|(name, value)| (&**name, value))
    }

    /// The value of the column of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values().find(|(column, _)| *column == name).map(|(_, value)| value)
    }

    /// The value of a column of integers or bools.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// The value of a column of floating-point numbers.
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.get(name) {
            Some(Value::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// The value of a column of strings or binary values.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.get(name) {
            Some(Value::Bytes(value)) => Some(value),
            _ => None,
        }
    }

    /// The value of a column of lists of numbers.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        match self.get(name) {
            Some(Value::Tensor(value)) => Some(value),
            _ => None,
        }
    }

    /// The bytes of its strings, and of the numbers in its lists.
    pub(crate) fn bytes_of_values(&self) -> usize {
        let bytes = |value: &Value| match value {
            Value::Int(_) | Value::Float(_) => 0,
            Value::Bytes(bytes) => bytes.len(),
            Value::Tensor(tensor) => footprint_of(tensor).host,
            Value::Values(Column::Tensor(tensor)) => footprint_of(tensor).host,
            Value::Values(Column::Ragged(lists)) => footprint_of(lists).host,
            Value::Values(Column::Bytes(bytes)) => bytes.bytes(),
        };
        self.values.iter().map(|(_, value)| bytes(value)).sum()
    }

    /// This row of a shard, with its number there and the bytes of its strings and lists of numbers.
    pub(crate) fn numbered(self, number: u64) -> Deferred<Self> {
        let bytes = self.bytes_of_values();
        Deferred::ready(self).at("row", number).of_bytes(bytes)
    }

    /// The values with the names of their columns, owned.
    pub fn into_values(self) -> Vec<(Arc<str>, Value)> {
        self.values
    }
}

/// The value of an array of one row.
fn value(array: Array) -> Result<Value, DataError> {
    macro_rules! number {
        ($type:ty) => {
            bytemuck::pod_read_unaligned::<$type>(array.values.bytes())
        };
    }
    let plain = array.offsets.is_empty() && array.per_row.is_none();
    Ok(match array.element {
        Element::Bool | Element::Uint8 if plain => Value::Int(number!(u8).into()),
        Element::Int8 if plain => Value::Int(number!(i8).into()),
        Element::Int16 if plain => Value::Int(number!(i16).into()),
        Element::Int32 | Element::Uint16 if plain => Value::Int(number!(i32).into()),
        Element::Int64 | Element::Uint32 if plain => Value::Int(number!(i64)),
        Element::Half if plain => Value::Float(half::f16::from_bits(number!(u16)).into()),
        Element::Float if plain => Value::Float(number!(f32).into()),
        Element::Double if plain => Value::Float(number!(f64)),
        Element::Fixed(_) if plain => Value::Bytes(array.values.bytes().to_vec()),
        Element::Bytes if array.offsets.len() == 1 => Value::Bytes(array.values.bytes().to_vec()),
        Element::Bytes | Element::Fixed(_) => Value::Values(array.into_values(false)?),
        element if array.offsets.len() <= 1 => {
            let length = (array.values.bytes().len() / element.bytes()) as i64;
            Value::Tensor(array.values.into_tensor(element.kind(), &[length])?)
        }
        _ => Value::Values(array.into_values(false)?),
    })
}
