//! A compiled step: the package, and the tensors it works on.

use std::sync::{Arc, Mutex, PoisonError};

use overdrive_ffi::{Form, Package, bump_version, memory_address, share_memory};
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

/// What became of a run.
#[derive(Debug)]
pub(crate) enum Ran {
    /// It returned what the recorded step did.
    Results(Vec<Tensor>),
    /// This batch has to run uncompiled, and nothing has changed: an index (a label, a token) is out of range, which the
    /// uncompiled step has an error for, or memory of the batch is written to under another name.
    Unfit,
    /// Nothing has changed, because the step is another one than was recorded; in what.
    Changed(String),
}

/// A compiled step.
#[derive(Debug)]
pub(crate) struct Graph {
    code: Code,
    batch: Vec<Form>,
    /// The tensors from outside, which stay the same objects, as they were recorded.
    kept: Vec<(Tensor, Form)>,
    /// Their memory, when it was last seen that they share none that the step writes to.
    memory: Vec<usize>,
    /// The numbers of the last run, as the package takes them.
    scalars: Vec<(f64, Tensor)>,
    /// Which tensors it writes to, those of the batch first.
    written: Vec<bool>,
    /// To which of them so that autograd notices it.
    noticed: Vec<bool>,
    /// How many results the recorded step had.
    results: usize,
}

impl Graph {
    /// A step that was recorded, and is run by code for it.
    pub(crate) fn new(code: Code, trace: &Trace, scalars: &[Scalar]) -> Self {
        Self {
            code,
            batch: trace.batch.iter().map(|(_, form)| form.clone()).collect(),
            memory: trace.kept().iter().map(|(_, tensor)| memory_address(tensor)).collect(),
            kept: trace
                .kept()
                .iter()
                .zip(trace.kept_forms())
                .map(|((_, it), form)| (it.shallow_clone(), form))
                .collect(),
            scalars: scalars.iter().map(|_| (0.0, Tensor::from(0.0))).collect(),
            written: trace.written().to_vec(),
            noticed: trace.noticed().to_vec(),
            results: trace.results().len(),
        }
    }

    /// Runs the step.
    pub(crate) fn run(&mut self, batch: &[Tensor], scalars: &[f64]) -> Result<Ran, CompileError> {
        let mut inputs = Vec::with_capacity(self.batch.len() + self.kept.len() + scalars.len());
        for (place, (form, tensor)) in self.batch.iter().zip(batch).enumerate() {
            inputs.push(inputs::take(form, tensor, place)?);
        }
        inputs.extend(self.kept.iter().map(|(tensor, _)| tensor.shallow_clone()));
        if self.has_come_to_share_memory() {
            return Ok(Ran::Changed("two tensors from outside of it share memory now, which it writes to".to_owned()));
        }
        if self.writes_under_another_name(&inputs) {
            return Ok(Ran::Unfit);
        }
        for ((last, tensor), now) in self.scalars.iter_mut().zip(scalars) {
            if last.to_bits() != now.to_bits() {
                (*last, *tensor) = (*now, Tensor::from(*now));
            }
            inputs.push(tensor.shallow_clone());
        }
        let ran = self.code.0.lock().unwrap_or_else(PoisonError::into_inner).run(&inputs);
        let mut results = match ran {
            Ok(results) => results,
            Err(error) => return self.difference().map(Ran::Changed).ok_or(error.into()),
        };
        // Code with indices has one more.
        let is_unfit = results.drain(self.results..).next();
        if is_unfit.map(|flag| flag.f_int64_value(&[])).transpose()? == Some(1) {
            return Ok(Ran::Unfit);
        }
        inputs.iter().zip(&self.noticed).filter(|(_, noticed)| **noticed).for_each(|(input, _)| bump_version(input));
        Ok(Ran::Results(results))
    }

    /// In what a tensor from outside is another one than was recorded. Code with such an input does not run.
    fn difference(&self) -> Option<String> {
        let (tensor, form) = self.kept.iter().find(|(tensor, form)| !form.fits(tensor))?;
        let found = Form::of(tensor).map_or_else(|error| error.to_string(), |form| form.to_string());
        Some(format!("a tensor that is not in the batch was {form}, and now: {found}"))
    }

    /// Whether tensors from outside, of which the step writes to one, have got the same memory since it was recorded, by
    /// `set_data` for instance.
    fn has_come_to_share_memory(&mut self) -> bool {
        let now = || self.kept.iter().map(|(tensor, _)| memory_address(tensor));
        if now().eq(self.memory.iter().copied()) {
            return false;
        }
        let (now, written) = (now().collect(), &self.written[self.batch.len()..]);
        let shares = |(one, (tensor, _)): (usize, &(Tensor, Form))| {
            let mut others = self.kept.iter().enumerate().filter(|(other, _)| *other != one);
            written[one] && others.any(|(_, (other, _))| share_memory(tensor, other))
        };
        let found = self.kept.iter().enumerate().any(shares);
        if !found {
            self.memory = now;
        }
        found
    }

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
