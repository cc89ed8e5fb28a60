#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch_sampler;
mod builder;
mod cache;
mod collate;
mod dataset;
mod decode;
mod epoch;
mod error;
mod idx;
mod image;
mod image_folder;
mod loader;
mod mnist;
mod pipeline;
mod read;
mod reorder;
mod rng;
mod sampler;
mod stats;
mod tensor;
mod to_float;
mod worker;

pub use batch_sampler::{BatchPlan, BatchSampler, FixedBatches};
pub use builder::DataLoaderBuilder;
pub use cache::Cached;
pub use collate::{Collate, Stack};
pub use dataset::{Dataset, FnDataset, Map, Subset};
pub use decode::{MAX_IMAGE_BYTES, decode_image};
pub use epoch::Epoch;
pub use error::DataError;
pub use idx::{IdxArray, read_idx};
pub use image::{Color, Image};
pub use image_folder::ImageFolder;
pub use loader::DataLoader;
pub use mnist::{Mnist, MnistSplit};
pub use rng::Philox;
pub use sampler::{RandomSampler, Sampler, SequentialSampler};
pub use stats::LoaderStats;
pub use to_float::ToFloat;
