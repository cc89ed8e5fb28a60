//! Samples of finished batches in the memory of a device.

use std::sync::{Mutex, PoisonError};

use overdrive_ffi::{Arg, LazyOp, Rows, upload};
use tch::{Device, Tensor};

use crate::DataError;
use crate::loader::TensorOps;

static INDEX_COPY: LazyOp = LazyOp::new("aten::index_copy_", "");
static INDEX_SELECT: LazyOp = LazyOp::new("aten::index_select", "");

pub(crate) struct DeviceStore<B> {
    ops: TensorOps<B>,
    device: Device,
    len: usize,
    /// `None` before the first batch.
    stored: Mutex<Option<Stored<B>>>,
}

struct Stored<B> {
    /// A batch of zero samples, which gives `get` the batch's type.
    structure: B,
    /// One tensor for each tensor of a batch, with room for all samples of the dataset.
    columns: Vec<Tensor>,
    present: Vec<bool>,
}

impl<B> DeviceStore<B> {
    pub(crate) fn new(ops: TensorOps<B>, device: Device, len: usize) -> Self {
        Self { ops, device, len, stored: Mutex::new(None) }
    }

    /// The batch of these samples, when all of them are stored.
    pub(crate) fn get(&self, indices: &[usize]) -> Result<Option<B>, DataError> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Stored { structure, columns, present }) = &*stored else { return Ok(None) };
        if !indices.iter().all(|&index| present.get(index) == Some(&true)) {
            return Ok(None);
        }
        let rows = self.rows(indices)?;
        let mut columns = columns.iter();
        let batch = (self.ops.map)(structure, &mut |_| {
            let column = columns.next().ok_or(DataError::EmptyBatch)?;
            Ok(INDEX_SELECT.tensor(&[Arg::Tensor(column), Arg::Int(0), Arg::Tensor(&rows)])?)
        })?;
        Ok(Some(batch))
    }

    /// Keeps the samples of a batch, which the calling thread's current stream may read.
    pub(crate) fn put(&self, indices: &[usize], batch: &B) -> Result<(), DataError> {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let structure = stored.as_ref().map_or(batch, |stored| &stored.structure);
        if !(self.ops.has_structure_of)(structure, batch) {
            let expected = "batches of the same structure, of tensors alone: no numbers or strings, and no `HashMap`";
            let found = "another one (`TensorBatch::has_structure_of` is false)";
            return Err(DataError::option("cache(OnDevice)", expected, found));
        }
        let stored = match &mut *stored {
            Some(stored) => stored,
            none => none.insert(self.allocate(indices.len(), batch)?),
        };
        let rows = self.rows(indices)?;
        let mut columns = stored.columns.iter();
        (self.ops.map)(batch, &mut |tensor| {
            let column = columns.next().ok_or(DataError::EmptyBatch)?;
            let mut expected = column.size();
            expected[0] = indices.len() as i64;
            if tensor.size() != expected || tensor.kind() != column.kind() {
                let expected = format!("a {:?} tensor of shape {expected:?}, as in the batches before", column.kind());
                let found = format!("{:?} {:?}", tensor.kind(), tensor.size());
                return Err(DataError::option("cache(OnDevice)", expected, found));
            }
            let values = tensor.f_to_device(self.device)?;
            INDEX_COPY.call(&[Arg::Tensor(column), Arg::Int(0), Arg::Tensor(&rows), Arg::Tensor(&values)])?;
            Ok(tensor.shallow_clone())
        })?;
        for &index in indices {
            stored.present[index] = true;
        }
        Ok(())
    }

    fn allocate(&self, samples: usize, batch: &B) -> Result<Stored<B>, DataError> {
        let mut columns = Vec::new();
        let structure = (self.ops.map)(batch, &mut |tensor| {
            let mut shape = tensor.size();
            if shape.first() != Some(&(samples as i64)) {
                let expected = format!("tensors with the batch's {samples} samples along their first dimension");
                return Err(DataError::option("cache(OnDevice)", expected, format!("shape {shape:?}")));
            }
            // Refuses sparse and quantised tensors.
            Rows::new(tensor)?;
            shape[0] = self.len as i64;
            columns.push(Tensor::f_empty(&shape, (tensor.kind(), self.device))?);
            // Not a part of the tensor, whose memory it would keep.
            shape[0] = 0;
            Ok(Tensor::f_empty(shape, (tensor.kind(), self.device))?)
        })?;
        Ok(Stored { structure, columns, present: vec![false; self.len] })
    }

    fn rows(&self, indices: &[usize]) -> Result<Tensor, DataError> {
        let rows: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        Ok(upload(&Tensor::f_from_slice(&rows)?, self.device)?)
    }
}
