//! Forward pass, loss and gradients in one compiled graph; the gradients go where they always go.

use overdrive_core::Module;
use overdrive_ffi::autograd::{self, Backward, BoxError as PassError, Call, GradOptions, Pass};
use overdrive_ffi::context::grad_enabled;
use overdrive_ffi::{Form, TensorId, record};
use tch::{Device, Tensor};

use crate::error::{BoxError, CompileError};
use crate::fingerprint::Watched;
use crate::graph::{Graph, Ran};
use crate::inputs;
use crate::options::Options;
use crate::plans::{self, Next, Plans};
use crate::seed::{Seed, Used};
use crate::trace::Recorder;

/// The closure of [`loss`].
pub type LossResult = Result<Tensor, BoxError>;

/// Compiles a loss and its gradients. The closure gets the batch and returns one number; the first two steps record it
/// while they run, and later ones do not call it.
///
/// What the step may use: the batch, tensors that stay the same objects (parameters, buffers, constants made before), and
/// numbers that stay the same. Anything else that the closure does besides tensor operators, such as counting, happens
/// only while recording.
///
/// `model` is watched: if a parameter is replaced, frozen or unfrozen, or a layer changes its mode, the step is recorded
/// anew. Other modules are not, unless [`watch`](CompiledLoss::watch) names them.
///
/// The gradients are computed with the loss, with the gradient that the last backward pass had brought to it (the scale
/// of a `GradScaler`); `backward` multiplies them by what has changed since.
///
/// # Source
/// `torch.compile(loss)`
pub fn loss<M, F>(model: &M, f: F) -> CompiledLoss<'_, M, F>
where
    M: Module,
    F: FnMut(&[Tensor]) -> LossResult,
{
    CompiledLoss { model, watched: Watched::new(model), f, steps: Plans::new(), seed: None }
}

/// A compiled loss; see [`loss`].
#[derive(Debug)]
pub struct CompiledLoss<'m, M, F> {
    model: &'m M,
    watched: Watched<'m>,
    f: F,
    steps: Plans<Key, Compiled>,
    /// None until a step is recorded.
    seed: Option<Seed>,
}

/// What a recorded step is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    model: u64,
    batch: Vec<Form>,
    differentiable: Vec<bool>,
}

impl plans::Key for Key {
    fn of_any_size(&self) -> Self {
        Self { batch: inputs::of_any_size(&self.batch), ..self.clone() }
    }
}

#[derive(Debug)]
struct Compiled {
    graph: Graph,
    wanted: Vec<Wanted>,
}

/// A tensor whose gradient is wanted.
#[derive(Debug)]
enum Wanted {
    /// The one at this place of each batch.
    Batch(usize),
    Kept(Tensor),
}

impl Wanted {
    fn new(tensor: &Tensor, batch: &[Tensor]) -> Self {
        let place = batch.iter().position(|other| TensorId::of(other) == TensorId::of(tensor));
        place.map_or_else(|| Self::Kept(tensor.shallow_clone()), Self::Batch)
    }

    fn of(&self, batch: &[Tensor]) -> Tensor {
        match self {
            Self::Batch(place) => batch[*place].shallow_clone(),
            Self::Kept(tensor) => tensor.shallow_clone(),
        }
    }
}

impl<'m, M: Module, F: FnMut(&[Tensor]) -> LossResult> CompiledLoss<'m, M, F> {
    /// With other options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.change(options);
        self
    }

    /// Watches another module that the closure uses, such as a teacher, as it does the model: when the module changes its
    /// mode, say, the step is recorded anew. Can be called for several.
    #[must_use]
    pub fn watch(mut self, module: &'m impl Module) -> Self {
        self.watched.add(module);
        self
    }

    /// Why steps run uncompiled, if they do; the latest reason.
    pub fn why_eager(&self) -> Option<&str> {
        self.steps.why_eager()
    }

    /// The loss of a batch, ready for `backward`. Where gradients are off, the closure itself runs.
    ///
    /// A step that cannot be compiled runs as it is; [`Options::strict`] makes that an error.
    ///
    /// # Errors
    /// Those of the closure, of a failed backward pass, and in strict mode why the step cannot be compiled.
    ///
    /// # Syncs
    /// The second step waits for the compiler: a minute or more unless the package is in the cache.
    pub fn run(&mut self, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        if !grad_enabled() {
            return self.plain(batch);
        }
        let batch = &inputs::in_memory(batch)?;
        let forms = match inputs::forms(batch) {
            Ok(forms) => forms,
            Err(error) => {
                self.steps.refuse(error)?;
                return self.plain(batch);
            }
        };
        let differentiable = batch.iter().map(Tensor::requires_grad).collect();
        let key = Key { model: self.fingerprint(), batch: forms, differentiable };
        match self.steps.next(&key)? {
            Next::Run(Compiled { graph, wanted }) => match graph.run(batch, &[])? {
                Ran::Results(results) => {
                    let wanted = wanted.iter().map(|wanted| wanted.of(batch)).collect::<Vec<_>>();
                    attach(&wanted, results, self.seed.as_ref())
                }
                Ran::Unfit => self.plain(batch),
                Ran::Changed(difference) => {
                    self.steps.forget(&key, &difference);
                    self.run(batch)
                }
            },
            Next::Plain | Next::Refused => self.plain(batch),
            Next::First | Next::Record => self.record(key, batch),
        }
    }

    /// The closure's loss, uncompiled.
    pub(crate) fn plain(&mut self, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        (self.f)(batch).map_err(CompileError::Step)
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.watched.fingerprint()
    }

    pub(crate) fn change(&mut self, options: Options) {
        self.steps.options = options;
    }

    /// Runs the step recorded, and compiles it if it was recorded before.
    fn record(&mut self, key: Key, batch: &[Tensor]) -> Result<Tensor, CompileError> {
        if self.seed.is_none() {
            self.seed = Some(Seed::new(device_of(self.model))?);
        }
        let Some(recorder) = Recorder::start(batch)? else { return self.plain(batch) };
        let params = self.model.named_parameters();
        let without_grad: Vec<_> = params.iter().filter(|param| !param.tensor().grad().defined()).collect();
        let loss = match self.plain(recorder.batch()) {
            // While it is recorded, the batch's tensors are leaves, which cannot be changed in place.
            Err(error) if batch.iter().any(|tensor| tensor.requires_grad() && !tensor.is_leaf()) => {
                drop(recorder);
                let reason = format!("with a batch that requires a gradient it failed: {error}");
                self.steps.never(key, CompileError::NotRecordable { reason, caller: None });
                return self.plain(batch);
            }
            loss => loss?,
        };
        if without_grad.iter().any(|param| param.tensor().grad().defined()) {
            record::refuse(
                "a backward pass within the closure leaves gradients in parameters, which compiled code would not",
            );
        }
        if loss.numel() != 1 {
            let text = format!("the loss has shape {:?}, but should be one number", loss.size());
            return Err(CompileError::Step(text.into()));
        }
        let seed = self.seed.iter().map(|seed| seed.of(&loss)).collect::<Result<Vec<_>, _>>()?;
        let wanted = recorder.differentiable()?;
        let options = GradOptions { allow_unused: true, ..GradOptions::default() };
        let grads = autograd::grad(&[&loss], &wanted.iter().collect::<Vec<_>>(), &seed, options)?;
        let (wanted, grads): (Vec<_>, Vec<_>) =
            wanted.into_iter().zip(grads).filter(|(_, grad)| grad.defined()).unzip();
        let results: Vec<Tensor> = std::iter::once(loss.f_detach()?).chain(grads).collect();
        let count = recorder.operators();
        let wanted: Vec<Wanted> = wanted.iter().map(|tensor| Wanted::new(tensor, recorder.batch())).collect();
        let trace = recorder.finish(&results, count..count)?;
        let inputs: Vec<Tensor> = wanted.iter().map(|wanted| wanted.of(batch)).collect();
        self.steps.learn(key, trace, Ok(Vec::new()), |graph| Compiled { graph, wanted });
        attach(&inputs, results, self.seed.as_ref())
    }
}

/// The device of a model's first parameter.
fn device_of(model: &impl Module) -> Device {
    model.named_parameters().first().map_or(Device::Cpu, |param| param.tensor().device())
}

/// A loss whose backward pass hands out the gradients that were computed with it.
fn attach(wanted: &[Tensor], results: Vec<Tensor>, seed: Option<&Seed>) -> Result<Tensor, CompileError> {
    let mut results = results.into_iter();
    let loss = results.next().ok_or_else(|| CompileError::Step("a step without a loss".into()))?;
    let inputs: Vec<&Tensor> = wanted.iter().collect();
    let call = Call {
        name: "CompiledLoss",
        materialize_grads: true,
        once_differentiable: true,
        inputs: &inputs,
        saved: &[],
        dirty: &[],
        non_differentiable: &[],
    };
    let used = seed.map(Seed::used).transpose()?;
    let grads = Grads(std::sync::Mutex::new((results.collect(), used)));
    let outputs = call.record(&[loss], Box::new(grads))?;
    outputs.into_iter().next().ok_or_else(|| CompileError::Step("a step without a loss".into()))
}

/// The gradients of a loss, computed with it, and what with.
struct Grads(std::sync::Mutex<(Vec<Tensor>, Option<Used>)>);

impl Backward for Grads {
    fn backward(&self, _pass: &Pass<'_>, of_loss: Vec<Tensor>) -> Result<Vec<Tensor>, PassError> {
        let mut kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let grads = std::mem::take(&mut kept.0);
        if grads.is_empty() {
            return Err("the graph of a compiled loss was freed: call `run` again before another backward pass".into());
        }
        let factor = kept.1.as_ref().map(|used| used.factor(&of_loss[0])).transpose()?;
        let Some(factor) = factor.flatten() else { return Ok(grads) };
        Ok(grads.iter().map(|grad| grad.f_mul(&factor)).collect::<Result<_, _>>()?)
    }
}
