//! Lists of different lengths as tensors.

use std::sync::Arc;

use overdrive_ffi::{Arg, LazyOp, copy_ranges};
use tch::{Device, Kind, Tensor};

use super::array::Array;
use super::element::{Element, encode};
use super::words::Words;
use crate::{DataError, TensorBatch};

static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");

/// Lists of different lengths, stored together: all their values, and the offsets of each level of lists. Both are
/// tensors, which a loader copies to its device; the host knows the offsets as well, so that nothing waits for lengths.
///
/// Lists of strings are lists of lists of bytes. Values may have dimensions of their own, as the four numbers of a
/// bounding box do. Clones share their memory.
#[derive(Debug)]
pub struct Ragged {
    element: Element,
    /// The dimensions of one value; none for a number.
    item: Vec<i64>,
    rows: usize,
    /// The offsets of each level, outermost first.
    offsets: Arc<[Vec<i64>]>,
    values: Tensor,
    /// The offsets beside the values, where those are.
    starts: Vec<Tensor>,
}

impl Ragged {
    /// An array of at least one level of lists. The offsets are copied to pinned memory when `pinned`.
    pub(super) fn new(array: Array, pinned: bool) -> Result<Self, DataError> {
        let count = (array.values.bytes().len() / array.element.bytes().max(1)) as i64;
        Self::of_items(array, count, Vec::new(), pinned)
    }

    /// `count` values of the dimensions `item` in lists: the array's numbers, which are as many as these dimensions say.
    pub(crate) fn of_items(array: Array, count: i64, item: Vec<i64>, pinned: bool) -> Result<Self, DataError> {
        let Array { element, rows, offsets, values, .. } = array;
        let mut shape = vec![count];
        match element {
            Element::Fixed(bytes) => shape.push(bytes as i64),
            _ => shape.extend(&item),
        }
        let starts = offsets.iter().map(|offsets| {
            let bytes = bytemuck::cast_slice(offsets);
            let mut words = Words::with(bytes.len(), pinned)?;
            words.bytes_mut().copy_from_slice(bytes);
            words.into_tensor(Kind::Int64, &[offsets.len() as i64])
        });
        let starts = starts.collect::<Result<_, DataError>>()?;
        let values = values.into_tensor(element.kind(), &shape)?;
        Ok(Self { element, item, rows, offsets: offsets.into(), values, starts })
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of levels of lists: 1 for plain lists, 2 for lists of lists.
    pub fn lists(&self) -> usize {
        self.offsets.len()
    }

    /// The device that the values are on.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// The offsets of a level: where each list begins among its elements, and the end of the last one. Level 0 is the
    /// outermost. They are on the host, wherever the values are.
    ///
    /// With one level, row `i` has the values `offsets(0)[i]..offsets(0)[i + 1]`.
    pub fn offsets(&self, level: usize) -> Option<&[i64]> {
        self.offsets.get(level).map(Vec::as_slice)
    }

    /// The values of all rows, and the offsets of each level of lists, on the device of the column. They share its
    /// memory.
    ///
    /// # Shapes
    /// Values `[V]`, `[V, B]` for binary values of `B` bytes, `[V, ..]` for values with dimensions; offsets int64 `[L + 1]` for a level of `L` lists.
    ///
    /// # Errors
    /// None today.
    pub fn into_tensors(self) -> Result<(Tensor, Vec<Tensor>), DataError> {
        Ok((self.values, self.starts))
    }

    /// A tensor with a row for each list, padded with `value`, and the lengths of the lists, on the column's device.
    ///
    /// The rows are as long as the longest list, or `max_len` if given: longer lists are truncated, and their length is
    /// `max_len`.
    ///
    /// # Shapes
    /// `[N, max_len]` of the column's kind, or `[N, max_len, ..]` for values with dimensions, and int64 `[N]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for lists of lists and of binary values, for a `value` that the column's kind
    /// cannot hold, and for more than 2^40 bytes; [`DataError::Torch`]; [`DataError::Tensor`].
    ///
    /// # Syncs
    /// No.
    ///
    /// # Source
    /// `torch.nested.to_padded_tensor`, `torch.nn.utils.rnn.pad_sequence`.
    #[doc(alias = "pad_sequence")]
    pub fn to_padded(&self, value: f64, max_len: Option<usize>) -> Result<(Tensor, Tensor), DataError> {
        let [offsets] = &*self.offsets else {
            return Err(DataError::option("to_padded", "one level of lists", self.lists()));
        };
        let pad = encode(self.element, value)
            .ok_or_else(|| DataError::option("to_padded", format!("a value of {:?}", self.element), value))?;
        let pad = pad.repeat(self.item.iter().product::<i64>() as usize);
        let longest = || offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        let width = max_len.unwrap_or_else(longest);
        let bytes = width.saturating_mul(pad.len()).saturating_mul(self.rows.max(1));
        if bytes > 1 << 40 {
            let found = format!("{} rows of {width}", self.rows);
            return Err(DataError::option("max_len", "at most 2^40 bytes in total", found));
        }
        let is_plain = self.values.is_contiguous() && self.values.f_kind()? == self.element.kind();
        match self.device() {
            Device::Cpu if is_plain => self.padded_on_host(offsets, &pad, width),
            _ => self.padded_on_device(value, width as i64),
        }
    }

    /// Copies the lists one by one.
    fn padded_on_host(&self, offsets: &[i64], pad: &[u8], width: usize) -> Result<(Tensor, Tensor), DataError> {
        let row_bytes = width * pad.len();
        let lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]).min(width as i64));
        let lengths: Vec<i64> = lengths.collect();
        let mut padded = Words::new(row_bytes * self.rows)?;
        let rows = padded.bytes_mut().chunks_exact_mut(row_bytes.max(1));
        for (row, &length) in rows.zip(&lengths) {
            let rest = &mut row[length as usize * pad.len()..];
            rest.chunks_exact_mut(pad.len().max(1)).for_each(|place| place.copy_from_slice(pad));
        }
        let copies = offsets.iter().zip(&lengths).enumerate().map(|(row, (&start, &length))| {
            let start = start as usize * pad.len();
            (row * row_bytes, start..start + length as usize * pad.len())
        });
        copy_ranges(&self.values, padded.bytes_mut(), copies)?;
        let shape = [&[self.rows as i64, width as i64][..], &self.item].concat();
        let lengths = overdrive_ffi::tensor_from_vec(lengths, Kind::Int64, &shape[..1])?;
        Ok((padded.into_tensor(self.element.kind(), &shape)?, lengths))
    }

    /// Looks up each place among the values, in work for the device alone.
    fn padded_on_device(&self, value: f64, width: i64) -> Result<(Tensor, Tensor), DataError> {
        // `map_tensors` may have changed them.
        let (rows, kind, starts) = (self.rows as i64, self.values.f_kind()?, &self.starts[0]);
        if starts.f_kind()? != Kind::Int64 {
            return Err(DataError::option("to_padded", "offsets of kind Int64", format!("{:?}", starts.kind())));
        }
        let clamp_max = |tensor: &Tensor, most| CLAMP_MAX.tensor(&[Arg::Tensor(tensor), Arg::Int(most)]);
        let first = starts.f_narrow(0, 0, rows)?;
        let lengths = clamp_max(&starts.f_narrow(0, 1, rows)?.f_sub(&first)?, width)?;
        // Counted from 1.
        let ones = Tensor::f_ones([width], (Kind::Int64, self.device()))?;
        let column = ones.f_cumsum(0, Kind::Int64)?;
        let shape = [&[rows, width][..], &self.item].concat();
        let outside = column.f_gt_tensor(&lengths.f_unsqueeze(1)?)?;
        let outside = outside.f_view(&*[&[rows, width][..], &vec![1; self.item.len()]].concat())?;
        let padded = match self.values.size()[0] {
            0 => Tensor::f_zeros(&shape, (kind, self.device()))?,
            count => {
                let places = clamp_max(&first.f_unsqueeze(1)?.f_add(&column)?.f_sub(&ones)?, count - 1)?;
                self.values.f_index_select(0, &places.f_reshape([-1])?)?.f_view(&*shape)?
            }
        };
        let pad = if self.values.f_is_floating_point()? { Arg::Double(value) } else { Arg::Int(value as i64) };
        MASKED_FILL.call(&[Arg::Tensor(&padded), Arg::Tensor(&outside), pad])?;
        Ok((padded, lengths))
    }

    /// A tensor with a row for each list; all must have the same length. It shares the column's memory.
    ///
    /// # Shapes
    /// `[N, M]` of the column's kind, or `[N, M, ..]` for values with dimensions.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for lists of different lengths (with the first row that differs), and for lists of
    /// lists.
    ///
    /// # Syncs
    /// No.
    pub fn to_tensor(&self) -> Result<Tensor, DataError> {
        let offsets = match &*self.offsets {
            [offsets] if !matches!(self.element, Element::Fixed(_)) => offsets,
            _ => {
                return Err(DataError::option(
                    "to_tensor",
                    "one number list per row",
                    format!("{} lists", self.lists()),
                ));
            }
        };
        let length = uniform(offsets).map_err(|(row, length)| {
            DataError::option("to_tensor", "lists of one length", format!("one of {length} in row {row}"))
        })?;
        Ok(self.values.f_view(&*[&[self.rows as i64, length][..], &self.item].concat())?)
    }

    /// What the values are, and the offsets of each level with them.
    #[cfg(any(feature = "arrow", test))]
    pub(crate) fn parts(&self) -> (Element, &[Vec<i64>], &Tensor) {
        (self.element, &self.offsets, &self.values)
    }
}

/// The common length of all lists; otherwise the first list of another length, as (row, length).
pub(crate) fn uniform(offsets: &[i64]) -> Result<i64, (usize, i64)> {
    let mut lengths = offsets.windows(2).map(|pair| pair[1] - pair[0]).enumerate();
    let Some((_, first)) = lengths.next() else { return Ok(0) };
    lengths.find(|(_, length)| *length != first).map_or(Ok(first), Err)
}

impl Clone for Ragged {
    fn clone(&self) -> Self {
        let starts = self.starts.iter().map(Tensor::shallow_clone).collect();
        Self {
            item: self.item.clone(),
            offsets: self.offsets.clone(),
            values: self.values.shallow_clone(),
            starts,
            ..*self
        }
    }
}

impl TensorBatch for Ragged {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        let values = change(&self.values)?;
        let starts = self.starts.iter().map(change).collect::<Result<_, _>>()?;
        Ok(Self { item: self.item.clone(), offsets: self.offsets.clone(), values, starts, ..*self })
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        visit(&self.values);
        self.starts.iter().for_each(visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(lists: &[&[i16]]) -> Ragged {
        let (mut offsets, mut values) = (vec![0], Words::default());
        for list in lists {
            values.extend(2 * list.len()).unwrap().copy_from_slice(bytemuck::cast_slice(list));
            offsets.push(offsets[offsets.len() - 1] + list.len() as i64);
        }
        Ragged::new(Array::of_lists(Element::Int16, vec![offsets], values), false).unwrap()
    }

    /// With values of another kind, which are padded as on a device.
    fn widened(lists: &Ragged) -> Ragged {
        let widen =
            |tensor: &Tensor| tensor.f_to_kind(if tensor.kind() == Kind::Int16 { Kind::Float } else { Kind::Int64 });
        lists.map_tensors(&mut |tensor| Ok(widen(tensor)?)).unwrap()
    }

    #[test]
    fn lists_are_padded_in_one_way_everywhere() -> Result<(), DataError> {
        for rows in [&[&[1i16, 2, 3][..], &[], &[4]][..], &[&[], &[]], &[]] {
            let lists = lists(rows);
            for max_len in [None, Some(0), Some(2), Some(5)] {
                let longest = rows.iter().map(|list| list.len()).max().unwrap_or(0);
                let width = max_len.unwrap_or(longest);
                let row = |list: &&[i16]| (0..width).map(|at| list.get(at).map_or(-7.0, |&it| f64::from(it))).collect();
                let expected: Vec<f64> = rows.iter().map(row).collect::<Vec<Vec<f64>>>().concat();
                for lists in [&lists, &widened(&lists)] {
                    let (padded, lengths) = lists.to_padded(-7.0, max_len)?;
                    assert_eq!(padded.size(), [rows.len() as i64, width as i64]);
                    assert_eq!(Vec::<f64>::try_from(padded.view(-1).to_kind(Kind::Double))?, expected);
                    let expected: Vec<i64> = rows.iter().map(|list| list.len().min(width) as i64).collect();
                    assert_eq!(Vec::<i64>::try_from(lengths)?, expected);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn offsets_of_another_kind_are_refused_on_a_device() {
        let halves = lists(&[&[1, 2], &[3]]).map_tensors(&mut |tensor| Ok(tensor.f_to_kind(Kind::Half)?)).unwrap();
        let error = halves.to_padded(0.0, None).unwrap_err().to_string();
        assert!(error.contains("offsets of kind Int64"), "{error}");
    }
}
