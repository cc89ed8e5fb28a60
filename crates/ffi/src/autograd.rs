//! Functions with a backward pass of their own, and gradients of chosen tensors.
//!
//! Users call `overdrive_nn::autograd`, which gives both a typed form.

use std::borrow::Borrow;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr;

use tch::Tensor;

use crate::callback;
pub use crate::callback::BoxError;
use crate::error::{Error, check};
use crate::raw;
use crate::tensor_list::TensorList;

/// The backward pass of one call of a function.
///
/// For tensors of a GPU it runs on a thread of libtorch's, otherwise on the thread that runs the pass. Several threads
/// may run passes over one graph.
pub trait Backward: Send + Sync {
    /// The gradients of the inputs, from those of the outputs. An undefined tensor means that there is no gradient.
    ///
    /// # Errors
    /// Its message comes out of the pass. So does the message of a panic, which [`grad`] and [`backward`]
    /// resume.
    fn backward(&self, pass: &Pass<'_>, grads: Vec<Tensor>) -> Result<Vec<Tensor>, BoxError>;
}

/// What a call of a function puts into the graph.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The function's name, for error messages.
    pub name: &'a str,
    /// Whether backward gets zeros in place of gradients that do not exist.
    pub materialize_grads: bool,
    /// Whether differentiating the gradients is an error.
    pub once_differentiable: bool,
    /// The inputs; an undefined tensor stands for an input that is left out.
    pub inputs: &'a [&'a Tensor],
    /// What backward can ask for.
    pub saved: &'a [Tensor],
    /// The inputs that were changed in place. All have to be outputs.
    pub dirty: &'a [Tensor],
    /// The outputs that have no gradient.
    pub non_differentiable: &'a [Tensor],
}

impl Call<'_> {
    /// The outputs with their place in the graph, which keeps `backward`. Nothing is recorded when gradients are off or
    /// no input requires one.
    ///
    /// # Errors
    /// When an input that was changed in place is not an output, or is a leaf that requires a gradient.
    ///
    /// # Source
    /// `torch.autograd.Function.apply`, after `forward`
    pub fn record(&self, outputs: &[Tensor], backward: Box<dyn Backward>) -> Result<Vec<Tensor>, Error> {
        let name = CString::new(self.name).map_err(|_| Error::refused("the name of a function holds a 0 byte"))?;
        let (inputs, outputs) = (TensorList::new(self.inputs)?, TensorList::new(outputs)?);
        let (saved, dirty) = (TensorList::new(self.saved)?, TensorList::new(self.dirty)?);
        let non_differentiable = TensorList::new(self.non_differentiable)?;
        let function = raw::Function {
            name: name.as_ptr(),
            materialize_grads: i32::from(self.materialize_grads),
            once_differentiable: i32::from(self.once_differentiable),
            inputs: inputs.as_ptr(),
            outputs: outputs.as_ptr(),
            saved: saved.as_ptr(),
            dirty: dirty.as_ptr(),
            non_differentiable: non_differentiable.as_ptr(),
            owner: Box::into_raw(Box::new(backward)).cast(),
            backward: on_backward,
            drop: callback::drop_box::<Box<dyn Backward>>,
            drop_panic: callback::drop_panic,
        };
        // SAFETY: all lists and the name live through the call, which takes ownership of `owner`.
        TensorList::receive(|out, err| unsafe { raw::od_function_record(&function, out, err) })?.to_vec()
    }
}

/// A running backward pass, as a function sees it.
#[derive(Debug)]
pub struct Pass<'a> {
    node: &'a raw::Node,
    /// Which gradients are needed is known to the thread alone.
    _not_send: PhantomData<*const ()>,
}

impl Pass<'_> {
    /// The saved tensors.
    ///
    /// # Errors
    /// When one of them was changed in place since, or they were freed by an earlier pass.
    ///
    /// # Source
    /// `ctx.saved_tensors`
    pub fn saved_tensors(&self) -> Result<Vec<Tensor>, Error> {
        // SAFETY: the node lives through the callback that `self` is lent to.
        TensorList::receive(|out, err| unsafe { raw::od_node_saved(self.node, out, err) })?.to_vec()
    }

    /// Whether this pass needs the gradient of the input with this index.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Source
    /// `ctx.needs_input_grad`
    pub fn needs_input_grad(&self, index: usize) -> Result<bool, Error> {
        let mut needed = 0;
        // SAFETY: as above, and `needed` lives through the call.
        check(|err| unsafe { raw::od_node_needs_input_grad(self.node, index, &mut needed, err) })?;
        Ok(needed != 0)
    }
}

/// Options of [`grad`] and [`backward`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GradOptions {
    /// Whether the graph is kept for another pass.
    pub retain_graph: bool,
    /// Whether the gradients can be differentiated.
    pub create_graph: bool,
    /// Whether an input that the outputs do not depend on gets an undefined gradient, in place of an error.
    pub allow_unused: bool,
}

/// The gradients of the inputs. No leaf's `grad` changes. `grad_outputs` is empty, or has one tensor for each output;
/// an undefined one stands for 1.
///
/// # Errors
/// When an output or an input requires no gradient, an output without a given gradient is not a single number, the
/// graph was freed, or the backward pass of a function fails.
///
/// # Panics
/// When the backward pass of a function panics, with what it panicked with.
///
/// # Source
/// `torch.autograd.grad`
pub fn grad<T: Borrow<Tensor>>(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: &[T],
    options: GradOptions,
) -> Result<Vec<Tensor>, Error> {
    execute(outputs, inputs, grad_outputs, options, false)
}

/// Adds to the gradients of the leaves; the rest is as for [`grad`].
///
/// # Errors
/// As [`grad`].
///
/// # Panics
/// As [`grad`].
///
/// # Source
/// `torch.autograd.backward`
pub fn backward<T: Borrow<Tensor>>(outputs: &[&Tensor], grad_outputs: &[T], options: GradOptions) -> Result<(), Error> {
    execute(outputs, &[], grad_outputs, options, true).map(drop)
}

fn execute<T: Borrow<Tensor>>(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: &[T],
    options: GradOptions,
    accumulate: bool,
) -> Result<Vec<Tensor>, Error> {
    let [outputs, inputs] = [TensorList::new(outputs)?, TensorList::new(inputs)?];
    let grad_outputs = TensorList::new(grad_outputs)?;
    let options = raw::GradOptions {
        retain_graph: i32::from(options.retain_graph),
        create_graph: i32::from(options.create_graph),
        allow_unused: i32::from(options.allow_unused),
        accumulate: i32::from(accumulate),
    };
    let mut panic = ptr::null_mut::<c_void>();
    // SAFETY: lists, options and out-parameters live through the call.
    let grads = TensorList::receive(|out, err| unsafe {
        let (outputs, inputs, grad_outputs) = (outputs.as_ptr(), inputs.as_ptr(), grad_outputs.as_ptr());
        raw::od_grad(outputs, inputs, grad_outputs, &options, out, &mut panic, err)
    });
    // SAFETY: a callback has made it, and the C++ side has handed it over.
    unsafe { callback::resume(panic) };
    grads?.to_vec()
}

extern "C" fn on_backward(
    owner: *mut c_void,
    node: *const raw::Node,
    grads: *mut raw::TensorList,
    out: *mut *mut raw::TensorList,
    panic: *mut *mut c_void,
    err: *mut raw::Error,
) -> raw::Status {
    let run = || {
        // SAFETY: `owner` was made of such a box in `record`, and the graph keeps it and the node through this call.
        let (backward, node) = unsafe { (&*owner.cast::<Box<dyn Backward>>(), &*node) };
        // SAFETY: the list is handed over to this call.
        let grads = unsafe { TensorList::from_raw(grads) }?.to_vec()?;
        let results = backward.backward(&Pass { node, _not_send: PhantomData }, grads)?;
        // SAFETY: the caller's out-parameter.
        unsafe { *out = TensorList::new(&results)?.into_raw() };
        Ok(())
    };
    // SAFETY: `panic` and `err` are the caller's.
    unsafe { callback::answer("a backward function", panic, err, run) }
}
