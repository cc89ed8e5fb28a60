//! What a function finds set when it runs: autocast, and the generators of random numbers.

use overdrive_ffi::{Error as TorchError, SyncTensor, autocast, rng};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use tch::Device;

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
    /// Of the CPU, and of all CUDA devices in use: a function may draw on another device than that of its inputs.
    pub(crate) fn in_use() -> Result<Self, TorchError> {
        Self::now(rng::devices()?)
    }

    fn now(devices: impl IntoIterator<Item = Device>) -> Result<Self, TorchError> {
        let states = devices.into_iter().map(|device| Ok((device, SyncTensor(rng::state(device)?))));
        states.collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn set(&self) -> Result<(), TorchError> {
        self.0.iter().try_for_each(|(device, state)| rng::set_state(*device, state))
    }
}

impl Context {
    /// As it is now.
    pub(super) fn now(with_generators: bool) -> Result<Self, TorchError> {
        let generators = if with_generators { Generators::in_use()? } else { Generators(Vec::new()) };
        let autocast = [Device::Cpu, Device::Cuda(0)].map(|device| Ok((device, autocast::state(device)?)));
        let autocast = autocast.into_iter().collect::<Result<_, TorchError>>()?;
        Ok(Self { generators, autocast })
    }

    /// Sets all as it was, until the result is dropped.
    pub(super) fn enter(&self) -> Result<Entered, TorchError> {
        /// Threads share the generators: each would draw from states that another one has set.
        static ALONE: ReentrantMutex<()> = ReentrantMutex::new(());
        let alone = (!self.generators.0.is_empty()).then(|| ALONE.lock());
        let before = Generators::now(self.generators.0.iter().map(|(device, _)| *device))?;
        let enter = |(device, state): &(Device, autocast::State)| autocast::Region::enter(*device, *state);
        let regions = self.autocast.iter().map(enter).collect::<Result<_, _>>()?;
        let entered = Entered { before, _regions: regions, _alone: alone };
        self.generators.set()?;
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
