//! A dataset of tensors in memory.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_ffi::Rows;
use tch::Tensor;

use crate::{Collate, DataError, DataLoader, DataLoaderBuilder, Dataset, FromDataset, TensorBatch};

/// Tensors of equal length: row `i` of each makes sample `i`.
///
/// [`loader`](Self::loader) gathers the rows of a whole batch at once, which is many times faster than stacking
/// samples. Tensors on a GPU are gathered there.
///
/// ```
/// use overdrive_dataload::TensorDataset;
/// use tch::{Device, Kind, Tensor};
///
/// let images = Tensor::zeros([100, 1, 28, 28], (Kind::Uint8, Device::Cpu));
/// let labels = Tensor::arange(100, (Kind::Int64, Device::Cpu));
/// let loader = TensorDataset::new((images, labels))?.loader().batch_size(32).shuffle(true).build()?;
/// for batch in &loader {
///     let (images, labels) = batch?;
///     assert_eq!(images.size()[0], labels.size()[0]);
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torch.utils.data.TensorDataset`
pub struct TensorDataset<T> {
    table: Arc<Table<T>>,
}

struct Table<T> {
    columns: Vec<Rows>,
    len: usize,
    /// A `T` whose tensors are empty: it has the structure from which `gather` builds a batch.
    structure: Mutex<T>,
}

impl<T> Clone for TensorDataset<T> {
    /// Shares the tensors.
    fn clone(&self) -> Self {
        Self { table: self.table.clone() }
    }
}

impl<T: TensorBatch + Send> TensorDataset<T> {
    /// A dataset of the rows of `tensors`: a tensor, or a tuple, vector or map of tensors. Contiguous tensors share
    /// their memory, others are copied.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when their lengths differ, or there is no tensor; [`DataError::Torch`] for a
    /// 0-dimensional, sparse or quantised tensor.
    pub fn new(tensors: T) -> Result<Self, DataError> {
        let mut columns = Vec::new();
        let structure = tensors.map_tensors(&mut |tensor| {
            columns.push(Rows::new(tensor)?);
            Ok(tensor.f_narrow(0, 0, 0)?)
        })?;
        let lens: Vec<usize> = columns.iter().map(Rows::len).collect();
        match lens.first() {
            Some(&len) if lens.iter().all(|&other| other == len) => {
                Ok(Self { table: Arc::new(Table { columns, len, structure: Mutex::new(structure) }) })
            }
            Some(_) => Err(DataError::option("tensors", "one length for all", format!("{lens:?}"))),
            None => Err(DataError::option("tensors", "at least one tensor", 0)),
        }
    }

    /// A builder of a loader over these rows. It gathers whole batches at once, so workers help only where rows are
    /// large.
    pub fn loader(self) -> DataLoaderBuilder<FromDataset<Self>, GatherRows<T>> {
        let gather = GatherRows { table: self.table.clone() };
        DataLoader::builder(self).collate(gather)
    }
}

impl<T: TensorBatch> Table<T> {
    fn gather(&self, rows: &[i64], pinned: bool) -> Result<T, DataError> {
        self.with(self.columns.iter().map(|column| Ok(column.gather(rows, pinned)?)))
    }

    /// The structure with these tensors in it.
    fn with(&self, columns: impl Iterator<Item = Result<Tensor, DataError>>) -> Result<T, DataError> {
        let columns: Vec<Tensor> = columns.collect::<Result<_, _>>()?;
        let mut next = columns.iter();
        let structure = self.structure.lock().unwrap_or_else(PoisonError::into_inner);
        structure.map_tensors(&mut |_| next.next().map(Tensor::shallow_clone).ok_or(DataError::EmptyBatch))
    }
}

impl<T: TensorBatch + Send> Dataset for TensorDataset<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.table.len
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        DataError::check_index(index, self.table.len)?;
        let row = self.table.gather(&[index as i64], false)?;
        row.map_tensors(&mut |tensor| Ok(tensor.f_squeeze_dim(0)?))
    }
}

/// Gathers the rows of a batch from a [`TensorDataset`] at once; made by [`TensorDataset::loader`].
///
/// # Shapes
/// Each tensor `[L, ..]` gives `[N, ..]`.
pub struct GatherRows<T> {
    table: Arc<Table<T>>,
}

impl<T: TensorBatch + Send> Collate<T> for GatherRows<T> {
    type Batch = T;

    fn collate(&self, rows: Vec<T>) -> Result<T, DataError> {
        let mut columns = vec![Vec::with_capacity(rows.len()); self.table.columns.len()];
        for row in &rows {
            let mut columns = columns.iter_mut();
            row.visit_tensors(&mut |tensor| columns.next().into_iter().for_each(|column| column.push(tensor)));
        }
        self.table.with(columns.iter().map(|column| Ok(Tensor::f_stack(column, 0)?)))
    }

    fn collate_from(&self, samples: &mut crate::BatchSamples<'_, T>) -> Result<T, DataError> {
        self.table.gather(&samples.indices()?, samples.pinned())
    }

    fn reads_samples(&self) -> bool {
        false
    }
}

impl<T> fmt::Debug for TensorDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorDataset").field("columns", &self.table.columns).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn numbers(len: i64) -> Tensor {
        Tensor::arange(len, (Kind::Int64, Device::Cpu))
    }

    #[test]
    fn rows_and_batches_keep_the_structure() -> Result<(), DataError> {
        let squares = numbers(10) * numbers(10);
        let data = TensorDataset::new((numbers(10), vec![squares.view([10, 1])]))?;
        let (number, rest) = data.get(7)?;
        assert_eq!((number.size(), number.int64_value(&[])), (vec![], 7));
        assert_eq!((rest[0].size(), rest[0].int64_value(&[0])), (vec![1], 49));
        assert!(matches!(data.get(10), Err(DataError::IndexOutOfRange { index: 10, len: 10 })));
        for workers in [0, 2] {
            let loader = data.clone().loader().batch_size(4).shuffle(true).num_workers(workers).build()?;
            let batches: Vec<_> = loader.iter().collect::<Result<_, _>>()?;
            assert_eq!(batches[2].1[0].size(), [2, 1]);
            let mut seen: Vec<i64> = batches.iter().flat_map(|(n, _)| Vec::<i64>::try_from(n).unwrap()).collect();
            assert!(batches.iter().all(|(n, rest)| (n * n).equal(&rest[0].view(-1))));
            seen.sort_unstable();
            assert_eq!(seen, (0..10).collect::<Vec<_>>());
        }
        Ok(())
    }

    #[test]
    fn different_lengths_are_refused() {
        let error = TensorDataset::new((numbers(3), numbers(4))).unwrap_err().to_string();
        assert_eq!(error, "tensors: expected one length for all, found [3, 4]");
        assert!(TensorDataset::new(Vec::<Tensor>::new()).is_err());
        assert!(TensorDataset::new(Tensor::from(1_i64)).is_err());
    }

    #[test]
    fn tensors_that_are_not_plain_numbers_are_refused() {
        let dense = Tensor::from_slice(&[1.0_f32, 0.0, 2.0]);
        let refused = |tensor: Tensor| match TensorDataset::new((numbers(3), tensor)) {
            Err(DataError::Torch(error)) => error.to_string(),
            other => panic!("expected an error, got {}", other.is_ok()),
        };
        assert!(refused(dense.to_sparse_sparse_dim(1)).contains("to_dense"));
        assert!(refused(dense.quantize_per_tensor(0.5, 0, Kind::QUInt8)).contains("dequantize"));
    }
}
