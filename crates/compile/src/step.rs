//! A whole training step in one compiled graph: forward pass, loss, gradients and the optimizer's update in place.

use overdrive_core::{AVERAGED, Averages, Module, Optimizer, OptimizerId};
use overdrive_ffi::autograd::{self, GradOptions};
use overdrive_ffi::{Form, TensorId};
use tch::Tensor;

use crate::error::{BoxError, CompileError};
use crate::graph::{Graph, Ran};
use crate::inputs;
use crate::loss::{CompiledLoss, LossResult, loss};
use crate::options::Options;
use crate::plans::{self, Next, Plans};
use crate::trace::Recorder;
use crate::update::{self, Number};

/// What runs between the gradients and the update.
type BeforeUpdate<'m> = Box<dyn FnMut(&mut dyn Optimizer) -> Result<(), BoxError> + 'm>;

/// Compiles a whole training step. The closure gets the batch and returns the loss, as for [`loss`]; the step also
/// computes the gradients and updates the parameters as the optimizer's fused kernel would (AdamW, Adam, SGD).
///
/// The first three steps of a batch's shape run uncompiled. The parameters, the optimizer's state and its counts stay the
/// tensors they are, so checkpoints, schedules and evaluation go on as ever.
///
/// With an optimizer that is not fused, or whose steps differ (Lookahead, Sam), the loss and gradients are compiled, and
/// the optimizer steps as ever.
pub fn step<'m, M, F>(model: &'m M, f: F) -> CompiledStep<'m, M, F>
where
    M: Module,
    F: FnMut(&[Tensor]) -> LossResult,
{
    CompiledStep { loss: loss(model, f), before_update: None, steps: Plans::new() }
}

/// A compiled training step; see [`step`].
pub struct CompiledStep<'m, M, F> {
    /// The step's loss, for itself.
    loss: CompiledLoss<'m, M, F>,
    before_update: Option<BeforeUpdate<'m>>,
    steps: Plans<Key, Compiled>,
}

/// What a recorded step is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    model: u64,
    optimizer: (OptimizerId, Option<u64>),
    averages: Option<TensorId>,
    /// Which groups have a momentum of 0: SGD leaves their state alone then.
    without_momentum: Vec<bool>,
    batch: Vec<Form>,
}

impl plans::Key for Key {
    fn of_any_size(&self) -> Self {
        Self { batch: inputs::of_any_size(&self.batch), ..self.clone() }
    }

    /// The optimizer's state or options were replaced.
    fn is_over(&self, now: &Self) -> bool {
        let ((id, revision), (other, newer)) = (self.optimizer, now.optimizer);
        id == other && revision < newer
    }
}

/// What a step changes.
struct State<'a, O> {
    opt: &'a mut O,
    averages: Option<&'a mut dyn Averages>,
}

struct Compiled {
    graph: Graph,
    numbers: Vec<Number>,
}

impl<'m, M: Module, F: FnMut(&[Tensor]) -> LossResult> CompiledStep<'m, M, F> {
    /// With other options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        // The update may be what cannot be compiled: the loss then is, for itself.
        self.loss.change(Options { auto: false, ..options.clone() });
        self.steps.options = options;
        self
    }

    /// Runs something between the gradients and the update, such as clipping. It is recorded with the step.
    #[must_use]
    pub fn before_update(mut self, work: impl FnMut(&mut dyn Optimizer) -> Result<(), BoxError> + 'm) -> Self {
        self.before_update = Some(Box::new(work));
        self
    }

    /// Watches another module that the closure uses, as [`CompiledLoss::watch`] does.
    #[must_use]
    pub fn watch(mut self, module: &'m impl Module) -> Self {
        self.loss = self.loss.watch(module);
        self
    }

    /// Why steps run uncompiled, or only in part, if they do; the latest reason.
    pub fn why_eager(&self) -> Option<&str> {
        self.steps.why_eager().or(self.loss.why_eager())
    }

    /// Makes a training step; returns the loss, without a graph. Gradients are freed before and after.
    ///
    /// # Errors
    /// Those of the closures and of the optimizer, and in strict mode why the step cannot be compiled: before anything
    /// has changed, so that the batch may be given again to another step.
    ///
    /// # Syncs
    /// The third step waits for the compiler: a minute or more unless the package is in the cache.
    pub fn run<O: Optimizer>(&mut self, opt: &mut O, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        self.run_of(&mut State { opt, averages: None }, batch)
    }

    /// The same, and then moves averages of the weights towards them, in the same graph (an `AveragedModel`). An update
    /// that copies the weights, as the first one does and all of a decay of 0 do, runs uncompiled.
    ///
    /// # Errors
    /// As [`run`](Self::run), and those of the averages.
    ///
    /// # Syncs
    /// As [`run`](Self::run).
    pub fn run_and_average<O: Optimizer>(
        &mut self,
        opt: &mut O,
        averages: &mut impl Averages,
        batch: &[Tensor],
    ) -> Result<Tensor, CompileError> {
        self.run_of(&mut State { opt, averages: Some(averages) }, batch)
    }

    fn run_of<O: Optimizer>(&mut self, state: &mut State<'_, O>, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        let batch = &inputs::in_memory(batch)?;
        let forms = match inputs::forms(batch) {
            Ok(forms) => forms,
            Err(error) => {
                self.steps.refuse(error)?;
                return self.plain(state, batch);
            }
        };
        if let Some(place) = batch.iter().position(Tensor::requires_grad) {
            let reason = "it requires a gradient, which a whole step hands to nobody: compile the loss by itself \
                          (`compile::loss`), or detach it";
            self.steps.refuse(CompileError::Unfit { place, reason: reason.to_owned() })?;
            return self.with_loss(state, batch);
        }
        let opt = &mut *state.opt;
        if opt.revision().is_none() {
            // Nothing would tell that its options have changed.
            self.steps.refuse(CompileError::OtherOptimizer)?;
            return self.with_loss(state, batch);
        }
        if !AVERAGED.is_empty() && AVERAGED.position(&opt.params()).is_some() {
            self.steps.refuse(CompileError::Averaged)?;
            return self.plain(state, batch);
        }
        if state.averages.as_ref().is_some_and(|averages| averages.next_weight() == 1.0) {
            return self.plain(state, batch);
        }
        let key = Key {
            model: self.loss.fingerprint(),
            optimizer: (opt.id(), opt.revision()),
            averages: state.averages.as_ref().and_then(|averages| averages.id()),
            without_momentum: (0..opt.num_groups()).map(|group| opt.momentum(group) == Some(0.0)).collect(),
            batch: forms,
        };
        match self.steps.next(&key)? {
            Next::Run(Compiled { graph, numbers }) => {
                let averages = state.averages.as_deref();
                let numbers: Vec<f64> = numbers.iter().map(|number| number.of(opt, averages)).collect();
                // As an uncompiled step does: gradients of a backward pass in between would stay.
                opt.zero_grad()?;
                let results = match graph.run(batch, &numbers)? {
                    Ran::Results(results) => results,
                    Ran::Unfit => return self.plain(state, batch),
                    Ran::Changed(difference) => {
                        self.steps.forget(&key, &difference);
                        return self.run_of(state, batch);
                    }
                };
                state.averages.iter_mut().for_each(|averages| averages.count_update());
                self.steps.end_trial(&key);
                results.into_iter().next().ok_or_else(|| CompileError::Step("a step without a loss".into()))
            }
            Next::Refused => self.with_loss(state, batch),
            Next::Plain => {
                let loss = self.plain(state, batch)?;
                self.steps.end_trial(&key);
                Ok(loss)
            }
            Next::First => {
                let loss = self.plain(state, batch)?;
                self.steps.start(key);
                Ok(loss)
            }
            Next::Record => self.record(state, key, batch),
        }
    }

    /// A step of which only the loss and the gradients may be compiled.
    fn with_loss(&mut self, state: &mut State<'_, impl Optimizer>, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        let loss = self.loss.run(batch)?;
        self.finish(state, &loss, || {})
    }

    /// An uncompiled step.
    fn plain(&mut self, state: &mut State<'_, impl Optimizer>, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        let loss = self.loss.plain(batch)?;
        self.finish(state, &loss, || {})
    }

    /// Backward pass and update. `between` is called after the backward pass, and before and after the optimizer's step.
    fn finish(
        &mut self,
        state: &mut State<'_, impl Optimizer>,
        loss: &Tensor,
        mut between: impl FnMut(),
    ) -> Result<Tensor, CompileError> {
        let opt = &mut *state.opt;
        opt.zero_grad()?;
        let made = (|| {
            autograd::backward::<Tensor>(&[loss], &[], GradOptions::default())?;
            between();
            if let Some(work) = &mut self.before_update {
                work(opt).map_err(CompileError::Step)?;
            }
            between();
            opt.step()?;
            between();
            Ok(state.averages.iter_mut().try_for_each(|averages| averages.update())?)
        })();
        opt.zero_grad()?;
        made.and_then(|()| Ok(loss.f_detach()?))
    }

    /// Makes a step that is recorded, and compiles it if one was recorded before.
    fn record(
        &mut self,
        state: &mut State<'_, impl Optimizer>,
        key: Key,
        batch: &[Tensor],
    ) -> Result<Tensor, CompileError> {
        let Some(recorder) = Recorder::start(batch)? else { return self.plain(state, batch) };
        let loss = self.loss.plain(recorder.batch())?;
        let mut ends = Vec::new();
        let mut trained = recorder.differentiable()?;
        let loss = self.finish(state, &loss, || {
            if ends.is_empty() {
                // A teacher has none.
                trained.retain(|tensor| tensor.grad().defined());
            }
            ends.push(recorder.operators());
        })?;
        // The step is made: what fails from here on only leaves it uncompiled.
        let trace = match recorder.finish(std::slice::from_ref(&loss), ends[1]..ends[2]) {
            Ok(trace) => trace,
            Err(why) => {
                self.steps.never(key, why);
                return Ok(loss);
            }
        };
        let numbers = update::check_trained(&trained, state.opt).and_then(|()| update::numbers(&trace, state.opt));
        let (scalars, numbers) = match numbers {
            Ok((scalars, numbers)) => (Ok(scalars), numbers),
            Err(error) => (Err(error), Vec::new()),
        };
        self.steps.learn(key, trace, scalars, |graph| Compiled { graph, numbers });
        Ok(loss)
    }
}
