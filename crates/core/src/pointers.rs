//! [`Module`] for pointers to modules.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use crate::module::{Module, ModuleId, Visitor};
use crate::module_state::{load_module_state, module_state};
use crate::state::{StateDict, StateError, Stateful};

macro_rules! pointers {
    ($(($($generics:tt)*) $pointer:ty;)+) => {$(
        impl<$($generics)*> Module for $pointer {
            fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
                (**self).visit(visitor);
            }

            fn describe(&self) -> String {
                (**self).describe()
            }

            fn as_any(&self) -> Option<&dyn Any> {
                (**self).as_any()
            }

            fn id(&self) -> Option<ModuleId> {
                (**self).id()
            }
        }
    )+};
}

pointers! {
    (M: Module + ?Sized) &M;
    (M: Module + ?Sized) Box<M>;
    (M: Module + ?Sized) Rc<M>;
    (M: Module + ?Sized) Arc<M>;
}

macro_rules! shared {
    ($($pointer:ident),+) => {$(
        /// A layer that several own.
        impl<M: Module + ?Sized> Stateful for $pointer<M> {
            fn state_dict(&self) -> Result<StateDict, StateError> {
                module_state(self)
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
                load_module_state(self, state)
            }
        }
    )+};
}

shared!(Rc, Arc);
