//! Tensors whose memory comes and goes.

use std::ffi::{CStr, CString};

use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Error, check};
use crate::kind::to_scalar_type;
use crate::raw_on_demand as raw;

/// A tensor whose memory comes and goes, for all handles and views of it, also those that autograd has saved. While the
/// memory is not there, any access is an error with the owner's message. Filling it does not count as a change in place.
///
/// # Source
/// `tensor.untyped_storage().resize_(..)` under `torch.autograd._unsafe_preserve_version_counter`, which leaves a null
/// pointer where this has an error
#[derive(Debug)]
pub struct OnDemand {
    tensor: Tensor,
    /// The memory, which the tensor may lose by `set_data`.
    memory: Tensor,
    message: CString,
    is_filled: bool,
}

const FREED: &CStr = c"the tensor's memory was freed";
const MOVED: &CStr = c"the tensor's memory was moved to another tensor";

impl OnDemand {
    /// Takes the tensor's memory away; from now on it is of dtype `kind`, and has memory of `bytes` when it is filled. The
    /// tensor stays the same for all who hold a handle of it; views from before keep the old memory. `message` is the
    /// error of those who access it meanwhile.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or needs more than `bytes`.
    pub fn new(tensor: &Tensor, kind: Kind, bytes: usize, message: &str) -> Result<Self, Error> {
        let message = CString::new(message).map_err(|_| Error::refused("the message holds a 0 byte"))?;
        let tensor = tensor.shallow_clone();
        // SAFETY: the tensor and the message live through the call. The old memory lives as long as views of it.
        check(|err| unsafe {
            raw::od_on_demand_new(tensor.as_ptr(), to_scalar_type(kind), bytes, message.as_ptr(), err)
        })?;
        let memory = tensor.f_detach()?;
        Ok(Self { tensor, memory, message, is_filled: false })
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Whether its memory is there.
    pub fn is_filled(&self) -> bool {
        self.is_filled
    }

    /// Moves the memory of a tensor to this one, without a copy.
    ///
    /// # Errors
    /// When this is filled, or the memory is not as large or on another device. A tensor that was replaced meanwhile,
    /// by `set_data` for instance, is refused too.
    pub fn fill(&mut self, from: Tensor) -> Result<(), Error> {
        // SAFETY: both tensors live through the call. Views of the memory stay within its size, which the call checks.
        check(|err| unsafe { raw::od_on_demand_fill(self.tensor.as_ptr(), from.as_ptr(), MOVED.as_ptr(), err) })?;
        self.is_filled = true;
        Ok(())
    }

    /// Frees its memory, and leaves that of other tensors alone, which the program may have put in its place by `set_data`.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn free(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.is_filled) {
            // SAFETY: both live through the call. Whoever has a view finds no memory from now on, and gets an error.
            // Operators that are under way on the device's current stream are before whatever reuses the memory there; as
            // with tch's `resize_` and `set_data`, no other thread may be in the middle of an operator that uses it, and
            // what uses it on another stream has to be recorded there.
            check(|err| unsafe { raw::od_on_demand_free(self.memory.as_ptr(), self.message.as_ptr(), err) })?;
        }
        Ok(())
    }
}

/// Frees the memory of a tensor on the host, whoever has a handle or a view of it; any access is an error from then on. For
/// what another thread keeps a handle of, and does not access any more.
///
/// # Errors
/// When the tensor is not on the host, where other streams could still use the memory, or has no strides.
///
/// # Source
/// `tensor.untyped_storage().resize_(0)`
pub fn free_memory(tensor: &Tensor) -> Result<(), Error> {
    if tensor.device() != Device::Cpu {
        return Err(
            TchError::Torch(format!("only memory of the host is freed so, not of {:?}", tensor.device())).into()
        );
    }
    // SAFETY: both live through the call. No operator is under way on host memory that this thread does not wait for, but by
    // the program's own threads, as with tch's `resize_`.
    check(|err| unsafe { raw::od_on_demand_free(tensor.as_ptr(), FREED.as_ptr(), err) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::is_alone;
    use crate::saved_tensors::version;
    use tch::Device;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn weight() -> (Tensor, OnDemand) {
        let weight = Tensor::ones([2, 3], FLOAT).set_requires_grad(true);
        let memory = OnDemand::new(&weight, Kind::Float, 4 * 9, "`weight` is not here").unwrap();
        (weight, memory)
    }

    fn nine(value: f64) -> Tensor {
        Tensor::full([3, 3], value, FLOAT)
    }

    #[test]
    fn a_tensor_without_memory_is_an_error_and_no_crash() {
        let (weight, mut memory) = weight();
        let x = Tensor::ones([2, 3], FLOAT);
        let told = |error: tch::TchError| assert!(error.to_string().contains("`weight` is not here"), "{error}");
        for _ in 0..2 {
            told(x.f_mul(&weight).unwrap_err());
            told(x.f_linear(&weight, None::<&Tensor>).unwrap_err());
            told(weight.f_sum(Kind::Float).unwrap_err());
            told(tch::no_grad(|| weight.shallow_clone().f_zero_()).unwrap_err());
            told(weight.transpose(0, 1).f_add(&weight.transpose(0, 1)).unwrap_err());
            told(weight.detach().f_double_value(&[1, 2]).unwrap_err());
            memory.fill(nine(2.0)).unwrap();
            assert_eq!(weight.sum(Kind::Float).double_value(&[]), 12.0);
            memory.free().unwrap();
        }
    }

    #[test]
    fn what_autograd_has_saved_is_filled_again_and_was_not_changed() {
        let (weight, mut memory) = weight();
        memory.fill(nine(2.0)).unwrap();
        let x = Tensor::ones([4, 3], FLOAT).set_requires_grad(true);
        let loss = x.linear(&weight, None::<&Tensor>).square().sum(Kind::Float);
        let before = version(&weight);
        memory.free().unwrap();
        memory.fill(nine(2.0)).unwrap();
        assert_eq!(version(&weight), before);
        loss.backward();
        assert_eq!(x.grad().double_value(&[0, 0]), 2.0 * 6.0 * 2.0 * 2.0);
        assert_eq!(weight.grad().size(), [2, 3]);
    }

    #[test]
    fn a_change_in_place_is_still_found() {
        let (weight, mut memory) = weight();
        memory.fill(nine(2.0)).unwrap();
        let x = Tensor::ones([4, 3], FLOAT).set_requires_grad(true);
        let loss = x.linear(&weight, None::<&Tensor>).sum(Kind::Float);
        let _changed = tch::no_grad(|| weight.shallow_clone().f_mul_(&Tensor::from(2.0f32))).unwrap();
        memory.free().unwrap();
        memory.fill(nine(2.0)).unwrap();
        assert!(loss.f_backward().unwrap_err().to_string().contains("modified by an inplace operation"));
    }

    #[test]
    fn a_backward_pass_without_the_memory_is_an_error() {
        let (weight, mut memory) = weight();
        memory.fill(nine(2.0)).unwrap();
        let x = Tensor::ones([4, 3], FLOAT).set_requires_grad(true);
        let loss = x.linear(&weight, None::<&Tensor>).sum(Kind::Float);
        memory.free().unwrap();
        assert!(loss.f_backward().unwrap_err().to_string().contains("`weight` is not here"));
    }

    #[test]
    fn memory_that_does_not_fit_is_refused() {
        let (weight, mut memory) = weight();
        assert!(memory.fill(Tensor::ones([2, 3], FLOAT)).unwrap_err().message().contains("should have 36"));
        let from = nine(1.0);
        memory.fill(from.shallow_clone()).unwrap();
        assert!(from.f_sum(Kind::Float).unwrap_err().to_string().contains("was moved to another tensor"));
        assert!(memory.fill(nine(1.0)).unwrap_err().message().contains("has memory already"));
        drop(weight);
        let shared = Tensor::ones([4, 3], FLOAT);
        assert!(is_alone(&shared).unwrap());
        let part = shared.narrow(0, 0, 2);
        assert!(!is_alone(&part).unwrap() && !is_alone(&shared).unwrap());
        drop(part);
        let across = Tensor::ones([2, 3], FLOAT).transpose(0, 1);
        assert!(OnDemand::new(&across, Kind::Float, 24, "").unwrap_err().message().contains("contiguous"));
        assert!(OnDemand::new(&shared, Kind::Double, 48, "").is_err());
    }

    #[test]
    fn a_tensor_that_took_its_place_keeps_its_memory() {
        let (weight, mut memory) = weight();
        memory.fill(nine(2.0)).unwrap();
        let other = Tensor::ones([2, 3], FLOAT);
        tch::no_grad(|| weight.shallow_clone().set_data(&other));
        memory.free().unwrap();
        assert_eq!(other.sum(Kind::Float).double_value(&[]), 6.0);
        assert!(memory.fill(nine(1.0)).unwrap_err().message().contains("was it replaced?"));
    }

    #[test]
    fn the_dtype_changes_for_all_handles() {
        let weight = Tensor::ones([2, 3], FLOAT).set_requires_grad(true);
        let other = weight.shallow_clone();
        let mut memory = OnDemand::new(&weight, Kind::BFloat16, 12, "gone").unwrap();
        memory.fill(Tensor::ones([2, 3], (Kind::BFloat16, Device::Cpu))).unwrap();
        assert_eq!((other.kind(), other.requires_grad()), (Kind::BFloat16, true));
        assert_eq!(other.sum(Kind::Float).double_value(&[]), 6.0);
    }
}
