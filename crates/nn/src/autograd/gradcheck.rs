//! Compares gradients with finite differences.

use overdrive_ffi::autograd::BoxError;
use tch::{Kind, Tensor};

use super::grad;
use super::jacobian::{Jacobian, analytical, compare, numerical, same, values};
use super::tensors::Tensors;
use crate::error::NnError;

/// Tolerances of [`gradcheck`]; the defaults are PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct GradcheckOptions {
    pub(super) eps: f64,
    pub(super) atol: f64,
    pub(super) rtol: f64,
    pub(super) nondet_tol: f64,
}

impl Default for GradcheckOptions {
    fn default() -> Self {
        Self { eps: 1e-6, atol: 1e-5, rtol: 1e-3, nondet_tol: 0.0 }
    }
}

impl GradcheckOptions {
    /// By how much an input's element is moved; default 1e-6.
    pub fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// The absolute tolerance; default 1e-5.
    pub fn atol(self, atol: f64) -> Self {
        Self { atol, ..self }
    }

    /// The tolerance relative to the numerical derivative; default 1e-3.
    pub fn rtol(self, rtol: f64) -> Self {
        Self { rtol, ..self }
    }

    /// By how much a second backward pass may differ from the first; default 0.
    pub fn nondet_tol(self, nondet_tol: f64) -> Self {
        Self { nondet_tol, ..self }
    }
}

/// Why [`gradcheck`] does not confirm the gradients.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradcheckError {
    /// A derivative differs.
    #[error(
        "Jacobian mismatch for output {output} with respect to input {input}, worst for element {to} of the output and \
         element {from} of the input: numerical {numerical}, analytical {analytical}"
    )]
    Mismatch {
        /// The output's index.
        output: usize,
        /// The input's index.
        input: usize,
        /// The element of the output, counted in row-major order.
        to: usize,
        /// The element of the input, counted in row-major order.
        from: usize,
        /// The finite difference.
        numerical: f64,
        /// By the backward pass.
        analytical: f64,
    },
    /// Two backward passes with the same values differ.
    #[error(
        "Backward is not reentrant: for output {output}, two passes with the same values differ by {difference}, more \
         than the tolerance {nondet_tol}"
    )]
    NotReentrant {
        /// The output's index.
        output: usize,
        /// The largest difference.
        difference: f64,
        /// What is allowed.
        nondet_tol: f64,
    },
    /// Gradients of 0 for the outputs give another gradient for an input.
    #[error("backward not multiplied by grad_output: input {input} has a gradient where all outputs' gradients are 0")]
    NotMultiplied {
        /// The input's index.
        input: usize,
    },
    /// No output requires a gradient, but one depends on an input.
    #[error(
        "Numerical gradient for function expected to be zero: no output requires a gradient, but output {output} \
         depends on input {input}"
    )]
    NotZero {
        /// The output's index.
        output: usize,
        /// The input's index.
        input: usize,
    },
    /// No input requires a gradient.
    #[error(
        "gradcheck expects at least one input tensor to require gradient, but none of the them have requires_grad=True."
    )]
    NoInput,
    /// A tensor cannot be checked.
    #[error("{tensor} is {found}, but gradcheck needs {needed}")]
    Unsupported {
        /// Which tensor.
        tensor: String,
        /// What it is.
        found: String,
        /// What would be right.
        needed: &'static str,
    },
    /// The function failed.
    #[error("the function failed: {0}")]
    Function(#[source] BoxError),
    /// A backward pass failed.
    #[error(transparent)]
    Backward(#[from] NnError),
}

impl From<tch::TchError> for GradcheckError {
    fn from(error: tch::TchError) -> Self {
        Self::Backward(error.into())
    }
}

pub(super) type Check<'a> = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>, BoxError> + 'a;

/// Checks the gradients of a function for these inputs by central differences, element by element.
///
/// The inputs have to be float64, because float32 is too coarse for differences. The function gets them as a slice, and
/// has to use these: it is called with others, too.
///
/// ```
/// # use overdrive_nn::autograd::{GradcheckOptions, gradcheck};
/// # use tch::{Device, Kind, Tensor};
/// # fn main() -> Result<(), overdrive_nn::autograd::GradcheckError> {
/// let x = Tensor::rand([2, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// let w = Tensor::rand([3, 2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// gradcheck(|args| args[0].f_matmul(&args[1]), [&x, &w], GradcheckOptions::default())?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When a gradient is wrong: [`Mismatch`](GradcheckError::Mismatch) has the worst entry. When an input is unsuitable,
/// or the function or its backward pass fails.
///
/// # Panics
/// When the function or the `backward` of a [`Function`](super::Function) panics.
///
/// # Source
/// `torch.autograd.gradcheck`, without complex and sparse tensors, `check_undefined_grad` and forward mode. There an
/// input that is not float64 is a warning.
pub fn gradcheck<'a, I, O, E>(
    function: impl Fn(&[Tensor]) -> Result<O, E>,
    inputs: I,
    options: GradcheckOptions,
) -> Result<(), GradcheckError>
where
    I: Tensors<Of<&'a Tensor> = I>,
    O: Tensors<Of<Tensor> = O>,
    E: Into<BoxError>,
{
    check(&|args| function(args).map(O::into_list).map_err(Into::into), &handles(inputs), options)
}

/// Checks the gradients of a function's gradients, for random gradients of its outputs. As [`gradcheck`].
///
/// # Errors
/// As [`gradcheck`]; the inputs are followed by the outputs' gradients, and the outputs are the inputs' gradients.
///
/// # Panics
/// As [`gradcheck`].
///
/// # Source
/// `torch.autograd.gradgradcheck`
pub fn gradgradcheck<'a, I, O, E>(
    function: impl Fn(&[Tensor]) -> Result<O, E>,
    inputs: I,
    options: GradcheckOptions,
) -> Result<(), GradcheckError>
where
    I: Tensors<Of<&'a Tensor> = I>,
    O: Tensors<Of<Tensor> = O>,
    E: Into<BoxError>,
{
    let outputs = |args: &[Tensor]| {
        let outputs = function(args).map(O::into_list).map_err(Into::into)?;
        Ok::<_, BoxError>(outputs.into_iter().filter(Tensor::requires_grad).collect::<Vec<_>>())
    };
    let mut args = handles(inputs);
    let count = args.len();
    for output in outputs(&args).map_err(GradcheckError::Function)? {
        args.push(output.f_detach()?.f_zeros_like()?.f_uniform_(-1.0, 1.0)?.f_set_requires_grad(true)?);
    }
    let gradients = |args: &[Tensor]| {
        let (inputs, grad_outputs) = args.split_at(count);
        let outputs = outputs(inputs)?;
        let inputs: Vec<_> = inputs.iter().filter(|input| input.requires_grad()).collect();
        let grads = grad(outputs.iter().collect::<Vec<_>>(), inputs).grad_outputs(grad_outputs).create_graph(true);
        Ok(grads.allow_unused().run()?.into_iter().flatten().collect())
    };
    check(&gradients, &args, options)
}

fn handles<'a, I: Tensors<Of<&'a Tensor> = I>>(inputs: I) -> Vec<Tensor> {
    I::into_list::<&'a Tensor>(inputs).into_iter().map(Tensor::shallow_clone).collect()
}

fn check(function: &Check<'_>, inputs: &[Tensor], options: GradcheckOptions) -> Result<(), GradcheckError> {
    for (index, input) in inputs.iter().enumerate().filter(|(_, input)| input.requires_grad()) {
        suitable(index, input)?;
    }
    let by: Vec<_> = (0..inputs.len()).filter(|&input| inputs[input].requires_grad()).collect();
    if by.is_empty() {
        return Err(GradcheckError::NoInput);
    }
    let outputs = function(inputs).map_err(GradcheckError::Function)?;
    for (index, output) in outputs.iter().enumerate() {
        real(index, output)?;
    }
    let of: Vec<_> = (0..outputs.len()).filter(|&output| outputs[output].requires_grad()).collect();
    let mut numericals = Vec::new();
    for &input in &by {
        numericals.push(numerical(function, inputs, input, &outputs, options.eps)?);
    }
    for &output in &of {
        let analyticals = analytical(&outputs[output], inputs, &by)?;
        let again = analytical(&outputs[output], inputs, &by)?;
        same(output, &analyticals, &again, options.nondet_tol)?;
        for ((&input, analytical), numerical) in by.iter().zip(&analyticals).zip(&numericals) {
            compare(output, input, &numerical[output], analytical, options)?;
        }
    }
    if of.is_empty() {
        return independent(&by, &numericals);
    }
    multiplied(&of.iter().map(|&output| &outputs[output]).collect::<Vec<_>>(), inputs, &by)
}

fn suitable(index: usize, input: &Tensor) -> Result<(), GradcheckError> {
    let unsupported =
        |found: String, needed| Err(GradcheckError::Unsupported { tensor: format!("input {index}"), found, needed });
    let kind = input.f_kind()?;
    if kind != Kind::Double {
        return unsupported(format!("{kind:?}"), "Double");
    }
    if input.is_sparse() {
        return unsupported("sparse".to_owned(), "a dense one: call `to_dense`");
    }
    if input.stride().iter().zip(input.size()).any(|(&stride, size)| stride == 0 && size > 1) {
        let found = "a tensor with stride 0".to_owned();
        return unsupported(found, "inputs that do not overlap: call `contiguous`");
    }
    Ok(())
}

fn real(index: usize, output: &Tensor) -> Result<(), GradcheckError> {
    let kind = output.f_kind()?;
    if matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble) {
        let (tensor, found) = (format!("output {index}"), format!("{kind:?}"));
        return Err(GradcheckError::Unsupported { tensor, found, needed: "real outputs" });
    }
    Ok(())
}

/// No output requires a gradient, so none may depend on an input.
fn independent(by: &[usize], numericals: &[Vec<Jacobian>]) -> Result<(), GradcheckError> {
    for (&input, outputs) in by.iter().zip(numericals) {
        for (output, jacobian) in outputs.iter().enumerate() {
            if jacobian.values.iter().any(|&value| value != 0.0) {
                return Err(GradcheckError::NotZero { output, input });
            }
        }
    }
    Ok(())
}

/// Gradients of 0 have to give gradients of 0.
fn multiplied(outputs: &[&Tensor], inputs: &[Tensor], by: &[usize]) -> Result<(), GradcheckError> {
    let zeros = outputs.iter().map(|output| output.f_zeros_like()).collect::<Result<Vec<_>, _>>()?;
    let inputs: Vec<_> = by.iter().map(|&input| &inputs[input]).collect();
    let grads = grad(outputs.to_vec(), inputs).grad_outputs(&zeros).allow_unused().run()?;
    for (&input, grad) in by.iter().zip(grads) {
        let grad = grad.as_ref().map(values).transpose()?.unwrap_or_default();
        if grad.iter().any(|&value| value != 0.0) {
            return Err(GradcheckError::NotMultiplied { input });
        }
    }
    Ok(())
}
