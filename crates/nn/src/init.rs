//! Initial values, drawn from libtorch's generator as PyTorch draws them.
//!
//! # Source
//! `torch.nn.init`

use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use crate::error::NnError;

// tch panics when libtorch refuses these.
static CLAMP: LazyOp = LazyOp::new("aten::clamp_", "");
static FILL: LazyOp = LazyOp::new("aten::fill_", "Scalar");

/// The function after a layer, for its recommended gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Nonlinearity {
    /// None: `linear`, `conv1d`, `conv2d`, ..
    Linear,
    /// The logistic function.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, slope * x)`.
    LeakyRelu,
    /// The scaled exponential linear unit.
    Selu,
}

/// Which number of values keeps its variance: a layer's inputs, in the forward pass, or its outputs, in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fan {
    /// `fan_in`
    In,
    /// `fan_out`
    Out,
}

/// The recommended gain for a nonlinearity; `negative_slope` counts for [`Nonlinearity::LeakyRelu`] alone, where PyTorch's
/// default is 0.01.
pub fn calculate_gain(nonlinearity: Nonlinearity, negative_slope: f64) -> f64 {
    match nonlinearity {
        Nonlinearity::Linear | Nonlinearity::Sigmoid => 1.0,
        Nonlinearity::Tanh => 5.0 / 3.0,
        Nonlinearity::Relu => 2f64.sqrt(),
        Nonlinearity::LeakyRelu => (2.0 / (1.0 + negative_slope.powi(2))).sqrt(),
        Nonlinearity::Selu => 3.0 / 4.0,
    }
}

/// Draws from the uniform distribution over [a, b).
///
/// # Errors
/// When `a` is larger than `b`, or the tensor is not floating-point.
pub fn uniform_(tensor: &Tensor, a: f64, b: f64) -> Result<(), NnError> {
    let _no_grad = tch::no_grad_guard();
    let _ = tensor.shallow_clone().f_uniform_(a, b)?;
    Ok(())
}

/// Draws from a normal distribution.
///
/// # Errors
/// When `std` is negative, or the tensor is not floating-point.
pub fn normal_(tensor: &Tensor, mean: f64, std: f64) -> Result<(), NnError> {
    let _no_grad = tch::no_grad_guard();
    let _ = tensor.shallow_clone().f_normal_(mean, std)?;
    Ok(())
}

/// Draws from a normal distribution that is cut off outside [a, b].
///
/// # Errors
/// When `std` is not positive, `a` is larger than `b`, or the tensor is not floating-point.
pub fn trunc_normal_(tensor: &Tensor, mean: f64, std: f64, a: f64, b: f64) -> Result<(), NnError> {
    if std.is_nan() || std <= 0.0 {
        let (found, expected) = (std.to_string(), "positive".to_owned());
        return Err(NnError::InvalidOption { layer: "trunc_normal_", option: "std", found, expected });
    }
    let cdf = |x: f64| (1.0 + libm::erf(x / 2f64.sqrt())) / 2.0;
    let (low, high) = (cdf((a - mean) / std), cdf((b - mean) / std));
    let (_no_grad, mut tensor) = (tch::no_grad_guard(), tensor.shallow_clone());
    let _ = tensor.f_uniform_(2.0 * low - 1.0, 2.0 * high - 1.0)?;
    let _ = tensor.f_erfinv_()?;
    tensor *= std * 2f64.sqrt();
    tensor += mean;
    CLAMP.call(&[Arg::Tensor(&tensor), Arg::Double(a), Arg::Double(b)])?;
    Ok(())
}

/// Fills with one value.
///
/// # Errors
/// When libtorch refuses.
pub fn constant_(tensor: &Tensor, value: f64) -> Result<(), NnError> {
    let _no_grad = tch::no_grad_guard();
    FILL.call(&[Arg::Tensor(tensor), Arg::Double(value)])?;
    Ok(())
}

/// Fills with 1.
///
/// # Errors
/// When libtorch refuses.
pub fn ones_(tensor: &Tensor) -> Result<(), NnError> {
    constant_(tensor, 1.0)
}

/// Fills with 0.
///
/// # Errors
/// When libtorch refuses.
pub fn zeros_(tensor: &Tensor) -> Result<(), NnError> {
    let _no_grad = tch::no_grad_guard();
    let _ = tensor.shallow_clone().f_zero_()?;
    Ok(())
}

/// Fills a matrix with the identity.
///
/// # Errors
/// When the tensor is not a matrix.
pub fn eye_(tensor: &Tensor) -> Result<(), NnError> {
    let (rows, columns) = matrix("eye_", tensor)?;
    let _no_grad = tch::no_grad_guard();
    let eye = Tensor::f_eye_m(rows, columns, (tensor.kind(), tensor.device()))?;
    tensor.shallow_clone().f_copy_(&eye)?;
    Ok(())
}

/// Fills a convolution's weight so that each group passes on its first input channels unchanged.
///
/// # Errors
/// When the tensor has other than 3, 4 or 5 dimensions, or `groups` does not divide the first.
pub fn dirac_(tensor: &Tensor, groups: i64) -> Result<(), NnError> {
    let shape = tensor.size();
    let fits = (3..=5).contains(&shape.len()) && groups > 0 && shape[0] % groups == 0;
    if !fits {
        let expected = format!("3, 4 or 5 dimensions, the first divisible by the {groups} groups");
        return Err(NnError::InvalidShape { function: "dirac_", expected, shape });
    }
    zeros_(tensor)?;
    let _no_grad = tch::no_grad_guard();
    let per_group = shape[0] / groups;
    for group in 0..groups {
        for channel in 0..per_group.min(shape[1]) {
            let mut at = tensor.f_select(0, group * per_group + channel)?.f_select(0, channel)?;
            for size in &shape[2..] {
                at = at.f_select(0, size / 2)?;
            }
            constant_(&at, 1.0)?;
        }
    }
    Ok(())
}

/// The numbers of values that a weight combines into one output, and that one input takes part in.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
fn fans(function: &'static str, tensor: &Tensor) -> Result<(f64, f64), NnError> {
    let shape = tensor.size();
    if shape.len() < 2 {
        return Err(NnError::InvalidShape { function, expected: "at least 2 dimensions".to_owned(), shape });
    }
    let field: i64 = shape[2..].iter().product();
    Ok(((shape[1] * field) as f64, (shape[0] * field) as f64))
}

/// Draws from a uniform distribution that keeps the variance of activations and gradients.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
///
/// # Source
/// Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.
pub fn xavier_uniform_(tensor: &Tensor, gain: f64) -> Result<(), NnError> {
    let (fan_in, fan_out) = fans("xavier_uniform_", tensor)?;
    let std = gain * (2.0 / (fan_in + fan_out)).sqrt();
    let a = 3f64.sqrt() * std;
    uniform_(tensor, -a, a)
}

/// Draws from a normal distribution that keeps the variance of activations and gradients.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
///
/// # Source
/// As [`xavier_uniform_`].
pub fn xavier_normal_(tensor: &Tensor, gain: f64) -> Result<(), NnError> {
    let (fan_in, fan_out) = fans("xavier_normal_", tensor)?;
    normal_(tensor, 0.0, gain * (2.0 / (fan_in + fan_out)).sqrt())
}

/// Draws from a uniform distribution that keeps the variance behind rectifiers; `a` is a leaky one's slope.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
///
/// # Source
/// He et al., "Delving Deep into Rectifiers", 2015.
pub fn kaiming_uniform_(tensor: &Tensor, a: f64, fan: Fan, nonlinearity: Nonlinearity) -> Result<(), NnError> {
    match kaiming_std("kaiming_uniform_", tensor, a, fan, nonlinearity)? {
        None => Ok(()),
        Some(std) => {
            let bound = 3f64.sqrt() * std;
            uniform_(tensor, -bound, bound)
        }
    }
}

/// Draws from a normal distribution that keeps the variance behind rectifiers; `a` is a leaky one's slope.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
///
/// # Source
/// As [`kaiming_uniform_`].
pub fn kaiming_normal_(tensor: &Tensor, a: f64, fan: Fan, nonlinearity: Nonlinearity) -> Result<(), NnError> {
    match kaiming_std("kaiming_normal_", tensor, a, fan, nonlinearity)? {
        None => Ok(()),
        Some(std) => normal_(tensor, 0.0, std),
    }
}

/// The standard deviation; none for a tensor without elements, for which nothing is drawn.
fn kaiming_std(
    function: &'static str,
    tensor: &Tensor,
    a: f64,
    fan: Fan,
    nonlinearity: Nonlinearity,
) -> Result<Option<f64>, NnError> {
    if tensor.numel() == 0 {
        return Ok(None);
    }
    let (fan_in, fan_out) = fans(function, tensor)?;
    let fan = if fan == Fan::In { fan_in } else { fan_out };
    Ok(Some(calculate_gain(nonlinearity, a) / fan.sqrt()))
}

/// Fills with a (semi-)orthogonal matrix; dimensions after the first are flattened.
///
/// # Errors
/// When the tensor has fewer than 2 dimensions.
///
/// # Source
/// Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks", 2013.
pub fn orthogonal_(tensor: &Tensor, gain: f64) -> Result<(), NnError> {
    let shape = tensor.size();
    if shape.len() < 2 {
        let expected = "at least 2 dimensions".to_owned();
        return Err(NnError::InvalidShape { function: "orthogonal_", expected, shape });
    }
    if tensor.numel() == 0 {
        return Ok(());
    }
    let _no_grad = tch::no_grad_guard();
    let (rows, columns) = (shape[0], tensor.numel() as i64 / shape[0]);
    let mut flat = Tensor::f_empty([rows, columns], (tensor.kind(), tensor.device()))?;
    let _ = flat.f_normal_(0.0, 1.0)?;
    let flat = if rows < columns { flat.f_tr()? } else { flat };
    let (q, r) = Tensor::f_linalg_qr(&flat, "reduced")?;
    let q = q.f_mul(&r.f_diag(0)?.f_sign()?)?;
    let q = if rows < columns { q.f_tr()? } else { q };
    let mut tensor = tensor.shallow_clone();
    tensor.f_copy_(&q.f_reshape(&shape)?)?;
    tensor *= gain;
    Ok(())
}

/// Draws a matrix from a normal distribution, then sets a share of each column to 0.
///
/// # Errors
/// When the tensor is not a matrix, or `sparsity` is outside [0, 1].
///
/// # Source
/// Martens, "Deep learning via Hessian-free optimization", 2010.
pub fn sparse_(tensor: &Tensor, sparsity: f64, std: f64) -> Result<(), NnError> {
    let (rows, columns) = matrix("sparse_", tensor)?;
    if !(0.0..=1.0).contains(&sparsity) {
        let (found, expected) = (sparsity.to_string(), "at least 0 and at most 1".to_owned());
        return Err(NnError::InvalidOption { layer: "sparse_", option: "sparsity", found, expected });
    }
    normal_(tensor, 0.0, std)?;
    let _no_grad = tch::no_grad_guard();
    let zeros = (sparsity * rows as f64).ceil() as i64;
    for column in 0..columns {
        let order = Tensor::f_randperm(rows, (Kind::Int64, tch::Device::Cpu))?;
        let order = order.f_narrow(0, 0, zeros)?.f_to_device(tensor.device())?;
        let _ = tensor.f_select(1, column)?.f_index_fill_(0, &order, 0.0)?;
    }
    Ok(())
}

fn matrix(function: &'static str, tensor: &Tensor) -> Result<(i64, i64), NnError> {
    match tensor.size()[..] {
        [rows, columns] => Ok((rows, columns)),
        _ => Err(NnError::InvalidShape { function, expected: "a matrix".to_owned(), shape: tensor.size() }),
    }
}
