//! The tensors that a compiled step is given.

use overdrive_ffi::{Form, is_lazy};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::error::CompileError;

/// A tensor of the batch as the step was recorded: the tensor itself, or a copy with the recorded strides.
///
/// # Errors
/// When shape, dtype or device are others.
pub(crate) fn take(form: &Form, tensor: &Tensor, place: usize) -> Result<Tensor, CompileError> {
    if form.fits(tensor) {
        return Ok(tensor.shallow_clone());
    }
    if tensor.kind() != form.kind || tensor.device() != form.device || tensor.size() != form.shape {
        let what = format!("tensor {place} of the batch");
        let found = Form::of(tensor)?.to_string();
        return Err(CompileError::OtherTensor { what, expected: form.to_string(), found });
    }
    let mut own = Tensor::f_empty_strided(&form.shape, &form.stride, (form.kind, form.device))?;
    own.f_copy_(tensor)?;
    Ok(own)
}

/// A batch with its values in memory: lazily negated and conjugated tensors (`z.conj().imag()`) are computed.
///
/// # Errors
/// When memory runs out.
pub(crate) fn in_memory(batch: &[Tensor]) -> Result<Vec<Tensor>, CompileError> {
    let one = |tensor: &Tensor| match is_lazy(tensor) {
        true => Ok(tensor.f_resolve_conj()?.f_resolve_neg()?),
        false => Ok(tensor.shallow_clone()),
    };
    batch.iter().map(one).collect()
}

/// The forms of a batch.
///
/// # Errors
/// When a tensor is one that compiled code cannot take.
pub(crate) fn forms(batch: &[Tensor]) -> Result<Vec<Form>, CompileError> {
    let one =
        |(place, tensor)| Form::of(tensor).map_err(|error| CompileError::Unfit { place, reason: error.to_string() });
    batch.iter().enumerate().map(one).collect()
}

/// The forms of a batch without its size: the first dimension is 0.
pub(crate) fn of_any_size(batch: &[Form]) -> Vec<Form> {
    let mut forms = batch.to_vec();
    forms.iter_mut().filter_map(|form| form.shape.first_mut()).for_each(|size| *size = 0);
    forms
}

/// As compile.py reads it.
pub(crate) fn to_json(form: &Form, number: i64) -> Value {
    json!({
        "number": number,
        "shape": form.shape,
        "stride": form.stride,
        "dtype": scalar_type(form.kind),
        "device": device(form.device),
    })
}

/// `c10::ScalarType`'s name.
fn scalar_type(kind: Kind) -> String {
    match kind {
        Kind::Uint8 => "Byte".to_owned(),
        Kind::Int8 => "Char".to_owned(),
        Kind::Int16 => "Short".to_owned(),
        Kind::Int => "Int".to_owned(),
        Kind::Int64 => "Long".to_owned(),
        other => format!("{other:?}"),
    }
}

fn device(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".to_owned(),
        Device::Cuda(index) => format!("cuda:{index}"),
        Device::Mps => "mps".to_owned(),
        Device::Vulkan => "vulkan".to_owned(),
    }
}
