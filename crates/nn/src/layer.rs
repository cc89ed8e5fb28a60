//! What all layers do alike.

use overdrive_core::{Module, ModuleState, TorchError};
use overdrive_ffi::context::grad_enabled;
use tch::{TchError, Tensor};

use crate::error::NnError;
use crate::summary::record::{FirstTensor, report};

/// Runs a layer's operator; an error names the layer.
pub(crate) fn run<M: Module, T: FirstTensor>(
    layer: &M,
    state: &ModuleState,
    operator: impl FnOnce() -> Result<T, TchError>,
) -> Result<T, NnError> {
    finish(layer, || state.path(), operator())
}

/// The error with the layer's name, unless it has that of a layer inside.
pub(crate) fn named<M: Module>(layer: &M, state: &ModuleState, error: NnError) -> NnError {
    let NnError::Torch(source) = error else { return error };
    let (path, text) = (state.path(), layer.describe());
    let layer = if path.is_empty() { text } else { format!("{path}: {text}") };
    NnError::Forward { layer, source }
}

/// Whether what is computed from these tensors gets a gradient: one of them does, and gradients are on.
pub(crate) fn needs_grad<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
    grad_enabled() && tensors.into_iter().any(Tensor::requires_grad)
}

/// Whether autocast is on, where PyTorch asks before it takes a fused operator: on the GPU, whatever the tensors' device.
pub(crate) fn is_autocast() -> bool {
    overdrive_ffi::autocast::state(tch::Device::Cuda(0)).is_ok_and(|state| state.enabled)
}

/// Runs the operator of a layer without a state, which does not know its name.
pub(crate) fn run_nameless<M: Module, T: FirstTensor, E: Into<TorchError>>(
    layer: &M,
    operator: impl FnOnce() -> Result<T, E>,
) -> Result<T, NnError> {
    finish(layer, String::new, operator())
}

fn finish<M: Module, T: FirstTensor, E: Into<TorchError>>(
    layer: &M,
    path: impl FnOnce() -> String,
    output: Result<T, E>,
) -> Result<T, NnError> {
    let output = output.map_err(|error| {
        let (path, text) = (path(), layer.describe());
        let layer = if path.is_empty() { text } else { format!("{path}: {text}") };
        NnError::Forward { layer, source: error.into() }
    })?;
    report(layer, None, &output);
    Ok(output)
}

/// An uninitialized float32 tensor on the CPU.
pub(crate) fn empty(shape: &[i64]) -> Result<Tensor, TchError> {
    Tensor::f_empty(shape, (tch::Kind::Float, tch::Device::Cpu))
}

/// An error unless an option is at least `least`.
pub(crate) fn at_least(layer: &'static str, option: &'static str, found: i64, least: i64) -> Result<(), NnError> {
    if found >= least {
        return Ok(());
    }
    let (found, expected) = (found.to_string(), format!("at least {least}"));
    Err(NnError::InvalidOption { layer, option, found, expected })
}

/// A bool as Python prints it.
pub(crate) fn python(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// A number as Python prints it.
pub(crate) fn float(value: f64) -> String {
    match value {
        value if value != 0.0 && value.abs() < 1e-4 => {
            let text = format!("{value:e}");
            let (digits, exponent) = text.split_once("e-").unwrap_or((&text, "0"));
            format!("{digits}e-{exponent:0>2}")
        }
        value => format!("{value:?}"),
    }
}
