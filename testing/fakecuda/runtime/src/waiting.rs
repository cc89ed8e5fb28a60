//! The world while it is locked, and the host's waits: they let the lock go while work waits for somebody else.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use crate::error::CudaError;
use crate::faults;
use crate::progress::Target;
use crate::world::World;

/// How long a waiting host leaves the world to others before it looks again: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(2)];

/// The world, locked.
pub struct Locked {
    mutex: &'static Mutex<World>,
    /// Nothing during a pause.
    world: Option<MutexGuard<'static, World>>,
}

const IS_LOCKED: &str = "only a pause is without the lock, and nobody sees it";

impl Deref for Locked {
    type Target = World;

    fn deref(&self) -> &World {
        self.world.as_deref().expect(IS_LOCKED)
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut World {
        self.world.as_deref_mut().expect(IS_LOCKED)
    }
}

impl Locked {
    pub fn new(mutex: &'static Mutex<World>) -> Self {
        Self { mutex, world: Some(mutex.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    fn wait(&mut self, targets: &[Target]) {
        let [mut pause, longest] = PAUSES;
        // Each is tried: one may wait for what another one does.
        while targets.iter().filter(|target| !self.progress.reach(target)).count() > 0 {
            self.world = None;
            sleep(pause);
            pause = (pause * 2).min(longest);
            *self = Self::new(self.mutex);
        }
        let host = self.progress.host().clone();
        self.accesses.forget(&host);
    }

    /// Lets a stream's work run. The host does not learn of failures.
    pub fn drain(&mut self, stream: u64) -> Result<(), CudaError> {
        let target = self.progress.target(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        self.wait(&[target]);
        Ok(())
    }

    /// The host waits for a stream, and learns of failed work.
    pub fn synchronize(&mut self, stream: u64) -> Result<(), CudaError> {
        self.drain(stream)?;
        faults::told()
    }

    /// The host waits for an event; false if there is none.
    pub fn synchronize_event(&mut self, event: u64) -> bool {
        let target = self.progress.target_of_event(event);
        target.map(|target| self.wait(&[target])).is_some()
    }

    /// The host waits for a device, and learns of failed work.
    pub fn synchronize_device(&mut self, device: usize) -> Result<(), CudaError> {
        self.wait(&self.progress.targets(Some(device)));
        faults::told()
    }

    /// The host waits for everything.
    pub fn synchronize_all(&mut self) {
        self.wait(&self.progress.targets(None));
    }
}
