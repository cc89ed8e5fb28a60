//! A scaler's options, checked before it is built.

use tch::Device;

use crate::autocast::check_exists;
use crate::error::AmpError;
use crate::grad_scaler::GradScaler;

/// What [`is_scale`] checks, for error messages.
pub(crate) const EXPECTED_SCALE: &str = "above 0 and finite as a float32";

/// Whether a scale can be used: libtorch keeps it in float32.
pub(crate) fn is_scale(scale: f64) -> bool {
    let scale = scale as f32;
    scale > 0.0 && scale.is_finite()
}

/// The options of a [`GradScaler`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct GradScalerBuilder {
    pub(crate) device: Device,
    pub(crate) init_scale: f64,
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: i64,
    pub(crate) enabled: bool,
}

impl GradScalerBuilder {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            device,
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }

    /// The initial scale; default 65536.
    pub fn init_scale(mut self, init_scale: f64) -> Self {
        self.init_scale = init_scale;
        self
    }

    /// What the scale is multiplied by after `growth_interval` good steps in a row; above 1, default 2.
    pub fn growth_factor(mut self, growth_factor: f64) -> Self {
        self.growth_factor = growth_factor;
        self
    }

    /// What the scale is multiplied by after an infinity or NaN; above 0 and below 1, default 0.5.
    pub fn backoff_factor(mut self, backoff_factor: f64) -> Self {
        self.backoff_factor = backoff_factor;
        self
    }

    /// How many good steps in a row the scale waits before it grows; default 2000.
    pub fn growth_interval(mut self, growth_interval: i64) -> Self {
        self.growth_interval = growth_interval;
        self
    }

    /// False makes a scaler that does nothing, so that a loop reads the same with and without scaling.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// The scaler; disabled, with a warning (`tracing`), if the device is a GPU that the machine lacks.
    ///
    /// # Errors
    /// [`AmpError::InvalidOption`]; a disabled scaler's options are not checked.
    pub fn build(self) -> Result<GradScaler, AmpError> {
        if self.enabled {
            self.check()?;
        }
        Ok(GradScaler::from_options(self.disabled_without_device()))
    }

    pub(crate) fn disabled_without_device(mut self) -> Self {
        if self.enabled
            && let Err(missing) = check_exists(self.device)
        {
            tracing::warn!("GradScaler is disabled: {missing}");
            self.enabled = false;
        }
        self
    }

    pub(crate) fn check(&self) -> Result<(), AmpError> {
        let refuse = |option, found, expected| Err(AmpError::InvalidOption { option, found, expected });
        if !is_scale(self.init_scale) {
            return refuse("init_scale", self.init_scale, EXPECTED_SCALE);
        }
        self.check_factors()
    }

    /// Checks all options but the scale, which a run may have backed off to 0.
    pub(crate) fn check_factors(&self) -> Result<(), AmpError> {
        let refuse = |option, found, expected| Err(AmpError::InvalidOption { option, found, expected });
        if !(self.growth_factor > 1.0 && self.growth_factor.is_finite()) {
            return refuse("growth_factor", self.growth_factor, "above 1 and finite");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return refuse("backoff_factor", self.backoff_factor, "above 0 and below 1");
        }
        // libtorch counts good steps in an int32.
        if !(1..=i64::from(i32::MAX)).contains(&self.growth_interval) {
            return refuse("growth_interval", self.growth_interval as f64, "from 1 to 2147483647");
        }
        Ok(())
    }
}
