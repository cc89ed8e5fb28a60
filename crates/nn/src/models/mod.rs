//! Models with the parameter names and initial values of torchvision and Hugging Face, so that their weights load.
//!
//! Each model has a function of its name, which makes it with its defaults, and a builder with options:
//!
//! ```
//! use overdrive_nn::models::{MobilenetV2, mobilenet_v2};
//!
//! # fn main() -> Result<(), overdrive_nn::NnError> {
//! tch::manual_seed(0);
//! let model = mobilenet_v2()?;
//! let small = MobilenetV2::builder().num_classes(10).width_mult(0.35).build()?;
//! # let _ = (model, small);
//! # Ok(())
//! # }
//! ```

mod blocks;
mod efficientnet;
mod gpt2;
mod mobilenet;
mod resnet;
mod vision_transformer;

use tch::Tensor;

use crate::containers::forwards;
use crate::error::NnError;

pub use efficientnet::{Efficientnet, EfficientnetBuilder, efficientnet_b0};
pub use gpt2::{Gpt2LmHeadModel, Gpt2LmHeadModelBuilder, gpt2};
pub use mobilenet::{MobilenetV2, MobilenetV2Builder, mobilenet_v2};
pub use resnet::{Resnet, ResnetBlock, ResnetBuilder, resnet18, resnet34, resnet50};
pub use vision_transformer::{VisionHeads, VisionTransformer, VisionTransformerBuilder, vit_b_16};

forwards!(Resnet, MobilenetV2, Efficientnet, VisionTransformer, Gpt2LmHeadModel);
