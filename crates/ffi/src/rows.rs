//! Gathers rows of a tensor on any thread.

use std::fmt;
use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, check};
use crate::raw;
use crate::{Arg, LazyOp, upload};

const OTHER_LAYOUT: &str = "a sparse tensor or another layout, which `to_dense` converts";

static INDEX_SELECT: LazyOp = LazyOp::new("aten::index_select", "");

/// A tensor whose rows several threads can read at once.
///
/// ```
/// use overdrive_ffi::Rows;
/// use tch::Tensor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rows = Rows::new(&Tensor::from_slice(&[10_i64, 20, 30]))?;
/// assert_eq!(Vec::<i64>::try_from(rows.gather(&[2, 0, 2], false)?)?, [30, 10, 30]);
/// # Ok(())
/// # }
/// ```
pub struct Rows {
    tensor: Tensor,
    len: usize,
}

// SAFETY: the tensor is only read, and libtorch counts its references atomically.
unsafe impl Sync for Rows {}

impl Rows {
    /// The rows of `tensor` along its first dimension; shares its memory where it is contiguous.
    ///
    /// # Errors
    /// `Other` for an undefined tensor, one without dimensions, and one whose values are not stored row by row: a
    /// sparse or quantised one; `OutOfMemory` if a copy is needed.
    pub fn new(tensor: &Tensor) -> Result<Self, Error> {
        let shape = if tensor.defined() { tensor.size() } else { Vec::new() };
        let Some(&len) = shape.first() else {
            return Err(Error::refused("rows: a tensor with at least one dimension is needed".to_owned()));
        };
        let needed = |found: &str| {
            Error::refused(format!("rows: a dense tensor of plain numbers is needed, found {found} (size {shape:?})"))
        };
        if tensor.is_sparse() || tensor.is_mkldnn() {
            return Err(needed(OTHER_LAYOUT));
        }
        if let Ok(Kind::QInt8 | Kind::QUInt8 | Kind::QInt32) = tensor.f_kind() {
            return Err(needed("a quantised tensor, which `dequantize` converts"));
        }
        // Lazy conjugation and negation are only flags, which copied bytes would lose.
        let settled = tensor.f_resolve_conj().and_then(|tensor| tensor.f_resolve_neg()?.f_contiguous());
        let tensor = settled.map_err(|error| match is_compressed(tensor) {
            true => needed(OTHER_LAYOUT),
            false => Error::refused(error.to_string()),
        })?;
        Ok(Self { tensor: tensor.detach(), len: len as usize })
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that they are on.
    pub fn device(&self) -> Device {
        self.tensor.device()
    }

    /// A new tensor of the rows with these indices, which may repeat; page-locked when `pinned` and on the host.
    ///
    /// On the host, the calling thread copies the rows itself and does not use libtorch's thread pool.
    ///
    /// # Shapes
    /// `[rows.len(), ..]`
    ///
    /// # Errors
    /// `Other` for an index that is out of range; `OutOfMemory`; `Cuda`.
    ///
    /// # Syncs
    /// No.
    ///
    /// # Source
    /// `torch.index_select` along dimension 0
    pub fn gather(&self, rows: &[i64], pinned: bool) -> Result<Tensor, Error> {
        if self.device() != Device::Cpu {
            if let Some(row) = rows.iter().find(|&&row| row < 0 || row as usize >= self.len) {
                return Err(Error::refused(format!("row {row} is out of range for {} rows", self.len)));
            }
            let rows = upload(&Tensor::f_from_slice(rows)?, self.device())?;
            return INDEX_SELECT.tensor(&[Arg::Tensor(&self.tensor), Arg::Int(0), Arg::Tensor(&rows)]);
        }
        let mut out = ptr::null_mut();
        // SAFETY: tensor and indices live through the call; on success `out` is a tensor that we own.
        check(|err| unsafe {
            raw::od_gather_rows(self.tensor.as_ptr(), rows.as_ptr(), rows.len(), i32::from(pinned), &mut out, err)
        })?;
        // SAFETY: as above.
        Ok(unsafe { Tensor::from_ptr(out) })
    }

    /// The dtype of the rows.
    pub fn kind(&self) -> Kind {
        self.tensor.kind()
    }
}

/// Whether a tensor has a compressed sparse layout, which tch does not know: it then has row or column indices.
///
/// Only for error messages, because for a dense tensor libtorch makes an error with a stack trace, which is slow.
fn is_compressed(tensor: &Tensor) -> bool {
    tensor.f_crow_indices().is_ok() || tensor.f_ccol_indices().is_ok()
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rows {{ {:?} {:?} }}", self.tensor.kind(), self.tensor.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_index_select_for_every_layout() -> Result<(), Box<dyn std::error::Error>> {
        let base = Tensor::arange(60, (Kind::Int64, Device::Cpu)).view([5, 3, 4]);
        for tensor in [base.shallow_clone(), base.transpose(0, 2), base.to_kind(Kind::Half), base.narrow(0, 1, 3)] {
            let rows = Rows::new(&tensor)?;
            assert_eq!((rows.len() as i64, rows.kind()), (tensor.size()[0], tensor.kind()));
            let numbers = [2, 0, 0, 1];
            let expected = tensor.index_select(0, &Tensor::from_slice(&numbers));
            assert!(rows.gather(&numbers, false)?.equal(&expected));
            assert_eq!(rows.gather(&[], false)?.size()[0], 0);
        }
        assert!(Rows::new(&Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)))?.is_empty());
        Ok(())
    }

    #[test]
    fn a_lazy_conjugate_is_resolved_first() -> Result<(), Box<dyn std::error::Error>> {
        let complex = Tensor::view_as_complex(&Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]).view([2, 2]));
        let conjugate = complex.conj();
        let rows = Rows::new(&conjugate)?.gather(&[1], false)?;
        assert!(rows.equal(&conjugate.narrow(0, 1, 1).resolve_conj()));
        let imaginary = conjugate.imag();
        assert_eq!(Vec::<f32>::try_from(Rows::new(&imaginary)?.gather(&[0, 1], false)?)?, [-2.0, -4.0]);
        Ok(())
    }

    #[test]
    fn bad_rows_and_tensors_are_errors() {
        let rows = Rows::new(&Tensor::from_slice(&[1.0_f32, 2.0])).unwrap();
        assert!(rows.gather(&[2], false).unwrap_err().message().contains("row 2 is out of range for 2 rows"));
        assert!(rows.gather(&[-1], false).is_err());
        assert!(Rows::new(&Tensor::from(1.0_f32)).is_err());
        assert!(Rows::new(&Tensor::new()).is_err());
    }

    #[test]
    fn sparse_and_quantised_tensors_are_refused() -> Result<(), Box<dyn std::error::Error>> {
        let dense = Tensor::from_slice(&[1.0_f32, 0.0, 2.0, 3.0]).view([2, 2]);
        let layouts = [dense.f_to_sparse_sparse_dim(1)?, dense.f_to_sparse_csr(None)?, dense.f_to_sparse_csc(None)?];
        for tensor in &layouts {
            let message = Rows::new(tensor).unwrap_err().message().to_owned();
            assert!(message.contains("to_dense") && message.contains("[2, 2]"), "{message}");
        }
        let quantised = dense.f_quantize_per_tensor(0.5, 0, Kind::QInt8)?;
        let message = Rows::new(&quantised).unwrap_err().message().to_owned();
        assert!(message.contains("dequantize"), "{message}");
        assert_eq!(Rows::new(&layouts[0].f_to_dense(None::<Kind>, false)?)?.len(), 2);
        Ok(())
    }
}
