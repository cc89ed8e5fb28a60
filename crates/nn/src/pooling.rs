//! Pooling and shapes.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::containers::Forward;
use crate::error::NnError;
use crate::layer::{python, run, run_nameless};
use crate::size::Size;

/// The largest value of each window over `N` dimensions.
///
/// # Source
/// `torch.nn.MaxPool1d`, `MaxPool2d`, `MaxPool3d`
#[derive(Debug, Module)]
#[module(describe)]
pub struct MaxPool<const N: usize> {
    state: ModuleState,
    #[module(skip)]
    options: Window<N>,
}

/// The mean of each window over `N` dimensions.
///
/// # Source
/// `torch.nn.AvgPool1d`, `AvgPool2d`, `AvgPool3d`
#[derive(Debug, Module)]
#[module(describe)]
pub struct AvgPool<const N: usize> {
    state: ModuleState,
    #[module(skip)]
    options: Window<N>,
}

/// The largest value of each window over one dimension.
pub type MaxPool1d = MaxPool<1>;
/// The largest value of each window over two dimensions.
pub type MaxPool2d = MaxPool<2>;
/// The largest value of each window over three dimensions.
pub type MaxPool3d = MaxPool<3>;
/// The mean of each window over one dimension.
pub type AvgPool1d = AvgPool<1>;
/// The mean of each window over two dimensions.
pub type AvgPool2d = AvgPool<2>;
/// The mean of each window over three dimensions.
pub type AvgPool3d = AvgPool<3>;

/// The windows of a pooling layer.
#[derive(Clone, Copy, Debug)]
struct Window<const N: usize> {
    kernel_size: Size<N>,
    stride: Size<N>,
    padding: Size<N>,
    dilation: Size<N>,
    ceil_mode: bool,
    count_include_pad: bool,
}

impl<const N: usize> Window<N> {
    fn new(kernel_size: Size<N>) -> Self {
        let (padding, dilation) = (Size([0; N]), Size([1; N]));
        Self { kernel_size, stride: kernel_size, padding, dilation, ceil_mode: false, count_include_pad: true }
    }
}

macro_rules! windowed {
    ($name:ident) => {
        impl<const N: usize> $name<N> {
            /// Windows of this size, next to each other.
            pub fn new(kernel_size: impl Into<Size<N>>) -> Self {
                Self { state: ModuleState::default(), options: Window::new(kernel_size.into()) }
            }

            /// By how much the windows move; default their size.
            #[must_use]
            pub fn stride(mut self, stride: impl Into<Size<N>>) -> Self {
                self.options.stride = stride.into();
                self
            }

            /// How much is added on both sides; default 0.
            #[must_use]
            pub fn padding(mut self, padding: impl Into<Size<N>>) -> Self {
                self.options.padding = padding.into();
                self
            }

            /// Whether windows may reach over the end; default false.
            #[must_use]
            pub fn ceil_mode(mut self, ceil_mode: bool) -> Self {
                self.options.ceil_mode = ceil_mode;
                self
            }
        }

        impl<const N: usize> Forward for $name<N> {
            fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
                self.forward(input)
            }
        }
    };
}

windowed!(MaxPool);
windowed!(AvgPool);

impl<const N: usize> MaxPool<N> {
    /// The distance of a window's elements; default 1.
    #[must_use]
    pub fn dilation(mut self, dilation: impl Into<Size<N>>) -> Self {
        self.options.dilation = dilation.into();
        self
    }

    /// # Shapes
    /// `[batch, channels, ..]` or `[channels, ..]` with `N` more dimensions.
    ///
    /// # Errors
    /// When the input has another number of dimensions, or a window does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        const { assert!(N >= 1 && N <= 3, "pooling has 1, 2 or 3 dimensions") };
        let Window { kernel_size, stride, padding, dilation, ceil_mode, .. } = &self.options;
        let (k, s, p, d) = (&kernel_size.0[..], &stride.0[..], &padding.0[..], &dilation.0[..]);
        run(self, &self.state, || match N {
            1 => x.f_max_pool1d(k, s, p, d, *ceil_mode),
            2 => x.f_max_pool2d(k, s, p, d, *ceil_mode),
            _ => x.f_max_pool3d(k, s, p, d, *ceil_mode),
        })
    }

    fn describe(&self) -> String {
        let Window { kernel_size, stride, padding, dilation, ceil_mode, .. } = &self.options;
        format!(
            "MaxPool{N}d(kernel_size={}, stride={}, padding={}, dilation={}, ceil_mode={})",
            short(*kernel_size),
            short(*stride),
            short(*padding),
            short(*dilation),
            python(*ceil_mode)
        )
    }
}

impl<const N: usize> AvgPool<N> {
    /// Whether what is added at the borders counts; default true.
    #[must_use]
    pub fn count_include_pad(mut self, count: bool) -> Self {
        self.options.count_include_pad = count;
        self
    }

    /// # Shapes
    /// `[batch, channels, ..]` or `[channels, ..]` with `N` more dimensions.
    ///
    /// # Errors
    /// When the input has another number of dimensions, or a window does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        const { assert!(N >= 1 && N <= 3, "pooling has 1, 2 or 3 dimensions") };
        let Window { kernel_size, stride, padding, ceil_mode, count_include_pad: count, .. } = &self.options;
        let (k, s, p) = (&kernel_size.0[..], &stride.0[..], &padding.0[..]);
        run(self, &self.state, || match N {
            1 => x.f_avg_pool1d(k, s, p, *ceil_mode, *count),
            2 => x.f_avg_pool2d(k, s, p, *ceil_mode, *count, None::<i64>),
            _ => x.f_avg_pool3d(k, s, p, *ceil_mode, *count, None::<i64>),
        })
    }

    fn describe(&self) -> String {
        let Window { kernel_size, stride, padding, .. } = &self.options;
        let text = |size: Size<N>| if N == 1 { size.text() } else { short(size) };
        format!("AvgPool{N}d(kernel_size={}, stride={}, padding={})", text(*kernel_size), text(*stride), text(*padding))
    }
}

/// The mean of as many windows as the output has elements.
///
/// # Source
/// `torch.nn.AdaptiveAvgPool1d`, `AdaptiveAvgPool2d`, `AdaptiveAvgPool3d`
#[derive(Debug, Module)]
#[module(describe)]
pub struct AdaptiveAvgPool<const N: usize> {
    state: ModuleState,
    #[module(skip)]
    output_size: Size<N>,
}

/// [`AdaptiveAvgPool`] over one dimension.
pub type AdaptiveAvgPool1d = AdaptiveAvgPool<1>;
/// [`AdaptiveAvgPool`] over two dimensions.
pub type AdaptiveAvgPool2d = AdaptiveAvgPool<2>;
/// [`AdaptiveAvgPool`] over three dimensions.
pub type AdaptiveAvgPool3d = AdaptiveAvgPool<3>;

impl<const N: usize> AdaptiveAvgPool<N> {
    /// Outputs of this size.
    pub fn new(output_size: impl Into<Size<N>>) -> Self {
        Self { state: ModuleState::default(), output_size: output_size.into() }
    }

    /// # Shapes
    /// `[batch, channels, ..]` or `[channels, ..]` to the same with `output_size` in place of the last `N`.
    ///
    /// # Errors
    /// When the input has another number of dimensions.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        const { assert!(N >= 1 && N <= 3, "pooling has 1, 2 or 3 dimensions") };
        let size = &self.output_size.0[..];
        run(self, &self.state, || match N {
            1 => x.f_adaptive_avg_pool1d(size),
            2 => x.f_adaptive_avg_pool2d(size),
            _ => x.f_adaptive_avg_pool3d(size),
        })
    }

    fn describe(&self) -> String {
        format!("AdaptiveAvgPool{N}d(output_size={})", short(self.output_size))
    }
}

impl<const N: usize> Forward for AdaptiveAvgPool<N> {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        self.forward(input)
    }
}

/// Joins dimensions.
///
/// # Source
/// `torch.nn.Flatten`
#[derive(Clone, Copy, Debug, Module)]
#[module(describe)]
pub struct Flatten {
    start_dim: i64,
    end_dim: i64,
}

impl Default for Flatten {
    fn default() -> Self {
        Self { start_dim: 1, end_dim: -1 }
    }
}

impl Flatten {
    /// Joins all dimensions but the first.
    pub fn new() -> Self {
        Self::default()
    }

    /// Joins the dimensions from `start_dim` to `end_dim`; negative ones count from the end.
    pub fn dims(start_dim: i64, end_dim: i64) -> Self {
        Self { start_dim, end_dim }
    }

    /// # Shapes
    /// `[batch, ..]` to `[batch, product]`.
    ///
    /// # Errors
    /// When the input does not have the dimensions.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run_nameless(self, || input.f_flatten(self.start_dim, self.end_dim))
    }

    fn describe(&self) -> String {
        format!("Flatten(start_dim={}, end_dim={})", self.start_dim, self.end_dim)
    }
}

crate::containers::forwards!(Flatten);

/// One number where all dimensions have the same, as PyTorch prints what was given as one.
fn short<const N: usize>(size: Size<N>) -> String {
    match size.is_all(size.0[0]) {
        true => size.0[0].to_string(),
        false => size.text(),
    }
}
