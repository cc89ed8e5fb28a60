//! Regions in which libtorch picks each operator's dtype.

use overdrive_ffi::autocast::{self as ffi, Region, State};
use tch::{Cuda, Device, Kind};

use crate::error::AmpError;

/// Runs `body` with matrix products and convolutions on `device` cast to `kind`; operators that need float32 keep it.
///
/// The previous state is restored when `body` returns or panics. Run backward outside of the region, as in PyTorch.
///
/// # Errors
/// When `kind` is neither `Half` nor `BFloat16`, or the device is missing or has no autocast; `body` does not run then.
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.autocast(device_type, dtype)`
#[doc(alias = "torch.autocast")]
pub fn autocast<T>(device: Device, kind: Kind, body: impl FnOnce() -> T) -> Result<T, AmpError> {
    Autocast::new(device).kind(kind).run(body)
}

/// Autocast's state for the device's type on this thread.
///
/// # Errors
/// When the device has no autocast.
///
/// # Source
/// `torch.is_autocast_enabled`, `torch.get_autocast_dtype`, `torch.is_autocast_cache_enabled`
#[doc(alias = "is_autocast_enabled")]
#[doc(alias = "get_autocast_dtype")]
pub fn autocast_state(device: Device) -> Result<State, AmpError> {
    check_has_autocast(device)?;
    Ok(ffi::state(device)?)
}

/// The options of an autocast region; [`autocast`] is the short form.
///
/// ```
/// use overdrive_amp::{Autocast, autocast};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_amp::AmpError> {
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let _region = Autocast::new(Device::Cpu).kind(Kind::BFloat16).enter()?;
/// assert_eq!(x.matmul(&x).kind(), Kind::BFloat16);
/// Autocast::new(Device::Cpu).enabled(false).run(|| assert_eq!(x.matmul(&x).kind(), Kind::Float))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `enter` or `run`"]
pub struct Autocast {
    device: Device,
    kind: Option<Kind>,
    enabled: bool,
    cache_enabled: Option<bool>,
}

impl Autocast {
    /// An enabled region for the device's type. Its dtype is that of the enclosing region, or libtorch's default
    /// (bfloat16 on a CPU, float16 on CUDA).
    pub fn new(device: Device) -> Self {
        Self { device, kind: None, enabled: true, cache_enabled: None }
    }

    /// The dtype that operators are cast to: `Half` or `BFloat16`.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// False switches autocast off for this region, inside an enabled one.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Whether a weight's cast copy is kept until the outermost region ends; defaults to the surrounding region's
    /// setting.
    pub fn cache_enabled(mut self, cache_enabled: bool) -> Self {
        self.cache_enabled = Some(cache_enabled);
        self
    }

    /// Enters the region; it ends when the guard is dropped.
    ///
    /// # Errors
    /// Those of [`autocast`]; the state is unchanged then. A disabled region takes any dtype.
    ///
    /// # Syncs
    /// No.
    pub fn enter(self) -> Result<AutocastGuard, AmpError> {
        check_has_autocast(self.device)?;
        let outside = ffi::state(self.device)?;
        let wanted = State {
            enabled: self.enabled,
            kind: self.kind.unwrap_or(outside.kind),
            cache_enabled: self.cache_enabled.unwrap_or(outside.cache_enabled),
        };
        if self.enabled {
            check_exists(self.device)?;
            check_kind(wanted.kind)?;
        }
        // A disabled region casts nothing, so a dtype that autocast does not support is ignored rather than refused.
        let kind = if check_kind(wanted.kind).is_ok() { wanted.kind } else { outside.kind };
        Ok(AutocastGuard { _region: Region::enter(self.device, State { kind, ..wanted })? })
    }

    /// Runs `body` within the region.
    ///
    /// # Errors
    /// Those of [`enter`](Self::enter); `body` does not run then.
    pub fn run<T>(self, body: impl FnOnce() -> T) -> Result<T, AmpError> {
        let _guard = self.enter()?;
        Ok(body())
    }
}

/// An autocast region that ends when this guard is dropped, also by a panic. It cannot move to another thread.
///
/// ```compile_fail
/// let guard = overdrive_amp::AutocastGuard::new(tch::Device::Cpu, tch::Kind::BFloat16).unwrap();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "the region ends when the guard is dropped"]
pub struct AutocastGuard {
    _region: Region,
}

impl AutocastGuard {
    /// Enters a region; see [`autocast`], and [`Autocast`] for more options.
    ///
    /// # Errors
    /// Those of [`autocast`].
    pub fn new(device: Device, kind: Kind) -> Result<Self, AmpError> {
        Autocast::new(device).kind(kind).enter()
    }
}

fn check_has_autocast(device: Device) -> Result<(), AmpError> {
    match device {
        Device::Cpu | Device::Cuda(_) | Device::Mps => Ok(()),
        Device::Vulkan => Err(AmpError::UnsupportedDevice { device }),
    }
}

pub(crate) fn check_exists(device: Device) -> Result<(), AmpError> {
    let count = Cuda::device_count();
    let exists = match device {
        Device::Cuda(index) => i64::try_from(index).is_ok_and(|index| index < count),
        Device::Mps => tch::utils::has_mps(),
        Device::Cpu | Device::Vulkan => true,
    };
    if exists { Ok(()) } else { Err(AmpError::MissingDevice { device, count }) }
}

fn check_kind(kind: Kind) -> Result<(), AmpError> {
    match kind {
        Kind::Half | Kind::BFloat16 => Ok(()),
        kind => Err(AmpError::UnsupportedKind { kind }),
    }
}
