//! The types that a field of a module can have.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use crate::module::{Module, ModuleState, Visitor};

/// A field of a module: a module, a parameter, a buffer or a plain value.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a field of a module",
    note = "a tensor is an `nn::Parameter` or an `nn::Buffer`, a list of modules an `nn::ModuleList`; `#[module(skip)]` \
            leaves a field of another type out"
)]
pub trait Part {
    /// Shows the visitor what is in the field, under the field's name.
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>);
}

impl<M: Module> Part for M {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.module(name, self);
    }
}

impl<P: Part> Part for Option<P> {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        if let Some(part) = self {
            part.show(name, visitor);
        }
    }
}

impl Part for ModuleState {
    fn show<'a>(&'a self, _: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.state(self);
    }
}

/// A plain value that can change, which is not part of the module's state.
impl<T: Copy + Debug> Part for Cell<T> {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.cell(name, &self.get());
    }
}

/// A plain value of a module that can change while the module is shared, also between threads.
#[derive(Debug, Default)]
pub struct Setting<T>(Mutex<T>);

impl<T: Copy> Setting<T> {
    /// With this value.
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value.
    pub fn get(&self) -> T {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the value.
    pub fn set(&self, value: T) {
        self.replace(value);
    }

    /// Sets the value; returns the one before.
    pub fn replace(&self, value: T) -> T {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), value)
    }
}

/// Not part of the module's state.
impl<T: Copy + Debug> Part for Setting<T> {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.cell(name, &self.get());
    }
}

macro_rules! plain {
    ($($type:ty),+) => {$(
        /// A plain value, which is not part of the module's state.
        impl Part for $type {
            fn show<'a>(&'a self, _: &str, _: &mut dyn Visitor<'a>) {}
        }
    )+};
}

plain!(bool, i32, i64, u32, u64, usize, f32, f64, String, &'static str);
plain!(tch::Device, tch::Kind, Vec<i64>);
