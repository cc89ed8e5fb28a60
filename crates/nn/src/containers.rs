//! Lists of modules.

use std::sync::Arc;

use overdrive_core::{Module, StateDict, StateError, Stateful, Visitor, load_module_state, module_state};
use tch::Tensor;

use crate::error::NnError;
use crate::summary::record::report;

/// A module that computes a tensor from a tensor, as the parts of a [`Sequential`] do.
pub trait Forward: Module + Stateful {
    /// Computes the output.
    ///
    /// # Errors
    /// When the input has a shape, dtype or device that the module does not take.
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError>;
}

macro_rules! forwards {
    ($($module:ty),+ $(,)?) => {$(
        impl $crate::Forward for $module {
            fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
                <$module>::forward(self, input)
            }
        }
    )+};
}

pub(crate) use forwards;

impl<F: Forward + ?Sized> Forward for Box<F> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        (**self).forward(input)
    }
}

impl<const N: usize> Forward for crate::Conv<N> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        self.forward(input)
    }
}

impl<const N: usize> Forward for crate::ConvTranspose<N> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        self.forward(input)
    }
}

impl<const N: usize> Forward for crate::BatchNorm<N> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        self.forward(input)
    }
}

forwards!(
    crate::Linear,
    crate::LayerNorm,
    crate::RmsNorm,
    crate::GroupNorm,
    crate::Embedding,
    crate::Dropout,
    crate::Dropout1d,
    crate::Dropout2d,
    crate::Dropout3d,
    crate::AlphaDropout,
);

/// Modules that compute one after the other. Their names are their places: `0.weight`, `1.weight`, ..
///
/// [`sequential!`](crate::sequential) makes one of a list of modules. A module in several places is an `Arc`.
///
/// # Source
/// `torch.nn.Sequential`
#[derive(Default)]
pub struct Sequential(Vec<Box<dyn Forward + Send + Sync>>);

impl Sequential {
    /// An empty one, which returns its input.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a module at the end.
    ///
    /// # Source
    /// `Sequential.append`
    #[must_use]
    pub fn append(mut self, module: impl Forward + Send + Sync + 'static) -> Self {
        self.0.push(Box::new(module));
        self
    }

    /// Adds a module at the end.
    pub fn push(&mut self, module: impl Forward + Send + Sync + 'static) {
        self.0.push(Box::new(module));
    }

    /// Computes with all modules in order.
    ///
    /// # Errors
    /// Those of the modules.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        let mut output = None;
        for (place, module) in self.0.iter().enumerate() {
            let x = module.forward(output.as_ref().unwrap_or(input)).map_err(|error| error.at(place))?;
            report(self, Some(place), &x);
            output = Some(x);
        }
        let output = output.unwrap_or_else(|| input.shallow_clone());
        report(self, None, &output);
        Ok(output)
    }

    /// The number of modules.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A layer that is used in several places.
impl<M: Forward + ?Sized> Forward for Arc<M> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        (**self).forward(input)
    }
}

impl Module for Sequential {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        for (index, module) in self.0.iter().enumerate() {
            visitor.module(&index.to_string(), module);
        }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

impl Stateful for Sequential {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        module_state(self)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        load_module_state(self, state)
    }
}

forwards!(Sequential);

impl std::fmt::Debug for Sequential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|module| module.describe())).finish()
    }
}

/// A [`Sequential`] of modules, or of fallible expressions that make modules.
///
/// ```
/// use overdrive_nn::{Linear, NnError, Relu, sequential};
///
/// # fn main() -> Result<(), NnError> {
/// let model = sequential![Linear::new(4, 8)?, Relu, Linear::new(8, 2)?];
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! sequential {
    ($($module:expr),* $(,)?) => {
        $crate::Sequential::new()$(.append($module))*
    };
}

/// Modules of one type. Their names are their places.
///
/// # Source
/// `torch.nn.ModuleList`
#[derive(Debug)]
pub struct ModuleList<M>(pub Vec<M>);

impl<M: Module + 'static> Module for ModuleList<M> {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        for (index, module) in self.0.iter().enumerate() {
            visitor.module(&index.to_string(), module);
        }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

impl<M> std::ops::Deref for ModuleList<M> {
    type Target = Vec<M>;

    fn deref(&self) -> &Vec<M> {
        &self.0
    }
}

impl<M> std::ops::DerefMut for ModuleList<M> {
    fn deref_mut(&mut self) -> &mut Vec<M> {
        &mut self.0
    }
}

impl<M> FromIterator<M> for ModuleList<M> {
    fn from_iter<I: IntoIterator<Item = M>>(modules: I) -> Self {
        Self(modules.into_iter().collect())
    }
}
