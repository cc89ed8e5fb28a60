//! A compiled step: the package, and the tensors it works on.

use std::sync::{Arc, Mutex, PoisonError};

use overdrive_ffi::{Form, Package, share_memory};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::cache::Cache;
use crate::error::CompileError;
use crate::inputs;
use crate::options::Options;
use crate::packages;
use crate::record::Record;
use crate::trace::Trace;
use crate::varying::Varying;

/// A number that is given anew at each run, and the arguments that it stands for: operator and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scalar {
    pub(crate) uses: Vec<(usize, usize)>,
}

impl Scalar {
    /// Whether an operator's argument is one of these.
    pub(crate) fn is_given(scalars: &[Self], operator: usize, place: usize) -> bool {
        scalars.iter().any(|scalar| scalar.uses.contains(&(operator, place)))
    }
}

/// Compiled code. Batches of several sizes can share it.
#[derive(Clone, Debug)]
pub(crate) struct Code(Arc<Mutex<Package>>);

impl Code {
    /// Compiles a recorded step, or takes it from the cache: for its own batch, or for one of any size.
    pub(crate) fn of(
        trace: &Trace,
        varying: Option<&Varying>,
        scalars: &[Scalar],
        options: &Options,
    ) -> Result<Self, CompileError> {
        let record = Record::new(request(trace, varying, scalars, options.threads()));
        let path = packages::package(&Cache::of_user(options.timeout)?, &record, &mut options.progress())?;
        let scalar = Form { shape: vec![], stride: vec![], kind: Kind::Double, device: Device::Cpu };
        let forms = trace.inputs().map(|(_, form)| form).chain(scalars.iter().map(|_| scalar.clone())).collect();
        let places = varying.map_or(&[][..], |varying| &varying.places);
        let unfit =
            |error| CompileError::Refused { reason: format!("libtorch cannot load it: {error}"), path: path.clone() };
        let package = Package::load(&path, forms, places).map_err(unfit)?;
        Ok(Self(Arc::new(Mutex::new(package))))
    }

    /// The least size of the batch, if it is for several.
    pub(crate) fn least_size(&self) -> i64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).least_size()
    }
}

/// A compiled step.
#[derive(Debug)]
pub(crate) struct Graph {
    code: Code,
    batch: Vec<Form>,
    /// The tensors from outside, which stay the same objects.
    kept: Vec<Tensor>,
    /// The numbers of the last run, as the package takes them.
    scalars: Vec<(f64, Tensor)>,
    /// Which tensors it writes to, those of the batch first.
    written: Vec<bool>,
    /// How many results the recorded step had.
    results: usize,
}

impl Graph {
    /// A step that was recorded, and is run by code for it.
    pub(crate) fn new(code: Code, trace: &Trace, scalars: &[Scalar]) -> Self {
        Self {
            code,
            batch: trace.batch.iter().map(|(_, form)| form.clone()).collect(),
            kept: trace.kept().iter().map(|(_, tensor)| tensor.shallow_clone()).collect(),
            scalars: scalars.iter().map(|_| (0.0, Tensor::from(0.0))).collect(),
            written: trace.written().to_vec(),
            results: trace.results().len(),
        }
    }

    /// Runs the step; returns what the recorded one did. `None` if this batch has to run uncompiled, and nothing has
    /// changed: an index (a label, a token) is out of range, which the uncompiled step has an error for, or memory of the
    /// batch is written to under another name.
    pub(crate) fn run(&mut self, batch: &[Tensor], scalars: &[f64]) -> Result<Option<Vec<Tensor>>, CompileError> {
        let mut inputs = Vec::with_capacity(self.batch.len() + self.kept.len() + scalars.len());
        for (place, (form, tensor)) in self.batch.iter().zip(batch).enumerate() {
            inputs.push(inputs::take(form, tensor, place)?);
        }
        inputs.extend(self.kept.iter().map(Tensor::shallow_clone));
        if self.writes_under_another_name(&inputs) {
            return Ok(None);
        }
        for ((last, tensor), now) in self.scalars.iter_mut().zip(scalars) {
            if last.to_bits() != now.to_bits() {
                (*last, *tensor) = (*now, Tensor::from(*now));
            }
            inputs.push(tensor.shallow_clone());
        }
        let mut results = self.code.0.lock().unwrap_or_else(PoisonError::into_inner).run(&inputs)?;
        // Code with indices has one more.
        let is_unfit = results.drain(self.results..).next();
        match is_unfit.map(|flag| flag.f_int64_value(&[])).transpose()? {
            Some(1) => Ok(None),
            _ => Ok(Some(results)),
        }
    }
}

impl Graph {
    /// Whether a tensor of the batch shares its memory with another one, and the step writes to one of them.
    fn writes_under_another_name(&self, inputs: &[Tensor]) -> bool {
        if !self.written.contains(&true) {
            return false;
        }
        let is_same = |one: usize, other: usize| {
            one != other && (self.written[one] || self.written[other]) && share_memory(&inputs[one], &inputs[other])
        };
        (0..self.batch.len()).any(|one| (0..inputs.len()).any(|other| is_same(one, other)))
    }
}

/// What compile.py reads.
fn request(trace: &Trace, varying: Option<&Varying>, scalars: &[Scalar], threads: i64) -> Value {
    let mut request = json!({
        "operators": varying.map_or(&trace.operators, |varying| &varying.operators),
        "inputs": trace.inputs().map(|(number, form)| inputs::to_json(&form, number)).collect::<Vec<_>>(),
        "scalars": scalars.iter().map(|scalar| json!({ "uses": scalar.uses })).collect::<Vec<_>>(),
        "outputs": trace.results(),
        "threads": threads,
    });
    if let Some(varying) = varying {
        request["batch"] = json!(varying.places);
    }
    request
}
