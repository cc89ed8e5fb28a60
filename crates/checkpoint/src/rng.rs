//! The random generators as a part.

use std::fmt;

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_ffi::rng;
use tch::{Device, Kind};

/// The entry of a GPU's generator, whichever GPU it is.
const CUDA: &str = "cuda";

/// The states of libtorch's default random generators: the CPU's, and the given device's if it is CUDA.
///
/// It holds no state itself: it reads and sets the process's. A run may resume with or without a GPU, whichever it had
/// before: generators that both machines have are loaded, and [`left_out`](Self::left_out) reports the others.
///
/// # Source
/// `torch.get_rng_state`, `torch.cuda.get_rng_state`
#[doc(alias = "get_rng_state")]
#[derive(Clone, Copy, Debug)]
pub struct RngState {
    device: Device,
    left_out: Option<LeftOut>,
}

/// A generator that loading did not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeftOut {
    /// The state has a GPU's generator, but this run has no GPU: numbers once drawn on the GPU now come from the CPU's
    /// generator.
    NoGpuHere,
    /// The state was saved by a run without a GPU: the GPU's generator continues from its own seed.
    NoGpuSaved,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoGpuHere => "the state of the GPU's generator was left out, because this run has no GPU",
            Self::NoGpuSaved => "the GPU's generator was not set, because the state was saved by a run without a GPU",
        })
    }
}

impl RngState {
    /// The generators of the CPU and of the device.
    pub fn new(device: Device) -> Self {
        Self { device, left_out: None }
    }

    /// The generator that the last load left out: random numbers then differ from those of the original run.
    pub fn left_out(&self) -> Option<LeftOut> {
        self.left_out
    }

    fn devices(self) -> Vec<(Device, &'static str)> {
        let mut devices = vec![(Device::Cpu, "cpu")];
        if self.device.is_cuda() {
            // Without the GPU's index: a resumed run may have another one.
            devices.push((self.device, CUDA));
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
        state.refuse_unknown(&["cpu", CUDA])?;
        let mut devices = self.devices();
        let left_out = match (devices.len() > 1, state.get(CUDA).is_ok()) {
            (false, true) => Some(LeftOut::NoGpuHere),
            (true, false) => Some(LeftOut::NoGpuSaved),
            _ => None,
        };
        devices.retain(|(_, key)| state.get(key).is_ok() || *key != CUDA);
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
        if let Some(left_out) = left_out {
            tracing::warn!("{left_out}");
        }
        self.left_out = left_out;
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        true
    }
}
