//! Linear layers.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::error::NnError;
use crate::init::{self, Fan, Nonlinearity};
use crate::layer::{at_least, empty, python, run};
use crate::tensors::Parameter;

/// A linear layer: `x A^T + b`.
///
/// # Source
/// `torch.nn.Linear`
#[derive(Debug, Module)]
#[module(describe)]
pub struct Linear {
    /// `[out_features, in_features]`.
    pub weight: Parameter,
    /// `[out_features]`.
    pub bias: Option<Parameter>,
    state: ModuleState,
    /// As it is printed.
    name: &'static str,
}

/// Options of a [`Linear`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct LinearBuilder {
    in_features: i64,
    out_features: i64,
    bias: bool,
    name: &'static str,
}

impl LinearBuilder {
    /// Whether there is a bias; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// What is printed in place of `Linear`.
    pub(crate) fn name(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// The layer with new weights.
    ///
    /// # Errors
    /// When a number of features is negative, or memory runs out.
    pub fn build(self) -> Result<Linear, NnError> {
        at_least("Linear", "in_features", self.in_features, 0)?;
        at_least("Linear", "out_features", self.out_features, 0)?;
        let weight = empty(&[self.out_features, self.in_features])?;
        let bias = self.bias.then(|| empty(&[self.out_features])).transpose()?;
        init::kaiming_uniform_(&weight, 5f64.sqrt(), Fan::In, Nonlinearity::LeakyRelu)?;
        if let Some(bias) = &bias {
            let bound = if self.in_features > 0 { 1.0 / (self.in_features as f64).sqrt() } else { 0.0 };
            init::uniform_(bias, -bound, bound)?;
        }
        let bias = bias.as_ref().map(Parameter::new).transpose()?;
        Ok(Linear { weight: Parameter::new(&weight)?, bias, state: ModuleState::default(), name: self.name })
    }
}

impl Linear {
    /// A layer with a bias.
    ///
    /// # Errors
    /// When a number of features is negative, or memory runs out.
    pub fn new(in_features: i64, out_features: i64) -> Result<Self, NnError> {
        Self::builder(in_features, out_features).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(in_features: i64, out_features: i64) -> LinearBuilder {
        LinearBuilder { in_features, out_features, bias: true, name: "Linear" }
    }

    /// # Shapes
    /// `[.., in_features]` to `[.., out_features]`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || input.f_linear(&self.weight, self.bias.as_deref()))
    }

    /// Another layer with the same values.
    pub(crate) fn copied(&self) -> Result<Self, NnError> {
        Ok(Self {
            weight: self.weight.copied()?,
            bias: self.bias.as_ref().map(Parameter::copied).transpose()?,
            state: self.state.clone(),
            name: self.name,
        })
    }

    fn describe(&self) -> String {
        let (size, bias) = (self.weight.size(), python(self.bias.is_some()));
        format!("{}(in_features={}, out_features={}, bias={bias})", self.name, size[1], size[0])
    }
}

/// A bilinear layer: `x1^T A x2 + b`.
///
/// # Source
/// `torch.nn.Bilinear`
#[derive(Debug, Module)]
#[module(describe)]
pub struct Bilinear {
    /// `[out_features, in1_features, in2_features]`.
    pub weight: Parameter,
    /// `[out_features]`.
    pub bias: Option<Parameter>,
    state: ModuleState,
}

impl Bilinear {
    /// A layer with new weights.
    ///
    /// # Errors
    /// When a number of features is not positive, or memory runs out.
    pub fn new(in1_features: i64, in2_features: i64, out_features: i64, bias: bool) -> Result<Self, NnError> {
        at_least("Bilinear", "in1_features", in1_features, 1)?;
        at_least("Bilinear", "in2_features", in2_features, 0)?;
        at_least("Bilinear", "out_features", out_features, 0)?;
        let weight = empty(&[out_features, in1_features, in2_features])?;
        let bias = bias.then(|| empty(&[out_features])).transpose()?;
        let bound = 1.0 / (in1_features as f64).sqrt();
        init::uniform_(&weight, -bound, bound)?;
        if let Some(bias) = &bias {
            init::uniform_(bias, -bound, bound)?;
        }
        let bias = bias.as_ref().map(Parameter::new).transpose()?;
        Ok(Self { weight: Parameter::new(&weight)?, bias, state: ModuleState::default() })
    }

    /// # Shapes
    /// `[.., in1_features]` and `[.., in2_features]` to `[.., out_features]`.
    ///
    /// # Errors
    /// When an input has another shape, dtype or device.
    pub fn forward(&self, input1: &Tensor, input2: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || Tensor::f_bilinear(input1, input2, &self.weight, self.bias.as_deref()))
    }

    fn describe(&self) -> String {
        let size = self.weight.size();
        let bias = python(self.bias.is_some());
        format!("Bilinear(in1_features={}, in2_features={}, out_features={}, bias={bias})", size[1], size[2], size[0])
    }
}
