//! The update of an optimizer in a recorded step: which operators it may have, and which of their numbers change from
//! step to step.

use std::collections::HashSet;

use overdrive_core::{Averages, Optimizer};
use overdrive_ffi::TensorId;
use serde_json::Value;

use crate::error::CompileError;
use crate::graph::Scalar;
use crate::trace::{Trace, name};

/// A number of an optimizer, or of averages, that is given anew at each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// The learning rate of a group.
    Lr(usize),
    /// The momentum of a group: SGD's `momentum`, the first of Adam's `betas`.
    Momentum(usize),
    /// How far the averages follow.
    AverageWeight,
}

impl Number {
    /// Its value now.
    pub(crate) fn of(self, opt: &impl Optimizer, averages: Option<&dyn Averages>) -> f64 {
        match self {
            Self::Lr(group) => opt.lr(group).unwrap_or(0.0),
            Self::Momentum(group) => opt.momentum(group).unwrap_or(0.0),
            Self::AverageWeight => averages.map_or(0.0, Averages::next_weight),
        }
    }
}

/// Where a fused operator takes learning rate and momentum; formulas.py has its formula.
fn places(operator: &Value) -> Option<(usize, usize)> {
    match operator["op"].as_str()? {
        "aten::_fused_adam_" | "aten::_fused_adamw_" => Some((6, 7)),
        "aten::_fused_sgd_" => Some((5, 4)),
        _ => None,
    }
}

/// An error if a tensor whose gradient is wanted is not one of the optimizer's: a compiled step hands no gradient out.
pub(crate) fn check_trained(tensors: &[tch::Tensor], opt: &impl Optimizer) -> Result<(), CompileError> {
    let params: HashSet<TensorId> = opt.params().iter().map(TensorId::of).collect();
    match tensors.iter().find(|tensor| !params.contains(&TensorId::of(tensor))) {
        None => Ok(()),
        Some(other) => {
            let (shape, kind) = (other.size(), other.kind());
            let reason = format!(
                "the step computes the gradient of a {kind:?} tensor of shape {shape:?}, which is no parameter of the optimizer: compile the loss by \
                 itself (`compile::loss`), or take away its `requires_grad`"
            );
            Err(CompileError::NotRecordable { reason, caller: None })
        }
    }
}

/// The numbers that the update takes at each step.
///
/// # Errors
/// When the update has other operators than fused ones and the counting of steps, or that of averages others than one
/// that moves all: numbers in them could follow from the learning rate or the count, and would stay what they were. Or
/// when another optimizer steps before.
pub(crate) fn numbers(trace: &Trace, opt: &impl Optimizer) -> Result<(Vec<Scalar>, Vec<Number>), CompileError> {
    let refused = |reason: String| CompileError::NotRecordable { reason, caller: None };
    let lens = opt.group_lens().ok_or_else(|| refused("the optimizer does not tell its groups".to_owned()))?;
    let params = opt.params();
    let mut found: Vec<(Number, Scalar)> = Vec::new();
    let mut add = |number: Number, place: (usize, usize)| match found.iter_mut().find(|(known, _)| *known == number) {
        Some((_, scalar)) => scalar.uses.push(place),
        None => found.push((number, Scalar { uses: vec![place] })),
    };
    let (update, averages) = trace.operators.split_at(trace.update.end);
    if update[..trace.update.start].iter().any(|operator| places(operator).is_some()) {
        return Err(refused("another optimizer steps before the update, whose numbers may change".to_owned()));
    }
    for (at, operator) in update.iter().enumerate().skip(trace.update.start) {
        let Some((lr, momentum)) = places(operator) else {
            match name(operator).as_str() {
                "aten::add_.Scalar" | "aten::_foreach_add_.Scalar" | "aten::detach" => continue,
                other => {
                    let reason = format!("the optimizer's update runs {other}, and only fused updates are compiled");
                    return Err(refused(reason));
                }
            }
        };
        let group = group_of(trace, operator, &params, &lens)
            .ok_or_else(|| refused("a fused update of parameters that the optimizer does not list".to_owned()))?;
        add(Number::Lr(group), (at, lr));
        if opt.momentum(group).is_some() {
            add(Number::Momentum(group), (at, momentum));
        }
    }
    for (at, operator) in averages.iter().enumerate() {
        match name(operator).as_str() {
            "aten::_foreach_lerp_.Scalar" => add(Number::AverageWeight, (trace.update.end + at, 2)),
            "aten::copy_" | "aten::_foreach_copy_" | "aten::detach" => {}
            other => return Err(refused(format!("the averages' update runs {other}, whose numbers may change"))),
        }
    }
    Ok(found.into_iter().map(|(number, scalar)| (scalar, number)).unzip())
}

/// The group of the first parameter that an operator updates.
fn group_of(trace: &Trace, operator: &Value, params: &[tch::Tensor], lens: &[usize]) -> Option<usize> {
    let number = operator["args"][0][0]["tensor"].as_i64()?;
    let (_, tensor) = trace.kept().iter().find(|(other, _)| *other == number)?;
    let place = params.iter().position(|param| TensorId::of(param) == TensorId::of(tensor))?;
    let mut end = 0;
    lens.iter().position(|len| {
        end += len;
        place < end
    })
}
