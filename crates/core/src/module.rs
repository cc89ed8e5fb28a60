//! Modules: what models are made of.

use std::any::Any;
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_ffi::{Error as TorchError, TensorId};
use tch::{Device, Kind, Tensor};

use crate::growth::Growth;
use crate::parameter::Parameter;
use crate::walk::{Item, apply, walk};

/// A part of a model: a layer, a block of layers, or the model itself.
///
/// `#[derive(Module)]` of `overdrive-nn` implements it for a struct whose fields are modules, parameters, buffers and
/// plain values. Dotted names follow from the fields, as in PyTorch: `layer1.0.conv1.weight`.
///
/// # Source
/// `torch.nn.Module`
pub trait Module {
    /// Shows the visitor the parameters, buffers and modules that belong to this one, in the order in which they were
    /// declared, each under a name of its own. A module that contains itself (by an `Rc`) is skipped where it would
    /// recur.
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>);

    /// Its type and options, as PyTorch prints them: `Linear(in_features=4, out_features=2, bias=True)`.
    fn describe(&self) -> String {
        let name = std::any::type_name::<Self>();
        let name = name.split('<').next().unwrap_or(name);
        name.rsplit("::").next().unwrap_or(name).to_owned()
    }

    /// The module as an `Any`, for `downcast_ref`. The derive gives it for modules that borrow nothing; None by
    /// default.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// The identity of the module: two references to the same module have equal ones. None for a module without data,
    /// such as an activation.
    ///
    /// # Source
    /// `id(module)`
    fn id(&self) -> Option<ModuleId> {
        let address = std::ptr::from_ref(self).cast::<()>() as usize;
        // The type is part of it, because a struct and its first field have the same address.
        (size_of_val(self) > 0).then(|| ModuleId(address, std::any::type_name::<Self>()))
    }

    /// Tells later which parameters were added to it since; `None` where none can be, or it does not know.
    fn growth(&self) -> Option<Growth> {
        None
    }

    /// The parameters with their dotted names, in the order in which they were declared. A parameter that is used in
    /// several places counts once, under its first name.
    ///
    /// # Source
    /// `Module.named_parameters()`
    fn named_parameters(&self) -> Vec<Parameter>
    where
        Self: Sized,
    {
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        walk(self, &mut |item| {
            if let Item::Parameter { name, tensor } = item
                && seen.insert(TensorId::of(tensor))
            {
                found.push(Parameter::named(name, tensor.shallow_clone()));
            }
        });
        found
    }

    /// The buffers (running means, say) with their dotted names, each once.
    ///
    /// # Source
    /// `Module.named_buffers()`
    fn named_buffers(&self) -> Vec<(String, Tensor)>
    where
        Self: Sized,
    {
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        walk(self, &mut |item| {
            if let Item::Buffer { name, tensor, .. } = item
                && seen.insert(TensorId::of(tensor))
            {
                found.push((name.to_owned(), tensor.shallow_clone()));
            }
        });
        found
    }

    /// The module itself, named `""`, and all modules in it with their dotted names, each before its own modules. A
    /// module that several own (in an `Rc`) counts once, under its first name.
    ///
    /// # Source
    /// `Module.named_modules()`
    fn named_modules(&self) -> Vec<(String, &dyn Module)>
    where
        Self: Sized,
    {
        let mut found: Vec<(String, &dyn Module)> = vec![(String::new(), self)];
        walk(self, &mut |item| {
            if let Item::Module { name, module } = item {
                found.push((name.to_owned(), module));
            }
        });
        let mut seen = HashSet::new();
        found.retain(|(_, module)| module.id().is_none_or(|id| seen.insert(id)));
        found
    }

    /// Calls a function for each module in this one, inner ones first, then for this one. A module that one parent
    /// owns twice is called once for that parent; one that two parents own, once for each.
    ///
    /// # Errors
    /// The first error of the function, which is not called for the remaining modules.
    ///
    /// # Source
    /// `Module.apply`
    fn apply<E>(&self, mut each: impl FnMut(&dyn Module) -> Result<(), E>) -> Result<(), E>
    where
        Self: Sized,
    {
        let mut result = Ok(());
        apply(self, &mut self.id().into_iter().collect(), &mut |module| {
            if result.is_ok() {
                result = each(module);
            }
        });
        result
    }

    /// Switches to training mode, where dropout drops and batch norm uses the batch's own statistics.
    ///
    /// # Source
    /// `Module.train()`
    fn train(&self) -> &Self
    where
        Self: Sized,
    {
        self.set_training(true)
    }

    /// Switches to evaluation mode.
    ///
    /// # Source
    /// `Module.eval()`
    fn eval(&self) -> &Self
    where
        Self: Sized,
    {
        self.set_training(false)
    }

    /// Switches to training mode or evaluation mode.
    ///
    /// # Source
    /// `Module.train(mode)`
    fn set_training(&self, training: bool) -> &Self
    where
        Self: Sized,
    {
        walk(self, &mut |item| {
            if let Item::State { state, .. } = item {
                state.set_training(training);
            }
        });
        self
    }

    /// Sets whether the parameters get gradients.
    ///
    /// # Source
    /// `Module.requires_grad_`
    ///
    /// # Errors
    /// When libtorch refuses.
    fn requires_grad_(&self, requires_grad: bool) -> Result<&Self, TorchError>
    where
        Self: Sized,
    {
        for parameter in self.named_parameters() {
            let _ = parameter.tensor().f_set_requires_grad(requires_grad)?;
        }
        Ok(self)
    }

    /// The number of elements of all parameters, each counted once.
    fn num_parameters(&self) -> usize
    where
        Self: Sized,
    {
        self.named_parameters().iter().map(|it| it.tensor().numel()).sum()
    }

    /// Moves all parameters and buffers to a device, or converts the floating-point and complex ones to a
    /// floating-point or complex dtype; complex ones lose their imaginary parts by a floating-point dtype, as in PyTorch.
    /// The tensors stay the same objects, so that an optimizer that was made before keeps using them. Gradients are moved
    /// and converted too.
    ///
    /// # Errors
    /// When the dtype is neither floating-point nor complex; nothing has changed then. When memory runs out or the
    /// device does not exist; what was moved before stays moved.
    ///
    /// # Syncs
    /// Waits for copies between the host and a GPU.
    ///
    /// # Source
    /// `Module.to`
    fn to(&self, to: impl Into<To>) -> Result<&Self, TorchError>
    where
        Self: Sized,
    {
        let (to, _no_grad) = (to.into(), tch::no_grad_guard());
        to.check()?;
        let parameters = self.named_parameters();
        let buffers = self.named_buffers();
        let tensors = parameters.iter().map(Parameter::tensor).chain(buffers.iter().map(|(_, tensor)| tensor));
        for tensor in tensors {
            let mut own = tensor.shallow_clone();
            own.f_set_data(&to.convert(tensor)?)?;
            let mut grad = tensor.grad();
            if grad.defined() {
                grad.f_set_data(&to.convert(&grad)?)?;
            }
        }
        Ok(self)
    }
}

impl dyn Module + '_ {
    /// The module as a type, if it is of that type: for functions that [`Module::apply`] calls with each module.
    ///
    /// # Source
    /// `isinstance(module, nn.Linear)`
    pub fn downcast_ref<M: 'static>(&self) -> Option<&M> {
        self.as_any()?.downcast_ref()
    }
}

/// The identity of a module, as long as the module lives and does not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleId(usize, &'static str);

/// Where [`Module::to`] moves tensors, or which dtype it gives them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum To {
    /// To a device.
    Device(Device),
    /// To a floating-point or complex dtype.
    Kind(Kind),
}

impl From<Device> for To {
    fn from(device: Device) -> Self {
        Self::Device(device)
    }
}

impl From<Kind> for To {
    fn from(kind: Kind) -> Self {
        Self::Kind(kind)
    }
}

impl To {
    fn check(self) -> Result<(), TorchError> {
        use Kind::{BFloat16, ComplexDouble, ComplexFloat, ComplexHalf, Double, Float, Half};
        match self {
            Self::Kind(Float | Double | Half | BFloat16 | ComplexHalf | ComplexFloat | ComplexDouble)
            | Self::Device(_) => Ok(()),
            Self::Kind(kind) => {
                let what = format!("a module can be converted to floating-point or complex dtypes, not to {kind:?}");
                Err(tch::TchError::Kind(what).into())
            }
        }
    }

    fn convert(self, tensor: &Tensor) -> Result<Tensor, TorchError> {
        Ok(match self {
            Self::Device(device) => tensor.f_detach()?.f_to_device(device)?,
            Self::Kind(kind) if tensor.f_is_floating_point()? || tensor.f_is_complex()? => {
                tensor.f_detach()?.f_to_kind(kind)?
            }
            Self::Kind(_) => tensor.f_detach()?,
        })
    }
}

/// Receives the parts of a module from [`Module::visit`].
pub trait Visitor<'a> {
    /// A parameter.
    fn parameter(&mut self, name: &str, parameter: &Tensor);
    /// A buffer; one that is not persistent is not saved.
    fn buffer(&mut self, name: &str, buffer: &Tensor, persistent: bool);
    /// A module.
    fn module(&mut self, name: &str, module: &'a dyn Module);
    /// The layer's own state: its mode and its path.
    fn state(&mut self, state: &'a ModuleState);
    /// A plain value that can change while the module is borrowed, in a [`Setting`](crate::Setting) or a `Cell`. A
    /// visitor that keeps what a module computed compares it, to see that the module computes something else now.
    fn cell(&mut self, _name: &str, _value: &dyn Debug) {}
}

/// What each layer knows of itself: its mode, and its path in the model.
#[derive(Debug)]
pub struct ModuleState {
    training: AtomicBool,
    path: Mutex<String>,
}

impl Default for ModuleState {
    fn default() -> Self {
        Self { training: AtomicBool::new(true), path: Mutex::default() }
    }
}

/// A copy has the same mode, and no path yet.
impl Clone for ModuleState {
    fn clone(&self) -> Self {
        Self { training: AtomicBool::new(self.is_training()), ..Self::default() }
    }
}

impl ModuleState {
    /// Whether the module is in training mode, as it is at first.
    pub fn is_training(&self) -> bool {
        self.training.load(Ordering::Relaxed)
    }

    /// Switches this layer alone to training mode or evaluation mode.
    pub fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }

    /// The dotted name of the layer in its model, for errors; empty until the model was walked for the first time (by
    /// an optimizer or `train`, say).
    pub fn path(&self) -> String {
        self.lock_path().clone()
    }

    /// Records the layer's path, if it is longer than the one before: a walk that starts at a part of the model sees
    /// only the end of the path.
    pub(crate) fn found_at(&self, path: &str) {
        let mut longest = self.lock_path();
        if longest.len() < path.len() {
            path.clone_into(&mut longest);
        }
    }

    fn lock_path(&self) -> MutexGuard<'_, String> {
        self.path.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
