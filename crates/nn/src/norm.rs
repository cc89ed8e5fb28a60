//! Normalization of activations.

use std::cell::Cell;

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{Device, Kind, Tensor};

use crate::error::NnError;
use crate::layer::{at_least, python, run};
use crate::tensors::{Buffer, Parameter};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn ones(shape: &[i64]) -> Result<Parameter, NnError> {
    Ok(Parameter::new(&Tensor::f_ones(shape, FLOAT)?)?)
}

fn zeros(shape: &[i64]) -> Result<Parameter, NnError> {
    Ok(Parameter::new(&Tensor::f_zeros(shape, FLOAT)?)?)
}

/// Batch normalization of inputs with `N` dimensions besides batch and channels.
///
/// # Source
/// `torch.nn.BatchNorm1d`, `BatchNorm2d`, `BatchNorm3d`; Ioffe and Szegedy, "Batch Normalization", 2015.
#[derive(Debug, Module)]
#[module(describe)]
pub struct BatchNorm<const N: usize> {
    /// `[num_features]`, at first 1.
    pub weight: Option<Parameter>,
    /// `[num_features]`, at first 0.
    pub bias: Option<Parameter>,
    /// `[num_features]`, at first 0.
    pub running_mean: Option<Buffer>,
    /// `[num_features]`, at first 1.
    pub running_var: Option<Buffer>,
    /// The number of batches seen in training, int64.
    pub num_batches_tracked: Option<Buffer>,
    state: ModuleState,
    #[module(skip)]
    options: BatchNormBuilder<N>,
    /// The weight of a new batch in the running statistics, see [`BatchNormBuilder::momentum`].
    #[module(skip)]
    pub momentum: Cell<Option<f64>>,
}

/// Batch normalization of `[batch, features]` or `[batch, channels, length]`.
pub type BatchNorm1d = BatchNorm<1>;
/// Batch normalization of images, `[batch, channels, height, width]`.
pub type BatchNorm2d = BatchNorm<2>;
/// Batch normalization of volumes, `[batch, channels, depth, height, width]`.
pub type BatchNorm3d = BatchNorm<3>;

/// Options of a [`BatchNorm`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct BatchNormBuilder<const N: usize> {
    num_features: i64,
    eps: f64,
    momentum: Option<f64>,
    affine: bool,
    track_running_stats: bool,
}

impl<const N: usize> BatchNormBuilder<N> {
    /// Added to the variance; default 1e-5.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// The weight of a new batch in the running statistics; default 0.1. With `None`, all batches have the same weight,
    /// and each training step waits for the device.
    pub fn momentum(mut self, momentum: impl Into<Option<f64>>) -> Self {
        self.momentum = momentum.into();
        self
    }

    /// Whether there are weight and bias; default true.
    pub fn affine(mut self, affine: bool) -> Self {
        self.affine = affine;
        self
    }

    /// Whether running statistics are kept, and used in evaluation mode; default true.
    pub fn track_running_stats(mut self, track: bool) -> Self {
        self.track_running_stats = track;
        self
    }

    /// The layer.
    ///
    /// # Errors
    /// When the number of features is negative, or memory runs out.
    pub fn build(self) -> Result<BatchNorm<N>, NnError> {
        at_least(name::<N>(), "num_features", self.num_features, 0)?;
        let shape = [self.num_features];
        let tracked = |tensor: fn(&[i64]) -> Result<Tensor, tch::TchError>, shape: &[i64]| {
            self.track_running_stats.then(|| Ok::<_, NnError>(Buffer::new(&tensor(shape)?))).transpose()
        };
        Ok(BatchNorm {
            weight: self.affine.then(|| ones(&shape)).transpose()?,
            bias: self.affine.then(|| zeros(&shape)).transpose()?,
            running_mean: tracked(|shape| Tensor::f_zeros(shape, FLOAT), &shape)?,
            running_var: tracked(|shape| Tensor::f_ones(shape, FLOAT), &shape)?,
            num_batches_tracked: tracked(|shape| Tensor::f_zeros(shape, (Kind::Int64, Device::Cpu)), &[])?,
            state: ModuleState::default(),
            options: self,
            momentum: Cell::new(self.momentum),
        })
    }
}

impl<const N: usize> BatchNorm<N> {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When the number of features is negative, or memory runs out.
    pub fn new(num_features: i64) -> Result<Self, NnError> {
        Self::builder(num_features).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(num_features: i64) -> BatchNormBuilder<N> {
        BatchNormBuilder { num_features, eps: 1e-5, momentum: Some(0.1), affine: true, track_running_stats: true }
    }

    /// In training mode, normalizes by the batch's own mean and variance and updates the running ones; in evaluation
    /// mode, by the running ones.
    ///
    /// # Shapes
    /// `[batch, num_features, ..]` with `N` more dimensions (of length 1 also with none), to the same.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device, or a training batch has one value a channel.
    ///
    /// # Syncs
    /// With a momentum of `None` in training; otherwise not.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            self.check(input)?;
            let training = self.state.is_training();
            let mut momentum = self.momentum.get().unwrap_or(0.0);
            if let (true, Some(count)) = (training, &self.num_batches_tracked) {
                let _no_grad = tch::no_grad_guard();
                let mut count = count.shallow_clone();
                count += 1;
                if self.momentum.get().is_none() {
                    momentum = 1.0 / count.f_int64_value(&[])? as f64;
                }
            }
            input.f_batch_norm(
                self.weight.as_deref(),
                self.bias.as_deref(),
                self.running_mean.as_deref(),
                self.running_var.as_deref(),
                training || self.running_mean.is_none(),
                momentum,
                self.options.eps,
                true,
            )
        })
    }

    /// libtorch computes with any number of dimensions, and NaN from one value a channel.
    fn check(&self, input: &Tensor) -> Result<(), tch::TchError> {
        let size = input.size();
        let refuse = |expected: &str| Err(tch::TchError::Shape(format!("expected {expected}, got shape {size:?}")));
        match (N, size.len()) {
            (1, 2 | 3) | (2, 4) | (3, 5) => {}
            (1, _) => return refuse("2 or 3 dimensions"),
            _ => return refuse(&format!("{} dimensions", N + 2)),
        }
        let is_of_batch = self.state.is_training() || self.running_mean.is_none();
        if is_of_batch && size[0] * size[2..].iter().product::<i64>() == 1 {
            return refuse("more than one value per channel when training");
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let BatchNormBuilder { num_features, eps, affine, track_running_stats, .. } = self.options;
        let momentum = self.momentum.get().map_or("None".to_owned(), float);
        format!(
            "{}({num_features}, eps={}, momentum={momentum}, affine={}, track_running_stats={})",
            name::<N>(),
            float(eps),
            python(affine),
            python(track_running_stats)
        )
    }
}

fn name<const N: usize>() -> &'static str {
    match N {
        1 => "BatchNorm1d",
        2 => "BatchNorm2d",
        _ => "BatchNorm3d",
    }
}

/// A number as Python prints it.
fn float(value: f64) -> String {
    match value {
        value if value != 0.0 && value.abs() < 1e-4 => {
            let text = format!("{value:e}");
            let (digits, exponent) = text.split_once("e-").unwrap_or((&text, "0"));
            format!("{digits}e-{exponent:0>2}")
        }
        value => format!("{value:?}"),
    }
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
    eps: f64,
}

impl LayerNorm {
    /// A layer with PyTorch's defaults: an `eps` of 1e-5, a weight and a bias.
    ///
    /// # Errors
    /// When `normalized_shape` is empty, or memory runs out.
    pub fn new(normalized_shape: &[i64]) -> Result<Self, NnError> {
        Self::with(normalized_shape, 1e-5, true, true)
    }

    /// A layer with other options: `eps` is added to the variance; weight and bias may be left out.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(normalized_shape: &[i64], eps: f64, elementwise_affine: bool, bias: bool) -> Result<Self, NnError> {
        check_shape("LayerNorm", normalized_shape)?;
        Ok(Self {
            weight: elementwise_affine.then(|| ones(normalized_shape)).transpose()?,
            bias: (elementwise_affine && bias).then(|| zeros(normalized_shape)).transpose()?,
            state: ModuleState::default(),
            normalized_shape: normalized_shape.to_vec(),
            eps,
        })
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

    fn describe(&self) -> String {
        let shape = crate::size::tuple(&self.normalized_shape);
        let mut text = format!(
            "LayerNorm({shape}, eps={}, elementwise_affine={}",
            float(self.eps),
            python(self.weight.is_some())
        );
        text += &format!(", bias={})", python(self.bias.is_some()));
        text
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

impl RmsNorm {
    /// A layer with PyTorch's defaults: a weight, and the input dtype's smallest difference from 1 as `eps`.
    ///
    /// # Errors
    /// When `normalized_shape` is empty, or memory runs out.
    pub fn new(normalized_shape: &[i64]) -> Result<Self, NnError> {
        Self::with(normalized_shape, None, true)
    }

    /// A layer with other options.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(normalized_shape: &[i64], eps: Option<f64>, elementwise_affine: bool) -> Result<Self, NnError> {
        check_shape("RmsNorm", normalized_shape)?;
        let weight = elementwise_affine.then(|| ones(normalized_shape)).transpose()?;
        Ok(Self { weight, state: ModuleState::default(), normalized_shape: normalized_shape.to_vec(), eps })
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

impl GroupNorm {
    /// A layer with PyTorch's defaults: an `eps` of 1e-5, a weight and a bias.
    ///
    /// # Errors
    /// When `num_groups` does not divide `num_channels`, or memory runs out.
    pub fn new(num_groups: i64, num_channels: i64) -> Result<Self, NnError> {
        Self::with(num_groups, num_channels, 1e-5, true)
    }

    /// A layer with other options: `eps` is added to the variance; weight and bias may be left out.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(num_groups: i64, num_channels: i64, eps: f64, affine: bool) -> Result<Self, NnError> {
        at_least("GroupNorm", "num_groups", num_groups, 1)?;
        if num_channels < 0 || num_channels % num_groups != 0 {
            let (found, expected) = (num_channels.to_string(), format!("divisible by the {num_groups} groups"));
            return Err(NnError::InvalidOption { layer: "GroupNorm", option: "num_channels", found, expected });
        }
        let shape = [num_channels];
        let weight = affine.then(|| ones(&shape)).transpose()?;
        let bias = affine.then(|| zeros(&shape)).transpose()?;
        Ok(Self { weight, bias, state: ModuleState::default(), num_groups, num_channels, eps })
    }

    /// # Shapes
    /// `[batch, num_channels, ..]` to the same.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            input.f_group_norm(self.num_groups, self.weight.as_deref(), self.bias.as_deref(), self.eps, true)
        })
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
