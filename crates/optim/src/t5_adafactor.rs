//! Adafactor in the form that T5 was trained with, following timm's.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use crate::adafactor::AdafactorOptions;
use crate::algorithm::{Slot, Step};

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static CLAMP_MIN: LazyOp = LazyOp::new("aten::clamp_min", "");

/// Second moments are kept by row and by column where both are longer than this.
const MIN_DIM: i64 = 16;

/// The two dimensions by which second moments are kept; `None` unless both are long. For convolutions these are the
/// first two, else the last two.
fn factored(size: &[i64]) -> Option<(i64, i64)> {
    let last = size.len();
    match size {
        [outputs, inputs, _, ..] if *outputs > MIN_DIM && *inputs > MIN_DIM => Some((0, 1)),
        [.., rows, columns] if *rows > MIN_DIM && *columns > MIN_DIM => Some((last as i64 - 2, last as i64 - 1)),
        _ => None,
    }
}

fn without(param: &Tensor, dim: fn((i64, i64)) -> i64) -> Result<Tensor, TorchError> {
    let mut size = param.size();
    if let Some(dims) = factored(&size) {
        size.remove(dim(dims) as usize);
    }
    Ok(Tensor::f_zeros(&size, (param.kind(), param.device()))?)
}

pub(crate) fn slots(param: &Tensor) -> Vec<Slot> {
    match factored(&param.size()) {
        Some(_) => vec![
            Slot::made("exp_avg_sq_row", |param, _| without(param, |(_, row)| row), 0.0),
            Slot::made("exp_avg_sq_col", |param, _| without(param, |(column, _)| column), 0.0),
        ],
        None => vec![Slot::zeros("exp_avg_sq")],
    }
}

/// The root mean square.
fn rms(tensor: &Tensor) -> Result<Tensor, TorchError> {
    MUL.tensor(&[Arg::Tensor(&tensor.f_norm()?), Arg::Double(1.0 / (tensor.numel() as f64).sqrt())])
}

fn clamped(tensor: &Tensor, low: f64) -> Result<Tensor, TorchError> {
    CLAMP_MIN.tensor(&[Arg::Tensor(tensor), Arg::Double(low)])
}

/// Moves `average` by the fraction `share` towards `value`.
fn follow(average: &Tensor, value: &Tensor, share: f64) -> Result<(), TorchError> {
    let moved = MUL.tensor(&[Arg::Tensor(average), Arg::Double(1.0 - share)])?;
    average.shallow_clone().f_copy_(&moved.f_add(&MUL.tensor(&[Arg::Tensor(value), Arg::Double(share)])?)?)?;
    Ok(())
}

pub(crate) fn step(options: &AdafactorOptions, warmup_init: bool, step: &Step<'_>) -> Result<(), TorchError> {
    let grads = step.signed_grads(options.maximize)?.to_vec()?;
    let counts = step.by_count(|count| count)?;
    for (index, (mut param, grad)) in step.params.to_vec()?.into_iter().zip(grads).enumerate() {
        let slots = step.slots.iter().map(|slot| slot.get(index)).collect::<Result<Vec<_>, _>>()?;
        let count = counts[index];
        let first = if warmup_init { 1e-6 * count } else { 1e-2 };
        let size = clamped(&rms(&param)?, options.eps.1)?;
        let lr = MUL.tensor(&[Arg::Tensor(&size), Arg::Double(first.min(1.0 / count.sqrt()))])?;

        let share = count.powf(options.beta2_decay);
        let eps = Arg::Double(options.eps.0.unwrap_or(1e-30));
        let squares = ADD.tensor(&[Arg::Tensor(&grad.f_square()?), eps])?;
        let scale = match (&slots[..], factored(&param.size())) {
            ([rows, columns], Some((column, row))) => {
                follow(rows, &squares.f_mean_dim(&[row][..], false, None::<Kind>)?, share)?;
                follow(columns, &squares.f_mean_dim(&[column][..], false, None::<Kind>)?, share)?;
                let mean = rows.f_mean_dim(&[column][..], true, None::<Kind>)?;
                let by_row = rows.f_div(&mean)?.f_rsqrt()?.f_unsqueeze(row)?;
                by_row.f_mul(&columns.f_unsqueeze(column)?.f_rsqrt()?)?
            }
            _ => {
                follow(&slots[0], &squares, share)?;
                slots[0].f_rsqrt()?
            }
        };
        let update = scale.f_mul(&grad)?;
        let excess = MUL.tensor(&[Arg::Tensor(&rms(&update)?), Arg::Double(1.0 / options.d)])?;
        let update = update.f_div(&clamped(&excess, 1.0)?)?.f_mul(&lr)?;
        if options.weight_decay != 0.0 {
            let decay = MUL.tensor(&[Arg::Tensor(&lr), Arg::Double(options.weight_decay)])?;
            let decayed = param.f_mul(&decay)?;
            let _ = param.f_sub_(&decayed)?;
        }
        let _ = param.f_sub_(&update)?;
    }
    Ok(())
}
