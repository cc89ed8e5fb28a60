//! What a function finds set when it runs: autocast, and the generators of random numbers.

use overdrive_ffi::{Error as TorchError, SyncTensor, autocast, rng};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use tch::{Device, Tensor};

/// The state of a moment.
#[derive(Debug)]
pub(super) struct Context {
    generators: Generators,
    autocast: Vec<(Device, autocast::State)>,
}

/// The states of generators.
#[derive(Debug)]
pub(crate) struct Generators(Vec<(Device, SyncTensor)>);

impl Generators {
    /// Of the CPU, and of the devices of these tensors.
    pub(crate) fn of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Self, TorchError> {
        let mut devices = vec![Device::Cpu];
        for device in tensors.into_iter().filter(|tensor| tensor.defined()).map(Tensor::device) {
            if device.is_cuda() && !devices.contains(&device) {
                devices.push(device);
            }
        }
        Self::now(devices)
    }

    /// Those too of the CUDA devices that are in use and can be asked: what is captured may be on another device.
    fn and_in_use(mut self) -> Self {
        let known = |all: &Self, device| all.0.iter().any(|(known, _)| *known == device);
        for device in rng::devices().unwrap_or_default() {
            if !known(&self, device)
                && let Ok(state) = rng::state(device)
            {
                self.0.push((device, SyncTensor(state)));
            }
        }
        self
    }

    fn now(devices: impl IntoIterator<Item = Device>) -> Result<Self, TorchError> {
        let states = devices.into_iter().map(|device| Ok((device, SyncTensor(rng::state(device)?))));
        states.collect::<Result<_, _>>().map(Self)
    }

    /// Those of some devices.
    fn only(&self, uses: impl Fn(Device) -> bool) -> Self {
        let used = self.0.iter().filter(|(device, _)| uses(*device));
        Self(used.map(|(device, state)| (*device, SyncTensor(state.shallow_clone()))).collect())
    }

    pub(crate) fn set(&self) -> Result<(), TorchError> {
        self.0.iter().try_for_each(|(device, state)| rng::set_state(*device, state))
    }
}

impl Context {
    /// As it is now.
    pub(super) fn now(inputs: &[Tensor], with_generators: bool) -> Result<Self, TorchError> {
        let generators = if with_generators { Generators::of(inputs)?.and_in_use() } else { Generators(Vec::new()) };
        let autocast = [Device::Cpu, Device::Cuda(0)].map(|device| Ok((device, autocast::state(device)?)));
        let autocast = autocast.into_iter().collect::<Result<_, TorchError>>()?;
        Ok(Self { generators, autocast })
    }

    /// Sets all as it was, and the generators of the devices that are used, until the result is dropped.
    pub(super) fn enter(&self, uses: impl Fn(Device) -> bool) -> Result<Entered, TorchError> {
        /// Threads share the generators: each would draw from states that another one has set.
        static ALONE: ReentrantMutex<()> = ReentrantMutex::new(());
        let alone = (!self.generators.0.is_empty()).then(|| ALONE.lock());
        let generators = self.generators.only(uses);
        let before = Generators::now(generators.0.iter().map(|(device, _)| *device))?;
        let enter = |(device, state): &(Device, autocast::State)| autocast::Region::enter(*device, *state);
        let regions = self.autocast.iter().map(enter).collect::<Result<_, _>>()?;
        let entered = Entered { before, _regions: regions, _alone: alone };
        generators.set()?;
        Ok(entered)
    }
}

/// Sets back what was before.
pub(super) struct Entered {
    before: Generators,
    _regions: Vec<autocast::Region>,
    _alone: Option<ReentrantMutexGuard<'static, ()>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // The states are those of these generators, so they cannot be refused.
        let set = self.before.set();
        debug_assert!(set.is_ok(), "generators not restored: {set:?}");
    }
}
