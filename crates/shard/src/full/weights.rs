//! A rank's rows for what keeps a copy of each, such as averages of weights.

use std::sync::Arc;

use overdrive_core::{OtherRanks, Parameter, Sharding, Stateful, Weights};
use tch::Tensor;

use super::state::shard;
use super::{FullyShardedDataParallel, Shared};

impl Weights for FullyShardedDataParallel {
    fn own_parameters(&self) -> Vec<Parameter> {
        self.parameters()
    }

    fn own_buffers(&self) -> Vec<(String, Tensor)> {
        self.buffers.iter().map(|(name, buffer)| (name.clone(), buffer.shallow_clone())).collect()
    }

    fn sharding(&self) -> Option<Sharding> {
        let rows = self.shared.lock().params().map(|param| param.layout.rows_of_whole()).collect();
        Some(Sharding { shard: shard(&self.ranks), rows, differs_by_rank: self.differs_by_rank() })
    }

    fn other_ranks(&self) -> Option<Arc<dyn OtherRanks>> {
        Some(Arc::new(self.shared.clone()))
    }
}

impl OtherRanks for Shared {
    fn tell_failure(&self, reason: &str) {
        self.lock().fail_between(reason.to_owned());
    }
}
