//! Parameters that a model gets after others were taken from it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_ffi::TensorId;
use tch::nn::{VarStore, Variables};

use crate::Parameter;

/// Tells which parameters were added to a `VarStore` after this was made.
#[derive(Clone)]
pub struct Growth {
    variables: Arc<Mutex<Variables>>,
    count: usize,
}

impl Growth {
    /// Tells of variables that are added from now on.
    pub fn of(vs: &VarStore) -> Self {
        let variables = vs.variables_.clone();
        let count = variables.lock().unwrap_or_else(PoisonError::into_inner).trainable_variables.len();
        Self { variables, count }
    }

    /// The first trainable variable that was added, and how many were before it.
    pub fn added(&self) -> Option<(Parameter, usize)> {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let added = &variables.trainable_variables.get(self.count)?.tensor;
        let id = TensorId::of(added);
        let name = variables.named_variables.iter().find(|(_, tensor)| TensorId::of(tensor) == id);
        let tensor = added.shallow_clone();
        let param = match name {
            Some((name, _)) => Parameter::named(name, tensor),
            None => Parameter::unnamed(tensor),
        };
        Some((param, self.count))
    }
}

impl fmt::Debug for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Growth").field("count", &self.count).finish_non_exhaustive()
    }
}
