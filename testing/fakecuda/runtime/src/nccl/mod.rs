//! NCCL over shared memory: ranks are processes, or threads of one, and their collectives really compute.
//!
//! A collective is work of its stream (`Round`): when the stream comes to it, it writes what its rank gives into the
//! file that the ranks share, and it is done when it has read what all others give. Nothing blocks but the stream: a
//! host that waits looks again and again without the world's lock, and a thread (`server`) lets collectives go on that
//! nobody in this process waits for.
//!
//! Ranks that do not agree on a collective, and ranks whose process ends, break the communicator: its work ends, what
//! it would have written is not written, and `ncclCommGetAsyncError` says why at each rank. A rank that is there
//! and does not come is waited for, until `ncclCommAbort`.

pub mod call;
pub mod code;
pub mod communicator;
mod file;
pub mod group;
pub mod journal;
mod lanes;
#[cfg(test)]
mod lanes_tests;
mod liveness;
pub mod members;
mod order;
pub mod reduce;
#[cfg(test)]
mod reduce_tests;
mod round;
#[cfg(test)]
mod round_tests;
mod server;

pub use file::{ID_BYTES, MAX_RANKS, new_id, path_of};
