//! Converts Parquet's physical types to the numbers that tensors hold.

use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{DataType, FixedLenByteArray};
use bytemuck::Pod;

use crate::columns::Element;

/// Processes the values of a column once their types are known.
pub(super) trait Consumer {
    type Output;

    /// Reads `reader`; each of its values becomes `per` values of `E`. `convert` returns the position of a value that
    /// is out of its type's range.
    fn consume<T, E>(
        self,
        reader: ColumnReaderImpl<T>,
        per: usize,
        convert: fn(&[T::T], &mut [E]) -> Option<usize>,
    ) -> Self::Output
    where
        T: DataType,
        E: Pod;
}

/// Calls `consumer` with the types of a column of numbers or fixed-length values; `None` when the column is not stored
/// as its schema says.
pub(super) fn dispatch<C: Consumer>(element: Element, reader: ColumnReader, consumer: C) -> Option<C::Output> {
    use ColumnReader::{
        BoolColumnReader, DoubleColumnReader, FixedLenByteArrayColumnReader, FloatColumnReader, Int32ColumnReader,
        Int64ColumnReader,
    };
    Some(match (element, reader) {
        (Element::Bool, BoolColumnReader(reader)) => consumer.consume(reader, 1, bools),
        (Element::Int8, Int32ColumnReader(reader)) => consumer.consume(reader, 1, narrow::<i8>),
        (Element::Int16, Int32ColumnReader(reader)) => consumer.consume(reader, 1, narrow::<i16>),
        (Element::Uint8, Int32ColumnReader(reader)) => consumer.consume(reader, 1, narrow::<u8>),
        (Element::Int32, Int32ColumnReader(reader)) => consumer.consume(reader, 1, same::<i32>),
        (Element::Uint16, Int32ColumnReader(reader)) => consumer.consume(reader, 1, uint16),
        (Element::Uint32, Int32ColumnReader(reader)) => consumer.consume(reader, 1, uint32),
        (Element::Int64, Int64ColumnReader(reader)) => consumer.consume(reader, 1, same::<i64>),
        (Element::Float, FloatColumnReader(reader)) => consumer.consume(reader, 1, same::<f32>),
        (Element::Double, DoubleColumnReader(reader)) => consumer.consume(reader, 1, same::<f64>),
        (Element::Half, FixedLenByteArrayColumnReader(reader)) => consumer.consume(reader, 2, fixed),
        (Element::Fixed(bytes), FixedLenByteArrayColumnReader(reader)) => consumer.consume(reader, bytes, fixed),
        _ => return None,
    })
}

fn same<T: Copy>(values: &[T], out: &mut [T]) -> Option<usize> {
    out.copy_from_slice(values);
    None
}

fn bools(values: &[bool], out: &mut [u8]) -> Option<usize> {
    out.iter_mut().zip(values).for_each(|(out, &value)| *out = value.into());
    None
}

fn narrow<E: TryFrom<i32>>(values: &[i32], out: &mut [E]) -> Option<usize> {
    for (position, (out, &value)) in out.iter_mut().zip(values).enumerate() {
        match E::try_from(value) {
            Ok(value) => *out = value,
            Err(_) => return Some(position),
        }
    }
    None
}

/// `uint16` as `i32`, which holds every value.
fn uint16(values: &[i32], out: &mut [i32]) -> Option<usize> {
    out.copy_from_slice(values);
    values.iter().position(|&value| u16::try_from(value).is_err())
}

/// The 32 bits of a `uint32` as `i64`, which holds every value.
fn uint32(values: &[i32], out: &mut [i64]) -> Option<usize> {
    out.iter_mut().zip(values).for_each(|(out, &value)| *out = (value as u32).into());
    None
}

fn fixed(values: &[FixedLenByteArray], out: &mut [u8]) -> Option<usize> {
    let width = out.len() / values.len().max(1);
    for (position, (out, value)) in out.chunks_exact_mut(width.max(1)).zip(values).enumerate() {
        match value.data() {
            bytes if bytes.len() == out.len() => out.copy_from_slice(bytes),
            _ => return Some(position),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_found() {
        let mut bytes = [0u8; 3];
        assert_eq!(narrow(&[0, 255, 7], &mut bytes), None);
        assert_eq!(
            (bytes, narrow(&[0, 256, 7], &mut [0u8; 3]), uint16(&[1, -1], &mut [0; 2])),
            ([0, 255, 7], Some(1), Some(1))
        );
        let mut wide = [0; 2];
        assert_eq!((uint32(&[-1, 5], &mut wide), wide), (None, [i64::from(u32::MAX), 5]));
    }
}
