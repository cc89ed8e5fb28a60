//! Functions with a backward pass of your own, gradients of chosen tensors, and a check of both.
//!
//! A [`Function`] is a value with two methods. Its options are its fields:
//!
//! ```
//! use overdrive_nn::autograd::{BackwardContext, BoxError, Context, Function, GradcheckOptions, gradcheck};
//! use tch::{Device, Kind, Tensor};
//!
//! /// `exp(by * x)`
//! struct ScaledExp {
//!     by: f64,
//! }
//!
//! impl Function for ScaledExp {
//!     type Inputs = Tensor;
//!     type Outputs = Tensor;
//!
//!     fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
//!         let y = (x * self.by).f_exp()?;
//!         ctx.save_for_backward([&y]);
//!         Ok(y)
//!     }
//!
//!     fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
//!         let [y] = ctx.saved_tensors()?;
//!         Ok(Some(grad * y * self.by))
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Tensor::rand([3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
//! let y = ScaledExp { by: 2.0 }.apply(&x)?;
//! y.sum(Kind::Double).f_backward()?;
//!
//! gradcheck(|x| ScaledExp { by: 2.0 }.apply(&x[0]), &x, GradcheckOptions::default())?;
//! # Ok(())
//! # }
//! ```
//!
//! Functions of several tensors take and give arrays, or `Vec`s if their number varies:
//! `type Inputs = [Tensor; 2]`, `type Outputs = Vec<Tensor>`.
//!
//! [`grad`] differentiates by chosen tensors, and its results can be differentiated again:
//!
//! ```
//! use overdrive_nn::autograd::grad;
//! use tch::Tensor;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let [x, t] = [2.0, 3.0].map(|value| Tensor::from(value).set_requires_grad(true));
//! let u = &x * &x * &t;
//! let [dx, dt] = grad(&u, [&x, &t]).create_graph(true).run()?;
//! let dxdt = grad(&dx, &t).run()?;
//! assert_eq!([&dx, &dt, &dxdt].map(|it| it.double_value(&[])), [12.0, 4.0, 4.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Source
//! `torch.autograd`

mod custom_fwd;
mod function;
mod grad;
mod gradcheck;
mod jacobian;
mod tensors;

pub use custom_fwd::CustomFwd;
pub use function::{BackwardContext, Context, Function};
pub use grad::{BackwardPass, Grad, GradOrNone, backward, grad};
pub use gradcheck::{GradcheckError, GradcheckOptions, gradcheck, gradgradcheck};
pub use overdrive_ffi::autograd::BoxError;
pub use tensors::Tensors;
