//! The state of libtorch's random number generators.

use std::ptr;

use tch::{Device, Tensor};

use crate::error::{Error, check};
use crate::raw;

/// The devices whose generators may be in use: the CPU, and the CUDA devices on which this process has a context. Makes no
/// context.
///
/// # Errors
/// When CUDA fails.
///
/// # Syncs
/// No.
pub fn devices() -> Result<Vec<Device>, Error> {
    let mut used = 0;
    // SAFETY: `used` lives through the call.
    check(|err| unsafe { raw::od_cuda_used(&mut used, err) })?;
    let cuda = (0..64).filter(|device| used >> device & 1 == 1).map(Device::Cuda);
    Ok(std::iter::once(Device::Cpu).chain(cuda).collect())
}

/// A copy of the state of a device's default generator.
///
/// ```
/// use overdrive_ffi::rng;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_ffi::Error> {
/// let state = rng::state(Device::Cpu)?;
/// let first = Tensor::rand([4], (Kind::Float, Device::Cpu));
/// rng::set_state(Device::Cpu, &state)?;
/// assert_eq!(Tensor::rand([4], (Kind::Float, Device::Cpu)), first);
/// # Ok(())
/// # }
/// ```
///
/// # Shapes
/// uint8 on the host: `[5056]` for a CPU, `[16]` for CUDA.
///
/// # Errors
/// For a device that does not exist, or has no generator.
///
/// # Syncs
/// No: it does not wait for the device.
///
/// # Source
/// `torch.get_rng_state`, `torch.cuda.get_rng_state`
#[doc(alias = "get_rng_state")]
pub fn state(device: Device) -> Result<Tensor, Error> {
    let (kind, index) = device_code(device)?;
    let mut out = ptr::null_mut();
    // SAFETY: `out` lives through the call; on success it is a tensor that we own.
    check(|err| unsafe { raw::od_rng_state(kind, index, &mut out, err) })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// Sets the state: the generator then gives the numbers that followed when the state was read.
///
/// # Shapes
/// As [`state`] returns it.
///
/// # Errors
/// When it is not a valid state of this generator; nothing has changed then.
///
/// # Syncs
/// No: it does not wait for the device.
///
/// # Source
/// `torch.set_rng_state`, `torch.cuda.set_rng_state`
#[doc(alias = "set_rng_state")]
pub fn set_state(device: Device, state: &Tensor) -> Result<(), Error> {
    let (kind, index) = device_code(device)?;
    if device == Device::Cpu {
        check_cpu(state)?;
    }
    // SAFETY: the tensor lives through the call, and `check_cpu` has refused a CPU state that would make libtorch read
    // past its buffer.
    check(|err| unsafe { raw::od_set_rng_state(kind, index, state.as_ptr(), err) })
}

/// Refuses a CPU state with which libtorch would read past its buffer.
///
/// A CPU state holds 624 numbers, the index `next` of the next one to be read, and `left`: the draw that brings `left`
/// to 0 first makes new numbers. libtorch checks `next` and `left` separately, but not their sum. Other invalid states
/// are left to libtorch.
fn check_cpu(state: &Tensor) -> Result<(), Error> {
    /// Offsets of the fields in `CPUGeneratorImplStateLegacy`.
    const LEFT: usize = 8;
    const NEXT: usize = 16;
    /// How many numbers MT19937 makes at once.
    const NUMBERS: u64 = 624;
    let Ok(bytes) = Vec::<u8>::try_from(state) else { return Ok(()) };
    let word = |at: usize| bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
    let (Some(left), Some(next)) = (word(LEFT), word(NEXT)) else { return Ok(()) };
    // `left` is an int; the other four of these eight bytes are a flag.
    let left = u64::from(left as u32);
    // `left - 1` numbers are read before new ones are made.
    let most = NUMBERS + 1;
    if next.saturating_add(left) > most {
        return Err(Error::refused(format!(
            "not a valid state of a CPU generator: `next` is {next} and `left` is {left}, but together they should be \
             at most {most}"
        )));
    }
    Ok(())
}

/// libtorch's code of the device's type (`c10::DeviceType`), and the device's number.
fn device_code(device: Device) -> Result<(i32, i32), Error> {
    match device {
        Device::Cpu => Ok((0, -1)),
        Device::Cuda(index) => Ok((1, i32::try_from(index).unwrap_or(i32::MAX))),
        other => Err(Error::refused(format!("{other:?} has no generator here: use the CPU or CUDA"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn an_invalid_state_is_refused_and_changes_nothing() {
        // The generator is shared by the process, but no test of this crate depends on the numbers drawn.
        for bad in [
            Tensor::new(),
            Tensor::zeros([5056], (Kind::Uint8, Device::Cpu)),
            Tensor::zeros([7], (Kind::Uint8, Device::Cpu)),
            Tensor::zeros([5056], (Kind::Float, Device::Cpu)),
        ] {
            assert!(set_state(Device::Cpu, &bad).is_err(), "{bad:?}");
        }
        let good = state(Device::Cpu).unwrap();
        let mut bytes = Vec::<u8>::try_from(&good).unwrap();
        bytes[8..12].copy_from_slice(&5i32.to_ne_bytes());
        bytes[16..24].copy_from_slice(&624u64.to_ne_bytes());
        let beyond = set_state(Device::Cpu, &Tensor::from_slice(&bytes)).unwrap_err();
        assert!(beyond.message().contains("`next` is 624 and `left` is 5"), "{beyond}");
        set_state(Device::Cpu, &good).unwrap();
        assert!(state(Device::Vulkan).unwrap_err().message().contains("no generator"));
        assert_eq!(state(Device::Cpu).unwrap().size(), [5056]);
        assert!(state(Device::Cuda(usize::MAX)).is_err());
        if !tch::Cuda::is_available() {
            assert!(state(Device::Cuda(0)).is_err());
        }
    }
}
