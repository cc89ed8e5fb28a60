//! Inference in one compiled graph.

use std::collections::HashMap;

use overdrive_core::Module;
use overdrive_ffi::Form;
use tch::Tensor;

use crate::error::{BoxError, CompileError};
use crate::fingerprint::fingerprint;
use crate::graph::Graph;
use crate::options::Options;
use crate::trace::{Recorder, Trace};

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
    CompiledForward { model, f, options: Options::default(), calls: HashMap::new(), why_eager: None }
}

/// A compiled forward pass; see [`forward`].
#[derive(Debug)]
pub struct CompiledForward<'m, M, F> {
    model: &'m M,
    f: F,
    options: Options,
    calls: HashMap<(u64, Vec<Form>), State>,
    why_eager: Option<String>,
}

#[derive(Debug)]
enum State {
    /// Recorded once.
    Recorded(Box<Trace>),
    Compiled(Box<Graph>),
    /// Cannot be compiled.
    Eager,
}

impl<M: Module, F: FnMut(&[Tensor]) -> Result<Vec<Tensor>, BoxError>> CompiledForward<'_, M, F> {
    /// With other options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Why calls run uncompiled, if they do; the latest reason.
    pub fn why_eager(&self) -> Option<&str> {
        self.why_eager.as_deref()
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
        let key = (fingerprint(self.model), inputs.iter().map(Form::of).collect());
        let has_room = self.calls.len() < self.options.shapes;
        match self.calls.get_mut(&key) {
            Some(State::Compiled(graph)) => graph.run(inputs, &[]),
            Some(State::Eager) => (self.f)(inputs).map_err(CompileError::Step),
            None if !has_room => (self.f)(inputs).map_err(CompileError::Step),
            _ => self.record(key, inputs),
        }
    }

    fn record(&mut self, key: (u64, Vec<Form>), inputs: &[Tensor]) -> Result<Vec<Tensor>, CompileError> {
        let Some(recorder) = Recorder::start(inputs)? else { return (self.f)(inputs).map_err(CompileError::Step) };
        let outputs = (self.f)(recorder.batch()).map_err(CompileError::Step)?;
        let count = recorder.operators();
        let trace = recorder.finish(&outputs, count)?;
        let next = match self.calls.remove(&key) {
            Some(State::Recorded(before)) => before
                .check_same(&trace, |_, _| false)
                .and_then(|()| Graph::compile(&trace, &[], self.options.threads(), &mut self.options.progress()))
                .map(|graph| State::Compiled(Box::new(graph))),
            _ => trace.check().map(|()| State::Recorded(Box::new(trace))),
        };
        match next {
            Ok(next) => drop(self.calls.insert(key, next)),
            Err(error) if self.options.strict => return Err(error),
            Err(error) => {
                self.options.say(&format!("not compiled: {error}"));
                self.why_eager = Some(error.to_string());
                self.calls.insert(key, State::Eager);
            }
        }
        Ok(outputs)
    }
}
