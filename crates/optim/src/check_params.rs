//! Which parameters can be optimized.

use std::collections::{HashMap, HashSet};

use overdrive_core::{IS_SHARDED, OptimizerError, Parameter, SHARDED};
use overdrive_ffi::data_address;
use tch::{Kind, Tensor};

use crate::algorithm::Algorithm;

/// Checks that all parameters can be optimized, that each is given once, and that each has a unique name, or all have
/// none.
pub(crate) fn check<'a, A: Algorithm>(
    groups: impl Iterator<Item = (&'a A, &'a [Parameter])>,
) -> Result<(), OptimizerError> {
    let (mut seen, mut names) = (HashMap::new(), HashSet::new());
    let mut index = 0;
    for (group, (algorithm, params)) in groups.enumerate() {
        for (place, param) in params.iter().enumerate() {
            let tensor = param.tensor();
            let reason = check_one(tensor).err().or_else(|| algorithm.refuses(tensor));
            // Empty tensors have no data to share.
            let known = match reason.is_none() && tensor.numel() > 0 {
                true => seen.insert(data_address(tensor), (group, place)),
                false => None,
            };
            let again = known.map(|(other, at)| {
                format!(
                    "it is given twice, as parameter {at} of group {other} and as parameter {place} of group {group} \
                     (counted from 0): give each parameter once"
                )
            });
            let misnamed = match param.name() {
                Some(name) if !names.insert(name.to_owned()) => Some(
                    "another parameter has the same name: give each model's parameters their own prefix with \
                         `overdrive_core::prefixed`",
                ),
                Some(_) if names.len() <= index => Some("it has a name, but others have none: name all or none"),
                None if !names.is_empty() => Some("it has no name, but others have one: name all or none"),
                _ => None,
            };
            if let Some(reason) = reason.or(again).or(misnamed.map(str::to_owned)) {
                return Err(OptimizerError::parameter(param, index, reason));
            }
            index += 1;
        }
    }
    Ok(())
}

fn check_one(param: &Tensor) -> Result<(), String> {
    if !param.defined() {
        return Err("it is undefined".to_owned());
    }
    if SHARDED.contains(param) {
        return Err(IS_SHARDED.to_owned());
    }
    let kind = param.kind();
    if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Err(format!("its dtype is {kind:?}, but should be Float, Double, Half or BFloat16"));
    }
    if param.is_sparse() {
        return Err("it is sparse, but should be dense".to_owned());
    }
    if !is_dense(&param.size(), &param.stride()) {
        let layout = format!("size {:?}, strides {:?}", param.size(), param.stride());
        return Err(format!("it has gaps or overlaps in memory ({layout}): give a contiguous copy"));
    }
    if !param.is_leaf() {
        return Err("it is not a leaf: give the variable itself, not a tensor computed from it".to_owned());
    }
    Ok(())
}

/// Whether the elements fill their memory without gaps or overlaps, in any order of dimensions. The fused kernels
/// iterate over the memory and ignore strides.
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
