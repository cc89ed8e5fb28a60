//! A whole training step in one compiled graph: forward pass, loss, gradients and the optimizer's update in place.

use std::collections::HashMap;

use overdrive_core::{Module, Optimizer, OptimizerId};
use overdrive_ffi::Form;
use overdrive_ffi::autograd::{self, GradOptions};
use tch::Tensor;

use crate::error::{BoxError, CompileError};
use crate::fingerprint::fingerprint;
use crate::graph::Graph;
use crate::loss::{CompiledLoss, LossResult, loss};
use crate::options::Options;
use crate::trace::{Recorder, Trace};
use crate::update::{self, Number};

/// What runs between the gradients and the update.
type BeforeUpdate<'m> = Box<dyn FnMut(&mut dyn Optimizer) -> Result<(), BoxError> + 'm>;

/// Compiles a whole training step. The closure gets the batch and returns the loss, as for [`loss`]; the step also
/// computes the gradients and updates the parameters as the optimizer's fused kernel would (AdamW, Adam, SGD).
///
/// The first three steps of a batch's shape run uncompiled. The parameters, the optimizer's state and its counts stay the
/// tensors they are, so checkpoints, schedules and evaluation go on as ever.
///
/// With an optimizer that is not fused, the loss and gradients are compiled, and the optimizer steps as ever.
pub fn step<'m, M, F>(model: &'m M, f: F) -> CompiledStep<'m, M, F>
where
    M: Module,
    F: FnMut(&[Tensor]) -> LossResult,
{
    CompiledStep { loss: loss(model, f), before_update: None, steps: HashMap::new() }
}

/// A compiled training step; see [`step`].
pub struct CompiledStep<'m, M, F> {
    /// The step's loss, for itself.
    loss: CompiledLoss<'m, M, F>,
    before_update: Option<BeforeUpdate<'m>>,
    steps: HashMap<Key, State>,
}

/// What a recorded step is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    model: u64,
    optimizer: (OptimizerId, Option<u64>),
    batch: Vec<Form>,
}

enum State {
    /// The optimizer has made a step, and with it its state.
    Started,
    Recorded(Box<Trace>),
    Compiled {
        graph: Box<Graph>,
        numbers: Vec<Number>,
    },
    /// The update cannot be compiled.
    LossOnly,
}

impl<'m, M: Module, F: FnMut(&[Tensor]) -> LossResult> CompiledStep<'m, M, F> {
    /// With other options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.loss = self.loss.options(options);
        self
    }

    /// Runs something between the gradients and the update, such as clipping. It is recorded with the step.
    #[must_use]
    pub fn before_update(mut self, work: impl FnMut(&mut dyn Optimizer) -> Result<(), BoxError> + 'm) -> Self {
        self.before_update = Some(Box::new(work));
        self
    }

    /// Why steps run uncompiled, or only in part, if they do; the latest reason.
    pub fn why_eager(&self) -> Option<&str> {
        self.loss.why_eager()
    }

    /// Makes a training step; returns the loss, without a graph. Gradients are freed before and after.
    ///
    /// # Errors
    /// Those of the closures and of the optimizer, and in strict mode why the step cannot be compiled.
    ///
    /// # Syncs
    /// The third step waits for the compiler: a minute or more unless the package is in the cache.
    pub fn run<O: Optimizer>(&mut self, opt: &mut O, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        let key = Key {
            model: fingerprint(self.loss.model()),
            optimizer: (opt.id(), opt.revision()),
            batch: batch.iter().map(Form::of).collect(),
        };
        let has_room = self.steps.len() < self.loss.shapes() && opt.revision().is_some();
        match self.steps.get_mut(&key) {
            Some(State::Compiled { graph, numbers }) => {
                let numbers: Vec<f64> = numbers.iter().map(|number| number.of(opt)).collect();
                let loss = graph.run(batch, &numbers)?.into_iter().next();
                loss.ok_or_else(|| CompileError::Step("a step without a loss".into()))
            }
            Some(State::LossOnly) => {
                let loss = self.loss.run(batch)?;
                self.finish(opt, &loss, || {})
            }
            None if !has_room => {
                let loss = self.loss.plain(batch)?;
                self.finish(opt, &loss, || {})
            }
            None => {
                let loss = self.loss.plain(batch)?;
                let loss = self.finish(opt, &loss, || {})?;
                self.steps.insert(key, State::Started);
                Ok(loss)
            }
            Some(_) => self.record(opt, key, batch),
        }
    }

    /// Backward pass and update. `before_step` is called before the optimizer's step.
    fn finish(
        &mut self,
        opt: &mut impl Optimizer,
        loss: &Tensor,
        before_step: impl FnOnce(),
    ) -> Result<Tensor, CompileError> {
        opt.zero_grad()?;
        let made = (|| {
            autograd::backward::<Tensor>(&[loss], &[], GradOptions::default())?;
            if let Some(work) = &mut self.before_update {
                work(opt).map_err(CompileError::Step)?;
            }
            before_step();
            Ok(opt.step()?)
        })();
        opt.zero_grad()?;
        made.and_then(|()| Ok(loss.f_detach()?))
    }

    /// Makes a step that is recorded, and compiles it if one was recorded before.
    fn record(&mut self, opt: &mut impl Optimizer, key: Key, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        let Some(recorder) = Recorder::start(batch)? else {
            let loss = self.loss.plain(batch)?;
            return self.finish(opt, &loss, || {});
        };
        let loss = self.loss.plain(recorder.batch())?;
        let mut update = 0;
        let loss = self.finish(opt, &loss, || update = recorder.operators())?;
        let trace = recorder.finish(std::slice::from_ref(&loss), update)?;
        let before = match self.steps.remove(&key) {
            Some(State::Recorded(before)) => Some(before),
            _ => None,
        };
        let next = match before {
            None => trace.check().map(|()| State::Recorded(Box::new(trace))),
            Some(before) => self.compile(opt, &before, &trace),
        };
        match next {
            Ok(next) => drop(self.steps.insert(key, next)),
            Err(error) if self.loss.is_strict() => return Err(error),
            Err(error) => {
                self.loss.falls_back(&error);
                self.steps.insert(key, State::LossOnly);
            }
        }
        Ok(loss)
    }

    fn compile(&self, opt: &impl Optimizer, before: &Trace, trace: &Trace) -> Result<State, CompileError> {
        before.check_same(trace, update::varies)?;
        let (scalars, numbers) = update::numbers(trace, opt)?;
        let graph = self.loss.compile(trace, &scalars)?;
        Ok(State::Compiled { graph: Box::new(graph), numbers })
    }
}
