//! Inference in one compiled graph.

use std::marker::PhantomData;

use overdrive_core::Module;
use overdrive_ffi::Form;
use tch::Tensor;

use crate::error::{BoxError, CompileError};
use crate::fingerprint::Watched;
use crate::graph::{Graph, Ran};
use crate::inputs;
use crate::options::Options;
use crate::plans::{self, Next, Plans};
use crate::trace::Recorder;

/// Compiles a forward pass. The closure gets the inputs and returns the outputs; the first two calls record it while they
/// run, without gradients, and later ones do not call it. Its rules are those of [`loss`](crate::loss).
///
/// # Source
/// `torch.compile(model)` under `torch.no_grad()`
pub fn forward<M, F>(model: &M, f: F) -> CompiledForward<'_, M, F>
where
    M: Module,
    F: FnMut(&[Tensor]) -> Result<Vec<Tensor>, BoxError>,
{
    CompiledForward { model: PhantomData, watched: Watched::new(model), f, calls: Plans::new() }
}

/// A compiled forward pass; see [`forward`].
#[derive(Debug)]
pub struct CompiledForward<'m, M, F> {
    model: PhantomData<&'m M>,
    watched: Watched<'m>,
    f: F,
    calls: Plans<Key, Graph>,
}

/// What a recorded call is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    model: u64,
    inputs: Vec<Form>,
}

impl plans::Key for Key {
    fn of_any_size(&self) -> Self {
        Self { inputs: inputs::of_any_size(&self.inputs), ..*self }
    }
}

impl<'m, M: Module, F: FnMut(&[Tensor]) -> Result<Vec<Tensor>, BoxError>> CompiledForward<'m, M, F> {
    /// With other options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.calls.options = options;
        self
    }

    /// Watches another module that the closure uses, as [`CompiledLoss::watch`](crate::CompiledLoss::watch) does.
    #[must_use]
    pub fn watch(mut self, module: &'m impl Module) -> Self {
        self.watched.add(module);
        self
    }

    /// Why calls run uncompiled, if they do; the latest reason.
    pub fn why_eager(&self) -> Option<&str> {
        self.calls.why_eager()
    }

    /// The outputs for these inputs, without a graph.
    ///
    /// # Errors
    /// Those of the closure, and in strict mode why it cannot be compiled.
    ///
    /// # Syncs
    /// The second call waits for the compiler: a minute or more unless the package is in the cache.
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>, CompileError> {
        let _no_grad = tch::no_grad_guard();
        let inputs = &inputs::in_memory(inputs)?;
        let forms = match inputs::forms(inputs) {
            Ok(forms) => forms,
            Err(error) => {
                self.calls.refuse(error)?;
                return (self.f)(inputs).map_err(CompileError::Step);
            }
        };
        let key = Key { model: self.watched.fingerprint(), inputs: forms };
        match self.calls.next(&key)? {
            Next::Run(graph) => match graph.run(inputs, &[])? {
                Ran::Results(outputs) => {
                    self.calls.end_trial(&key);
                    Ok(outputs)
                }
                Ran::Unfit => (self.f)(inputs).map_err(CompileError::Step),
                Ran::Changed(difference) => {
                    self.calls.forget(&key, &difference);
                    self.run(inputs)
                }
            },
            Next::Plain | Next::Refused => {
                let outputs = (self.f)(inputs).map_err(CompileError::Step);
                self.calls.end_trial(&key);
                outputs
            }
            Next::First | Next::Record => self.record(key, inputs),
        }
    }

    fn record(&mut self, key: Key, inputs: &[Tensor]) -> Result<Vec<Tensor>, CompileError> {
        let Some(recorder) = Recorder::start(inputs)? else { return (self.f)(inputs).map_err(CompileError::Step) };
        let outputs = (self.f)(recorder.batch()).map_err(CompileError::Step)?;
        let count = recorder.operators();
        let trace = recorder.finish(&outputs, count..count)?;
        self.calls.learn(key, trace, Ok(Vec::new()), |graph| graph);
        Ok(outputs)
    }
}
