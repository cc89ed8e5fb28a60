//! Transposed convolutions over 1, 2 or 3 dimensions.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::conv::{check, common, draw, name};
use crate::error::NnError;
use crate::layer::run;
use crate::size::Size;
use crate::tensors::Parameter;

/// A transposed convolution over `N` dimensions, which enlarges its input.
///
/// # Source
/// `torch.nn.ConvTranspose1d`, `ConvTranspose2d`, `ConvTranspose3d`
#[derive(Debug, Module)]
#[module(describe)]
pub struct ConvTranspose<const N: usize> {
    /// `[in_channels, out_channels / groups, ..kernel_size]`.
    pub weight: Parameter,
    /// `[out_channels]`.
    pub bias: Option<Parameter>,
    state: ModuleState,
    #[module(skip)]
    options: ConvTransposeBuilder<N>,
}

/// A transposed convolution over one dimension.
pub type ConvTranspose1d = ConvTranspose<1>;
/// A transposed convolution over two dimensions.
pub type ConvTranspose2d = ConvTranspose<2>;
/// A transposed convolution over three dimensions.
pub type ConvTranspose3d = ConvTranspose<3>;

/// Options of a [`ConvTranspose`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct ConvTransposeBuilder<const N: usize> {
    in_channels: i64,
    out_channels: i64,
    kernel_size: Size<N>,
    stride: Size<N>,
    padding: Size<N>,
    output_padding: Size<N>,
    dilation: Size<N>,
    groups: i64,
    bias: bool,
}

impl<const N: usize> ConvTransposeBuilder<N> {
    /// By how much the output moves for each element of the input; default 1.
    pub fn stride(mut self, stride: impl Into<Size<N>>) -> Self {
        self.stride = stride.into();
        self
    }

    /// How much of the output's borders is cut off; default 0.
    pub fn padding(mut self, padding: impl Into<Size<N>>) -> Self {
        self.padding = padding.into();
        self
    }

    /// How much is added to one side of the output; default 0.
    pub fn output_padding(mut self, output_padding: impl Into<Size<N>>) -> Self {
        self.output_padding = output_padding.into();
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

    /// The layer with new weights.
    ///
    /// # Errors
    /// When `groups` does not divide the channels, a size is out of its range, or memory runs out.
    pub fn build(self) -> Result<ConvTranspose<N>, NnError> {
        const { assert!(N >= 1 && N <= 3, "convolutions have 1, 2 or 3 dimensions") };
        let layer = name::<N>(true);
        check(layer, (self.in_channels, self.out_channels, self.groups), self.kernel_size, self.stride, self.dilation)?;
        let channels = [self.in_channels, self.out_channels / self.groups];
        let (weight, bias) = draw(&[&channels[..], &self.kernel_size.0].concat(), self.bias, self.out_channels)?;
        Ok(ConvTranspose { weight, bias, state: ModuleState::default(), options: self })
    }
}

impl<const N: usize> ConvTranspose<N> {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When a size is out of its range, or memory runs out.
    pub fn new(in_channels: i64, out_channels: i64, kernel_size: impl Into<Size<N>>) -> Result<Self, NnError> {
        Self::builder(in_channels, out_channels, kernel_size).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(in_channels: i64, out_channels: i64, kernel_size: impl Into<Size<N>>) -> ConvTransposeBuilder<N> {
        ConvTransposeBuilder {
            in_channels,
            out_channels,
            kernel_size: kernel_size.into(),
            stride: Size([1; N]),
            padding: Size([0; N]),
            output_padding: Size([0; N]),
            dilation: Size([1; N]),
            groups: 1,
            bias: true,
        }
    }

    /// # Shapes
    /// `[batch, in_channels, ..]` or `[in_channels, ..]` to the same with `out_channels`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            let ConvTransposeBuilder { stride, padding, output_padding, dilation, groups, .. } = &self.options;
            let (w, b, stride, padding) = (&*self.weight, self.bias.as_deref(), &stride.0[..], &padding.0[..]);
            let (output_padding, dilation, groups) = (&output_padding.0[..], &dilation.0[..], *groups);
            match N {
                1 => input.f_conv_transpose1d(w, b, stride, padding, output_padding, groups, dilation),
                2 => input.f_conv_transpose2d(w, b, stride, padding, output_padding, groups, dilation),
                _ => input.f_conv_transpose3d(w, b, stride, padding, output_padding, groups, dilation),
            }
        })
    }

    fn describe(&self) -> String {
        let ConvTransposeBuilder { in_channels, out_channels, kernel_size, stride, .. } = &self.options;
        let (kernel_size, stride) = (kernel_size.text(), stride.text());
        let mut text =
            format!("{}({in_channels}, {out_channels}, kernel_size={kernel_size}, stride={stride}", name::<N>(true));
        if !self.options.padding.is_all(0) {
            text += &format!(", padding={}", self.options.padding.text());
        }
        let output_padding = Some(self.options.output_padding);
        text + &common(self.options.dilation, output_padding, self.options.groups, self.bias.is_some()) + ")"
    }
}
