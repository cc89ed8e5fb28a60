//! Prodigy.

use std::cell::RefCell;

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::TensorList;
use tch::{Kind, Tensor};

use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::{GroupOptimizer, Values};
use crate::options::{BETA, Limits, NOT_NEGATIVE, Value, options};

/// Prodigy: Adam that estimates its own step size [`d`](Self::d), from how far the parameters have moved since the
/// start. The learning rate (1) is a factor of `d`.
///
/// All groups share `d`, and the options `betas`, `beta3`, `d0`, `d_coef`, `growth_rate`, `decouple` and
/// `use_bias_correction`, which are those of the first group. All groups need the same learning rate, except that
/// groups with a learning rate of 0 are not trained.
///
/// # Syncs
/// Each step waits for the device, to read what `d` is computed from: once for each group, device and dtype.
///
/// # Source
/// `prodigyopt.Prodigy`; Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", 2023.
/// There a group with a learning rate of 0 still moves by weight decay and by earlier gradients.
pub type Prodigy = GroupOptimizer<ProdigyOptions>;

/// The options of a [`Prodigy`].
pub type ProdigyBuilder = GroupBuilder<ProdigyOptions>;

/// What this step has computed so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Now {
    /// Whether this is the pass that moves the parameters, after the one that measures.
    moves: bool,
    /// The length of the step.
    dlr: f64,
    /// This, `beta3` and `decouple` are the first group's.
    betas: (f64, f64),
    beta3: f64,
    decouple: bool,
    /// For each parameter, the dot product of its gradient and its displacement since the start, and the sum of `|s|`.
    measured: RefCell<Vec<(f64, f64)>>,
}

/// Not saved: each step computes it anew.
impl Value for Now {
    fn fields(&mut self, _name: &str) -> Vec<(String, Field<'_>)> {
        Vec::new()
    }
}

const POSITIVE: Limits = (f64::MIN_POSITIVE..f64::INFINITY, "a finite number above 0");

options! {
    /// The options of a [`Prodigy`] group, except the learning rate.
    ProdigyOptions {
        /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9,
        /// 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        #[no_setter]
        beta3: Option<f64> = None, BETA;
        /// Added to the denominator, times `d`, above 0; default 1e-8.
        eps: f64 = 1e-8, POSITIVE;
        /// Weight decay, see [`decouple`](Self::decouple); default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Whether weight decay shrinks the parameters as AdamW's does, or is added to the gradient; default true.
        decouple: bool = true;
        /// Whether to correct for the averages' start at 0, as Adam does; default false.
        use_bias_correction: bool = false;
        /// Whether to leave the learning rate out of the denominator of `d`, for schedules with a warm-up; default
        /// false.
        safeguard_warmup: bool = false;
        #[no_setter]
        d0: f64 = 1e-6, POSITIVE;
        /// The factor of `d` to tune, above 0: 0.5 or 2, say; default 1.
        d_coef: f64 = 1.0, POSITIVE;
        /// The factor by which `d` may grow in a step, at least 1; default infinity.
        growth_rate: f64 = f64::INFINITY;
        /// Computes `d` from each `slice_p`th element of a parameter only, at least 1; default 1. 11 saves nearly half
        /// of the optimizer's memory.
        slice_p: i64 = 1, (1.0..f64::INFINITY, "at least 1");
        #[no_setter]
        d: f64 = 1e-6, POSITIVE;
        #[no_setter]
        d_max: f64 = 1e-6, POSITIVE;
        #[no_setter]
        d_numerator: f64 = 0.0, (f64::MIN..f64::INFINITY, "a finite number");
        #[no_setter]
        k: i64 = 0, NOT_NEGATIVE;
        #[no_setter]
        now: Now = Now::default();
    }
}

impl<Scope> Options<ProdigyOptions, Scope> {
    /// The decay rate of the sums that `d` is computed from, in [0, 1); default: the square root of the second of
    /// `betas`.
    pub fn beta3(self, beta3: impl Into<Option<f64>>) -> Self {
        let beta3 = beta3.into();
        self.with(move |options| options.beta3 = beta3)
    }

    /// The first `d`, above 0; default 1e-6. On a running optimizer, `d` starts again.
    pub fn d0(self, d0: f64) -> Self {
        self.with(move |options| (options.d0, options.d, options.d_max) = (d0, d0, d0))
    }
}

impl GroupOptimizer<ProdigyOptions> {
    /// The estimated step size, of which the learning rate is a factor.
    ///
    /// # Source
    /// `optimizer.param_groups[0]["d"]`
    pub fn d(&self) -> f64 {
        self.groups.first().map_or(f64::NAN, |group| group.values.options.d)
    }
}

impl Algorithm for ProdigyOptions {
    const LR: f64 = 1.0;
    const COUNTS_STEPS: bool = false;
    const PASSES: usize = 2;
    const STEPS_ALONE: bool = false;

    fn begin(groups: &mut [Values<Self>], pass: usize) -> Result<bool, OptimizerError> {
        if pass == 0 { Self::begin_measuring(groups) } else { Ok(Self::begin_moving(groups)) }
    }

    fn check(&self) -> Result<(), OptimizerError> {
        // Not declared as a range: ranges exclude their end, and infinity, the default, has to be allowed.
        if self.growth_rate.is_nan() || self.growth_rate < 1.0 {
            let (option, found, expected) = ("growth_rate", self.growth_rate, "at least 1");
            return Err(OptimizerError::InvalidOption { option, found, expected });
        }
        Ok(())
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        let slice = self.slice_p as f64;
        let s = |param: &Tensor, slice: f64| Ok(sliced(param, slice as i64)?.f_zeros_like()?);
        let p0 = |param: &Tensor, slice: f64| Ok(sliced(param, slice as i64)?.f_detach_copy()?);
        let mut slots = vec![Slot::made("s", s, slice), Slot::made("p0", p0, slice), Slot::zeros("exp_avg_sq")];
        slots.extend((self.betas.0 > 0.0).then(|| Slot::zeros("exp_avg")));
        slots
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        // A group that is not trained.
        if step.lr == 0.0 {
            return Ok(());
        }
        if self.now.moves { self.move_parameters(step) } else { self.measure(step) }
    }
}

/// Each `slice`th element, as a vector.
fn sliced(tensor: &Tensor, slice: i64) -> Result<Tensor, TorchError> {
    Ok(tensor.f_detach()?.f_flatten(0, -1)?.f_slice(0, None::<i64>, None::<i64>, slice)?)
}

impl ProdigyOptions {
    /// Begins the first pass, which updates the averages and measures what `d` is computed from.
    fn begin_measuring(groups: &mut [Values<Self>]) -> Result<bool, OptimizerError> {
        let lr = groups.iter().map(|group| group.lr).fold(0.0, f64::max);
        if let Some(other) = groups.iter().find(|group| group.lr != lr && group.lr != 0.0) {
            let expected = "the same in all groups, or 0 in groups that are not trained";
            return Err(OptimizerError::InvalidOption { option: "lr", found: other.lr, expected });
        }
        let Some(Values { options: first, .. }) = groups.first().cloned() else { return Ok(false) };
        let ((beta1, beta2), count) = (first.betas, (first.k + 1) as f64);
        let correction = match first.use_bias_correction {
            true => (1.0 - beta2.powf(count)).powf(0.5) / (1.0 - beta1.powf(count)),
            false => 1.0,
        };
        for Values { options, .. } in groups {
            (options.d, options.d_max, options.d0) = (first.d, first.d_max, first.d0);
            (options.d_numerator, options.k) = (first.d_numerator, first.k);
            if (options.betas.0 > 0.0) != (beta1 > 0.0) {
                let (option, found, expected) = ("beta1", options.betas.0, "0 in all groups or in none");
                return Err(OptimizerError::InvalidOption { option, found, expected });
            }
            let beta3 = first.beta3.unwrap_or(beta2.sqrt());
            let (dlr, decouple) = (first.d * lr * correction, first.decouple);
            options.now = Now { moves: false, dlr, betas: first.betas, beta3, decouple, measured: RefCell::default() };
        }
        Ok(true)
    }

    /// Begins the second pass, which moves the parameters: computes `d` from what the first one measured. False, which
    /// ends the step, if nothing was measured or all gradients were 0.
    fn begin_moving(groups: &mut [Values<Self>]) -> bool {
        let Some(Values { options: first, .. }) = groups.first().cloned() else { return false };
        let (mut numerator, mut denominator) = (0.0, 0.0);
        for group in groups.iter_mut() {
            for (product, sum) in std::mem::take(group.options.now.measured.get_mut()) {
                numerator += first.d / first.d0 * first.now.dlr * product;
                denominator += sum;
            }
        }
        if denominator == 0.0 {
            return false;
        }
        let numerator = first.d_numerator * first.now.beta3 + numerator;
        let d_hat = first.d_coef * numerator / denominator;
        let d = if first.d == first.d0 { larger(first.d, d_hat) } else { first.d };
        let d_max = larger(first.d_max, d_hat);
        let most = d * first.growth_rate;
        let d = if most < d_max { most } else { d_max };
        for Values { options, .. } in groups {
            (options.d, options.d_max, options.d_numerator) = (d, d_max, numerator);
            options.k += 1;
            options.now.moves = true;
        }
        true
    }

    fn measure(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let [s, p0, squares, ..] = step.slots else { return Ok(()) };
        let (d, (beta1, beta2)) = (self.d, self.now.betas);
        let grads = step.penalised_grads(false, if self.now.decouple { 0.0 } else { self.weight_decay })?;
        let slices = |list: &TensorList| {
            let slices = list.to_vec()?.iter().map(|it| sliced(it, self.slice_p)).collect::<Result<Vec<_>, _>>()?;
            TensorList::new(&slices)
        };
        let (sliced_grads, sliced_params) = (slices(&grads)?, slices(step.params)?);
        // A parameter may have been loaded since its bucket's first step.
        if step.first.contains(&true) {
            foreach::copy_(&p0.select(step.first)?, &sliced_params.select(step.first)?)?;
        }
        if let Some(averages) = step.slots.get(3) {
            foreach::mul_scalar_(averages, beta1)?;
            foreach::add_(averages, &grads, d * (1.0 - beta1))?;
        }
        foreach::mul_scalar_(squares, beta2)?;
        foreach::addcmul_(squares, &grads, &grads, d * d * (1.0 - beta2))?;
        foreach::mul_scalar_(s, self.now.beta3)?;
        foreach::add_(s, &sliced_grads, d / self.d0 * if self.safeguard_warmup { d } else { self.now.dlr })?;

        let ways = foreach::add(p0, &sliced_params, -1.0)?;
        let mut found = Vec::new();
        for ((grad, way), s) in sliced_grads.to_vec()?.iter().zip(ways.to_vec()?).zip(s.to_vec()?) {
            found.push(grad.f_dot(&way)?);
            found.push(s.f_abs()?.f_sum(s.kind())?);
        }
        let found = Tensor::f_stack(&found, 0)?.f_to_kind(Kind::Double)?;
        let found = Vec::<f64>::try_from(&found).map_err(TorchError::from)?;
        self.now.measured.borrow_mut().extend(found.chunks_exact(2).map(|pair| (pair[0], pair[1])));
        Ok(())
    }

    fn move_parameters(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let dlr = self.now.dlr;
        let denominators = foreach::sqrt(&step.slots[2])?;
        foreach::add_scalar_(&denominators, self.d * self.eps)?;
        // Computed before the parameters change, because the L2 penalty depends on them.
        let grads = step.penalised_grads(false, if self.now.decouple { 0.0 } else { self.weight_decay })?;
        if self.now.decouple && self.weight_decay != 0.0 {
            foreach::add_(step.params, step.params, -self.weight_decay * dlr)?;
        }
        match step.slots.get(3) {
            Some(averages) => foreach::addcdiv_(step.params, averages, &denominators, -dlr),
            None => foreach::addcdiv_(step.params, &grads, &denominators, -dlr * self.d),
        }
    }
}

/// Python's `max`: the first unless the second is larger, so that NaN is left out.
fn larger(one: f64, other: f64) -> f64 {
    if other > one { other } else { one }
}
