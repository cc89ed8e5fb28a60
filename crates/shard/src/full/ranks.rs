//! The groups of ranks that train a model.

use overdrive_ddp::ProcessGroup;

use crate::error::ShardError;
use crate::mesh::DeviceMesh;

#[derive(Clone, Debug)]
pub(super) struct Ranks {
    /// All of them: they make the same exchanges.
    pub(super) all: ProcessGroup,
    /// Those over which parameters are partitioned.
    pub(super) parts: ProcessGroup,
    /// Those that have the same rows as this one, if there are others.
    pub(super) replicas: Option<ProcessGroup>,
}

impl Ranks {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self { all: group.clone(), parts: group.clone(), replicas: None }
    }

    pub(super) fn of_mesh(mesh: &DeviceMesh, replicate: &str, shard: &str) -> Result<Self, ShardError> {
        let (replicas, parts) = (mesh.group(replicate)?, mesh.group(shard)?);
        if replicate == shard || replicas.size() * parts.size() != mesh.whole().size() {
            let dimensions = mesh.names().collect::<Vec<_>>().join(", ");
            let reason = format!(
                "a model is replicated over one dimension and sharded over another, and there should be no third: give \
                 two of a mesh of two, not `{replicate}` and `{shard}`"
            );
            return Err(ShardError::MeshNames { dimensions, reason });
        }
        let replicas = (replicas.size() > 1).then(|| replicas.clone());
        Ok(Self { all: mesh.whole().clone(), parts: parts.clone(), replicas })
    }
}
