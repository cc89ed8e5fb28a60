//! The state of libtorch's random number generators.

use std::ptr;

use tch::{Device, Tensor};

use crate::error::{Error, check};
use crate::raw;

/// The state of a device's default generator, a copy.
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
/// Bytes on the host: `[5056]` for a CPU, `[16]` for CUDA.
///
/// # Errors
/// For a device that is not there, or without a generator.
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.get_rng_state`, `torch.cuda.get_rng_state`
#[doc(alias = "get_rng_state")]
pub fn state(device: Device) -> Result<Tensor, Error> {
    let (kind, index) = place(device)?;
    let mut out = ptr::null_mut();
    // SAFETY: `out` lives through the call; on success it is a tensor that we own.
    check(|err| unsafe { raw::od_rng_state(kind, index, &mut out, err) })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// Puts a state back; the generator goes on as it did when the state was taken.
///
/// # Shapes
/// As [`state`] gives it.
///
/// # Errors
/// For what is no state of such a generator; the generator is then as it was.
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.set_rng_state`, `torch.cuda.set_rng_state`
#[doc(alias = "set_rng_state")]
pub fn set_state(device: Device, state: &Tensor) -> Result<(), Error> {
    let (kind, index) = place(device)?;
    if device == Device::Cpu {
        check_cpu(state)?;
    }
    // SAFETY: the tensor lives through the call, and a CPU's stays within its numbers.
    check(|err| unsafe { raw::od_set_rng_state(kind, index, state.as_ptr(), err) })
}

/// libtorch checks how many numbers are left and which is the next, but not that they are there: it would read on past the
/// last. What is no state at all is left to libtorch.
fn check_cpu(state: &Tensor) -> Result<(), Error> {
    /// Where `CPUGeneratorImplStateLegacy` has them, and how many numbers MT19937 makes at once.
    const LEFT: usize = 8;
    const NEXT: usize = 16;
    const NUMBERS: u64 = 624;
    let Ok(bytes) = Vec::<u8>::try_from(state) else { return Ok(()) };
    let word = |at: usize| bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
    let (Some(left), Some(next)) = (word(LEFT), word(NEXT)) else { return Ok(()) };
    // Four bytes; a flag follows.
    let left = u64::from(left as u32);
    if next.saturating_add(left) > NUMBERS + 1 {
        return Err(Error::refused(format!(
            "this is no state of a CPU's generator: number {next} comes next and {left} are left, of {NUMBERS}"
        )));
    }
    Ok(())
}

/// `c10::DeviceType` and the number of the device.
fn place(device: Device) -> Result<(i32, i32), Error> {
    match device {
        Device::Cpu => Ok((0, -1)),
        Device::Cuda(index) => Ok((1, i32::try_from(index).unwrap_or(i32::MAX))),
        other => Err(Error::refused(format!("{other:?} has no generator here: ask for the CPU's or for CUDA's"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn what_is_no_state_is_refused_and_changes_nothing() {
        // tch's generator is the process's: the tests of this crate that draw numbers do not ask for certain ones.
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
        assert!(beyond.message().contains("624 comes next and 5 are left"), "{beyond}");
        set_state(Device::Cpu, &good).unwrap();
        assert!(state(Device::Vulkan).unwrap_err().message().contains("no generator"));
        assert_eq!(state(Device::Cpu).unwrap().size(), [5056]);
        assert!(state(Device::Cuda(usize::MAX)).is_err());
        if !tch::Cuda::is_available() {
            assert!(state(Device::Cuda(0)).is_err());
        }
    }
}
