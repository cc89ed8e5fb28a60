//! Lists of tensors that live on the C++ side.

use std::ptr::{self, NonNull};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// A list of tensors held by libtorch, so that a step over hundreds of parameters needs only one FFI call.
///
/// It shares the tensors, as [`Tensor::shallow_clone`] does. (PyTorch: a `TensorList` argument.)
pub struct TensorList(NonNull<raw::TensorList>);

// SAFETY: like tch's Tensor, the list only holds atomically counted references. Two threads may hold handles of one
// list (`share`), but a list never changes once it is made, so both only read.
unsafe impl Send for TensorList {}

/// The identity of a tensor: equal for a tensor and its [`shallow_clone`](Tensor::shallow_clone)s, and different for
/// all others, even views of the same memory. All undefined tensors have the same identity.
///
/// It is valid as long as a handle of the tensor lives; a later tensor may get the same.
///
/// # Source
/// `a is b`, or `id(a)`, for tensors in Python
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId(usize);

impl TensorId {
    /// The identity of this tensor.
    pub fn of(tensor: &Tensor) -> Self {
        // SAFETY: the handle is live.
        Self(unsafe { raw::od_tensor_id(tensor.as_ptr()) })
    }
}

/// The gradients of a [`TensorList`], as [`TensorList::grads`] finds them.
pub struct Grads {
    /// The gradients that are defined, in the order of the parameters.
    pub list: TensorList,
    /// For each parameter, whether it has a gradient.
    pub defined: Vec<bool>,
}

impl Grads {
    /// Whether every parameter has a gradient.
    pub fn complete(&self) -> bool {
        self.list.len() == self.defined.len()
    }
}

impl TensorList {
    /// A list that shares the given tensors.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new<T: std::borrow::Borrow<Tensor>>(tensors: &[T]) -> Result<Self, Error> {
        let pointers: Vec<_> = tensors.iter().map(|tensor| tensor.borrow().as_ptr()).collect();
        // SAFETY: each pointer belongs to a tensor borrowed for the length of the call.
        Self::receive(|out, err| unsafe { raw::od_tensor_list_new(pointers.as_ptr(), pointers.len(), out, err) })
    }

    /// A second handle to the same list.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn share(&self) -> Result<Self, Error> {
        // SAFETY: the handle is live.
        Self::receive(|out, err| unsafe { raw::od_tensor_list_share(self.as_ptr(), out, err) })
    }

    /// How many tensors it holds.
    pub fn len(&self) -> usize {
        // SAFETY: the handle is live.
        unsafe { raw::od_tensor_list_len(self.as_ptr()) }
    }

    /// How often its tensors have been written to in place, in total: if it has not grown, they are unchanged.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Source
    /// `Tensor._version`
    pub fn writes(&self) -> Result<u64, Error> {
        let mut writes = 0;
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_tensor_list_writes(self.as_ptr(), &mut writes, err) })?;
        Ok(writes)
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor at `index`, shared.
    ///
    /// # Errors
    /// When `index` is not below [`len`](Self::len).
    pub fn get(&self, index: usize) -> Result<Tensor, Error> {
        let len = self.len();
        if index >= len {
            return Err(Error::refused(format!("index {index} is outside a list of {len} tensors")));
        }
        let mut out = ptr::null_mut();
        // SAFETY: the handle is live and the index was checked; on success `out` is a tensor that we own.
        check(|err| unsafe { raw::od_tensor_list_get(self.as_ptr(), index, &mut out, err) })?;
        // SAFETY: as above.
        Ok(unsafe { Tensor::from_ptr(out) })
    }

    /// All tensors, shared.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn to_vec(&self) -> Result<Vec<Tensor>, Error> {
        (0..self.len()).map(|index| self.get(index)).collect()
    }

    /// The gradients of these tensors, shared; tensors without a gradient are left out.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn grads(&self) -> Result<Grads, Error> {
        self.find_grads(false)
    }

    /// The gradients of these tensors, each in its tensor's memory layout, as fused kernels need them: shared if the
    /// layout is the same (as autograd makes it), otherwise a copy.
    ///
    /// # Errors
    /// When a gradient is sparse, or memory runs out.
    pub fn grads_in_layout(&self) -> Result<Grads, Error> {
        self.find_grads(true)
    }

    fn find_grads(&self, like_params: bool) -> Result<Grads, Error> {
        let mut defined = vec![0u8; self.len()];
        let mut count = 0;
        // SAFETY: `defined` has one element per tensor.
        let list = Self::receive(|out, err| unsafe {
            raw::od_tensor_list_grads(self.as_ptr(), i32::from(like_params), defined.as_mut_ptr(), &mut count, out, err)
        })?;
        Ok(Grads { list, defined: defined.into_iter().map(|flag| flag != 0).collect() })
    }

    /// The index of the first tensor whose gradient is not dense, if there is one.
    ///
    /// # Errors
    /// When libtorch refuses, which it does not for leaves.
    pub fn sparse_grad(&self) -> Result<Option<usize>, Error> {
        let mut index = 0;
        // SAFETY: the handle is live, and so is the out-parameter.
        check(|err| unsafe { raw::od_tensor_list_sparse_grad(self.as_ptr(), &mut index, err) })?;
        Ok((index < self.len()).then_some(index))
    }

    /// Frees the gradients of these tensors (PyTorch: `zero_grad(set_to_none=True)`).
    ///
    /// # Errors
    /// When libtorch refuses, which it does not for leaves.
    pub fn clear_grads(&self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_tensor_list_clear_grads(self.as_ptr(), err) })
    }

    /// The tensors for which `keep` is true, shared.
    ///
    /// # Errors
    /// When `keep` is not as long as the list.
    pub fn select(&self, keep: &[bool]) -> Result<Self, Error> {
        if keep.len() != self.len() {
            return Err(Error::refused(format!("{} flags for a list of {} tensors", keep.len(), self.len())));
        }
        let keep: Vec<u8> = keep.iter().map(|&flag| u8::from(flag)).collect();
        // SAFETY: `keep` has one element per tensor.
        Self::receive(|out, err| unsafe { raw::od_tensor_list_select(self.as_ptr(), keep.as_ptr(), out, err) })
    }

    pub(crate) fn as_ptr(&self) -> *const raw::TensorList {
        self.0.as_ptr()
    }

    /// Hands the list over: the caller frees it.
    pub(crate) fn into_raw(self) -> *mut raw::TensorList {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }

    /// Takes over a list that the C++ side has allocated.
    ///
    /// # Safety
    /// `pointer` is a list that nothing else frees.
    pub(crate) unsafe fn from_raw(pointer: *mut raw::TensorList) -> Result<Self, Error> {
        NonNull::new(pointer).map(Self).ok_or_else(|| Error::refused("libtorch returned no list"))
    }

    pub(crate) fn receive(
        call: impl FnOnce(*mut *mut raw::TensorList, *mut raw::Error) -> raw::Status,
    ) -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        check(|err| call(&mut out, err))?;
        // SAFETY: the call succeeded, so `out` is a new list with no other owner.
        unsafe { Self::from_raw(out) }
    }
}

/// Sets the gradient of a leaf, or takes it away.
///
/// # Errors
/// When the gradient has another shape, dtype or device.
///
/// # Source
/// `tensor.grad = grad`
pub fn set_grad(tensor: &Tensor, grad: Option<&Tensor>) -> Result<(), Error> {
    let grad = grad.map_or(ptr::null(), |grad| grad.as_ptr());
    // SAFETY: both live through the call.
    check(|err| unsafe { raw::od_tensor_set_grad(tensor.as_ptr(), grad, err) })
}

/// Takes the gradient of a leaf away, to be overwritten: itself, or a copy where somebody else has it too or has a view of it,
/// where it is a part of a larger memory, or not contiguous. So a dense one is contiguous and all of its memory. `None` if there
/// is none.
///
/// # Errors
/// When memory runs out; the gradient is there as before.
pub fn take_grad(tensor: &Tensor) -> Result<Option<Tensor>, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: the tensor lives through the call, and `out` receives an owner or null.
    check(|err| unsafe { raw::od_tensor_take_grad(tensor.as_ptr(), &mut out, err) })?;
    // SAFETY: as above.
    Ok((!out.is_null()).then(|| unsafe { Tensor::from_ptr(out) }))
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: the handle is live and never used again.
        unsafe { raw::od_tensor_list_free(self.0.as_ptr()) }
    }
}

impl std::fmt::Debug for TensorList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TensorList({} tensors)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn a_gradient_is_set_if_it_fits() {
        let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let grad = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        set_grad(&x, Some(&grad)).unwrap();
        assert_eq!(x.grad().data_ptr(), grad.data_ptr());
        for other in [Tensor::zeros([3], (Kind::Float, Device::Cpu)), Tensor::zeros([2], (Kind::Half, Device::Cpu))] {
            let error = set_grad(&x, Some(&other)).unwrap_err().to_string();
            assert!(error.contains("cannot be one of"), "{error}");
        }
        set_grad(&x, None).unwrap();
        assert!(!x.grad().defined());
    }

    #[test]
    fn a_gradient_that_is_taken_is_contiguous_and_all_of_its_memory() {
        let ones = |size: &[i64]| Tensor::ones(size, (Kind::Float, Device::Cpu));
        // Each gradient is a part of the stack's.
        let stacked = [(); 3].map(|()| ones(&[4]).set_requires_grad(true));
        Tensor::stack(&stacked, 0).sum(Kind::Float).backward();
        // One that the program has set has the strides that it was set with.
        let x = ones(&[2, 3]).set_requires_grad(true);
        let set = |grad: &Tensor| {
            set_grad(&x, Some(grad)).unwrap();
            x.shallow_clone()
        };
        let mut taken: Vec<Tensor> = stacked.iter().map(|it| take_grad(it).unwrap().unwrap()).collect();
        taken.push(take_grad(&set(&ones(&[1]).expand([2, 3], false))).unwrap().unwrap());
        taken.push(take_grad(&set(&ones(&[3, 2]).transpose(0, 1))).unwrap().unwrap());
        for grad in &mut taken {
            assert!(grad.is_contiguous());
            assert_eq!(crate::storage(grad).unwrap().bytes, 4 * grad.numel());
            assert_eq!((grad.g_add_scalar_(1.0).min().double_value(&[]), grad.max().double_value(&[])), (2.0, 2.0));
        }
    }

    #[test]
    fn a_gradient_is_taken_or_copied_where_others_have_it() {
        let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        assert!(take_grad(&x).unwrap().is_none());
        let backward = || {
            x.square().sum(Kind::Float).backward();
            x.grad().data_ptr()
        };
        let memory = backward();
        assert_eq!(take_grad(&x).unwrap().unwrap().data_ptr(), memory);
        assert!(!x.grad().defined());
        type Hold = fn(&Tensor) -> Vec<Tensor>;
        let holds: [Hold; 2] = [|grad| vec![grad.shallow_clone()], |grad| vec![grad.detach()]];
        for hold in holds {
            let memory = backward();
            let held = hold(&x.grad());
            let mut taken = take_grad(&x).unwrap().unwrap();
            assert_ne!(taken.data_ptr(), memory);
            let _zeros = taken.zero_();
            assert_eq!(held[0].double_value(&[0]), 2.0);
        }
    }

    #[test]
    fn a_tensor_differs_from_others_of_the_same_memory() {
        let options = (Kind::Float, Device::Cpu);
        let (x, y) = (Tensor::ones([2], options), Tensor::ones([0], options));
        assert_eq!(TensorId::of(&x), TensorId::of(&x.shallow_clone()));
        assert_eq!(TensorId::of(&y), TensorId::of(&TensorList::new(&[&y]).unwrap().get(0).unwrap()));
        for other in [x.view([2]), x.detach(), x.copy(), y, Tensor::ones([0], options), Tensor::new()] {
            assert_ne!(TensorId::of(&x), TensorId::of(&other));
        }
    }
}
