//! Tensors in page-locked host memory, and in the memory of a vector.

use std::ffi::c_void;
use std::{ptr, slice};

use tch::kind::Element;
use tch::{Kind, Tensor};

use crate::error::{Error, check};
use crate::host_buffer::are_bools;
use crate::kind::to_scalar_type;
use crate::raw;

/// An uninitialised tensor in page-locked host memory, from which copies to the GPU can overlap with the computation.
///
/// # Shapes
/// `shape`, row-major.
///
/// # Errors
/// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) or `Other` without a CUDA device; `OutOfMemory` when no pages are left
/// to lock; `Other` for a negative size.
///
/// # Syncs
/// A new block may wait for the driver; a block that the caching allocator reuses does not.
///
/// # Source
/// `torch.empty(.., pin_memory=True)`
pub fn empty_pinned(shape: &[i64], kind: Kind) -> Result<Tensor, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: the shape lives through the call; on success `out` is a tensor that we own.
    check(|err| unsafe { raw::od_empty_pinned(shape.as_ptr(), shape.len(), to_scalar_type(kind), &mut out, err) })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// A tensor's storage: the memory that it shares with its views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Tensors that share the storage have the same one. For a tensor on a GPU it is an address of the GPU's memory, which
    /// the host cannot read.
    pub address: usize,
    /// Its size.
    pub bytes: usize,
}

/// The storage of a tensor.
///
/// # Errors
/// For a tensor without memory of its own, such as a sparse one.
///
/// # Source
/// `torch.Tensor.untyped_storage`
pub fn storage(tensor: &Tensor) -> Result<Storage, Error> {
    let raw::Storage { data, bytes, .. } = storage_of(tensor)?;
    Ok(Storage { address: data.addr(), bytes })
}

/// The storage of a tensor: its address and size, and how many tensors share it.
///
/// # Errors
/// For a tensor without memory of its own, such as a sparse one.
pub(crate) fn storage_of(tensor: &Tensor) -> Result<raw::Storage, Error> {
    let mut storage = raw::Storage { owners: 0, data: ptr::null_mut(), bytes: 0 };
    // SAFETY: the tensor and the out-parameter live through the call.
    check(|err| unsafe { raw::od_storage_state(tensor.as_ptr(), &mut storage, err) })?;
    Ok(storage)
}

/// A tensor in the memory of a vector, without a copy.
///
/// The vector's bytes are read as `kind`, in the machine's byte order. The vector may be longer than the tensor needs.
///
/// # Shapes
/// `shape`, row-major.
///
/// # Errors
/// `Other` for a negative size, for more elements than the vector has bytes for, for a vector that is not aligned for
/// `kind`, and for `Kind::Bool` when a byte is neither 0 nor 1.
///
/// # Source
/// `torch.from_numpy`, which shares the memory; here the tensor owns it from then on.
#[doc(alias = "from_blob")]
pub fn tensor_from_vec<T: Element + Send + 'static>(
    values: Vec<T>,
    kind: Kind,
    shape: &[i64],
) -> Result<Tensor, Error> {
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
    let given = size_of_val(values.as_slice());
    if bytes.is_none_or(|bytes| bytes > given) {
        return Err(Error::refused(format!("a tensor of {shape:?} and {kind:?} does not fit into {given} bytes")));
    }
    // A complex number has the alignment of its parts.
    let alignment = kind.elt_size_in_bytes().min(align_of::<f64>());
    if bytes != Some(0) && !values.as_ptr().addr().is_multiple_of(alignment) {
        return Err(Error::refused(format!("the vector should be aligned to {alignment} bytes, as {kind:?} needs")));
    }
    if kind == Kind::Bool && T::KIND != Kind::Bool {
        // SAFETY: elements are plain numbers without padding, and `bytes` of them are there.
        let bytes = unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes.unwrap_or(0)) };
        if !are_bools(bytes) {
            return Err(Error::refused("for Kind::Bool every byte should be 0 or 1"));
        }
    }

    let mut owner = Box::new(values);
    let data = owner.as_mut_ptr().cast::<c_void>();
    let owner = Box::into_raw(owner).cast::<c_void>();
    let mut out = ptr::null_mut();
    // SAFETY: the memory at `data` lives until `drop_vector` is called with its owner, which happens once, on
    // success and on failure; it holds as many bytes as the tensor has, is aligned for it and is initialised, since
    // elements have no padding. The shape lives through the call; on success `out` is a tensor that we own.
    check(|err| unsafe {
        let (shape, n_dims) = (shape.as_ptr(), shape.len());
        raw::od_tensor_from_memory(data, shape, n_dims, to_scalar_type(kind), owner, drop_vector::<T>, &mut out, err)
    })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// A panic must not unwind into C++. Freeing a vector of plain numbers cannot panic, so nothing is caught here.
extern "C" fn drop_vector<T: Element>(owner: *mut c_void) {
    // SAFETY: `owner` came out of `Box::into_raw` above as a `Vec<T>`, and is passed here once.
    drop(unsafe { Box::from_raw(owner.cast::<Vec<T>>()) });
}
