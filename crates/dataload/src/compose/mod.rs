//! Datasets made of other datasets. `Map` and `Subset` are in `dataset.rs`, next to the trait whose methods make them.

mod chain;
pub(crate) mod concat;
mod filter;
mod interleave;
mod map_style;
mod mixture;
mod pcg64;
mod stream_mixture;
mod zip;

pub use chain::Chain;
pub use concat::Concat;
pub use filter::Filter;
pub use interleave::{InterleaveBuilder, StoppingStrategy, interleave_datasets};
pub use map_style::{MapStyle, map_style};
pub use mixture::Mixture;
pub use stream_mixture::StreamMixture;
pub use zip::{Zip, ZipParts};
