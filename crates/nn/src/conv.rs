//! Convolutions over 1, 2 or 3 dimensions.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{TchError, Tensor};

use crate::error::NnError;
use crate::init::{self, Fan, Nonlinearity};
use crate::layer::{at_least, empty, run};
use crate::size::Size;
use crate::tensors::Parameter;

/// A convolution over `N` dimensions.
///
/// # Source
/// `torch.nn.Conv1d`, `Conv2d`, `Conv3d`
#[derive(Debug, Module)]
#[module(describe)]
pub struct Conv<const N: usize> {
    /// `[out_channels, in_channels / groups, ..kernel_size]`.
    pub weight: Parameter,
    /// `[out_channels]`.
    pub bias: Option<Parameter>,
    state: ModuleState,
    #[module(skip)]
    options: ConvBuilder<N>,
}

/// A convolution over one dimension.
pub type Conv1d = Conv<1>;
/// A convolution over two dimensions.
pub type Conv2d = Conv<2>;
/// A convolution over three dimensions.
pub type Conv3d = Conv<3>;

/// How much is added at the borders of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// So much on both sides.
    Size(Size<N>),
    /// As much as makes the output as large as the input; the stride has to be 1.
    Same,
    /// Nothing.
    Valid,
}

impl<const N: usize> From<i64> for Padding<N> {
    fn from(size: i64) -> Self {
        Self::Size(size.into())
    }
}

impl<const N: usize> From<[i64; N]> for Padding<N> {
    fn from(sizes: [i64; N]) -> Self {
        Self::Size(sizes.into())
    }
}

/// What is added at the borders of the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PaddingMode {
    /// Zeros.
    #[default]
    Zeros,
    /// The input mirrored at its border, without the border itself.
    Reflect,
    /// The border's values.
    Replicate,
    /// The values of the other side.
    Circular,
}

impl PaddingMode {
    fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Reflect => "reflect",
            Self::Replicate => "replicate",
            Self::Circular => "circular",
        }
    }
}

/// Options of a [`Conv`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct ConvBuilder<const N: usize> {
    in_channels: i64,
    out_channels: i64,
    kernel_size: Size<N>,
    stride: Size<N>,
    padding: Padding<N>,
    dilation: Size<N>,
    groups: i64,
    bias: bool,
    padding_mode: PaddingMode,
}

impl<const N: usize> ConvBuilder<N> {
    /// By how much the kernel moves; default 1.
    pub fn stride(mut self, stride: impl Into<Size<N>>) -> Self {
        self.stride = stride.into();
        self
    }

    /// How much is added at the borders; default 0.
    pub fn padding(mut self, padding: impl Into<Padding<N>>) -> Self {
        self.padding = padding.into();
        self
    }

    /// As much as makes the output as large as the input, in place of [`padding`](Self::padding).
    ///
    /// # Source
    /// `padding='same'`
    pub fn padding_same(mut self) -> Self {
        self.padding = Padding::Same;
        self
    }

    /// The distance of the kernel's elements; default 1.
    pub fn dilation(mut self, dilation: impl Into<Size<N>>) -> Self {
        self.dilation = dilation.into();
        self
    }

    /// Groups of channels that are convolved separately; default 1.
    pub fn groups(mut self, groups: i64) -> Self {
        self.groups = groups;
        self
    }

    /// Whether there is a bias; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// What is added at the borders; default zeros.
    pub fn padding_mode(mut self, padding_mode: PaddingMode) -> Self {
        self.padding_mode = padding_mode;
        self
    }

    /// The layer with new weights.
    ///
    /// # Errors
    /// When `groups` does not divide the channels, a size is out of its range, `same` padding is combined with a stride,
    /// or memory runs out.
    pub fn build(self) -> Result<Conv<N>, NnError> {
        const { assert!(N >= 1 && N <= 3, "convolutions have 1, 2 or 3 dimensions") };
        let layer = name::<N>(false);
        check(layer, (self.in_channels, self.out_channels, self.groups), self.kernel_size, self.stride, self.dilation)?;
        if self.padding == Padding::Same && !self.stride.is_all(1) {
            let (found, expected) = (self.stride.text(), "1 with `same` padding".to_owned());
            return Err(NnError::InvalidOption { layer, option: "stride", found, expected });
        }
        let channels = [self.out_channels, self.in_channels / self.groups];
        let (weight, bias) = draw(&[&channels[..], &self.kernel_size.0].concat(), self.bias, self.out_channels)?;
        Ok(Conv { weight, bias, state: ModuleState::default(), options: self })
    }

    /// How much is added on both sides of each dimension, the last dimension first, as `pad` takes it.
    fn reversed_padding(&self) -> Vec<i64> {
        let of = |dim: usize| match self.padding {
            Padding::Size(size) => [size.0[dim]; 2],
            Padding::Valid => [0; 2],
            Padding::Same => {
                let total = self.dilation.0[dim] * (self.kernel_size.0[dim] - 1);
                [total / 2, total - total / 2]
            }
        };
        (0..N).rev().flat_map(of).collect()
    }
}

impl<const N: usize> Conv<N> {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When a size is out of its range, or memory runs out.
    pub fn new(in_channels: i64, out_channels: i64, kernel_size: impl Into<Size<N>>) -> Result<Self, NnError> {
        Self::builder(in_channels, out_channels, kernel_size).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(in_channels: i64, out_channels: i64, kernel_size: impl Into<Size<N>>) -> ConvBuilder<N> {
        ConvBuilder {
            in_channels,
            out_channels,
            kernel_size: kernel_size.into(),
            stride: Size([1; N]),
            padding: Padding::Size(Size([0; N])),
            dilation: Size([1; N]),
            groups: 1,
            bias: true,
            padding_mode: PaddingMode::Zeros,
        }
    }

    /// # Shapes
    /// `[batch, in_channels, ..]` or `[in_channels, ..]` to the same with `out_channels`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            let options = &self.options;
            if options.padding_mode == PaddingMode::Zeros {
                return self.convolve(input, options.padding);
            }
            let padded = input.f_pad(options.reversed_padding(), options.padding_mode.name(), None)?;
            self.convolve(&padded, Padding::Valid)
        })
    }

    fn convolve(&self, x: &Tensor, padding: Padding<N>) -> Result<Tensor, TchError> {
        let ConvBuilder { stride, dilation, groups, .. } = &self.options;
        let (w, b, stride, dilation, groups) =
            (&*self.weight, self.bias.as_deref(), &stride.0[..], &dilation.0[..], *groups);
        let padding = match padding {
            Padding::Size(size) => size,
            Padding::Valid => Size([0; N]),
            Padding::Same => {
                return match N {
                    1 => x.f_conv1d_padding(w, b, stride, "same", dilation, groups),
                    2 => x.f_conv2d_padding(w, b, stride, "same", dilation, groups),
                    _ => x.f_conv3d_padding(w, b, stride, "same", dilation, groups),
                };
            }
        };
        let padding = &padding.0[..];
        match N {
            1 => x.f_conv1d(w, b, stride, padding, dilation, groups),
            2 => x.f_conv2d(w, b, stride, padding, dilation, groups),
            _ => x.f_conv3d(w, b, stride, padding, dilation, groups),
        }
    }

    fn describe(&self) -> String {
        let ConvBuilder { in_channels, out_channels, kernel_size, stride, .. } = &self.options;
        let (kernel_size, stride) = (kernel_size.text(), stride.text());
        let mut text =
            format!("{}({in_channels}, {out_channels}, kernel_size={kernel_size}, stride={stride}", name::<N>(false));
        match self.options.padding {
            Padding::Size(size) if size.is_all(0) => {}
            Padding::Size(size) => text += &format!(", padding={}", size.text()),
            Padding::Same => text += ", padding=same",
            Padding::Valid => text += ", padding=valid",
        }
        text += &common(self.options.dilation, None, self.options.groups, self.bias.is_some());
        if self.options.padding_mode != PaddingMode::Zeros {
            text += &format!(", padding_mode={}", self.options.padding_mode.name());
        }
        text + ")"
    }
}

pub(crate) fn name<const N: usize>(is_transposed: bool) -> &'static str {
    match (is_transposed, N) {
        (false, 1) => "Conv1d",
        (false, 2) => "Conv2d",
        (false, _) => "Conv3d",
        (true, 1) => "ConvTranspose1d",
        (true, 2) => "ConvTranspose2d",
        (true, _) => "ConvTranspose3d",
    }
}

pub(crate) fn check<const N: usize>(
    layer: &'static str,
    (in_channels, out_channels, groups): (i64, i64, i64),
    kernel_size: Size<N>,
    stride: Size<N>,
    dilation: Size<N>,
) -> Result<(), NnError> {
    at_least(layer, "groups", groups, 1)?;
    for (option, found) in [("in_channels", in_channels), ("out_channels", out_channels)] {
        at_least(layer, option, found, 0)?;
        if found % groups != 0 {
            let (found, expected) = (found.to_string(), format!("divisible by the {groups} groups"));
            return Err(NnError::InvalidOption { layer, option, found, expected });
        }
    }
    for (option, size) in [("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)] {
        size.0.iter().try_for_each(|size| at_least(layer, option, *size, 1))?;
    }
    Ok(())
}

/// A new weight, then a new bias.
pub(crate) fn draw(shape: &[i64], bias: bool, out_channels: i64) -> Result<(Parameter, Option<Parameter>), NnError> {
    let weight = empty(shape)?;
    let bias = bias.then(|| empty(&[out_channels])).transpose()?;
    init::kaiming_uniform_(&weight, 5f64.sqrt(), Fan::In, Nonlinearity::LeakyRelu)?;
    if let Some(bias) = &bias {
        let fan_in: i64 = shape[1..].iter().product();
        if fan_in != 0 {
            let bound = 1.0 / (fan_in as f64).sqrt();
            init::uniform_(bias, -bound, bound)?;
        }
    }
    let bias = bias.as_ref().map(Parameter::new).transpose()?;
    Ok((Parameter::new(&weight)?, bias))
}

/// The options that are described alike, where they are not the defaults.
pub(crate) fn common<const N: usize>(
    dilation: Size<N>,
    output_padding: Option<Size<N>>,
    groups: i64,
    bias: bool,
) -> String {
    let mut text = String::new();
    if !dilation.is_all(1) {
        text += &format!(", dilation={}", dilation.text());
    }
    if let Some(size) = output_padding.filter(|size| !size.is_all(0)) {
        text += &format!(", output_padding={}", size.text());
    }
    if groups != 1 {
        text += &format!(", groups={groups}");
    }
    if !bias {
        text += ", bias=False";
    }
    text
}
