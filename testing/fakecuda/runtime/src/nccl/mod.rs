//! NCCL over shared memory. Ranks are processes, or threads of one process, and their collectives compute real results.
//!
//! A collective is work of its stream (`Round`). When the stream comes to it, it writes what its rank sends to the file
//! that the ranks share. It is done when it has read what all other ranks send. Only the stream waits for that: a host
//! that waits tries again and again without the world's lock, and a thread (`server`) runs the collectives that nobody
//! in this process waits for.
//!
//! A communicator breaks when its ranks do not agree on a collective, or when the process of a rank ends. Then its work
//! ends without writing results, and `ncclCommGetAsyncError` gives the reason at each rank. A rank that is alive but
//! does not come is waited for, until `ncclCommAbort`.

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
mod registered;
mod round;
#[cfg(test)]
mod round_tests;
mod server;

pub use file::{ID_BYTES, MAX_RANKS, new_id, path_of};
