//! Autocast's thread-local state by device type and dtype.
//!
//! What a user calls is `overdrive_amp::autocast`, which also checks that the pair makes sense.

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::error::{Error, check};
use crate::kind::to_scalar_type;
use crate::raw;

/// Autocast's state for one device type on this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Whether operators on this device type are cast.
    pub enabled: bool,
    /// What they are cast to.
    pub kind: Kind,
    /// Whether the casted copy of a weight is kept until the outermost region ends.
    pub cache_enabled: bool,
}

/// An autocast region: entered when made, the state before it restored when dropped, panics included.
///
/// Regions nest. The guard is not `Send`, because the state belongs to the thread.
#[must_use = "the region ends when the guard is dropped"]
#[derive(Debug)]
pub struct Region {
    previous: raw::AutocastState,
    _not_send: PhantomData<*const ()>,
}

impl Region {
    /// Enters a region for the device's type; its index does not matter.
    ///
    /// # Errors
    /// When libtorch has no autocast for this device type.
    pub fn enter(device: Device, wanted: State) -> Result<Self, Error> {
        let wanted = raw::AutocastState {
            device_type: device_type(device),
            enabled: i32::from(wanted.enabled),
            scalar_type: to_scalar_type(wanted.kind),
            cache_enabled: i32::from(wanted.cache_enabled),
        };
        let mut previous = wanted;
        // SAFETY: both structs live through the call.
        check(|err| unsafe { raw::od_autocast_enter(&wanted, &mut previous, err) })?;
        Ok(Self { previous, _not_send: PhantomData })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the state was read by `enter`. It was valid then, so putting it back cannot fail.
        let restored = check(|err| unsafe { raw::od_autocast_exit(&self.previous, err) });
        debug_assert!(restored.is_ok(), "autocast state not restored: {restored:?}");
    }
}

/// This thread's autocast state for the device's type.
///
/// # Errors
/// When libtorch has no autocast for this device type.
pub fn state(device: Device) -> Result<State, Error> {
    let mut out = raw::AutocastState { device_type: 0, enabled: 0, scalar_type: 0, cache_enabled: 0 };
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_autocast_get(device_type(device), &mut out, err) })?;
    let kind = kind_from_c_int(out.scalar_type)?;
    Ok(State { enabled: out.enabled != 0, kind, cache_enabled: out.cache_enabled != 0 })
}

fn kind_from_c_int(code: i32) -> Result<Kind, Error> {
    [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double]
        .into_iter()
        .find(|kind| to_scalar_type(*kind) == code)
        .ok_or_else(|| Error::refused(format!("autocast to scalar type {code} has no name in tch")))
}

/// `c10::DeviceType`'s number.
fn device_type(device: Device) -> i32 {
    match device {
        Device::Cpu => 0,
        Device::Cuda(_) => 1,
        Device::Vulkan => 10,
        Device::Mps => 13,
    }
}
