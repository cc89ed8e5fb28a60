//! A rank's part of a model's weights.

use std::fmt::Debug;
use std::sync::Arc;

use tch::Tensor;

use crate::module::Module;
use crate::parameter::Parameter;
use crate::rows::{Rows, Shard};

/// The weights that a rank has of a model, for what keeps a copy of each, such as averages: a module's, which are
/// whole, or its rows of those of a model that is sharded over ranks.
pub trait Weights {
    /// The parameters, or this rank's rows of each, under their names in the model; the data is shared.
    fn own_parameters(&self) -> Vec<Parameter>;

    /// The buffers by name; the data is shared.
    fn own_buffers(&self) -> Vec<(String, Tensor)>;

    /// Which rows of the whole parameters these are; `None` where they are whole.
    fn sharding(&self) -> Option<Sharding> {
        None
    }

    /// The other ranks, where they exchange the weights to compute; `None` where each rank computes with its own.
    fn other_ranks(&self) -> Option<Arc<dyn OtherRanks>> {
        None
    }
}

/// The ranks that would wait for this one at their next exchange.
pub trait OtherRanks: Debug + Send + Sync {
    /// Tells them that this rank has failed and does not come to their next exchange: it is an error with this reason
    /// there, at once. Gradients are freed on all ranks, which may go on afterwards. Does not wait for them, unless they have
    /// not heard of an earlier failure yet.
    fn tell_failure(&self, reason: &str);
}

impl<M: Module> Weights for M {
    fn own_parameters(&self) -> Vec<Parameter> {
        self.named_parameters()
    }

    fn own_buffers(&self) -> Vec<(String, Tensor)> {
        self.named_buffers()
    }
}

/// Which part of a model's parameters a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The number of the part.
    pub shard: Shard,
    /// Of each parameter, in their order.
    pub rows: Vec<Rows>,
    /// Whether other ranks have something else.
    pub differs_by_rank: bool,
}
