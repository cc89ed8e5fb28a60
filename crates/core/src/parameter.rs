//! Parameters with the names that they have in their model.

use tch::Tensor;

use crate::growth::Growth;
use crate::module::Module;
use crate::walk::{Item, walk};

/// A tensor to train, and its name in the model where it has one.
///
/// # Source
/// An entry of `Module.named_parameters()`.
#[derive(Debug)]
#[doc(alias = "named_parameters")]
pub struct Parameter {
    name: Option<String>,
    tensor: Tensor,
}

impl Parameter {
    /// A parameter with a name.
    pub fn named(name: impl Into<String>, tensor: Tensor) -> Self {
        Self { name: Some(name.into()), tensor }
    }

    /// A parameter without a name.
    pub fn unnamed(tensor: Tensor) -> Self {
        Self { name: None, tensor }
    }

    /// Its name in the model, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The tensor, sharing its data with the model.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// How errors name it: by its name, or without one by `index`, its place in the list of parameters.
    pub fn label(&self, index: usize) -> String {
        match &self.name {
            Some(name) => format!("`{name}`"),
            None => format!("number {index}"),
        }
    }

    /// The same tensor under the same name.
    pub fn share(&self) -> Self {
        Self { name: self.name.clone(), tensor: self.tensor.shallow_clone() }
    }
}

/// What parameters can be given as: a module, a `VarStore`, pairs of name and tensor, or plain tensors.
///
/// A module gives its parameters in the order in which they were declared, a `VarStore` its trainable variables, frozen ones among them, in the order in which they were made, as
/// `Module.named_parameters()` does. Where parameters have names, states are saved and loaded by name and errors report
/// it.
pub trait IntoParameters {
    /// The parameters in order, sharing their data.
    fn into_parameters(self) -> Vec<Parameter>;

    /// What is saved beside the parameters, by name: a module's persistent buffers, running means for instance, of which a
    /// tied one has several names. A list has none.
    fn buffers(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// As [`Module::growth`]; `None` of a list.
    fn growth(&self) -> Option<Growth> {
        None
    }
}

/// The parameters with `prefix` and a dot before their names: for several models under one optimizer.
pub fn prefixed(prefix: &str, params: impl IntoParameters) -> Vec<Parameter> {
    let put_before = |mut it: Parameter| {
        it.name = it.name.map(|name| format!("{prefix}.{name}"));
        it
    };
    params.into_parameters().into_iter().map(put_before).collect()
}

impl<M: Module> IntoParameters for &M {
    fn into_parameters(self) -> Vec<Parameter> {
        self.named_parameters()
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        persistent_buffers(*self)
    }

    fn growth(&self) -> Option<Growth> {
        Module::growth(*self)
    }
}

impl<M: Module> IntoParameters for &mut M {
    fn into_parameters(self) -> Vec<Parameter> {
        self.named_parameters()
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        persistent_buffers(&**self)
    }

    fn growth(&self) -> Option<Growth> {
        Module::growth(&**self)
    }
}

fn persistent_buffers<M: Module>(module: &M) -> Vec<(String, Tensor)> {
    let mut found = Vec::new();
    walk(module, &mut |item| {
        if let Item::Buffer { name, tensor, persistent: true } = item {
            found.push((name.to_owned(), tensor.shallow_clone()));
        }
    });
    found
}

/// An item of a list of parameters.
trait AsParameter {
    fn as_parameter(&self) -> Parameter;
}

impl AsParameter for Parameter {
    fn as_parameter(&self) -> Parameter {
        self.share()
    }
}

impl AsParameter for Tensor {
    fn as_parameter(&self) -> Parameter {
        Parameter::unnamed(self.shallow_clone())
    }
}

impl AsParameter for &Tensor {
    fn as_parameter(&self) -> Parameter {
        (**self).as_parameter()
    }
}

impl<S: AsRef<str>> AsParameter for (S, Tensor) {
    fn as_parameter(&self) -> Parameter {
        Parameter::named(self.0.as_ref(), self.1.shallow_clone())
    }
}

impl<S: AsRef<str>> AsParameter for (S, &Tensor) {
    fn as_parameter(&self) -> Parameter {
        Parameter::named(self.0.as_ref(), self.1.shallow_clone())
    }
}

macro_rules! lists {
    ($(($($generics:tt)*) $item:ty;)+) => {$(
        impl<$($generics)*> IntoParameters for &[$item] {
            fn into_parameters(self) -> Vec<Parameter> {
                self.iter().map(AsParameter::as_parameter).collect()
            }
        }

        impl<$($generics)*> IntoParameters for Vec<$item> {
            fn into_parameters(self) -> Vec<Parameter> {
                self.as_slice().into_parameters()
            }
        }

        impl<$($generics)*> IntoParameters for &Vec<$item> {
            fn into_parameters(self) -> Vec<Parameter> {
                self.as_slice().into_parameters()
            }
        }
    )+};
}

macro_rules! arrays {
    ($(($($generics:tt)*) $item:ty;)+) => {$(
        impl<$($generics)* const N: usize> IntoParameters for [$item; N] {
            fn into_parameters(self) -> Vec<Parameter> {
                self.as_slice().into_parameters()
            }
        }

        impl<$($generics)* const N: usize> IntoParameters for &[$item; N] {
            fn into_parameters(self) -> Vec<Parameter> {
                self.as_slice().into_parameters()
            }
        }
    )+};
}

lists! { () Parameter; () Tensor; () &Tensor; (S: AsRef<str>) (S, Tensor); (S: AsRef<str>) (S, &Tensor); }
arrays! { () Parameter; () Tensor; () &Tensor; (S: AsRef<str>,) (S, Tensor); (S: AsRef<str>,) (S, &Tensor); }
