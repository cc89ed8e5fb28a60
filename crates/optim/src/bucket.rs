//! Parameters that one fused kernel can update together: of one device and one dtype.

use std::collections::HashSet;

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::TensorList;
use tch::{Device, Kind, Tensor};

/// Splits parameters by device and dtype, in order, after checking each.
pub(crate) fn buckets(params: &[Tensor]) -> Result<Vec<TensorList>, OptimizerError> {
    check(params)?;
    let mut split: Vec<((Device, Kind), Vec<&Tensor>)> = Vec::new();
    for param in params {
        let key = (param.device(), param.kind());
        match split.iter_mut().find(|(known, _)| *known == key) {
            Some((_, members)) => members.push(param),
            None => split.push((key, vec![param])),
        }
    }
    split.into_iter().map(|(_, members)| Ok(TensorList::new(&members)?)).collect()
}

fn check(params: &[Tensor]) -> Result<(), OptimizerError> {
    let refuse = |index, reason| Err(OptimizerError::InvalidParameter { index, reason });
    let mut seen = HashSet::new();
    for (index, param) in params.iter().enumerate() {
        if !param.defined() {
            return refuse(index, "it is undefined".to_owned());
        }
        let kind = param.kind();
        if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
            return refuse(index, format!("its dtype is {kind:?}, but should be Float, Double, Half or BFloat16"));
        }
        if param.is_sparse() {
            return refuse(index, "it is sparse: give a dense one".to_owned());
        }
        if !is_dense(&param.size(), &param.stride()) {
            let layout = format!("size {:?}, strides {:?}", param.size(), param.stride());
            return refuse(index, format!("it does not fill its memory ({layout}): give a contiguous copy"));
        }
        if !param.is_leaf() {
            return refuse(
                index,
                "it is not a leaf: give the variable itself, not what was computed from it".to_owned(),
            );
        }
        // Empty tensors have no data to share.
        if param.numel() > 0 && !seen.insert(param.data_ptr() as usize) {
            return refuse(index, "it is given twice: each parameter belongs to one group once".to_owned());
        }
    }
    Ok(())
}

/// Whether the elements fill their memory without gaps or overlaps, in any order of dimensions. The fused kernels walk
/// over the memory and look at no strides.
fn is_dense(size: &[i64], stride: &[i64]) -> bool {
    let mut dims: Vec<_> = stride.iter().zip(size).filter(|(_, size)| **size != 1).collect();
    dims.sort();
    let mut expected = 1;
    let follows = |(&stride, &size): (&i64, &i64)| {
        let as_expected = stride == expected;
        expected *= size;
        as_expected
    };
    size.contains(&0) || dims.into_iter().all(follows)
}

/// The caller's parameters, sharing their data with the model.
pub(crate) fn shared(params: impl AsRef<[Tensor]>) -> Vec<Tensor> {
    params.as_ref().iter().map(Tensor::shallow_clone).collect()
}

/// One tensor of zeros like each parameter.
pub(crate) fn zeros_like(params: &TensorList) -> Result<TensorList, TorchError> {
    let _no_grad = tch::no_grad_guard();
    let zeros: Result<Vec<_>, TorchError> = params.to_vec()?.iter().map(|param| Ok(param.f_zeros_like()?)).collect();
    TensorList::new(&zeros?)
}
