//! Meters of a training loop that do not wait for the device.
//!
//! A meter adds on the device that computes; only asking for a number waits. So a loop that prints every tenth batch
//! waits at every tenth batch.
//!
//! ```
//! use overdrive_nn::metrics::{AverageMeter, ProgressMeter, accuracy};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), overdrive_nn::NnError> {
//! let mut losses = AverageMeter::new("Loss").scientific(4);
//! let mut top1 = AverageMeter::new("Acc@1").fixed(6, 2);
//! let progress = ProgressMeter::new(20, "Epoch: [0]");
//! for batch in 0..20 {
//!     let (output, target) = (Tensor::eye(4, (Kind::Float, Device::Cpu)), Tensor::from_slice(&[0i64, 1, 2, 0]));
//!     losses.update(&output.cross_entropy_for_logits(&target), 4)?;
//!     top1.update(&accuracy(&output, &target, &[1])?[0], 4)?;
//!     if batch % 10 == 0 {
//!         println!("{}", progress.display(batch + 1, &[&losses, &top1])?);
//!     }
//! }
//! assert_eq!(top1.to_text()?, "Acc@1  75.00 ( 75.00)");
//! # Ok(())
//! # }
//! ```
//!
//! # Source
//! The ImageNet example of PyTorch

mod accuracy;
mod average;
mod progress;

pub use accuracy::{TopKAccuracy, accuracy};
pub use average::{AverageMeter, Summary};
pub use progress::ProgressMeter;
