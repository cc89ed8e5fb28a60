//! Clouds of points, and a part of them for each step.

mod cloud;
mod farthest;
mod stack;
mod voxel;

pub use cloud::PointCloud;
pub use stack::StackPoints;
