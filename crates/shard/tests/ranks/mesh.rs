//! Meshes of ranks.

use anyhow::{Result, ensure};
use overdrive_ddp::{ProcessGroup, ReduceOp};
use overdrive_shard::{DeviceMesh, ShardError};
use tch::Tensor;

use crate::harness::Meeting;

/// The ranks of a group, each told by itself.
fn members(group: &ProcessGroup, rank: usize) -> Result<Vec<i64>> {
    let all = group.all_gather(&Tensor::from_slice(&[rank as i64]))?;
    Ok(all.iter().map(|one| one.int64_value(&[0])).collect())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
    ensure!(mesh.coordinate() == [rank / 2, rank % 2], "{:?}", mesh.coordinate());
    ensure!(mesh.shape() == [2, 2] && mesh.names().collect::<Vec<_>>() == ["replicate", "shard"]);
    ensure!(mesh.size("shard")? == 2 && mesh.whole().size() == 4);
    let (shard, replicate) = (members(mesh.group("shard")?, rank)?, members(mesh.group("replicate")?, rank)?);
    let (row, column) = (rank as i64 / 2 * 2, rank as i64 % 2);
    ensure!(shard == [row, row + 1] && replicate == [column, column + 2], "{shard:?} {replicate:?}");
    // Sums over both dimensions, one after the other, are those over all ranks.
    let mut sum = Tensor::from_slice(&[1 << rank]);
    mesh.group("shard")?.all_reduce(&mut sum, ReduceOp::Sum)?;
    mesh.group("replicate")?.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.int64_value(&[0]) == 15, "{sum}");
    // Sizes of 1 and of all ranks.
    let flat = DeviceMesh::new(&group, &[("replicate", 1), ("shard", 4)])?;
    ensure!(members(flat.group("shard")?, rank)? == [0, 1, 2, 3] && flat.coordinate() == [0, rank]);
    ensure!(members(flat.group("replicate")?, rank)? == [rank as i64]);
    let deep = DeviceMesh::new(mesh.group("shard")?, &[("a", 2), ("b", 1)])?;
    ensure!(members(deep.group("a")?, rank)? == shard, "a mesh of a mesh's group");
    Ok(())
}

pub fn refusals(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let told = |dimensions: &[(&str, usize)]| DeviceMesh::new(&group, dimensions).map(drop);
    let sizes = told(&[("replicate", 2), ("shard", 3)]);
    ensure!(matches!(&sizes, Err(ShardError::MeshSizes { ranks: 4, needed, .. }) if needed == "6"), "{sizes:?}");
    for dimensions in [&[("a", 2), ("a", 2)][..], &[("", 4)], &[]] {
        let names = told(dimensions);
        ensure!(matches!(names, Err(ShardError::MeshNames { .. })), "{names:?}");
    }
    let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
    let unknown = mesh.group("tensor").map(drop);
    ensure!(
        matches!(&unknown, Err(ShardError::NoSuchDimension { name, names }) if name == "tensor" && names.len() == 2),
        "{unknown:?}"
    );
    ensure!(mesh.size("").is_err());
    Ok(())
}

/// Ranks that were given different dimensions all get the same error, and go on.
pub fn that_differ(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let name = if group.rank() == 2 { "other" } else { "shard" };
    let told = DeviceMesh::new(&group, &[(name, 3)]).map(drop);
    ensure!(
        matches!(&told, Err(ShardError::RanksDisagree { rank: 2, found, expected, .. })
            if found == "other=3" && expected == "shard=3"),
        "{told:?}"
    );
    ensure!(DeviceMesh::new(&group, &[("shard", 3)]).is_ok());
    Ok(())
}
