//! Samples kept for the epochs after the first.

mod device;
mod disk;
mod kind;
mod ram;
mod storable;

pub(crate) use device::DeviceStore;
pub use disk::DiskCached;
pub use kind::{CacheKind, Disk, OnDevice, Ram};
pub use ram::Cached;
pub use storable::Storable;
