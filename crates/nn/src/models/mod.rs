//! Models with the parameter names and initial values of torchvision and Hugging Face, so that their weights load.

mod resnet;

pub use resnet::{Resnet, resnet18, resnet34, resnet50};
