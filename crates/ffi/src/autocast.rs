//! Autocast's thread-local state by device type and dtype.
//!
//! Users call `overdrive_amp::autocast`, which also checks that device and dtype fit together.

use std::cell::RefCell;
use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::error::{Error, check};
use crate::kind::to_scalar_type;
use crate::raw;

/// Autocast's state for one device type on this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// Whether operators on this device type are cast.
    pub enabled: bool,
    /// The dtype that they are cast to.
    pub kind: Kind,
    /// Whether the cast copy of a weight is kept until the outermost region ends.
    pub cache_enabled: bool,
}

thread_local! {
    /// The regions of this thread, innermost last, each with the state to restore when it ends.
    static OPEN: RefCell<Vec<Open>> = const { RefCell::new(Vec::new()) };
}

struct Open {
    id: u64,
    previous: raw::AutocastState,
}

/// An autocast region: entered when made, and ended when dropped, also in a panic; the previous state is restored then.
///
/// Regions nest. If a region ends before a region inside of it (a `Vec` drops its guards in this order), the inner
/// one's state stays, and the inner region restores the outer one's previous state when it ends. The guard is not
/// `Send`, because the state belongs to the thread.
#[must_use = "the region ends when the guard is dropped"]
#[derive(Debug)]
pub struct Region {
    id: u64,
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
        let id = OPEN.with_borrow_mut(|open| {
            let id = open.last().map_or(0, |innermost| innermost.id + 1);
            open.push(Open { id, previous });
            id
        });
        Ok(Self { id, _not_send: PhantomData })
    }
}

/// Takes a region out of the open ones; returns the state that its device type should have from now on.
fn close(open: &mut Vec<Open>, id: u64) -> Option<raw::AutocastState> {
    let place = open.iter().position(|region| region.id == id)?;
    let ended = open.remove(place).previous;
    let mut now = ended;
    let mut current = ended;
    // SAFETY: `current` lives through the call.
    check(|err| unsafe { raw::od_autocast_get(ended.device_type, &mut current, err) }).ok()?;
    // An inner region of the same device type takes over the state to restore; for the cache, which all device types
    // share, the next inner region does.
    if let Some(inner) = open[place..].iter_mut().find(|inner| inner.previous.device_type == ended.device_type) {
        (inner.previous.enabled, inner.previous.scalar_type) = (ended.enabled, ended.scalar_type);
        (now.enabled, now.scalar_type) = (current.enabled, current.scalar_type);
    }
    if let Some(inner) = open.get_mut(place) {
        inner.previous.cache_enabled = ended.cache_enabled;
        now.cache_enabled = current.cache_enabled;
    }
    Some(now)
}

impl Drop for Region {
    fn drop(&mut self) {
        // Without the list the thread itself is ending, and its state ends with it.
        let Ok(Some(state)) = OPEN.try_with(|open| close(&mut open.borrow_mut(), self.id)) else { return };
        // SAFETY: the state was read from libtorch, so it is valid and restoring it cannot fail.
        let restored = check(|err| unsafe { raw::od_autocast_exit(&state, err) });
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
