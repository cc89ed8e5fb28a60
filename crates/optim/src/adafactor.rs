//! Adafactor.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, DeviceConstants, LazyOp, TensorList};
use tch::{Kind, TchError, Tensor};

use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
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
                Slot { name: "row_var", fresh: |param, _| reduced(param, 1), fill: 0.0 },
                Slot { name: "col_var", fresh: |param, _| reduced(param, 2), fill: 0.0 },
            ],
            false => vec![Slot::zeros("variance")],
        }
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        if self.form.0 != FORMS[0] {
            return t5::step(self, self.form.0 == FORMS[2], step);
        }
        let params = step.params.to_vec()?;
        let grads = step.signed_grads(self.maximize)?;
        let eps1 = self.eps.0.unwrap_or_else(|| precision(params[0].kind()));
        let roots: Vec<f64> = params.iter().map(|param| (param.numel() as f64).sqrt()).collect();

        let shares = step.by_count(|count| count.powf(self.beta2_decay))?;
        // eps1 is squared, because the root is taken next.
        let updates = match step.slots {
            [rows, columns] => {
                let estimates = self.factored(&grads, rows, columns, &shares, eps1)?;
                foreach::clamp_min_(&estimates, eps1 * eps1)?;
                estimates
            }
            _ => {
                foreach::lerp_each_(&step.slots[0], &foreach::mul(&grads, &grads)?, &shares)?;
                foreach::clamp_min(&step.slots[0], eps1 * eps1)?
            }
        };
        foreach::rsqrt_(&updates)?;
        foreach::mul_(&updates, &grads)?;

        // A parameter's step size is the rate times max(eps2, its root mean square), divided by max(1, the update's
        // root mean square / d). 2-norms take the place of root mean squares, because the numbers of elements cancel
        // out. The norms stay on the device, so that the host does not wait for it; those of both lists are computed
        // together, so that there are few kernel launches.
        let mut lists = params;
        let count = lists.len();
        lists.extend(updates.to_vec()?);
        let [zero] = ZERO.on(lists[0].device(), || Ok::<_, TchError>([Tensor::from(0.0)]))?;
        let norms = Tensor::f_stack(&foreach::norm(&TensorList::new(&lists)?, 2.0)?.to_vec()?, 0)?;
        // The maximum with float64 bounds makes the norms float64, and a norm of NaN the bound, as in Python's
        // `max(bound, norm)`.
        let lows = [self.eps.1, self.d].into_iter().flat_map(|least| roots.iter().map(move |root| root * least));
        let lows = step.constants.on(lists[0].device(), &lows.collect::<Vec<_>>())?;
        let norms = as_list(&norms.f_fmax(&lows)?)?.to_vec()?;
        let (sizes, excess) = norms.split_at(count);
        let rates = step.by_count(|count| -self.d * step.lr.min(1.0 / count.sqrt()))?;
        let zeros = TensorList::new(&vec![&zero; count])?;
        let sizes = foreach::addcdiv_each(&zeros, &TensorList::new(sizes)?, &TensorList::new(excess)?, &rates)?;
        if self.weight_decay != 0.0 {
            foreach::mul_scalar_(step.params, 1.0 - step.lr * self.weight_decay)?;
        }
        foreach::mul_(&updates, &sizes)?;
        foreach::add_(step.params, &updates, 1.0)
    }
}

impl AdafactorOptions {
    /// Estimates of the second moments from the means of their rows and columns.
    fn factored(
        &self,
        grads: &TensorList,
        rows: &TensorList,
        columns: &TensorList,
        shares: &[f64],
        eps1: f64,
    ) -> Result<TensorList, TorchError> {
        let (mut means, mut lengths, mut averages) = (Vec::new(), Vec::new(), Vec::new());
        for (list, dim) in [(rows, -1), (columns, -2)] {
            for grad in grads.to_vec()? {
                means.push(NORM.tensor(&[
                    Arg::Tensor(&grad),
                    Arg::Double(2.0),
                    Arg::IntList(&[dim]),
                    Arg::Bool(true),
                ])?);
                lengths.push(grad.size()[(grad.dim() as i64 + dim) as usize] as f64);
            }
            averages.extend(list.to_vec()?);
        }
        let means = TensorList::new(&means)?;
        // The mean of squares is the squared norm divided by the length, so no tensor of squares is needed. Rows and
        // columns are averaged together, so that there are few kernel launches. These are PyTorch's operators: its bits.
        foreach::mul_(&means, &means)?;
        foreach::div_each_(&means, &lengths)?;
        foreach::lerp_each_(&TensorList::new(&averages)?, &means, &[shares, shares].concat())?;
        let (mut estimates, mut means) = (Vec::new(), Vec::new());
        for (row, column) in rows.to_vec()?.iter().zip(columns.to_vec()?) {
            estimates.push(row.f_matmul(&column)?);
            means.push(row.f_mean_dim(&[-2i64][..], true, None::<Kind>)?);
        }
        let (estimates, means) = (TensorList::new(&estimates)?, TensorList::new(&means)?);
        foreach::clamp_min_(&means, eps1)?;
        foreach::div_(&estimates, &means)?;
        Ok(estimates)
    }
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
