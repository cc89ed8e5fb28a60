//! Times on a GPU, taken without waiting for it.

use std::fmt;
use std::ptr::{self, NonNull};

use crate::error::{Error, check};
use crate::raw;

/// A point in a CUDA stream, with the time at which the device reached it.
///
/// # Source
/// `torch.cuda.Event(enable_timing=True)`
pub struct TimedEvent(NonNull<raw::TimedEvent>);

// SAFETY: CUDA takes calls on an event from any thread, and `&mut` in `record` keeps them from overlapping.
unsafe impl Send for TimedEvent {}

impl TimedEvent {
    /// An event for the CUDA device with this number. It may be recorded repeatedly.
    ///
    /// # Errors
    /// Without CUDA, or when there is no such device.
    pub fn new(device: usize) -> Result<Self, Error> {
        let device = i32::try_from(device).unwrap_or(i32::MAX);
        let mut out = ptr::null_mut();
        // SAFETY: `out` lives through the call.
        check(|err| unsafe { raw::od_timed_event_new(device, &mut out, err) })?;
        Ok(Self(NonNull::new(out).expect("a status of success comes with an event")))
    }

    /// Records the event after all work submitted to the calling thread's current stream so far.
    ///
    /// # Errors
    /// `Cuda`
    ///
    /// # Syncs
    /// No.
    pub fn record(&mut self) -> Result<(), Error> {
        // SAFETY: the event lives through the call.
        check(|err| unsafe { raw::od_timed_event_record(self.0.as_ptr(), err) })
    }

    /// Whether the device has reached the event; false if it was not recorded.
    ///
    /// # Errors
    /// `Cuda`: earlier errors on the device.
    ///
    /// # Syncs
    /// No.
    pub fn is_reached(&self) -> Result<bool, Error> {
        let mut reached = 0;
        // SAFETY: event and `reached` live through the call.
        check(|err| unsafe { raw::od_timed_event_is_reached(self.0.as_ptr(), &mut reached, err) })?;
        Ok(reached != 0)
    }

    /// Milliseconds on the device from this event to a later one.
    ///
    /// # Errors
    /// When one of them has not been [reached](Self::is_reached); `Cuda`.
    ///
    /// # Syncs
    /// No.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f64, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: both events and `milliseconds` live through the call.
        check(|err| unsafe { raw::od_timed_event_elapsed(self.0.as_ptr(), later.0.as_ptr(), &mut milliseconds, err) })?;
        Ok(milliseconds)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        // SAFETY: made by `od_timed_event_new`, not used again.
        unsafe { raw::od_timed_event_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for TimedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TimedEvent")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_an_error() {
        assert!(TimedEvent::new(usize::MAX).is_err());
        if !tch::Cuda::is_available() {
            assert!(TimedEvent::new(0).is_err());
        }
    }
}
