//! Point clouds, and sub-sampling them for each step.

mod cloud;
mod farthest;
mod stack;
mod voxel;

pub use cloud::PointCloud;
pub use stack::StackPoints;
