//! Tensors in page-locked host memory, and in memory that something else has allocated.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

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

/// Whether a tensor is contiguous, and has its memory for itself: no view shares it.
///
/// # Errors
/// For a tensor without memory of its own, such as a sparse one.
pub fn is_alone(tensor: &Tensor) -> Result<bool, Error> {
    Ok(storage_of(tensor)?.owners == 1 && tensor.is_contiguous())
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
    let mut values = values;
    let elements = NonNull::from(values.as_mut_slice());
    let data = NonNull::slice_from_raw_parts(elements.cast(), elements.len() * size_of::<T>());
    // SAFETY: the vector, which nobody else can reach, keeps its memory where it is until it is dropped. Elements are
    // plain numbers without padding, so that all bytes are initialised.
    unsafe { tensor_from_memory(data, T::KIND == Kind::Bool, Box::into_raw(Box::new(values)), kind, shape) }
}

/// A tensor in the memory of any owner of bytes, without a copy: in a buffer of another library, for example, which is
/// dropped with the tensor's storage.
///
/// The owner lends its bytes for writing as well, because a tensor can be written to. So memory that is shared with
/// others cannot become a tensor.
///
/// ```
/// use overdrive_ffi::tensor_from_owner;
/// use tch::Kind;
///
/// let tensor = tensor_from_owner(vec![0, 1, 2, 3].into_boxed_slice(), Kind::Uint8, &[2, 2])?;
/// assert_eq!(tensor.int64_value(&[1, 0]), 2);
/// # Ok::<(), overdrive_ffi::Error>(())
/// ```
///
/// # Shapes
/// `shape`, row-major.
///
/// # Errors
/// As [`tensor_from_vec`].
///
/// # Source
/// `torch.frombuffer` of a writable buffer.
#[doc(alias = "frombuffer")]
pub fn tensor_from_owner<O: AsMut<[u8]> + Send + 'static>(
    owner: O,
    kind: Kind,
    shape: &[i64],
) -> Result<Tensor, Error> {
    let owner = Box::into_raw(Box::new(owner));
    // SAFETY: the pointer is that of a live box, which nobody else has.
    let data = NonNull::from(unsafe { &mut *owner }.as_mut());
    // SAFETY: the owner stays where it is until it is dropped, and nobody else can reach it meanwhile. So the exclusive
    // borrow above, and with it the bytes that are lent, last as long.
    unsafe { tensor_from_memory(data, false, owner, kind, shape) }
}

/// A tensor in memory that belongs to `owner`.
///
/// # Safety
/// `owner` comes out of `Box::into_raw`. Until it is dropped, on whatever thread, `data` is initialised, valid for
/// reads and writes and reached by nobody else. Where `bools`, every byte is 0 or 1.
unsafe fn tensor_from_memory<O: Send + 'static>(
    data: NonNull<[u8]>,
    bools: bool,
    owner: *mut O,
    kind: Kind,
    shape: &[i64],
) -> Result<Tensor, Error> {
    let owner = owner.cast::<c_void>();
    // SAFETY: the caller says so.
    if let Err(error) = check_memory(unsafe { data.as_ref() }, bools, kind, shape) {
        drop_owner::<O>(owner);
        return Err(error);
    }
    let mut out = ptr::null_mut();
    // SAFETY: the memory at `data` lives until `drop_owner` is called with its owner, which happens once, on success
    // and on failure; it holds as many bytes as the tensor has, is aligned for it and is initialised. The shape lives
    // through the call; on success `out` is a tensor that we own.
    check(|err| unsafe {
        let (data, shape, n_dims) = (data.cast::<c_void>().as_ptr(), shape.as_ptr(), shape.len());
        raw::od_tensor_from_memory(data, shape, n_dims, to_scalar_type(kind), owner, drop_owner::<O>, &mut out, err)
    })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// Checks that memory is large enough for a tensor, aligned for it, and holds values of its kind.
fn check_memory(data: &[u8], bools: bool, kind: Kind, shape: &[i64]) -> Result<(), Error> {
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
    let Some(bytes) = bytes.and_then(|bytes| data.get(..bytes)) else {
        let given = data.len();
        return Err(Error::refused(format!("a tensor of {shape:?} and {kind:?} does not fit into {given} bytes")));
    };
    // A complex number has the alignment of its parts.
    let alignment = kind.elt_size_in_bytes().min(align_of::<f64>());
    if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(alignment) {
        return Err(Error::refused(format!("the memory should be aligned to {alignment} bytes, as {kind:?} needs")));
    }
    if kind == Kind::Bool && !bools && !are_bools(bytes) {
        return Err(Error::refused("for Kind::Bool every byte should be 0 or 1"));
    }
    Ok(())
}

/// A panic must not unwind into C++: it ends the process, as one in a destructor does.
extern "C" fn drop_owner<O>(owner: *mut c_void) {
    // SAFETY: `owner` came out of `Box::into_raw` above as an `O`, and is passed here once.
    drop(unsafe { Box::from_raw(owner.cast::<O>()) });
}
