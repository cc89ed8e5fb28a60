//! DeepSpeed's rule for loss scales.

use overdrive_amp::GradScaler;
use overdrive_core::{Entry, Optimizer, StateDict, StateError, Stateful};
use tch::{Device, Tensor};

use super::error::DeepSpeedError;
use super::precision::{Dynamic, Scaling};

/// A `GradScaler` whose scale follows DeepSpeed's rule, and which steps and updates in one call.
///
/// The rule of `fp16`: `initial_scale_power` gives the first scale. Good steps double it, `loss_scale_window` of them in a
/// row, and one more after a start or an overflow. An overflow skips the step; it halves the scale only if it is the
/// `hysteresis`-th since the scale was last doubled (with `consecutive_hysteresis`: in a row); with stage 0 every overflow
/// halves it. A `loss_scale` above 0 stays. With `bf16` losses are not scaled, and steps whose gradients overflow are skipped, unless
/// `check_grad_overflow` is false. With `torch_autocast` in float16 it is `GradScaler` with its defaults. In float32 it
/// does nothing.
///
/// The order of calls within a step is that of `GradScaler`: [`scale`](Self::scale), backward,
/// ([`unscale_`](Self::unscale_), clipping,) [`step`](Self::step).
///
/// # Source
/// DeepSpeed's `DynamicLossScaler` and `LossScaler`, and the rule of its `FP16_Optimizer` for stage 0
#[derive(Debug)]
pub struct LossScaler {
    inner: GradScaler,
    scaling: Scaling,
    now: Now,
}

/// The names are DeepSpeed's.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Now {
    cur_scale: f64,
    cur_iter: i64,
    last_overflow_iter: i64,
    cur_hysteresis: i64,
}

impl Now {
    fn start(options: &Dynamic) -> Self {
        let cur_hysteresis = count(options.hysteresis);
        Self { cur_scale: options.initial, cur_iter: 0, last_overflow_iter: -1, cur_hysteresis }
    }

    /// After a step; false where the scale would have to be smaller than the smallest.
    fn update(&mut self, options: &Dynamic, overflow: bool) -> bool {
        let mut can_go_on = true;
        if overflow {
            if self.cur_hysteresis <= 1 {
                can_go_on = self.cur_scale != options.min || !options.ends_at_min;
                self.cur_scale = (self.cur_scale / 2.0).max(options.min);
            } else {
                self.cur_hysteresis -= 1;
            }
            self.last_overflow_iter = self.cur_iter;
        } else {
            let good = self.cur_iter - self.last_overflow_iter - 1;
            let doubles = good > 0 && good % count(options.window) == 0;
            if options.consecutive || doubles {
                self.cur_hysteresis = count(options.hysteresis);
            }
            // Float32 has no larger one.
            if doubles && self.cur_scale < 2f64.powi(127) {
                self.cur_scale *= 2.0;
            }
        }
        self.cur_iter += 1;
        can_go_on
    }
}

fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl LossScaler {
    pub(super) fn new(device: Device, scaling: Scaling) -> Result<Self, DeepSpeedError> {
        let builder = GradScaler::builder(device);
        let none = Now { cur_scale: 1.0, cur_iter: 0, last_overflow_iter: -1, cur_hysteresis: 1 };
        let (builder, now) = match scaling {
            Scaling::Off => (builder.enabled(false), none),
            Scaling::Fixed(scale) => (builder.init_scale(scale), Now { cur_scale: scale, ..none }),
            Scaling::Dynamic(options) => (builder.init_scale(options.initial), Now::start(&options)),
            Scaling::Torch => (builder, none),
        };
        Ok(Self { inner: builder.build()?, scaling, now })
    }

    /// The loss times the scale.
    ///
    /// # Shapes
    /// Any; the result has the same shape.
    ///
    /// # Errors
    /// As `GradScaler::scale`.
    ///
    /// # Syncs
    /// No.
    pub fn scale(&mut self, loss: &Tensor) -> Result<Tensor, DeepSpeedError> {
        Ok(self.inner.scale(loss)?)
    }

    /// Divides the gradients by the scale, so that they can be clipped before [`step`](Self::step).
    ///
    /// # Errors
    /// As `GradScaler::unscale_`.
    ///
    /// # Syncs
    /// No; with a sharded optimizer waits for all ranks, and with offloaded rows for the device.
    pub fn unscale_<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<(), DeepSpeedError> {
        Ok(self.inner.unscale_(optimizer)?)
    }

    /// Steps the optimizer unless its gradients overflow, and updates the scale. Whether it has stepped: a schedule steps
    /// only then, as in DeepSpeed.
    ///
    /// # Errors
    /// As `GradScaler::step`, and [`DeepSpeedError::LossScale`] after an overflow at the smallest scale with stages 1
    /// to 3, where DeepSpeed ends the run too.
    ///
    /// # Syncs
    /// Waits for the device, unless it does nothing.
    pub fn step<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<bool, DeepSpeedError> {
        let overflow = self.inner.step(optimizer)?.skipped()?;
        match &self.scaling {
            Scaling::Off => {}
            Scaling::Torch => self.inner.update()?,
            Scaling::Fixed(scale) => self.inner.update_to(*scale)?,
            Scaling::Dynamic(options) => {
                let can_go_on = self.now.update(options, overflow);
                self.inner.update_to(self.now.cur_scale)?;
                if !can_go_on {
                    return Err(DeepSpeedError::LossScale { min_loss_scale: options.min });
                }
            }
        }
        Ok(!overflow)
    }

    /// The scale now; 1 where losses are not scaled.
    ///
    /// # Errors
    /// When an earlier kernel failed.
    ///
    /// # Syncs
    /// Waits for the device.
    pub fn scale_value(&self) -> Result<f64, DeepSpeedError> {
        Ok(self.inner.scale_value()?)
    }
}

/// DeepSpeed's entries `cur_scale`, `cur_iter`, `last_overflow_iter` and `cur_hysteresis`; those of `GradScaler` with
/// `torch_autocast` in float16; none where the scale stays.
impl Stateful for LossScaler {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        match self.scaling {
            Scaling::Off | Scaling::Fixed(_) => {}
            Scaling::Torch => return self.inner.state_dict(),
            Scaling::Dynamic(_) => {
                state.insert("cur_scale", Entry::Float(self.now.cur_scale));
                state.insert("cur_iter", Entry::Int(self.now.cur_iter));
                state.insert("last_overflow_iter", Entry::Int(self.now.last_overflow_iter));
                state.insert("cur_hysteresis", Entry::Int(self.now.cur_hysteresis));
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let options = match self.scaling {
            Scaling::Off | Scaling::Fixed(_) => return state.refuse_unknown(&[]),
            Scaling::Torch => return self.inner.load_state_dict(state),
            Scaling::Dynamic(options) => options,
        };
        state.refuse_unknown(&["cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"])?;
        let now = Now {
            cur_scale: state.float("cur_scale")?,
            cur_iter: state.int("cur_iter")?,
            last_overflow_iter: state.int("last_overflow_iter")?,
            cur_hysteresis: state.int("cur_hysteresis")?,
        };
        let check = |holds: bool, key: &str, expected: String, found: String| match holds {
            true => Ok(()),
            false => Err(StateError::Mismatch { key: key.to_owned(), expected, found }),
        };
        let (scale, iterations) = (now.cur_scale, now.cur_iter);
        // Below the smallest one too, where `initial_scale_power` says so.
        let is_scale = scale > 0.0 && (scale as f32).is_finite();
        check(is_scale, "cur_scale", "above 0, to 2^127".to_owned(), scale.to_string())?;
        check(iterations >= 0, "cur_iter", "at least 0".to_owned(), iterations.to_string())?;
        let is_before = (-1..iterations.max(0)).contains(&now.last_overflow_iter);
        let expected = format!("from -1 to before {iterations}");
        check(is_before, "last_overflow_iter", expected, now.last_overflow_iter.to_string())?;
        let hysteresis = count(options.hysteresis);
        let expected = format!("from 1 to {hysteresis}");
        let holds = (1..=hysteresis).contains(&now.cur_hysteresis);
        check(holds, "cur_hysteresis", expected, now.cur_hysteresis.to_string())?;
        let mut inner = self.inner.state_dict()?;
        if !inner.is_empty() {
            inner.insert("scale", Entry::Float(scale));
            self.inner.load_state_dict(&inner)?;
        }
        self.now = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use overdrive_optim::Sgd;
    use tch::Kind;

    use super::*;

    const OPTIONS: Dynamic =
        Dynamic { initial: 64.0, window: 3, hysteresis: 2, consecutive: false, min: 1.0, ends_at_min: true };

    /// Scales after each step, by whether its gradients overflow.
    fn scales(options: Dynamic, overflows: &[bool]) -> Vec<f64> {
        let mut now = Now::start(&options);
        let after = |&overflow: &bool| {
            now.update(&options, overflow);
            now.cur_scale
        };
        overflows.iter().map(after).collect()
    }

    const X: bool = true;
    const O: bool = false;

    /// Worked out by hand from the rule of DeepSpeed's `DynamicLossScaler.update_scale`.
    #[test]
    fn scales_follow_deepspeed_s_rule() {
        // Doubled after 4 good steps, then after every 3.
        assert_eq!(scales(OPTIONS, &[O; 8]), [64.0, 64.0, 64.0, 128.0, 128.0, 128.0, 256.0, 256.0]);
        // The first overflow counts, the second and later ones halve.
        assert_eq!(scales(OPTIONS, &[X, X, X, O]), [64.0, 32.0, 16.0, 16.0]);
        // A good step between does not begin the count anew, a doubled scale does.
        assert_eq!(scales(OPTIONS, &[X, O, X]), [64.0, 64.0, 32.0]);
        assert_eq!(scales(OPTIONS, &[X, O, O, O, O, X, X]), [64.0, 64.0, 64.0, 64.0, 128.0, 128.0, 64.0]);
        let consecutive = Dynamic { consecutive: true, ..OPTIONS };
        assert_eq!(scales(consecutive, &[X, O, X, X]), [64.0, 64.0, 64.0, 32.0]);
        let first = Dynamic { hysteresis: 1, ..OPTIONS };
        assert_eq!(scales(first, &[X, X]), [32.0, 16.0]);
        let min = Dynamic { hysteresis: 1, min: 24.0, ..OPTIONS };
        assert_eq!(scales(min, &[X, X, X]), [32.0, 24.0, 24.0]);
    }

    type Run = (u64, u64, bool, f64, &'static str, [f64; 24]);

    /// Printed by DeepSpeed's own `DynamicLossScaler` (August 2026), told not to raise: window, hysteresis, whether it is
    /// consecutive, the smallest scale, which steps overflow (X), and the scales after them from 64 on.
    #[rustfmt::skip]
    const RUNS: &[Run] = &[
        (3, 2, false, 1.0, "OOOXOOXOOOXXXOOOXOOOOOOO", [64.0, 64.0, 64.0, 64.0, 64.0, 64.0, 32.0, 32.0, 32.0, 32.0, 16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]),
        (2, 1, false, 1.0, "XXXXXOOOOOXOOXOXXOXOOOOO", [32.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]),
        (3, 3, true, 1.0, "OOOOOOOXXOOOXOOOXXOOOXOO", [64.0, 64.0, 64.0, 128.0, 128.0, 128.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0, 256.0]),
        (2, 2, false, 16.0, "OOOOOOOOXOOOOOOOOXXXXOOX", [64.0, 64.0, 128.0, 128.0, 256.0, 256.0, 512.0, 512.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0, 4096.0, 2048.0, 1024.0, 512.0, 512.0, 512.0, 256.0]),
    ];

    #[test]
    fn scales_of_long_runs_are_deepspeed_s() {
        for &(window, hysteresis, consecutive, min, steps, expected) in RUNS {
            let options = Dynamic { initial: 64.0, window, hysteresis, consecutive, min, ends_at_min: true };
            let overflows: Vec<bool> = steps.chars().map(|letter| letter == 'X').collect();
            assert_eq!(scales(options, &overflows), expected, "{steps}");
        }
    }

    fn trained(scaler: &mut LossScaler, factor: f64) -> Result<(bool, f64), DeepSpeedError> {
        let weight = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut opt = Sgd::builder([&weight]).lr(0.5).build()?;
        scaler.scale(&(&weight * factor).sum(Kind::Float))?.backward();
        scaler.unscale_(&mut opt)?;
        let is_stepped = scaler.step(&mut opt)?;
        Ok((is_stepped, weight.double_value(&[0])))
    }

    #[test]
    fn steps_are_skipped_and_the_scale_changes() {
        let options = Dynamic { initial: 4.0, hysteresis: 1, ..OPTIONS };
        let mut scaler = LossScaler::new(Device::Cpu, Scaling::Dynamic(options)).unwrap();
        assert_eq!(trained(&mut scaler, 0.25).unwrap(), (true, 1.0 - 0.125));
        assert_eq!(trained(&mut scaler, f64::INFINITY).unwrap(), (false, 1.0));
        assert_eq!(scaler.scale_value().unwrap(), 2.0);
        assert_eq!(trained(&mut scaler, f64::NAN).unwrap(), (false, 1.0));
        assert_eq!(scaler.scale_value().unwrap(), 1.0);
        let told = trained(&mut scaler, f64::NAN).unwrap_err().to_string();
        assert!(told.contains("`fp16.min_loss_scale`"), "{told}");
        assert_eq!(trained(&mut scaler, 1.0).unwrap(), (true, 0.5), "it can go on all the same");
        let without = Dynamic { initial: 1.0, ends_at_min: false, ..options };
        let mut scaler = LossScaler::new(Device::Cpu, Scaling::Dynamic(without)).unwrap();
        assert_eq!(trained(&mut scaler, f64::NAN).unwrap(), (false, 1.0));
        assert_eq!(scaler.scale_value().unwrap(), 1.0);
    }

    #[test]
    fn a_first_scale_below_the_smallest_one_is_saved_and_loaded() {
        let below = Dynamic { initial: 1.0, min: 4.0, ..OPTIONS };
        let mut scaler = LossScaler::new(Device::Cpu, Scaling::Dynamic(below)).unwrap();
        let state = scaler.state_dict().unwrap();
        scaler.load_state_dict(&state).unwrap();
    }

    #[test]
    fn a_scale_that_stays_skips_all_the_same_and_none_does_nothing() {
        let mut fixed = LossScaler::new(Device::Cpu, Scaling::Fixed(1.0)).unwrap();
        assert_eq!(trained(&mut fixed, f64::INFINITY).unwrap(), (false, 1.0));
        assert_eq!(trained(&mut fixed, 1.0).unwrap(), (true, 0.5));
        assert_eq!(fixed.scale_value().unwrap(), 1.0);
        let mut off = LossScaler::new(Device::Cpu, Scaling::Off).unwrap();
        assert_eq!(trained(&mut off, f64::INFINITY).unwrap(), (true, f64::NEG_INFINITY));
        let mut torch = LossScaler::new(Device::Cpu, Scaling::Torch).unwrap();
        assert_eq!(trained(&mut torch, f64::INFINITY).unwrap(), (false, 1.0));
        assert_eq!(torch.scale_value().unwrap(), 32768.0);
    }

    #[test]
    fn a_loaded_state_goes_on_as_the_saved_one() {
        let new = || LossScaler::new(Device::Cpu, Scaling::Dynamic(OPTIONS)).unwrap();
        let (mut one, mut other) = (new(), new());
        for factor in [1.0, 1.0, f64::NAN, 1.0] {
            trained(&mut one, factor).unwrap();
        }
        other.load_state_dict(&one.state_dict().unwrap()).unwrap();
        assert_eq!(one.now, other.now);
        for factor in [f64::NAN, 1.0, 1.0, 1.0, 1.0] {
            assert_eq!(trained(&mut one, factor).unwrap(), trained(&mut other, factor).unwrap());
            assert_eq!(one.scale_value().unwrap(), other.scale_value().unwrap());
        }
        assert_eq!(other.scale_value().unwrap(), 64.0, "halved, then doubled");
    }

    #[test]
    fn states_that_do_not_fit_are_refused_and_change_nothing() {
        let mut scaler = LossScaler::new(Device::Cpu, Scaling::Dynamic(OPTIONS)).unwrap();
        let good = scaler.state_dict().unwrap();
        for (key, entry) in [
            ("cur_scale", Entry::Float(0.0)),
            ("cur_scale", Entry::Float(f64::NAN)),
            ("cur_iter", Entry::Int(-1)),
            ("last_overflow_iter", Entry::Int(0)),
            ("cur_hysteresis", Entry::Int(3)),
            ("other", Entry::Int(3)),
        ] {
            let mut state = good.copied().unwrap();
            state.insert(key, entry);
            let told = scaler.load_state_dict(&state).expect_err(key).to_string();
            assert!(told.contains(key), "{told}");
            assert_eq!(scaler.now, Now::start(&OPTIONS));
        }
        let mut off = LossScaler::new(Device::Cpu, Scaling::Off).unwrap();
        assert!(off.state_dict().unwrap().is_empty() && off.load_state_dict(&good).is_err());
    }
}
