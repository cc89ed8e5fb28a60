//! Functions with a backward pass of their own.

use overdrive_ffi::autograd::{Backward, BoxError, Call, Pass};
use tch::Tensor;

use super::custom_fwd::{Autocast, CustomFwd};
use super::tensors::Tensors;
use crate::error::NnError;

/// A differentiable function with a backward pass of its own; see the [module](super) for an example.
///
/// Options that are not tensors are fields. `forward` may set fields for `backward`, but tensors go through
/// [`Context::save_for_backward`] (a field cannot hold one, because the function has to be `Sync`).
///
/// `backward` runs on the thread that runs the pass, or on one of libtorch's for tensors of a GPU. If it panics,
/// [`grad`](super::grad()) and [`autograd::backward`](super::backward()) resume the panic, and tch's `f_backward`
/// returns an error with its message.
///
/// # Source
/// `torch.autograd.Function`
pub trait Function: Send + Sync + Sized + 'static {
    /// What it is called with: `Tensor`, `[Tensor; N]` or `Vec<Tensor>`. `forward` gets references. An undefined tensor
    /// (`Tensor::new()`) stands for none.
    type Inputs: Tensors;
    /// What it returns: `Tensor`, `[Tensor; N]` or `Vec<Tensor>`.
    type Outputs: Tensors<Of<Tensor> = Self::Outputs>;

    /// Whether differentiating the gradients is an error, instead of wrong if `backward` cannot be differentiated.
    ///
    /// # Source
    /// `torch.autograd.function.once_differentiable`
    const ONCE_DIFFERENTIABLE: bool = false;

    /// What autocast does to the function.
    const CUSTOM_FWD: Option<CustomFwd> = None;

    /// The name in error messages.
    fn name() -> &'static str {
        let path = std::any::type_name::<Self>();
        let path = path.split('<').next().unwrap_or(path);
        path.rsplit("::").next().unwrap_or(path)
    }

    /// Computes the outputs. Nothing in it is recorded.
    ///
    /// An input that is returned unchanged becomes a view of it.
    ///
    /// # Errors
    /// Any; [`apply`](Self::apply) returns it.
    fn forward(
        &mut self,
        ctx: &mut Context,
        inputs: <Self::Inputs as Tensors>::Of<&Tensor>,
    ) -> Result<Self::Outputs, BoxError>;

    /// Computes the inputs' gradients from those of the outputs; `None` for an input that has none.
    ///
    /// Gradients of outputs that were not used are zeros, or undefined after
    /// [`set_materialize_grads(false)`](Context::set_materialize_grads). If the pass creates a graph, the operations
    /// are recorded.
    ///
    /// # Errors
    /// Any; its message comes out of the pass. Another number of gradients than inputs, or of another shape, is an
    /// error too.
    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: Self::Outputs,
    ) -> Result<<Self::Inputs as Tensors>::Of<Option<Tensor>>, BoxError>;

    /// Calls the function.
    ///
    /// # Errors
    /// When `forward` fails, or marked an input as changed that cannot be: a leaf that requires a gradient, or one that
    /// is not an output.
    fn apply(mut self, inputs: <Self::Inputs as Tensors>::Of<&Tensor>) -> Result<Self::Outputs, NnError> {
        let inputs = Self::Inputs::into_list(inputs);
        let mut ctx = Context::new(&inputs);
        let mut forward = |inputs: &[&Tensor]| {
            let inputs = Self::Inputs::from_list(inputs.to_vec()).ok_or("inputs are missing")?;
            let _no_grad = tch::no_grad_guard();
            Ok(Self::Outputs::into_list(self.forward(&mut ctx, inputs)?))
        };
        let (outputs, autocast) = match Self::CUSTOM_FWD {
            Some(custom) => custom.forward(&inputs, forward).map(|(outputs, state)| (outputs, Some(state)))?,
            None => (forward(&inputs), None),
        };
        let failed = |source| NnError::Function { function: Self::name(), source };
        let outputs = ctx.record(&inputs, &outputs.map_err(failed)?, Recorded { function: self, autocast })?;
        Self::Outputs::from_list(outputs).ok_or_else(|| failed("outputs are missing".into()))
    }
}

/// What `forward` says about the call.
#[derive(Debug)]
pub struct Context {
    needs_input_grad: Vec<bool>,
    materialize_grads: bool,
    saved: Vec<Tensor>,
    dirty: Vec<Tensor>,
    non_differentiable: Vec<Tensor>,
}

fn handles<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<Tensor> {
    tensors.into_iter().map(Tensor::shallow_clone).collect()
}

impl Context {
    fn new(inputs: &[&Tensor]) -> Self {
        let needs_input_grad = inputs.iter().map(|input| input.defined() && input.requires_grad()).collect();
        let (saved, dirty, non_differentiable) = (Vec::new(), Vec::new(), Vec::new());
        Self { needs_input_grad, materialize_grads: true, saved, dirty, non_differentiable }
    }

    /// Keeps inputs, outputs or other tensors for `backward`, in place of those of an earlier call. If one is changed
    /// in place meanwhile, the backward pass is an error.
    ///
    /// `backward` cannot be differentiated through a saved tensor that is neither an input nor an output.
    pub fn save_for_backward<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) {
        self.saved = handles(tensors);
    }

    /// Says that inputs were changed in place. They have to be returned as outputs.
    pub fn mark_dirty<'a>(&mut self, inputs: impl IntoIterator<Item = &'a Tensor>) {
        self.dirty = handles(inputs);
    }

    /// Says that outputs have no gradient.
    pub fn mark_non_differentiable<'a>(&mut self, outputs: impl IntoIterator<Item = &'a Tensor>) {
        self.non_differentiable = handles(outputs);
    }

    /// Whether `backward` gets zeros for the gradients of outputs that were not used, or undefined tensors; default
    /// true.
    pub fn set_materialize_grads(&mut self, value: bool) {
        self.materialize_grads = value;
    }

    /// Whether the input with this index requires a gradient.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_input_grad.get(index).copied().unwrap_or(false)
    }

    fn record<F: Function>(
        &self,
        inputs: &[&Tensor],
        outputs: &[Tensor],
        backward: Recorded<F>,
    ) -> Result<Vec<Tensor>, NnError> {
        let call = Call {
            name: F::name(),
            materialize_grads: self.materialize_grads,
            once_differentiable: F::ONCE_DIFFERENTIABLE,
            inputs,
            saved: &self.saved,
            dirty: &self.dirty,
            non_differentiable: &self.non_differentiable,
        };
        Ok(call.record(outputs, Box::new(backward))?)
    }
}

/// What `backward` knows of the call.
#[derive(Debug)]
pub struct BackwardContext<'a>(&'a Pass<'a>);

impl BackwardContext<'_> {
    /// The tensors that `forward` saved, as an array: `let [x, y] = ctx.saved_tensors()?;`
    ///
    /// # Errors
    /// When it saved another number, one of them was changed in place since, or they were freed by an earlier pass.
    pub fn saved_tensors<const N: usize>(&self) -> Result<[Tensor; N], NnError> {
        let what = "saved tensors";
        let wrong = |list: Vec<_>| NnError::TensorCount { what, expected: N, found: list.len() };
        self.saved_list()?.try_into().map_err(wrong)
    }

    /// The tensors that `forward` saved, if their number varies.
    ///
    /// # Errors
    /// When one of them was changed in place since, or they were freed by an earlier pass.
    #[doc(alias = "saved_tensors")]
    pub fn saved_list(&self) -> Result<Vec<Tensor>, NnError> {
        Ok(self.0.saved_tensors()?)
    }

    /// Whether this pass needs the gradient of the input with this index.
    ///
    /// In Python it says whether the input requires one, even if the pass is for others.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.0.needs_input_grad(index).unwrap_or(true)
    }
}

/// A call in the graph.
struct Recorded<F> {
    function: F,
    autocast: Option<Autocast>,
}

impl<F: Function> Backward for Recorded<F> {
    fn backward(&self, pass: &Pass<'_>, grads: Vec<Tensor>) -> Result<Vec<Tensor>, BoxError> {
        let _region = self.autocast.map(Autocast::enter).transpose()?;
        let grads = F::Outputs::from_list(grads).ok_or("gradients are missing")?;
        let grads = self.function.backward(&BackwardContext(pass), grads)?;
        Ok(F::Inputs::into_list(grads).into_iter().map(|grad| grad.unwrap_or_else(Tensor::new)).collect())
    }
}
