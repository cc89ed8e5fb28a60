//! The generators of random numbers as a part.

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_ffi::rng;
use tch::{Device, Kind};

/// The states of libtorch's default generators: the CPU's, and that of one device more where it is CUDA.
///
/// It holds no state itself: it takes and sets the process's.
///
/// # Source
/// `torch.get_rng_state`, `torch.cuda.get_rng_state`
#[doc(alias = "get_rng_state")]
#[derive(Clone, Copy, Debug)]
pub struct RngState {
    device: Device,
}

impl RngState {
    /// The CPU's generator and the device's.
    pub fn new(device: Device) -> Self {
        Self { device }
    }

    fn devices(self) -> Vec<(Device, &'static str)> {
        let mut devices = vec![(Device::Cpu, "cpu")];
        if self.device.is_cuda() {
            // By no number: a resumed run may have been given another device.
            devices.push((self.device, "cuda"));
        }
        devices
    }
}

impl Stateful for RngState {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        for (device, key) in self.devices() {
            state.insert(key, Entry::Tensor(rng::state(device)?));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let devices = self.devices();
        state.refuse_unknown(&devices.iter().map(|(_, key)| *key).collect::<Vec<_>>())?;
        let mut states = Vec::new();
        for &(device, key) in &devices {
            let before = rng::state(device)?;
            states.push((device, state.tensor(key, &before.size(), Kind::Uint8)?, before));
        }
        for (done, (device, saved, _)) in states.iter().enumerate() {
            if let Err(error) = rng::set_state(*device, saved) {
                for (device, _, before) in &states[..done] {
                    rng::set_state(*device, before)?;
                }
                return Err(error.into());
            }
        }
        Ok(())
    }
}
