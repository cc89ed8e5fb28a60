//! Normalization of activations.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{Device, Kind, Tensor};

use crate::error::NnError;
use crate::layer::{at_least, float, python, run};
use crate::size::Shape;
use crate::tensors::Parameter;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub(crate) fn ones(shape: &[i64]) -> Result<Parameter, NnError> {
    Ok(Parameter::new(&Tensor::f_ones(shape, FLOAT)?)?)
}

pub(crate) fn zeros(shape: &[i64]) -> Result<Parameter, NnError> {
    Ok(Parameter::new(&Tensor::f_zeros(shape, FLOAT)?)?)
}

/// Layer normalization: over the last dimensions.
///
/// # Source
/// `torch.nn.LayerNorm`; Ba, Kiros and Hinton, "Layer Normalization", 2016.
#[derive(Debug, Module)]
#[module(describe)]
pub struct LayerNorm {
    /// `normalized_shape`, at first 1.
    pub weight: Option<Parameter>,
    /// `normalized_shape`, at first 0.
    pub bias: Option<Parameter>,
    state: ModuleState,
    normalized_shape: Vec<i64>,
    pub(crate) eps: f64,
}

/// Options of a [`LayerNorm`].
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct LayerNormBuilder {
    normalized_shape: Vec<i64>,
    eps: f64,
    elementwise_affine: bool,
    bias: bool,
}

impl LayerNormBuilder {
    /// Added to the variance; default 1e-5.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Whether there are a weight and a bias; default true.
    pub fn elementwise_affine(mut self, affine: bool) -> Self {
        self.elementwise_affine = affine;
        self
    }

    /// Whether there is a bias beside the weight; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// The layer.
    ///
    /// # Errors
    /// When the shape is empty, or memory runs out.
    pub fn build(self) -> Result<LayerNorm, NnError> {
        check_shape("LayerNorm", &self.normalized_shape)?;
        let Self { normalized_shape, eps, elementwise_affine, bias } = self;
        Ok(LayerNorm {
            weight: elementwise_affine.then(|| ones(&normalized_shape)).transpose()?,
            bias: (elementwise_affine && bias).then(|| zeros(&normalized_shape)).transpose()?,
            state: ModuleState::default(),
            normalized_shape,
            eps,
        })
    }
}

impl LayerNorm {
    /// A layer over the last dimensions, which have this shape, with PyTorch's defaults.
    ///
    /// # Errors
    /// When the shape is empty, or memory runs out.
    pub fn new(normalized_shape: impl Into<Shape>) -> Result<Self, NnError> {
        Self::builder(normalized_shape).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(normalized_shape: impl Into<Shape>) -> LayerNormBuilder {
        let normalized_shape = normalized_shape.into().0;
        LayerNormBuilder { normalized_shape, eps: 1e-5, elementwise_affine: true, bias: true }
    }

    /// # Shapes
    /// `[.., ..normalized_shape]` to the same.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            input.f_layer_norm(&self.normalized_shape[..], self.weight.as_deref(), self.bias.as_deref(), self.eps, true)
        })
    }

    /// Another layer with the same values.
    pub(crate) fn copied(&self) -> Result<Self, NnError> {
        Ok(Self {
            weight: self.weight.as_ref().map(Parameter::copied).transpose()?,
            bias: self.bias.as_ref().map(Parameter::copied).transpose()?,
            state: self.state.clone(),
            normalized_shape: self.normalized_shape.clone(),
            eps: self.eps,
        })
    }

    fn describe(&self) -> String {
        let shape = crate::size::tuple(&self.normalized_shape);
        let (eps, affine) = (float(self.eps), python(self.weight.is_some()));
        format!("LayerNorm({shape}, eps={eps}, elementwise_affine={affine})")
    }
}

/// Normalization by the root of the mean of the squares, over the last dimensions.
///
/// # Source
/// `torch.nn.RMSNorm`; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#[derive(Debug, Module)]
#[module(describe)]
#[doc(alias = "RMSNorm")]
pub struct RmsNorm {
    /// `normalized_shape`, at first 1.
    pub weight: Option<Parameter>,
    state: ModuleState,
    normalized_shape: Vec<i64>,
    eps: Option<f64>,
}

/// Options of an [`RmsNorm`].
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct RmsNormBuilder {
    normalized_shape: Vec<i64>,
    eps: Option<f64>,
    elementwise_affine: bool,
}

impl RmsNormBuilder {
    /// Added to the mean of the squares; default the smallest difference from 1 of the input's dtype.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = Some(eps);
        self
    }

    /// Whether there is a weight; default true.
    pub fn elementwise_affine(mut self, affine: bool) -> Self {
        self.elementwise_affine = affine;
        self
    }

    /// The layer.
    ///
    /// # Errors
    /// When the shape is empty, or memory runs out.
    pub fn build(self) -> Result<RmsNorm, NnError> {
        check_shape("RMSNorm", &self.normalized_shape)?;
        let Self { normalized_shape, eps, elementwise_affine } = self;
        let weight = elementwise_affine.then(|| ones(&normalized_shape)).transpose()?;
        Ok(RmsNorm { weight, state: ModuleState::default(), normalized_shape, eps })
    }
}

impl RmsNorm {
    /// A layer over the last dimensions, which have this shape, with PyTorch's defaults.
    ///
    /// # Errors
    /// When the shape is empty, or memory runs out.
    pub fn new(normalized_shape: impl Into<Shape>) -> Result<Self, NnError> {
        Self::builder(normalized_shape).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(normalized_shape: impl Into<Shape>) -> RmsNormBuilder {
        RmsNormBuilder { normalized_shape: normalized_shape.into().0, eps: None, elementwise_affine: true }
    }

    /// # Shapes
    /// `[.., ..normalized_shape]` to the same.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || input.f_rms_norm(&self.normalized_shape[..], self.weight.as_deref(), self.eps))
    }

    fn describe(&self) -> String {
        let (shape, eps) = (crate::size::tuple(&self.normalized_shape), self.eps.map_or("None".to_owned(), float));
        format!("RMSNorm({shape}, eps={eps}, elementwise_affine={})", python(self.weight.is_some()))
    }
}

/// Normalization within groups of channels.
///
/// # Source
/// `torch.nn.GroupNorm`; Wu and He, "Group Normalization", 2018.
#[derive(Debug, Module)]
#[module(describe)]
pub struct GroupNorm {
    /// `[num_channels]`, at first 1.
    pub weight: Option<Parameter>,
    /// `[num_channels]`, at first 0.
    pub bias: Option<Parameter>,
    state: ModuleState,
    num_groups: i64,
    num_channels: i64,
    eps: f64,
}

/// Options of a [`GroupNorm`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct GroupNormBuilder {
    num_groups: i64,
    num_channels: i64,
    eps: f64,
    affine: bool,
}

impl GroupNormBuilder {
    /// Added to the variance; default 1e-5.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Whether there are a weight and a bias; default true.
    pub fn affine(mut self, affine: bool) -> Self {
        self.affine = affine;
        self
    }

    /// The layer.
    ///
    /// # Errors
    /// When `num_groups` does not divide `num_channels`, or memory runs out.
    pub fn build(self) -> Result<GroupNorm, NnError> {
        let Self { num_groups, num_channels, eps, affine } = self;
        at_least("GroupNorm", "num_groups", num_groups, 1)?;
        if num_channels < 0 || num_channels % num_groups != 0 {
            let (found, expected) = (num_channels.to_string(), format!("divisible by the {num_groups} groups"));
            return Err(NnError::InvalidOption { layer: "GroupNorm", option: "num_channels", found, expected });
        }
        let weight = affine.then(|| ones(&[num_channels])).transpose()?;
        let bias = affine.then(|| zeros(&[num_channels])).transpose()?;
        Ok(GroupNorm { weight, bias, state: ModuleState::default(), num_groups, num_channels, eps })
    }
}

impl GroupNorm {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When `num_groups` does not divide `num_channels`, or memory runs out.
    pub fn new(num_groups: i64, num_channels: i64) -> Result<Self, NnError> {
        Self::builder(num_groups, num_channels).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(num_groups: i64, num_channels: i64) -> GroupNormBuilder {
        GroupNormBuilder { num_groups, num_channels, eps: 1e-5, affine: true }
    }

    /// # Shapes
    /// `[batch, num_channels, ..]` to the same.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            self.check(&input.size())?;
            input.f_group_norm(self.num_groups, self.weight.as_deref(), self.bias.as_deref(), self.eps, true)
        })
    }

    /// libtorch computes the bias from one value a group.
    fn check(&self, size: &[i64]) -> Result<(), tch::TchError> {
        let refuse = |expected: &str| Err(tch::TchError::Shape(format!("expected {expected}, got shape {size:?}")));
        match size {
            [] | [_] => refuse("at least 2 dimensions"),
            [batch, channels, rest @ ..] if batch * channels / self.num_groups * rest.iter().product::<i64>() == 1 => {
                refuse("more than one value per group and channel")
            }
            _ => Ok(()),
        }
    }

    fn describe(&self) -> String {
        let (eps, affine) = (float(self.eps), python(self.weight.is_some()));
        format!("GroupNorm({}, {}, eps={eps}, affine={affine})", self.num_groups, self.num_channels)
    }
}

fn check_shape(layer: &'static str, shape: &[i64]) -> Result<(), NnError> {
    if shape.is_empty() {
        let (found, expected) = ("[]".to_owned(), "at least one dimension".to_owned());
        return Err(NnError::InvalidOption { layer, option: "normalized_shape", found, expected });
    }
    shape.iter().try_for_each(|size| at_least(layer, "normalized_shape", *size, 0))
}
