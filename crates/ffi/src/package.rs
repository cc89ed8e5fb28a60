//! Compiled steps, as AOTInductor packages them.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::{self, NonNull};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, check};
use crate::raw_record as raw;
use crate::tensor_list::TensorList;

/// Shape, strides, dtype and device of a tensor. Compiled code relies on these without a check of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// The size of each dimension.
    pub shape: Vec<i64>,
    /// The stride of each dimension, in elements.
    pub stride: Vec<i64>,
    /// The dtype.
    pub kind: Kind,
    /// The device.
    pub device: Device,
}

impl Form {
    /// The form of a tensor.
    ///
    /// # Errors
    /// When the tensor is undefined or has no strides (a sparse one), or its values are not those in its memory: it is
    /// negated or conjugated lazily.
    pub fn of(tensor: &Tensor) -> Result<Self, Error> {
        let why = match values(tensor) {
            raw::IN_MEMORY => {
                let (shape, stride) = (tensor.size(), tensor.stride());
                return Ok(Self { shape, stride, kind: tensor.f_kind()?, device: tensor.device() });
            }
            raw::UNDEFINED => return Err(Error::refused("the tensor is undefined")),
            raw::LAZY => "is negated or conjugated lazily: call `resolve_neg` or `resolve_conj`",
            _ => "is sparse or has no strides: make it dense",
        };
        Err(Error::refused(format!("a {:?} tensor of shape {:?} {why}", tensor.f_kind()?, tensor.size())))
    }

    /// Whether a tensor has this form.
    pub fn fits(&self, tensor: &Tensor) -> bool {
        values(tensor) == raw::IN_MEMORY
            && tensor.kind() == self.kind
            && tensor.device() == self.device
            && tensor.size() == self.shape
            && tensor.stride() == self.stride
    }
}

/// Whether a tensor's values lie in memory at its strides.
fn values(tensor: &Tensor) -> i32 {
    // SAFETY: the tensor is live.
    unsafe { raw::od_tensor_values(tensor.as_ptr()) }
}

/// Whether a tensor's values are the negatives or conjugates of those in its memory (`Tensor.is_neg`, `is_conj`).
pub fn is_lazy(tensor: &Tensor) -> bool {
    values(tensor) == raw::LAZY
}

/// Whether two tensors are parts of one allocation. A tensor without memory shares none.
pub fn share_memory(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both tensors are live.
    unsafe { raw::od_tensors_share_memory(one.as_ptr(), other.as_ptr()) != 0 }
}

/// The begin of the allocation that a tensor is a part of; 0 if it has none.
pub fn memory_address(tensor: &Tensor) -> usize {
    // SAFETY: the tensor is live, and the address is not read.
    unsafe { raw::od_tensor_memory(tensor.as_ptr()) as usize }
}

/// The address of a tensor's first element, to tell tensors apart; 0 if it has no memory. Nothing is accessed: memory on
/// which [`Arrivals`](crate::Arrivals) wait has one too, where tch's `data_ptr` panics.
pub fn data_address(tensor: &Tensor) -> usize {
    // SAFETY: the tensor is live, and the address is not read.
    unsafe { raw::od_tensor_address(tensor.as_ptr()) as usize }
}

/// Increments the tensor's version (`Tensor._version`), so that a backward pass that needs the values from before is an
/// error.
pub fn bump_version(tensor: &Tensor) {
    // SAFETY: the tensor is live.
    unsafe { raw::od_tensor_bump_version(tensor.as_ptr()) }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shape, stride, kind, device } = self;
        write!(f, "a {kind:?} tensor of shape {shape:?} and strides {stride:?} on {device:?}")
    }
}

/// A package made by AOTInductor (`torch._inductor.aoti_compile_and_package`), loaded into this process. It runs
/// without Python.
pub struct Package {
    handle: NonNull<raw::Package>,
    inputs: Vec<Form>,
    /// The inputs whose first dimension may have another size, the same for all.
    varying: Vec<usize>,
    /// The least size that they may have.
    least_size: i64,
}

/// The least size of a dimension that varies. A dimension of size 1 broadcasts, so a compiler makes other code for it.
pub const LEAST_SIZE: i64 = 2;

// SAFETY: the loader has no state of a thread, and `run` takes `&mut self`.
unsafe impl Send for Package {}

impl Package {
    /// Loads a package that was compiled for inputs of these forms. The first dimension of the `varying` ones may have
    /// any size from [`least_size`](Self::least_size), the same for all.
    ///
    /// A package is a shared library, and loading it runs its code, so it has to be a file that only this user or root
    /// can have written. It has to come from a compiler that was told these forms.
    ///
    /// # Errors
    /// When somebody else may have written it, it cannot be read or was not made for this libtorch, or there is no room
    /// to unpack it in the folder for temporary files; when `varying` names an input without dimensions.
    ///
    /// # Source
    /// `torch._inductor.aoti_load_package`
    pub fn load(path: &Path, inputs: Vec<Form>, varying: &[usize]) -> Result<Self, Error> {
        if let Some(place) = varying.iter().find(|&&place| inputs.get(place).is_none_or(|form| form.shape.is_empty())) {
            return Err(Error::refused(format!("input {place} has no first dimension that could vary")));
        }
        check_owner(path)?;
        let text = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::refused(format!("{} holds a zero byte", path.display())))?;
        let index = inputs.iter().find_map(|form| match form.device {
            Device::Cuda(index) => i32::try_from(index).ok(),
            _ => None,
        });
        let mut out = ptr::null_mut();
        // SAFETY: the text lives through the call; the code is the user's own.
        check(|err| unsafe { raw::od_package_load(text.as_ptr(), index.unwrap_or(-1), &mut out, err) })?;
        let handle = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no package"))?;
        let mut package = Self { handle, inputs, varying: varying.to_vec(), least_size: LEAST_SIZE };
        let mut least_size = 0;
        // SAFETY: the handle is live, and so is the out-parameter.
        check(|err| unsafe { raw::od_package_least_size(handle.as_ptr(), &mut least_size, err) })?;
        package.least_size = least_size.max(LEAST_SIZE);
        Ok(package)
    }

    /// The least size that varying dimensions may have: 2, or more if another dimension of the step, which depends on
    /// them, would otherwise be 1.
    pub fn least_size(&self) -> i64 {
        self.least_size
    }

    /// Runs it. Inputs that it updates are written in place; autograd does not notice unless the caller says so with
    /// [`bump_version`].
    ///
    /// # Errors
    /// When an input has another form than it was compiled for, and when the package fails.
    ///
    /// # Syncs
    /// No.
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        if inputs.len() != self.inputs.len() {
            let (found, expected) = (inputs.len(), self.inputs.len());
            return Err(Error::refused(format!("a compiled step got {found} inputs, but takes {expected}")));
        }
        self.set_size(inputs)?;
        if let Some(place) = self.inputs.iter().zip(inputs).position(|(form, input)| !form.fits(input)) {
            let form = &self.inputs[place];
            let found = Form::of(&inputs[place]).map_or_else(|error| error.to_string(), |form| form.to_string());
            return Err(Error::refused(format!("input {place} of a compiled step is {found}, but should be {form}")));
        }
        let inputs = TensorList::new(inputs)?;
        // SAFETY: both handles are live, and the inputs have the forms that the code relies on.
        TensorList::receive(|out, err| unsafe { raw::od_package_run(self.handle.as_ptr(), inputs.as_ptr(), out, err) })?
            .to_vec()
    }

    /// Takes the size of the varying inputs from the first of them.
    fn set_size(&mut self, inputs: &[Tensor]) -> Result<(), Error> {
        let Some(first) = self.varying.first().map(|&place| &inputs[place]) else { return Ok(()) };
        let size = if first.defined() { first.size().first().copied().unwrap_or(0) } else { 0 };
        let least = self.least_size;
        if size < least {
            return Err(Error::refused(format!("a batch of size {size}, but this step needs at least {least}")));
        }
        for &place in &self.varying {
            self.inputs[place].shape[0] = size;
        }
        Ok(())
    }
}

/// An error unless this user or root owns the file or folder, and nobody else may write to it.
///
/// # Errors
/// When that is not so, or the owner and permissions cannot be read.
pub fn check_owner(path: &Path) -> Result<(), Error> {
    let refused = |reason: String| Err(Error::refused(format!("{}: {reason}", path.display())));
    let (about, own) = match (std::fs::metadata(path), std::fs::metadata("/proc/self")) {
        (Ok(about), Ok(own)) => (about, own.uid()),
        (Err(error), _) | (_, Err(error)) => return refused(error.to_string()),
    };
    if about.uid() != own && about.uid() != 0 {
        return refused(format!("it belongs to user {}, but should belong to this user ({own})", about.uid()));
    }
    match about.mode() & 0o022 {
        0 => Ok(()),
        _ => refused("others may write to it: remove that permission (chmod go-w)".to_owned()),
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        // SAFETY: the handle is live and never used again.
        unsafe { raw::od_package_free(self.handle.as_ptr()) }
    }
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package").field("inputs", &self.inputs.len()).finish_non_exhaustive()
    }
}
