//! What all layers do alike.

use overdrive_core::{Module, ModuleState};
use tch::{TchError, Tensor};

use crate::error::NnError;

/// Runs a layer's operator; an error names the layer.
pub(crate) fn run<M: Module, T>(
    layer: &M,
    state: &ModuleState,
    operator: impl FnOnce() -> Result<T, TchError>,
) -> Result<T, NnError> {
    operator().map_err(|error| {
        let (path, text) = (state.path(), layer.describe());
        let layer = if path.is_empty() { text } else { format!("{path}: {text}") };
        NnError::Forward { layer, source: error.into() }
    })
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
