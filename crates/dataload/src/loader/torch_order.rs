//! Orders that a loader draws as PyTorch's loader does.

use std::sync::{Arc, Mutex};

use crate::loader::lock;
use crate::{DataError, Generator};

/// The generator of a loader; with `None`, libtorch's default one.
#[derive(Debug)]
pub(crate) struct TorchOrder(Mutex<Option<Generator>>);

impl TorchOrder {
    pub(crate) fn new(generator: Option<Generator>) -> Self {
        Self(Mutex::new(generator))
    }

    /// Draws an epoch's order. `start` is the generator's state before the epoch: of a resumed epoch the saved one; for
    /// a new epoch it is set.
    ///
    /// The generator continues after the draws. So does libtorch's, but not for a resumed epoch: it had drawn before
    /// the state was saved, and a checkpoint restores it.
    pub(crate) fn draw<T>(
        &self,
        start: &mut Option<Arc<[u8]>>,
        draw: impl FnOnce(&mut Generator) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        let mut own = lock(&self.0);
        let resumed = start.is_some();
        let mut generator = match (&*start, &*own) {
            (Some(state), own) => Generator::restored(state, own.is_none())
                .ok_or_else(|| DataError::other("the saved state of the generator is not valid"))?,
            (None, Some(own)) => own.clone(),
            (None, None) => Generator::of_torch()?,
        };
        let state = generator.state();
        // PyTorch's loader draws a seed for its workers first, whether it has any or not.
        generator.random();
        let drawn = draw(&mut generator)?;
        match &mut *own {
            Some(own) => *own = generator,
            None if resumed => {}
            None => generator.continue_in_torch()?,
        }
        *start = Some(state);
        Ok(drawn)
    }

    /// The state from which the next epoch is drawn; `None` where that is libtorch's own.
    pub(crate) fn state(&self) -> Option<Arc<[u8]>> {
        lock(&self.0).as_ref().map(Generator::state)
    }
}
