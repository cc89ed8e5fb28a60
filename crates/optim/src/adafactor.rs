//! Adafactor.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, DeviceConstants, LazyOp, TensorList};
use tch::{Kind, TchError, Tensor};

use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{NOT_NEGATIVE, Value, options};
use crate::t5_adafactor as t5;
use crate::trust::as_list;

static ZERO: DeviceConstants<1> = DeviceConstants::new();
static NORM: LazyOp = LazyOp::new("aten::linalg_vector_norm", "");

/// Adafactor: keeps only row and column averages of a matrix's second moments; lr 1e-2.
///
/// One NaN in a vector's gradient makes that element of the vector NaN, as in PyTorch; in a matrix, or with
/// [`AdafactorForm::T5`], the whole parameter.
///
/// # Source
/// `torch.optim.Adafactor`; Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
pub type Adafactor = GroupOptimizer<AdafactorOptions>;

/// The options of an [`Adafactor`].
pub type AdafactorBuilder = GroupBuilder<AdafactorOptions>;

/// The published variants of [`Adafactor`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdafactorForm {
    /// PyTorch's: the step size is min(lr, 1 / sqrt(t)) times the root mean square of the parameter, at step t.
    #[default]
    Pytorch,
    /// T5's relative step: min(0.01, 1 / sqrt(t)) times the root mean square of the parameter, without a learning rate.
    /// Second moments are kept by row and column where both are longer than 16, and eps1 (default 1e-30) is added to
    /// the squared gradients.
    ///
    /// Source: timm 1.0.22, `timm.optim.Adafactor`, which follows fairseq's; Raffel et al., "T5", 2020.
    T5 {
        /// Whether the steps start small: 1e-6 times t instead of 0.01.
        warmup_init: bool,
    },
}

const FORMS: &[&str] = &["pytorch", "t5", "t5_warmup_init"];

/// One of `FORMS`.
#[derive(Clone, Debug)]
pub(crate) struct Form(&'static str);

impl Value for Form {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::OwnWord(&mut self.0, FORMS))]
    }
}

options! {
    /// The options of an [`Adafactor`] group, except the learning rate.
    AdafactorOptions {
        /// The exponent that decays the second moments, at most 0: at step t they are averaged with beta2 = 1 -
        /// t^beta2_decay; default -0.8.
        beta2_decay: f64 = -0.8, (f64::MIN..0f64.next_up(), "a finite number of at most 0");
        /// Lower bounds: eps1 of a second moment's root (none: the machine epsilon of the parameter's dtype), eps2 of a
        /// parameter's root mean square; default (none, 1e-3).
        eps(eps1: Option<f64>, eps2: f64) = (None, 1e-3), NOT_NEGATIVE;
        /// The clipping threshold: the largest root mean square of an update, at least 1; default 1.
        d: f64 = 1.0, (1.0..f64::INFINITY, "a finite number of at least 1");
        /// Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay (T5's form: with the relative
        /// step as lr); default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        #[no_setter]
        form: Form = Form(FORMS[0]);
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl<Scope> Options<AdafactorOptions, Scope> {
    /// The variant; default [`AdafactorForm::Pytorch`].
    pub fn form(self, form: AdafactorForm) -> Self {
        let word = match form {
            AdafactorForm::Pytorch => FORMS[0],
            AdafactorForm::T5 { warmup_init } => FORMS[1 + usize::from(warmup_init)],
        };
        self.with(move |options| options.form = Form(word))
    }
}

/// Zeros of the parameter's shape, but with size 1 in the dimension `from_end` places from the end.
fn reduced(param: &Tensor, from_end: usize) -> Result<Tensor, TorchError> {
    let mut size = param.size();
    let place = size.len() - from_end;
    size[place] = 1;
    Ok(Tensor::f_zeros(&size, (param.kind(), param.device()))?)
}

impl Algorithm for AdafactorOptions {
    const LR: f64 = 1e-2;
    const COUNTS_STEPS: bool = true;
    const COUPLES_ELEMENTS: bool = true;

    fn takes_lr(&self) -> bool {
        self.form.0 == FORMS[0]
    }

    fn slots(&self, param: &Tensor) -> Vec<Slot> {
        if self.form.0 != FORMS[0] {
            return t5::slots(param);
        }
        match param.dim() > 1 {
            true => vec![
                Slot::made("row_var", |param, _| reduced(param, 1), 0.0),
                Slot::made("col_var", |param, _| reduced(param, 2), 0.0),
            ],
            false => vec![Slot::zeros("variance")],
        }
    }

    const STEPS_TOGETHER: bool = true;

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        self.step_together(&[step])
    }

    /// Matrices and vectors together, where both are given, so that there are few kernel launches.
    fn step_together(&self, steps: &[&Step<'_>]) -> Result<(), TorchError> {
        if self.form.0 != FORMS[0] {
            return steps.iter().try_for_each(|step| t5::step(self, self.form.0 == FORMS[2], step));
        }
        let Some(Step { lr, constants, .. }) = steps.first() else { return Ok(()) };
        let grads = steps.iter().map(|step| step.signed_grads(self.maximize)).collect::<Result<Vec<_>, _>>()?;
        self.average(steps, &grads)?;
        let (mut params, mut updates, mut all_grads, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (step, grads) in steps.iter().zip(&grads) {
            params.extend(step.params.to_vec()?);
            updates.extend(self.estimates(step)?.to_vec()?);
            all_grads.extend(grads.to_vec()?);
            rates.extend(step.by_count(|count| -self.d * step.lr.min(1.0 / count.sqrt()))?);
        }
        let device = params[0].device();
        let roots: Vec<f64> = params.iter().map(|param| (param.numel() as f64).sqrt()).collect();
        let both: Vec<&Tensor> = params.iter().chain(&updates).collect();
        let (both, params, updates) = (TensorList::new(&both)?, TensorList::new(&params)?, TensorList::new(&updates)?);
        foreach::rsqrt_(&updates)?;
        foreach::mul_(&updates, &TensorList::new(&all_grads)?)?;

        // A parameter's step size is the rate times max(eps2, its root mean square), divided by max(1, the update's
        // root mean square / d). 2-norms take the place of root mean squares, because the numbers of elements cancel
        // out. The norms stay on the device, so that the host does not wait for it.
        let [zero] = ZERO.on(device, || Ok::<_, TchError>([Tensor::from(0.0)]))?;
        let norms = Tensor::f_stack(&foreach::norm(&both, 2.0)?.to_vec()?, 0)?;
        // The maximum with float64 bounds makes the norms float64, and a norm of NaN the bound, as in Python's
        // `max(bound, norm)`.
        let lows = [self.eps.1, self.d].into_iter().flat_map(|least| roots.iter().map(move |root| root * least));
        let lows = constants.on(device, &lows.collect::<Vec<_>>())?;
        let norms = as_list(&norms.f_fmax(&lows)?)?.to_vec()?;
        let (sizes, excess) = norms.split_at(rates.len());
        let zeros = TensorList::new(&vec![&zero; rates.len()])?;
        let sizes = foreach::addcdiv_each(&zeros, &TensorList::new(sizes)?, &TensorList::new(excess)?, &rates)?;
        if self.weight_decay != 0.0 {
            foreach::mul_scalar_(&params, 1.0 - lr * self.weight_decay)?;
        }
        foreach::mul_(&updates, &sizes)?;
        foreach::add_(&params, &updates, 1.0)
    }
}

impl AdafactorOptions {
    /// Moves the averages towards the squared gradients: those of a matrix towards the means of its rows and columns.
    fn average(&self, steps: &[&Step<'_>], grads: &[Lent<'_>]) -> Result<(), TorchError> {
        let (mut averages, mut squares, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for (step, grads) in steps.iter().zip(grads) {
            let shares = step.by_count(|count| count.powf(self.beta2_decay))?;
            match step.slots {
                [_, _] => squares.extend(means(grads)?.to_vec()?),
                _ => squares.extend(foreach::mul(grads, grads)?.to_vec()?),
            }
            for slot in step.slots {
                averages.extend(slot.to_vec()?);
                weights.extend(&shares);
            }
        }
        foreach::lerp_each_(&TensorList::new(&averages)?, &TensorList::new(&squares)?, &weights)
    }

    /// Estimates of the second moments: those of a matrix from the averages of its rows and columns.
    fn estimates(&self, step: &Step<'_>) -> Result<TensorList, TorchError> {
        let kind = step.params.get(0)?.kind();
        let eps1 = self.eps.0.unwrap_or_else(|| precision(kind));
        // eps1 is squared, because the root is taken next.
        let [rows, columns] = step.slots else { return foreach::clamp_min(&step.slots[0], eps1 * eps1) };
        let (mut estimates, mut means) = (Vec::new(), Vec::new());
        for (row, column) in rows.to_vec()?.iter().zip(columns.to_vec()?) {
            estimates.push(row.f_matmul(&column)?);
            means.push(row.f_mean_dim(&[-2i64][..], true, None::<Kind>)?);
        }
        let (estimates, means) = (TensorList::new(&estimates)?, TensorList::new(&means)?);
        foreach::clamp_min_(&means, eps1)?;
        foreach::div_(&estimates, &means)?;
        foreach::clamp_min_(&estimates, eps1 * eps1)?;
        Ok(estimates)
    }
}

/// The mean of squares of each matrix's rows, then those of the columns.
fn means(grads: &TensorList) -> Result<TensorList, TorchError> {
    let (mut means, mut lengths) = (Vec::new(), Vec::new());
    for dim in [-1, -2] {
        for grad in grads.to_vec()? {
            means.push(NORM.tensor(&[Arg::Tensor(&grad), Arg::Double(2.0), Arg::IntList(&[dim]), Arg::Bool(true)])?);
            lengths.push(grad.size()[(grad.dim() as i64 + dim) as usize] as f64);
        }
    }
    let means = TensorList::new(&means)?;
    // The mean of squares is the squared norm divided by the length, so no tensor of squares is needed. These are
    // PyTorch's operators: its bits.
    foreach::mul_(&means, &means)?;
    foreach::div_each_(&means, &lengths)?;
    Ok(means)
}

/// The machine epsilon: the distance from 1 to the next larger number.
fn precision(kind: Kind) -> f64 {
    match kind {
        Kind::Double => f64::EPSILON,
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        _ => f64::from(f32::EPSILON),
    }
}
