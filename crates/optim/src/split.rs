//! Splits groups: by weight decay, and by layer.

use std::collections::BTreeMap;

use overdrive_core::{OptimizerError, Parameter};

use crate::algorithm::{Algorithm, Field};
use crate::builder::ParamGroup;
use crate::optimizer::Values;

/// Splits each group in two, the parameters with weight decay first; empty groups are left out.
pub(crate) fn by_decay<A: Algorithm>(groups: &[ParamGroup<A>], is_exempt: impl Fn(&str) -> bool) -> Vec<ParamGroup<A>> {
    let is_free = |param: &Parameter| {
        param.tensor().dim() <= 1 || param.name().is_some_and(|name| is_bias(name) || is_exempt(name))
    };
    let mut split = Vec::new();
    for group in groups {
        for (is_free, params) in sorted(&group.scope.params, is_free) {
            let part = group.part(params);
            split.push(if is_free { part.edit(without_decay) } else { part });
        }
    }
    split
}

fn is_bias(name: &str) -> bool {
    name == "bias" || name.ends_with(".bias")
}

fn without_decay<A: Algorithm>(values: &mut Values<A>) {
    for (name, field) in values.options.fields() {
        if let ("weight_decay", Field::Float(value)) = (name.as_str(), field) {
            *value = 0.0;
        }
    }
}

/// Splits each group into one per layer.
pub(crate) fn by_layer<A: Algorithm>(
    groups: &[ParamGroup<A>],
    decay: f64,
    layer_of: impl Fn(&str) -> usize,
) -> Result<Vec<ParamGroup<A>>, OptimizerError> {
    OptimizerError::check_range("layer_decay", decay, f64::MIN_POSITIVE..f64::INFINITY, "finite and above 0")?;
    let all = groups.iter().flat_map(|group| &group.scope.params);
    if let Some((index, param)) = all.clone().enumerate().find(|(_, param)| param.name().is_none()) {
        let reason = "it has no name, and `layer_decay` finds the layer by name: give the optimizer a VarStore, or \
                      names and tensors";
        return Err(OptimizerError::parameter(param, index, reason));
    }
    let layer = |param: &Parameter| layer_of(param.name().unwrap_or_default());
    let last = all.map(layer).max().unwrap_or(0);
    let mut split = Vec::new();
    for group in groups {
        for (layer, params) in sorted(&group.scope.params, layer) {
            let factor = decay.powf((last - layer) as f64);
            split.push(group.part(params).edit(move |values| values.lr *= factor));
        }
    }
    Ok(split)
}

/// Parameters by key, in the order of the keys; those with the same key keep their order.
fn sorted<K: Ord>(params: &[Parameter], key: impl Fn(&Parameter) -> K) -> BTreeMap<K, Vec<Parameter>> {
    let mut sorted = BTreeMap::new();
    for param in params {
        sorted.entry(key(param)).or_insert_with(Vec::new).push(param.share());
    }
    sorted
}
