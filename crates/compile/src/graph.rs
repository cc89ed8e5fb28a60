//! A compiled step: the package, and the tensors it works on.

use overdrive_ffi::{Form, Package};
use serde_json::{Value, json};
use tch::Tensor;

use crate::cache::Cache;
use crate::error::CompileError;
use crate::inputs;
use crate::options::Options;
use crate::packages;
use crate::record::Record;
use crate::trace::Trace;

/// A number that is given anew at each run, and the arguments that it stands for: operator and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scalar {
    pub(crate) uses: Vec<(usize, usize)>,
}

/// A compiled step.
#[derive(Debug)]
pub(crate) struct Graph {
    package: Package,
    batch: Vec<Form>,
    /// The tensors from outside, which stay the same objects.
    kept: Vec<Tensor>,
    /// The numbers of the last run, as the package takes them.
    scalars: Vec<(f64, Tensor)>,
}

impl Graph {
    /// Compiles a recorded step, or takes it from the cache.
    pub(crate) fn compile(trace: &Trace, scalars: &[Scalar], options: &Options) -> Result<Self, CompileError> {
        let record = Record::new(request(trace, scalars, options.threads()));
        let path = packages::package(&Cache::of_user()?, &record, &mut options.progress())?;
        let tensors = || trace.externals().iter().map(|(_, tensor)| tensor);
        let scalars: Vec<(f64, Tensor)> = scalars.iter().map(|_| (0.0, Tensor::from(0.0))).collect();
        let forms = tensors().chain(scalars.iter().map(|(_, tensor)| tensor)).map(Form::of).collect();
        Ok(Self {
            package: Package::load(&path, forms)?,
            batch: tensors().take(trace.batch).map(Form::of).collect(),
            kept: tensors().skip(trace.batch).map(Tensor::shallow_clone).collect(),
            scalars,
        })
    }

    /// Runs the step; returns what the recorded one did.
    pub(crate) fn run(&mut self, batch: &[Tensor], scalars: &[f64]) -> Result<Vec<Tensor>, CompileError> {
        let mut inputs = Vec::with_capacity(self.batch.len() + self.kept.len() + scalars.len());
        for (place, (form, tensor)) in self.batch.iter().zip(batch).enumerate() {
            inputs.push(inputs::take(form, tensor, place)?);
        }
        inputs.extend(self.kept.iter().map(Tensor::shallow_clone));
        for ((last, tensor), now) in self.scalars.iter_mut().zip(scalars) {
            if last.to_bits() != now.to_bits() {
                (*last, *tensor) = (*now, Tensor::from(*now));
            }
            inputs.push(tensor.shallow_clone());
        }
        Ok(self.package.run(&inputs)?)
    }
}

/// What compile.py reads.
fn request(trace: &Trace, scalars: &[Scalar], threads: i64) -> Value {
    json!({
        "operators": trace.operators,
        "inputs": trace.externals().iter().map(|(number, tensor)| inputs::to_json(&Form::of(tensor), *number)).collect::<Vec<_>>(),
        "scalars": scalars.iter().map(|scalar| json!({ "uses": scalar.uses })).collect::<Vec<_>>(),
        "outputs": trace.results(),
        "threads": threads,
    })
}
