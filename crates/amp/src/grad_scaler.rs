//! Keeps small float16 gradients from underflowing to zero, by a loss scale that adapts to the run.

mod asked;
mod state;

use overdrive_core::{GradScale, Marked, Optimizer, OptimizerId, UNSCALED};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use crate::error::AmpError;
use crate::grad_scaler::asked::{agreed, check_all_unscaled, check_behavior, combined};
use crate::scaler_options::{EXPECTED_SCALE, GradScalerBuilder, is_scale};
use crate::unscale::{Half, to_device, unscale};

static UPDATE_SCALE: LazyOp = LazyOp::new("aten::_amp_update_scale_", "");
static FILL: LazyOp = LazyOp::new("aten::fill_", "Scalar");

/// Scales the loss so that float16 gradients do not underflow, skips steps whose gradients overflowed, and adapts the
/// scale: times `growth_factor` after `growth_interval` good steps in a row, times `backoff_factor` after a bad one.
///
/// The order of calls within a step is `scale`, backward, (`unscale_`, clipping,) `step`, `update`. Several losses and
/// several optimizers may share a scaler; call `update` once, after all of them.
///
/// # Source
/// `torch.amp.GradScaler`; Micikevicius et al., "Mixed Precision Training", 2018.
#[doc(alias = "torch.amp.GradScaler")]
#[derive(Debug)]
pub struct GradScaler {
    options: GradScalerBuilder,
    on_device: Option<OnDevice>,
    optimizers: Vec<(OptimizerId, Progress)>,
    init_growth_tracker: i64,
}

/// The scale and the number of good steps in a row, on the loss's device.
#[derive(Debug)]
struct OnDevice {
    scale: Tensor,
    growth_tracker: Tensor,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Ready,
    Unscaled,
    Stepped,
}

/// What one optimizer has done since the last update, and whether its gradients held infinities: one flag per device.
#[derive(Debug, Default)]
struct Progress {
    stage: Stage,
    found_inf: Vec<Tensor>,
    /// The optimizer's `gradients_used` at that time: after SAM's ascent it is higher, and the new gradients are
    /// scaled.
    gradients_used: u64,
    /// How many parameter groups it had at that time.
    groups: usize,
    /// Marks the parameters while their gradients are unscaled, so that accumulation refuses to add scaled ones.
    unscaled: Option<Marked>,
}

/// The outcome of a step.
#[derive(Debug)]
pub enum StepOutcome {
    /// The parameters were updated.
    Stepped,
    /// The gradients held an infinity or NaN, so nothing was changed.
    Skipped,
    /// A fused optimizer decides on the device; this flag, on the device, is 1 when the step is skipped.
    OnDevice(Tensor),
}

impl StepOutcome {
    /// Whether the step was skipped.
    ///
    /// # Errors
    /// When an earlier kernel failed.
    ///
    /// # Syncs
    /// Waits for the device after a fused step; otherwise no.
    pub fn skipped(&self) -> Result<bool, AmpError> {
        match self {
            Self::Stepped => Ok(false),
            Self::Skipped => Ok(true),
            Self::OnDevice(found_inf) => Ok(found_inf.f_double_value(&[])? != 0.0),
        }
    }
}

impl GradScaler {
    /// A scaler with PyTorch's defaults for a loss on `device`. The scale itself is created on the first loss's device.
    ///
    /// If `device` is a GPU and the machine has none, it warns (`tracing`) and is disabled, like PyTorch's.
    pub fn new(device: Device) -> Self {
        Self::from_options(GradScalerBuilder::new(device).disabled_without_device())
    }

    /// A builder for other options than PyTorch's defaults.
    pub fn builder(device: Device) -> GradScalerBuilder {
        GradScalerBuilder::new(device)
    }

    pub(crate) fn from_options(options: GradScalerBuilder) -> Self {
        Self { options, on_device: None, optimizers: Vec::new(), init_growth_tracker: 0 }
    }

    /// The loss, or any output, times the scale.
    ///
    /// # Shapes
    /// Any; the result has the same shape.
    ///
    /// # Errors
    /// When the output is undefined, or libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn scale(&mut self, output: &Tensor) -> Result<Tensor, AmpError> {
        if !output.defined() {
            return Err(AmpError::UndefinedOutput);
        }
        if !self.options.enabled {
            return Ok(output.shallow_clone());
        }
        let on_device = self.on_device_or_init(output.device())?;
        let scale = to_device(&on_device.scale, output.device())?;
        Ok(output.f_mul(&scale)?)
    }

    /// Several outputs times the scale, each on its own device.
    ///
    /// # Errors
    /// Those of [`scale`](Self::scale).
    ///
    /// # Syncs
    /// No.
    pub fn scale_all<T: std::borrow::Borrow<Tensor>>(&mut self, outputs: &[T]) -> Result<Vec<Tensor>, AmpError> {
        outputs.iter().map(|output| self.scale(output.borrow())).collect()
    }

    /// Divides the optimizer's gradients by the scale, so that they can be clipped or inspected before `step`.
    ///
    /// # Errors
    /// When called before `scale`, twice for the same gradients, or after `step`; when a gradient is in float16 (no
    /// gradient is changed then); when the optimizer's steps cannot be skipped (`behavior`).
    ///
    /// # Syncs
    /// No; for gradients on the host, whose scale is on a device, once.
    pub fn unscale_<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<(), AmpError> {
        if !self.options.enabled {
            return Ok(());
        }
        check_behavior(optimizer)?;
        let scale = &self.initialised("unscale_")?.scale;
        match self.stage(optimizer) {
            Stage::Ready => {}
            Stage::Unscaled => return Err(AmpError::AlreadyUnscaled),
            Stage::Stepped => return Err(AmpError::UnscaledAfterStep),
        }
        // In float64, because the reciprocal of a large scale is subnormal in float32.
        let inv_scale = scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        let found_inf = unscale(optimizer, &inv_scale, Half::Refused)
            .map(|found_inf| found_inf.into_iter().chain(optimizer.used_found_inf()).collect());
        let found_inf = agreed(optimizer, found_inf, scale.device())?;
        self.record(optimizer, Stage::Unscaled, found_inf);
        Ok(())
    }

    /// Steps the optimizer, unless its gradients hold an infinity or NaN. Unscales them first if `unscale_` has not.
    ///
    /// # Errors
    /// When called before `scale` or twice between updates, when the optimizer's steps cannot be skipped (`behavior`),
    /// and when the optimizer fails. Also when there are no gradients, except for an optimizer that takes the scale on
    /// the device: its step then does nothing, as in PyTorch.
    ///
    /// # Syncs
    /// With an optimizer that takes the scale and the flag on the device (`takes_grad_scale`), no. With any other,
    /// waits for the device once to read the flag, as PyTorch does.
    pub fn step<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<StepOutcome, AmpError> {
        if !self.options.enabled {
            optimizer.step()?;
            return Ok(StepOutcome::Stepped);
        }
        check_behavior(optimizer)?;
        self.initialised("step")?;
        let stage = self.stage(optimizer);
        if stage == Stage::Stepped {
            return Err(AmpError::AlreadyStepped);
        }
        if stage == Stage::Unscaled && self.progress_mut(optimizer.id()).groups != optimizer.num_groups() {
            check_all_unscaled(optimizer)?;
        }
        let outcome =
            if optimizer.takes_grad_scale() { self.step_on_device(optimizer)? } else { self.step_or_skip(optimizer)? };
        let progress = self.progress_mut(optimizer.id());
        (progress.stage, progress.unscaled) = (Stage::Stepped, None);
        Ok(outcome)
    }

    fn step_on_device<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<StepOutcome, AmpError> {
        let scale = self.initialised("step")?.scale.shallow_clone();
        let still_scaled = self.stage(optimizer) == Stage::Ready;
        if still_scaled {
            // Only looks for infinities (an inverse scale of 1): the optimizer divides by the scale when it reads the
            // gradients.
            let one = Tensor::f_ones([], (Kind::Float, scale.device()))?;
            let found_inf = agreed(optimizer, unscale(optimizer, &one, Half::Allowed), scale.device())?;
            self.record(optimizer, Stage::Ready, found_inf);
        }
        let flags = &self.progress_mut(optimizer.id()).found_inf;
        let found_inf = match flags.is_empty() {
            true => Tensor::f_zeros([], (Kind::Float, scale.device()))?,
            false => combined(flags, scale.device(), "step")?,
        };
        let grad_scale = GradScale { scale: still_scaled.then_some(&scale), found_inf: &found_inf };
        optimizer.step_scaled(grad_scale)?;
        Ok(StepOutcome::OnDevice(found_inf))
    }

    fn step_or_skip<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<StepOutcome, AmpError> {
        if self.stage(optimizer) == Stage::Ready {
            self.unscale_(optimizer)?;
        }
        let device = self.initialised("step")?.scale.device();
        let found_inf = combined(&self.progress_mut(optimizer.id()).found_inf, device, "step")?;
        if found_inf.f_double_value(&[])? != 0.0 {
            optimizer.step_skipped()?;
            return Ok(StepOutcome::Skipped);
        }
        optimizer.step()?;
        Ok(StepOutcome::Stepped)
    }

    /// Grows or backs off the scale, by whether gradients held an infinity or NaN since the last update.
    ///
    /// # Errors
    /// When called before `scale`, or when no optimizer had gradients since the last update.
    ///
    /// # Syncs
    /// No.
    pub fn update(&mut self) -> Result<(), AmpError> {
        if !self.options.enabled {
            return Ok(());
        }
        let on_device = self.initialised("update")?;
        let flags: Vec<_> = self.optimizers.iter().flat_map(|(_, progress)| &progress.found_inf).collect();
        let found_inf = combined(&flags, on_device.scale.device(), "update")?;
        UPDATE_SCALE.call(&[
            Arg::Tensor(&on_device.scale),
            Arg::Tensor(&on_device.growth_tracker),
            Arg::Tensor(&found_inf),
            Arg::Double(self.options.growth_factor),
            Arg::Double(self.options.backoff_factor),
            Arg::Int(self.options.growth_interval),
        ])?;
        self.optimizers.clear();
        Ok(())
    }

    /// Sets the scale instead of adapting it; `update(new_scale)` in PyTorch.
    ///
    /// # Errors
    /// When called before `scale`, or when the scale is not above 0 and finite in float32.
    ///
    /// # Syncs
    /// No.
    pub fn update_to(&mut self, new_scale: f64) -> Result<(), AmpError> {
        if !self.options.enabled {
            return Ok(());
        }
        if !is_scale(new_scale) {
            let (option, found) = ("new scale", new_scale);
            return Err(AmpError::InvalidOption { option, found, expected: EXPECTED_SCALE });
        }
        let scale = &self.initialised("update_to")?.scale;
        FILL.call(&[Arg::Tensor(scale), Arg::Double(f64::from(new_scale as f32))])?;
        self.optimizers.clear();
        Ok(())
    }

    /// The scale now; 1 when disabled.
    ///
    /// # Errors
    /// When an earlier kernel failed.
    ///
    /// # Syncs
    /// Waits for the device.
    ///
    /// # Source
    /// `GradScaler.get_scale`
    #[doc(alias = "get_scale")]
    pub fn scale_value(&self) -> Result<f64, AmpError> {
        match &self.on_device {
            _ if !self.options.enabled => Ok(1.0),
            Some(on_device) => Ok(on_device.scale.f_double_value(&[])?),
            None => Ok(f64::from(self.options.init_scale as f32)),
        }
    }

    /// The number of good steps in a row so far; 0 when disabled.
    ///
    /// # Errors
    /// When an earlier kernel failed.
    ///
    /// # Syncs
    /// Waits for the device.
    pub fn growth_tracker(&self) -> Result<i64, AmpError> {
        match &self.on_device {
            _ if !self.options.enabled => Ok(0),
            Some(on_device) => Ok(on_device.growth_tracker.f_int64_value(&[])?),
            None => Ok(self.init_growth_tracker),
        }
    }

    /// What the scale is multiplied by after enough good steps in a row.
    pub fn growth_factor(&self) -> f64 {
        self.options.growth_factor
    }

    /// What the scale is multiplied by after an infinity or NaN.
    pub fn backoff_factor(&self) -> f64 {
        self.options.backoff_factor
    }

    /// How many good steps in a row the scale waits before it grows.
    pub fn growth_interval(&self) -> i64 {
        self.options.growth_interval
    }

    /// Changes both factors and the interval, for later updates.
    ///
    /// # Errors
    /// [`AmpError::InvalidOption`]; nothing changes then.
    ///
    /// # Source
    /// `set_growth_factor`, `set_backoff_factor`, `set_growth_interval`
    pub fn set_factors(
        &mut self,
        growth_factor: f64,
        backoff_factor: f64,
        growth_interval: i64,
    ) -> Result<(), AmpError> {
        let options = GradScalerBuilder { growth_factor, backoff_factor, growth_interval, ..self.options };
        options.check_factors()?;
        self.options = options;
        Ok(())
    }

    /// Whether the scaler scales and skips; a disabled one does nothing.
    pub fn is_enabled(&self) -> bool {
        self.options.enabled
    }

    fn on_device_or_init(&mut self, device: Device) -> Result<&OnDevice, AmpError> {
        let on_device = match self.on_device.take() {
            Some(on_device) => on_device,
            None => OnDevice {
                scale: Tensor::f_full(&[0; 0][..], f64::from(self.options.init_scale as f32), (Kind::Float, device))?,
                growth_tracker: Tensor::f_full(&[0; 0][..], self.init_growth_tracker, (Kind::Int, device))?,
            },
        };
        Ok(self.on_device.insert(on_device))
    }

    fn initialised(&self, call: &'static str) -> Result<&OnDevice, AmpError> {
        self.on_device.as_ref().ok_or(AmpError::NotScaled { call })
    }

    fn stage<O: Optimizer + ?Sized>(&self, optimizer: &O) -> Stage {
        match self.optimizers.iter().find(|(known, _)| *known == optimizer.id()) {
            Some((_, seen)) if seen.stage != Stage::Unscaled || seen.gradients_used == optimizer.gradients_used() => {
                seen.stage
            }
            _ => Stage::Ready,
        }
    }

    fn progress_mut(&mut self, id: OptimizerId) -> &mut Progress {
        let place = match self.optimizers.iter().position(|(known, _)| *known == id) {
            Some(place) => place,
            None => {
                self.optimizers.push((id, Progress::default()));
                self.optimizers.len() - 1
            }
        };
        &mut self.optimizers[place].1
    }

    /// The flags of several calls add up until `update`.
    fn record<O: Optimizer + ?Sized>(&mut self, optimizer: &O, stage: Stage, found_inf: Vec<Tensor>) {
        let progress = self.progress_mut(optimizer.id());
        progress.found_inf.extend(found_inf);
        (progress.stage, progress.gradients_used) = (stage, optimizer.gradients_used());
        progress.groups = optimizer.num_groups();
        progress.unscaled = (stage == Stage::Unscaled).then(|| UNSCALED.mark(optimizer.params()));
    }
}
