//! Gradients of chosen tensors.

use overdrive_ffi::autograd::{self, GradOptions};
use tch::Tensor;

use super::tensors::Tensors;
use crate::error::NnError;

/// The gradients of `inputs`, to be computed by [`run`](Grad::run): the sum over the outputs. No `grad()` of a tensor
/// changes.
///
/// Both are a `&Tensor`, an array or a `Vec` of them, and the result has the form of `inputs`:
///
/// ```
/// # use overdrive_nn::autograd::grad;
/// # use tch::Tensor;
/// # fn main() -> Result<(), overdrive_nn::NnError> {
/// # let [x, w] = [2.0, 3.0].map(|value| Tensor::from(value).set_requires_grad(true));
/// let y = &x * &w;
/// let dx = grad(&y, &x).retain_graph(true).run()?;
/// let [dx, dw] = grad(&y, [&x, &w]).run()?;
/// # let _ = (dx, dw);
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.autograd.grad`
pub fn grad<'a, O, I>(outputs: O, inputs: I) -> Grad<'a, I>
where
    O: Tensors<Of<&'a Tensor> = O>,
    I: Tensors<Of<&'a Tensor> = I>,
{
    let (outputs, inputs) = (O::into_list::<&'a Tensor>(outputs), I::into_list::<&'a Tensor>(inputs));
    let form = std::marker::PhantomData;
    Grad { outputs, inputs, grad_outputs: Vec::new(), retain_graph: None, create_graph: false, form }
}

/// A differentiation that [`grad`] describes.
#[derive(Debug)]
#[must_use = "nothing is computed until `run`"]
pub struct Grad<'a, I> {
    outputs: Vec<&'a Tensor>,
    inputs: Vec<&'a Tensor>,
    grad_outputs: Vec<Tensor>,
    retain_graph: Option<bool>,
    create_graph: bool,
    form: std::marker::PhantomData<I>,
}

impl<'a, I: Tensors<Of<&'a Tensor> = I>> Grad<'a, I> {
    /// The gradients of the outputs; default 1 for outputs with a single number, where `None` stands for it too.
    pub fn grad_outputs<'g>(mut self, grads: impl IntoIterator<Item = impl Into<Option<&'g Tensor>>>) -> Self {
        let handle = |grad: Option<&Tensor>| grad.map_or_else(Tensor::new, Tensor::shallow_clone);
        self.grad_outputs = grads.into_iter().map(|grad| handle(grad.into())).collect();
        self
    }

    /// Whether the graph is kept for another pass; default [`create_graph`](Self::create_graph).
    pub fn retain_graph(mut self, retain: bool) -> Self {
        self.retain_graph = Some(retain);
        self
    }

    /// Whether the gradients can be differentiated; default false.
    pub fn create_graph(mut self, create: bool) -> Self {
        self.create_graph = create;
        self
    }

    /// The gradient of an input that the outputs do not depend on is `None`, in place of an error.
    pub fn allow_unused(self) -> GradOrNone<'a, I> {
        GradOrNone(self)
    }

    /// Computes the gradients.
    ///
    /// # Errors
    /// When an output or an input requires no gradient, the outputs do not depend on an input, an output without a
    /// given gradient is not a single number, the graph was freed, or the `backward` of a
    /// [`Function`](super::Function) fails.
    ///
    /// # Panics
    /// When the `backward` of a function panics.
    pub fn run(self) -> Result<I::Of<Tensor>, NnError> {
        form::<I, _>(self.compute(false)?)
    }

    /// [`run`](Self::run) with zeros for inputs that the outputs do not depend on.
    ///
    /// # Errors
    /// As [`run`](Self::run), apart from such inputs.
    ///
    /// # Panics
    /// When the `backward` of a function panics.
    ///
    /// # Source
    /// `torch.autograd.grad(materialize_grads=True)`
    #[doc(alias = "materialize_grads")]
    pub fn run_with_zeros(self) -> Result<I::Of<Tensor>, NnError> {
        let zeros = |input: &Tensor| input.f_zeros_like()?.f_set_requires_grad(self.create_graph);
        let grads = self.compute(true)?.into_iter().zip(&self.inputs);
        let grads = grads.map(|(grad, input)| if grad.defined() { Ok(grad) } else { zeros(input) });
        form::<I, _>(grads.collect::<Result<_, _>>()?)
    }

    fn compute(&self, allow_unused: bool) -> Result<Vec<Tensor>, NnError> {
        let options = GradOptions { allow_unused, ..self.options() };
        Ok(autograd::grad(&self.outputs, &self.inputs, &self.grad_outputs, options)?)
    }

    fn options(&self) -> GradOptions {
        let retain_graph = self.retain_graph.unwrap_or(self.create_graph);
        GradOptions { retain_graph, create_graph: self.create_graph, allow_unused: false }
    }
}

/// A [`Grad`] that allows inputs that the outputs do not depend on.
#[derive(Debug)]
#[must_use = "nothing is computed until `run`"]
pub struct GradOrNone<'a, I>(Grad<'a, I>);

impl<'a, I: Tensors<Of<&'a Tensor> = I>> GradOrNone<'a, I> {
    /// Computes the gradients; `None` for an input that the outputs do not depend on.
    ///
    /// # Errors
    /// As [`Grad::run`], apart from such inputs.
    ///
    /// # Panics
    /// When the `backward` of a function panics.
    pub fn run(self) -> Result<I::Of<Option<Tensor>>, NnError> {
        let grads = self.0.compute(true)?.into_iter();
        form::<I, _>(grads.map(|grad| grad.defined().then_some(grad)).collect())
    }
}

/// Gives gradients the form of the inputs.
fn form<I: Tensors, T>(grads: Vec<T>) -> Result<I::Of<T>, NnError> {
    let found = grads.len();
    I::from_list(grads).ok_or(NnError::TensorCount { what: "gradients", expected: 1, found })
}

/// Adds the gradients of tensors to `grad()` of all leaves, by [`run`](BackwardPass::run): tch's `backward` with
/// options, errors and the panics of functions.
///
/// # Source
/// `torch.autograd.backward`
pub fn backward<'a, O: Tensors<Of<&'a Tensor> = O>>(tensors: O) -> BackwardPass<'a> {
    BackwardPass(grad(tensors, Vec::new()))
}

/// A pass that [`backward`] describes.
#[derive(Debug)]
#[must_use = "nothing is computed until `run`"]
pub struct BackwardPass<'a>(Grad<'a, Vec<&'a Tensor>>);

impl BackwardPass<'_> {
    /// The gradients of the tensors; default 1 for tensors with a single number, where `None` stands for it too.
    pub fn grad_tensors<'g>(self, grads: impl IntoIterator<Item = impl Into<Option<&'g Tensor>>>) -> Self {
        Self(self.0.grad_outputs(grads))
    }

    /// Whether the graph is kept for another pass; default [`create_graph`](Self::create_graph).
    pub fn retain_graph(self, retain: bool) -> Self {
        Self(self.0.retain_graph(retain))
    }

    /// Whether the gradients can be differentiated; default false. A leaf and its gradient then keep each other alive
    /// until the gradient is removed, so prefer [`grad()`].
    pub fn create_graph(self, create: bool) -> Self {
        Self(self.0.create_graph(create))
    }

    /// Computes the gradients.
    ///
    /// # Errors
    /// When a tensor requires no gradient, or has several numbers and no given gradient, the graph was freed, or the
    /// `backward` of a [`Function`](super::Function) fails.
    ///
    /// # Panics
    /// When the `backward` of a function panics.
    pub fn run(self) -> Result<(), NnError> {
        Ok(autograd::backward(&self.0.outputs, &self.0.grad_outputs, self.0.options())?)
    }
}
