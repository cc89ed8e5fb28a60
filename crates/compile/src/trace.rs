//! A recorded step, and what makes two of them the same.

use std::collections::BTreeSet;
use std::ops::Range;

use overdrive_core::TorchError;
use overdrive_ffi::record::{Record, Recording, Refusal};
use overdrive_ffi::{Form, TensorId};
use serde_json::Value;
use tch::{Device, Tensor};

use crate::error::CompileError;
use crate::graph::Scalar;

/// A recorded step: its operators, and the tensors that come in and go out.
#[derive(Debug)]
pub(crate) struct Trace {
    record: Record,
    /// The operators, parsed.
    pub(crate) operators: Vec<Value>,
    /// The tensors of the batch: their numbers, and what they are.
    pub(crate) batch: Vec<(i64, Form)>,
    /// The tensors from outside that are not the batch's: their numbers, and what they are.
    outside: Vec<(i64, TensorId, Form)>,
    /// The operators of the optimizer's update. Later ones are those of averages.
    pub(crate) update: Range<usize>,
}

/// Operators that refuse numbers out of range. Their compiled code would compute with them or write elsewhere, or it would
/// fail in the middle of the step.
const UNCHECKED: [&str; 19] = [
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::_linalg_check_errors",
    "aten::bernoulli",
    "aten::bernoulli_.Tensor",
    "aten::binary_cross_entropy",
    "aten::binomial",
    "aten::embedding_renorm_",
    "aten::masked_scatter",
    "aten::masked_scatter_",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    "aten::multi_margin_loss",
    "aten::multilabel_margin_loss_forward",
    "aten::multinomial",
    "aten::normal.Tensor_Tensor",
    "aten::normal.float_Tensor",
    "aten::poisson",
    "aten::segment_reduce",
];

/// Records a step while it runs.
pub(crate) struct Recorder {
    recording: Recording,
    batch: Vec<Tensor>,
}

impl Recorder {
    /// Starts to record a step over this batch; `None` while another thread records. Waiting for it could last for ever:
    /// its step may wait for this thread's, if both are ranks.
    pub(crate) fn start(batch: &[Tensor]) -> Result<Option<Self>, CompileError> {
        // Handles of their own, so that each tensor of the batch is an input of its own even if two are the same.
        let own = |tensor: &Tensor| tensor.f_detach()?.f_set_requires_grad(tensor.requires_grad());
        let batch = batch.iter().map(own).collect::<Result<Vec<_>, _>>()?;
        let Some(recording) = Recording::start()? else { return Ok(None) };
        for tensor in &batch {
            recording.add_input(tensor)?;
        }
        Ok(Some(Self { recording, batch }))
    }

    /// What the step has to use as its batch.
    pub(crate) fn batch(&self) -> &[Tensor] {
        &self.batch
    }

    /// How many operators there are so far.
    pub(crate) fn operators(&self) -> usize {
        self.recording.operators()
    }

    /// The tensors from outside that gradients are wanted of.
    pub(crate) fn differentiable(&self) -> Result<Vec<Tensor>, CompileError> {
        let mut externals = self.recording.externals()?;
        externals.retain(Tensor::requires_grad);
        Ok(externals)
    }

    /// Ends the record of a step with these results, of which these operators are the optimizer's update.
    pub(crate) fn finish(self, results: &[Tensor], update: Range<usize>) -> Result<Trace, CompileError> {
        let mut record = self.recording.finish(results)?;
        let operators: Vec<Value> = serde_json::from_str(&record.operators).unwrap_or_default();
        let batch = record.externals.drain(..self.batch.len()).map(|(number, tensor)| Ok((number, Form::of(&tensor)?)));
        let batch = batch.collect::<Result<_, TorchError>>()?;
        let outside = |(number, tensor): &(i64, Tensor)| Ok((*number, TensorId::of(tensor), Form::of(tensor)?));
        let outside = record.externals.iter().map(outside).collect::<Result<_, TorchError>>().unwrap_or_else(|error| {
            let reason = format!("the step uses a tensor that compiled code cannot take: {error}");
            record.refusals.push(Refusal { reason, operator: None, caller: None });
            Vec::new()
        });
        let is_unchecked = |operator: &Value| UNCHECKED.contains(&name(operator).as_str());
        record.refusals.extend(operators.iter().enumerate().filter(|(_, operator)| is_unchecked(operator)).map(
            |(place, operator)| {
                let reason = format!("{} checks its numbers, and compiled code would not", name(operator));
                Refusal { reason, operator: Some(place), caller: None }
            },
        ));
        Ok(Trace { batch, outside, record, operators, update })
    }
}

impl Trace {
    /// The tensors from outside that are not the batch's, with their numbers. They stay the same objects.
    pub(crate) fn kept(&self) -> &[(i64, Tensor)] {
        &self.record.externals
    }

    /// Their forms.
    pub(crate) fn kept_forms(&self) -> impl Iterator<Item = Form> {
        self.outside.iter().map(|(_, _, form)| form.clone())
    }

    /// All that comes in: numbers and forms, those of the batch first.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (i64, Form)> {
        let numbers = self.outside.iter().map(|(number, _, _)| *number);
        self.batch.iter().cloned().chain(numbers.zip(self.kept_forms()))
    }

    /// The form of a tensor of the batch.
    pub(crate) fn form(&self, place: usize) -> Option<&Form> {
        self.batch.get(place).map(|(_, form)| form)
    }

    /// The GPUs that have its tensors from outside.
    pub(crate) fn gpus(&self) -> BTreeSet<usize> {
        let gpu = |(_, form): (i64, Form)| match form.device {
            Device::Cuda(gpu) => Some(gpu),
            _ => None,
        };
        self.inputs().filter_map(gpu).collect()
    }

    /// Frees what only errors need.
    pub(crate) fn forget_callers(&mut self) {
        self.record.forget_callers();
    }

    /// Which of [`inputs`](Self::inputs) the step writes to.
    pub(crate) fn written(&self) -> &[bool] {
        &self.record.written
    }

    /// To which of them so that autograd notices it.
    pub(crate) fn noticed(&self) -> &[bool] {
        &self.record.noticed
    }

    /// The numbers of the results.
    pub(crate) fn results(&self) -> &[i64] {
        &self.record.results
    }

    /// An error if the step holds something that cannot be compiled.
    pub(crate) fn check(&self) -> Result<(), CompileError> {
        let Some(refusal) = self.record.refusals.first() else { return Ok(()) };
        let of_operator = || refusal.operator.and_then(|operator| self.record.caller(operator));
        let caller = refusal.caller.clone().or_else(of_operator);
        Err(CompileError::NotRecordable { reason: refusal.reason.clone(), caller })
    }

    /// An error unless the other record is of the same step: the same operators with the same numbers, apart from those
    /// that are given anew at each run, over the same tensors apart from the batch.
    pub(crate) fn check_same(&self, other: &Self, scalars: &[Scalar]) -> Result<(), CompileError> {
        match first_difference(&self.operators, &other.operators, scalars) {
            Some((at, difference)) => Err(CompileError::Changes { difference, caller: other.record.caller(at) }),
            None => self.check_same_tensors(other),
        }
    }

    /// An error unless the other record has the same tensors from outside, apart from the batch, and the same results.
    pub(crate) fn check_same_tensors(&self, other: &Self) -> Result<(), CompileError> {
        let changes = |difference: String| Err(CompileError::Changes { difference, caller: None });
        let (before, now) = (&self.outside, &other.outside);
        if let Some(((_, id, before), (_, other, form))) = before.iter().zip(now).find(|(one, two)| one != two) {
            return changes(match id == other && before != form {
                true => format!("a tensor that is not in the batch was {before}, then {form}"),
                false => format!("it used {form} that is neither in the batch nor the same object as the step before"),
            });
        }
        if before.len() != now.len() || self.results() != other.results() {
            return changes("it used more tensors in one run than in the other".to_owned());
        }
        Ok(())
    }
}

/// The first operator in which two records differ, and how.
pub(crate) fn first_difference(one: &[Value], two: &[Value], scalars: &[Scalar]) -> Option<(usize, String)> {
    for (at, (one, two)) in one.iter().zip(two).enumerate() {
        if one["op"] != two["op"] || one["overload"] != two["overload"] || one["out"] != two["out"] {
            return Some((at, format!("{} ran where {} had run", name(two), name(one))));
        }
        let (Some(args), Some(others)) = (one["args"].as_array(), two["args"].as_array()) else { continue };
        let differs = |place: &usize| args.get(*place) != others.get(*place) && !Scalar::is_given(scalars, at, *place);
        if let Some(place) = (0..args.len().max(others.len())).find(differs) {
            let text = |args: &[Value]| args.get(place).unwrap_or(&Value::Null).to_string();
            return Some((at, format!("argument {place} of {} was {}, then {}", name(one), text(args), text(others))));
        }
    }
    let (before, now) = (one.len(), two.len());
    (before != now).then(|| (before.min(now), format!("it had {before} operators, then {now}")))
}

/// An operator's name with its overload.
pub(crate) fn name(operator: &Value) -> String {
    let word = |key: &str| operator[key].as_str().unwrap_or_default().to_owned();
    match word("overload") {
        overload if overload.is_empty() => word("op"),
        overload => format!("{}.{overload}", word("op")),
    }
}
