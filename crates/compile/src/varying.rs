//! Steps over batches of any size: numbers in them follow from the size of the batch.

use overdrive_ffi::{Form, LEAST_SIZE};
use serde_json::{Value, json};

use crate::graph::Scalar;
use crate::trace::{Trace, first_difference};

/// The operators of a step that was recorded with two sizes of the batch. An integer that differs between the records is
/// `{"batch": [a, c]}`: `a` times the size, plus `c`.
///
/// # Source
/// `torch._dynamo.mark_dynamic(tensor, 0)`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Varying {
    pub(crate) operators: Vec<Value>,
    /// The places in the batch of the tensors whose first dimension is the batch's size.
    pub(crate) places: Vec<usize>,
}

impl Varying {
    /// Joins two records. `None` unless they differ only in what follows from the batch's size.
    pub(crate) fn join(one: &Trace, two: &Trace, scalars: &[Scalar]) -> Option<Self> {
        let places: Vec<usize> = (0..one.batch.len()).filter(|&at| one.form(at) != two.form(at)).collect();
        let mut all = places.iter().map(|&at| Sizes::of(one.form(at)?, two.form(at)?));
        let sizes = all.next()??;
        if !all.all(|other| other == Some(sizes)) || one.check_same_tensors(two).is_err() {
            return None;
        }
        if one.operators.len() != two.operators.len() {
            return None;
        }
        let pairs = one.operators.iter().zip(&two.operators).enumerate();
        let operators = pairs.map(|(at, (one, two))| sizes.join_operators(at, one, two, scalars));
        Some(Self { operators: operators.collect::<Option<_>>()?, places })
    }

    /// Whether a record with a batch of another size is one of this step.
    pub(crate) fn has(&self, trace: &Trace, scalars: &[Scalar]) -> bool {
        let Some(size) = self.size_of(trace).filter(|&size| size >= LEAST_SIZE) else { return false };
        let ours: Vec<Value> = self.operators.iter().map(|operator| of_size(operator, size)).collect();
        first_difference(&ours, &trace.operators, scalars).is_none()
    }

    /// The size of a record's batch; `None` if its tensors have several.
    pub(crate) fn size_of(&self, trace: &Trace) -> Option<i64> {
        let size_at = |&at: &usize| trace.form(at).and_then(|form| form.shape.first().copied());
        let size = self.places.first().and_then(size_at);
        size.filter(|_| self.places.iter().all(|at| size_at(at) == size))
    }
}

/// The sizes of the batch in two records.
#[derive(Clone, Copy, PartialEq)]
struct Sizes {
    one: i64,
    two: i64,
}

impl Sizes {
    /// `None` unless the forms differ in their first dimension alone.
    fn of(one: &Form, two: &Form) -> Option<Self> {
        let sizes = Self { one: *one.shape.first()?, two: *two.shape.first()? };
        let mut same = two.clone();
        same.shape[0] = sizes.one;
        (same == *one && sizes.one.min(sizes.two) >= LEAST_SIZE).then_some(sizes)
    }

    fn join_operators(self, at: usize, one: &Value, two: &Value, scalars: &[Scalar]) -> Option<Value> {
        let mut joined = one.clone();
        let (args, others) = (joined["args"].as_array_mut()?, two["args"].as_array()?);
        if args.len() != others.len() {
            return None;
        }
        for (place, (arg, other)) in args.iter_mut().zip(others).enumerate() {
            if !Scalar::is_given(scalars, at, place) {
                *arg = self.join(arg, other)?;
            }
        }
        let same = |key: &str| one[key] == two[key];
        (same("op") && same("overload") && same("out")).then_some(joined)
    }

    fn join(self, one: &Value, two: &Value) -> Option<Value> {
        if one == two {
            return Some(one.clone());
        }
        if let (Some(one), Some(two)) = (one.as_array(), two.as_array()) {
            let items = one.iter().zip(two).map(|(one, two)| self.join(one, two));
            return (one.len() == two.len()).then(|| items.collect::<Option<_>>().map(Value::Array))?;
        }
        let (one, two) = (one.as_i64()?, two.as_i64()?);
        let (rise, run) = (two - one, self.two - self.one);
        let factor = rise / run;
        (rise % run == 0).then(|| json!({ "batch": [factor, one - factor * self.one] }))
    }
}

/// An operator over a batch of this size.
fn of_size(operator: &Value, size: i64) -> Value {
    match operator {
        Value::Array(items) => items.iter().map(|item| of_size(item, size)).collect(),
        Value::Object(entries) => match entries.get("batch").and_then(Value::as_array).map(Vec::as_slice) {
            Some([factor, offset]) => {
                let of = |value: &Value| value.as_i64().unwrap_or_default();
                (of(factor) * size + of(offset)).into()
            }
            _ => entries.iter().map(|(key, value)| (key.clone(), of_size(value, size))).collect(),
        },
        other => other.clone(),
    }
}
