//! Averages of what each batch gives.

use overdrive_core::{GradientSync, SyncError, TorchError};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use crate::error::NnError;
use crate::layer::at_least;

static ADD: LazyOp = LazyOp::new("aten::add_", "Tensor");

/// What [`AverageMeter::summary`] shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Summary {
    /// Nothing.
    None,
    /// The average.
    #[default]
    Average,
    /// The sum.
    Sum,
    /// The number of samples.
    Count,
}

/// The latest value and the average of a number that each batch gives: a loss on the device, or a time on the host.
///
/// Values on a device are added up there, in float64 (as `loss.item()` would be on the host), and read when asked for.
///
/// # Source
/// `AverageMeter` of PyTorch's ImageNet example
#[derive(Debug)]
pub struct AverageMeter {
    name: String,
    format: Format,
    summary: Summary,
    latest: Number,
    /// The weighted sum of values on the host, and of those on a device.
    sums: (f64, Option<Tensor>),
    count: i64,
}

#[derive(Debug)]
enum Number {
    Host(f64),
    Device(Tensor),
}

#[derive(Clone, Copy, Debug)]
enum Format {
    Fixed { width: usize, digits: usize },
    Scientific { digits: usize },
}

impl AverageMeter {
    /// A meter that shows 6 decimals.
    pub fn new(name: impl Into<String>) -> Self {
        let format = Format::Fixed { width: 0, digits: 6 };
        let (latest, sums) = (Number::Host(0.0), (0.0, None));
        Self { name: name.into(), format, summary: Summary::default(), latest, sums, count: 0 }
    }

    /// Shows this many decimals, in at least this width: Python's `:6.2f` is `fixed(6, 2)`.
    pub fn fixed(mut self, width: usize, digits: usize) -> Self {
        self.format = Format::Fixed { width, digits };
        self
    }

    /// Shows a power of ten, with this many decimals: Python's `:.4e` is `scientific(4)`.
    pub fn scientific(mut self, digits: usize) -> Self {
        self.format = Format::Scientific { digits };
        self
    }

    /// What [`summary`](Self::summary) shows; the average unless set.
    pub fn summary_type(mut self, summary: Summary) -> Self {
        self.summary = summary;
        self
    }

    /// Takes the mean value of `n` samples, on any device.
    ///
    /// # Shapes
    /// One number.
    ///
    /// # Errors
    /// When it is not one number, is on another device than the values before, or `n` is negative.
    ///
    /// # Syncs
    /// No.
    pub fn update(&mut self, value: &Tensor, n: i64) -> Result<(), NnError> {
        let _no_grad = tch::no_grad_guard();
        self.check(n)?;
        if !value.defined() || value.numel() != 1 {
            let shape = if value.defined() { value.size() } else { Vec::new() };
            let expected = "one number".to_owned();
            return Err(NnError::InvalidShape { function: "AverageMeter::update", expected, shape });
        }
        // Apple's GPUs have no float64.
        let kind = if value.device() == Device::Mps { Kind::Float } else { Kind::Double };
        // A copy, because the caller may write to the tensor later.
        let value = value.f_detach_copy()?.f_reshape([0i64; 0])?;
        let sum = match &self.sums.1 {
            Some(sum) => sum.shallow_clone(),
            None => Tensor::f_zeros([0i64; 0], (kind, value.device()))?,
        };
        // In one kernel where the product is exact: float64 holds a float32 times a count.
        let (value_in, factor) = match value.kind() {
            Kind::Double => (&value * n as f64, 1.0),
            _ => (value.shallow_clone(), n as f64),
        };
        ADD.call(&[Arg::Tensor(&sum), Arg::Tensor(&value_in), Arg::Double(factor)])?;
        self.sums.1 = Some(sum);
        self.latest = Number::Device(value);
        self.count += n;
        Ok(())
    }

    /// Takes the mean value of `n` samples that the host knows: the seconds that a batch took, with an `n` of 1.
    ///
    /// # Errors
    /// When `n` is negative.
    pub fn update_host(&mut self, value: f64, n: i64) -> Result<(), NnError> {
        self.check(n)?;
        self.sums.0 += value * n as f64;
        self.latest = Number::Host(value);
        self.count += n;
        Ok(())
    }

    fn check(&self, n: i64) -> Result<(), NnError> {
        at_least("AverageMeter", "n", n, 0)
    }

    /// The latest value; 0 before the first.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Waits for the device, if the value is there.
    pub fn val(&self) -> Result<f64, TorchError> {
        match &self.latest {
            Number::Host(value) => Ok(*value),
            Number::Device(value) => Ok(value.f_double_value(&[])?),
        }
    }

    /// The weighted sum of all values.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Waits for the device, if values were there.
    pub fn sum(&self) -> Result<f64, TorchError> {
        let (host, device) = &self.sums;
        Ok(host + device.as_ref().map_or(Ok(0.0), |sum| sum.f_double_value(&[]))?)
    }

    /// The number of samples.
    pub fn count(&self) -> i64 {
        self.count
    }

    /// The average over all samples; 0 before the first.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// As [`sum`](Self::sum).
    pub fn avg(&self) -> Result<f64, TorchError> {
        Ok(if self.count == 0 { 0.0 } else { self.sum()? / self.count as f64 })
    }

    /// Begins anew.
    pub fn reset(&mut self) {
        (self.latest, self.sums, self.count) = (Number::Host(0.0), (0.0, None), 0);
    }

    /// Replaces the sum and the number of samples by those of all ranks, of a process group or of a
    /// `DistributedDataParallel`.
    ///
    /// # Errors
    /// When libtorch or a rank fails.
    ///
    /// # Syncs
    /// Waits for the device and for all ranks.
    pub fn all_reduce(&mut self, ranks: &impl GradientSync) -> Result<(), SyncError> {
        let sum = self.sum().map_err(|error| SyncError(Box::new(error)))?;
        let (sum, count) = (ranks.sum(sum)?, ranks.sum(self.count as f64)?);
        (self.sums, self.count) = ((sum, None), count as i64);
        Ok(())
    }

    /// Its name, latest value and average: `Loss 6.9078e+00 (6.9112e+00)`.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// As [`sum`](Self::sum).
    #[doc(alias = "__str__")]
    pub fn to_text(&self) -> Result<String, TorchError> {
        Ok(format!("{} {} ({})", self.name, self.format.text(self.val()?), self.format.text(self.avg()?)))
    }

    /// Its name, and the average, the sum or the number of samples with 3 decimals, as
    /// [`summary_type`](Self::summary_type) says.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// As [`sum`](Self::sum).
    pub fn summary(&self) -> Result<String, TorchError> {
        let value = match self.summary {
            Summary::None => return Ok(String::new()),
            Summary::Average => self.avg()?,
            Summary::Sum => self.sum()?,
            Summary::Count => self.count as f64,
        };
        Ok(format!("{} {}", self.name, Format::Fixed { width: 0, digits: 3 }.text(value)))
    }
}

impl Format {
    /// As Python's `format` writes it.
    fn text(self, value: f64) -> String {
        match self {
            // Python writes NaN in small letters.
            _ if value.is_nan() => format!("{:>1$}", "nan", self.width()),
            Self::Fixed { width, digits } => format!("{value:width$.digits$}"),
            Self::Scientific { digits } => {
                let text = format!("{value:.digits$e}");
                match text.split_once('e').map(|(mantissa, power)| (mantissa, power.parse::<i32>())) {
                    Some((mantissa, Ok(power))) => format!("{mantissa}e{power:+03}"),
                    _ => text,
                }
            }
        }
    }

    fn width(self) -> usize {
        match self {
            Self::Fixed { width, .. } => width,
            Self::Scientific { .. } => 0,
        }
    }
}
