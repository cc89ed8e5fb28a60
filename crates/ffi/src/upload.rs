//! Small tensors of the host on a device.

use std::sync::{Mutex, PoisonError};

use tch::{Device, Tensor};

use crate::{Error, empty_pinned};

/// Copies a tensor of the host to a device, on the calling thread's current stream.
///
/// # Errors
/// `OutOfMemory`, and `Cuda` where an earlier kernel has failed.
///
/// # Syncs
/// No: a GPU copies from pinned memory of its own, which libtorch uses again only after the copy.
///
/// # Source
/// `tensor.pin_memory().to(device, non_blocking=True)`
pub fn upload(host: &Tensor, device: Device) -> Result<Tensor, Error> {
    if !device.is_cuda() {
        return Ok(host.f_to_device(device)?);
    }
    // A copy, also of a tensor that is pinned already: the caller may write to that before the device has read it.
    let mut pinned = empty_pinned(&host.size(), host.kind())?;
    pinned.f_copy_(host)?;
    Ok(pinned.f_to_device_(device, host.kind(), true, false)?)
}

/// `N` tensors that never change, on each device that has asked for them.
#[derive(Debug, Default)]
pub struct DeviceConstants<const N: usize> {
    made: Mutex<Vec<(Device, [Tensor; N])>>,
}

impl<const N: usize> DeviceConstants<N> {
    /// Constants that are on no device yet.
    pub const fn new() -> Self {
        Self { made: Mutex::new(Vec::new()) }
    }

    /// The tensors on this device. `make` gives them on the host; it is called once for each device.
    ///
    /// # Errors
    /// Those of `make`, and `OutOfMemory`.
    ///
    /// # Syncs
    /// Only the first time on each device: then every stream may read them.
    pub fn on<E: From<tch::TchError>>(
        &self,
        device: Device,
        make: impl FnOnce() -> Result<[Tensor; N], E>,
    ) -> Result<[Tensor; N], E> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tensors)) = made.iter().find(|(known, _)| *known == device) {
            return Ok(tensors.each_ref().map(Tensor::shallow_clone));
        }
        let mut tensors = make()?;
        for tensor in &mut tensors {
            *tensor = tensor.f_to_device(device)?;
        }
        made.push((device, tensors.each_ref().map(Tensor::shallow_clone)));
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_made_once() {
        let constants = DeviceConstants::new();
        let mut times = 0;
        for _ in 0..2 {
            let made = constants.on(Device::Cpu, || {
                times += 1;
                Ok::<_, tch::TchError>([Tensor::from_slice(&[1.0_f32, 2.0])])
            });
            let [made] = made.unwrap();
            assert_eq!(Vec::<f32>::try_from(&made).unwrap(), [1.0, 2.0]);
        }
        assert_eq!(times, 1);
        assert!(constants.on(Device::Cuda(99), || Err::<[Tensor; 1], _>(tch::TchError::Torch("no".into()))).is_err());
        assert_eq!(upload(&Tensor::from(3_i64), Device::Cpu).unwrap().int64_value(&[]), 3);
    }
}
