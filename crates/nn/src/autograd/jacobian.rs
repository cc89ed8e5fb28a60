//! Derivatives of every output element by every input element.

use overdrive_ffi::TensorId;
use tch::{Kind, Tensor};

use super::grad;
use super::gradcheck::{Check, GradcheckError, GradcheckOptions};

/// The derivatives of one output by one input: a row for each element of the input.
pub(super) struct Jacobian {
    columns: usize,
    pub(super) values: Vec<f64>,
}

pub(super) fn values(tensor: &Tensor) -> Result<Vec<f64>, tch::TchError> {
    Vec::try_from(tensor.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?.f_to_device(tch::Device::Cpu)?)
}

/// A tensor with these values and another's form.
fn like(tensor: &Tensor, values: &[f64]) -> Result<Tensor, tch::TchError> {
    Tensor::f_from_slice(values)?.f_reshape(tensor.size())?.f_to_kind(tensor.f_kind()?)?.f_to_device(tensor.device())
}

/// By central differences, for every output.
pub(super) fn numerical(
    function: &Check<'_>,
    inputs: &[Tensor],
    input: usize,
    outputs: &[Tensor],
    eps: f64,
) -> Result<Vec<Jacobian>, GradcheckError> {
    let at = values(&inputs[input])?;
    let mut jacobians: Vec<_> =
        outputs.iter().map(|output| Jacobian { columns: output.numel(), values: Vec::new() }).collect();
    for element in 0..at.len() {
        let moved = |by: f64| -> Result<Vec<Tensor>, GradcheckError> {
            let mut values = at.clone();
            values[element] += by;
            let moved = like(&inputs[input], &values)?.f_set_requires_grad(true)?;
            // A tensor that is given twice moves in both places.
            let is_it = |other: &Tensor| TensorId::of(other) == TensorId::of(&inputs[input]);
            let arg = |it: &Tensor| if is_it(it) { moved.shallow_clone() } else { it.shallow_clone() };
            let args: Vec<_> = inputs.iter().map(arg).collect();
            function(&args).map_err(GradcheckError::Function)
        };
        let (low, high) = (moved(-eps)?, moved(eps)?);
        for (index, jacobian) in jacobians.iter_mut().enumerate() {
            let [low, high] = [&low, &high].map(|outputs| outputs.get(index).map_or(Ok(Vec::new()), values));
            let (low, high) = (low?, high?);
            if low.len() != jacobian.columns || high.len() != jacobian.columns {
                let found = format!("of another size when input {input} is moved by {eps}");
                let tensor = format!("output {index}");
                return Err(GradcheckError::Unsupported { tensor, found, needed: "outputs of the same shape" });
            }
            jacobian.values.extend(low.iter().zip(&high).map(|(low, high)| (high - low) / (2.0 * eps)));
        }
    }
    Ok(jacobians)
}

/// By a backward pass for each element of the output, for every input that requires a gradient.
pub(super) fn analytical(output: &Tensor, inputs: &[Tensor], by: &[usize]) -> Result<Vec<Jacobian>, GradcheckError> {
    let columns = output.numel();
    let inputs: Vec<_> = by.iter().map(|&input| &inputs[input]).collect();
    let mut jacobians: Vec<_> =
        inputs.iter().map(|input| Jacobian { columns, values: vec![0.0; columns * input.numel()] }).collect();
    for column in 0..columns {
        let mut one_hot = vec![0.0; columns];
        one_hot[column] = 1.0;
        let one_hot = like(output, &one_hot)?;
        let grads = grad(output, inputs.clone()).grad_outputs([&one_hot]).retain_graph(true).allow_unused().run()?;
        for (jacobian, grad) in jacobians.iter_mut().zip(grads) {
            let grad = grad.as_ref().map(values).transpose()?.unwrap_or_default();
            for (row, value) in grad.into_iter().enumerate() {
                jacobian.values[row * columns + column] = value;
            }
        }
    }
    Ok(jacobians)
}

pub(super) fn same(
    output: usize,
    first: &[Jacobian],
    second: &[Jacobian],
    nondet_tol: f64,
) -> Result<(), GradcheckError> {
    let pairs = first.iter().zip(second).flat_map(|(first, second)| first.values.iter().zip(&second.values));
    let difference = pairs.map(|(first, second)| (first - second).abs()).fold(0.0, f64::max);
    if difference > nondet_tol {
        return Err(GradcheckError::NotReentrant { output, difference, nondet_tol });
    }
    Ok(())
}

pub(super) fn compare(
    output: usize,
    input: usize,
    numerical: &Jacobian,
    analytical: &Jacobian,
    options: GradcheckOptions,
) -> Result<(), GradcheckError> {
    let excess = |(numerical, analytical): (&f64, &f64)| {
        let excess = (analytical - numerical).abs() - (options.atol + options.rtol * numerical.abs());
        if excess.is_nan() { f64::INFINITY } else { excess }
    };
    let all = numerical.values.iter().zip(&analytical.values).map(excess).enumerate();
    match all.max_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((place, excess)) if excess > 0.0 => {
            let (from, to) = (place / numerical.columns, place % numerical.columns);
            let (numerical, analytical) = (numerical.values[place], analytical.values[place]);
            Err(GradcheckError::Mismatch { output, input, to, from, numerical, analytical })
        }
        _ => Ok(()),
    }
}
