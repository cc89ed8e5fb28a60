//! Batch normalization.

use overdrive_core::{ModuleState, Setting, is_recomputing};
use overdrive_nn_macros::Module;
use tch::{Device, Kind, Tensor};

use crate::error::NnError;
use crate::layer::{at_least, float, python, run};
use crate::norm::{ones, zeros};
use crate::tensors::{Buffer, Parameter};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

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
    pub momentum: Setting<Option<f64>>,
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
    /// When the number of features is negative, `eps` is not above 0, or memory runs out.
    pub fn build(self) -> Result<BatchNorm<N>, NnError> {
        at_least(name::<N>(), "num_features", self.num_features, 0)?;
        if self.eps.is_nan() || self.eps <= 0.0 {
            let (found, expected) = (self.eps.to_string(), "above 0".to_owned());
            return Err(NnError::InvalidOption { layer: name::<N>(), option: "eps", found, expected });
        }
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
            momentum: Setting::new(self.momentum),
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
            // The same batch again does not count: a weight of 0 leaves the statistics as they are.
            let counts = !is_recomputing();
            let mut momentum = self.momentum.get().filter(|_| counts).unwrap_or(0.0);
            if let (true, true, Some(count)) = (training, counts, &self.num_batches_tracked) {
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
