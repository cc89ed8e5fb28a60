//! Process groups by the names of dimensions.

use overdrive_ddp::ProcessGroup;

use crate::agree;
use crate::error::ShardError;

/// The ranks of a group as a grid with named dimensions, and a sub-group for each line of the grid.
///
/// Ranks count up along the last dimension first, as in PyTorch: on a mesh of `replicate=2 x shard=2`, ranks 0 and 1
/// are one `"shard"` group, 2 and 3 the other; 0 and 2 are one `"replicate"` group, 1 and 3 the other. Put the
/// dimension that communicates most last, where its ranks are on one host.
///
/// ```no_run
/// use overdrive_ddp::{Backend, InitMethod, init_process_group};
/// use overdrive_shard::DeviceMesh;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?; // 4 ranks
/// let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
/// let shard = mesh.group("shard")?; // of 2 ranks
/// assert_eq!(shard.rank(), mesh.coordinate()[1]);
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.distributed.device_mesh.init_device_mesh`
#[derive(Clone, Debug)]
#[doc(alias = "init_device_mesh")]
pub struct DeviceMesh {
    whole: ProcessGroup,
    dimensions: Vec<Dimension>,
    coordinate: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Dimension {
    name: String,
    size: usize,
    group: ProcessGroup,
}

impl DeviceMesh {
    /// Makes a mesh of all ranks of `group`. Every rank calls it with the same dimensions, given as names and sizes.
    ///
    /// # Errors
    /// The same on every rank, and nothing is made: [`ShardError::MeshSizes`] when the sizes do not multiply to the
    /// number of ranks, [`ShardError::MeshNames`] when a name is empty or repeated or there are no dimensions,
    /// [`ShardError::RanksDisagree`] when ranks were given different dimensions. [`ShardError::Ddp`] when a rank has
    /// exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(group: &ProcessGroup, dimensions: &[(&str, usize)]) -> Result<Self, ShardError> {
        let text = describe(dimensions);
        let texts = agree::all_have(group, "making a mesh", Ok::<_, ShardError>(text))?;
        agree::on_text("the mesh", &texts)?;
        check(dimensions, group.size())?;
        let sizes: Vec<usize> = dimensions.iter().map(|&(_, size)| size).collect();
        let coordinate = coordinate(&sizes, group.rank());
        let mut made = Vec::with_capacity(dimensions.len());
        for (at, &(name, size)) in dimensions.iter().enumerate() {
            let own = match size == group.size() {
                true => Some(group.clone()),
                false => line(group, &sizes, at)?,
            };
            // Each rank is on one line of each dimension.
            let Some(own) = own else {
                return Err(ShardError::NoSuchDimension { name: name.to_owned(), names: Vec::new() });
            };
            made.push(Dimension { name: name.to_owned(), size, group: own });
        }
        Ok(Self { whole: group.clone(), dimensions: made, coordinate })
    }

    /// The group of the ranks that differ from this one in the dimension `name` alone. Its ranks count along that
    /// dimension.
    ///
    /// # Errors
    /// [`ShardError::NoSuchDimension`]
    ///
    /// # Source
    /// `DeviceMesh.get_group`
    #[doc(alias = "get_group")]
    pub fn group(&self, name: &str) -> Result<&ProcessGroup, ShardError> {
        Ok(&self.dimension(name)?.group)
    }

    /// How many ranks there are along the dimension `name`.
    ///
    /// # Errors
    /// [`ShardError::NoSuchDimension`]
    ///
    /// # Source
    /// `DeviceMesh.size(mesh_dim)`
    pub fn size(&self, name: &str) -> Result<usize, ShardError> {
        Ok(self.dimension(name)?.size)
    }

    /// This rank's place along each dimension, in their order.
    ///
    /// # Source
    /// `DeviceMesh.get_coordinate`
    #[doc(alias = "get_coordinate")]
    pub fn coordinate(&self) -> &[usize] {
        &self.coordinate
    }

    /// The dimensions' names, in their order.
    ///
    /// # Source
    /// `DeviceMesh.mesh_dim_names`
    #[doc(alias = "mesh_dim_names")]
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.dimensions.iter().map(|dimension| dimension.name.as_str())
    }

    /// How many ranks there are along each dimension, in their order.
    ///
    /// # Source
    /// `DeviceMesh.shape`
    pub fn shape(&self) -> Vec<usize> {
        self.dimensions.iter().map(|dimension| dimension.size).collect()
    }

    /// The group of all ranks of the mesh, from which it was made.
    pub fn whole(&self) -> &ProcessGroup {
        &self.whole
    }

    fn dimension(&self, name: &str) -> Result<&Dimension, ShardError> {
        self.dimensions.iter().find(|dimension| dimension.name == name).ok_or_else(|| ShardError::NoSuchDimension {
            name: name.to_owned(),
            names: self.names().map(str::to_owned).collect(),
        })
    }
}

/// Makes the sub-group of each line along the dimension `at`; every rank takes part in making all. This rank's own.
fn line(group: &ProcessGroup, sizes: &[usize], at: usize) -> Result<Option<ProcessGroup>, ShardError> {
    let stride: usize = sizes[at + 1..].iter().product();
    let mut own = None;
    for first in (0..group.size()).filter(|rank| (rank / stride).is_multiple_of(sizes[at])) {
        let ranks: Vec<usize> = (0..sizes[at]).map(|place| first + place * stride).collect();
        own = group.new_group(&ranks)?.or(own);
    }
    Ok(own)
}

fn coordinate(sizes: &[usize], rank: usize) -> Vec<usize> {
    let mut rest = rank;
    let mut coordinate: Vec<usize> = Vec::with_capacity(sizes.len());
    for size in sizes.iter().rev() {
        coordinate.push(rest % size);
        rest /= size;
    }
    coordinate.reverse();
    coordinate
}

fn describe(dimensions: &[(&str, usize)]) -> String {
    let one = |(name, size): &(&str, usize)| format!("{name}={size}");
    match dimensions {
        [] => "[]".to_owned(),
        some => some.iter().map(one).collect::<Vec<_>>().join(" x "),
    }
}

fn check(dimensions: &[(&str, usize)], ranks: usize) -> Result<(), ShardError> {
    let refuse = |reason: String| Err(ShardError::MeshNames { dimensions: describe(dimensions), reason });
    if dimensions.is_empty() {
        return refuse("give at least one, as a name and a size".to_owned());
    }
    for (at, (name, _)) in dimensions.iter().enumerate() {
        if name.is_empty() {
            return refuse(format!("dimension {at} has no name, but should have one"));
        }
        if dimensions[..at].iter().any(|(before, _)| before == name) {
            return refuse(format!("the name {name:?} is given twice, but each dimension should have its own"));
        }
    }
    let product = dimensions.iter().try_fold(1usize, |product, &(_, size)| product.checked_mul(size));
    if product == Some(ranks) {
        return Ok(());
    }
    let needed = product.map_or_else(|| "too many".to_owned(), |product| product.to_string());
    Err(ShardError::MeshSizes { dimensions: describe(dimensions), needed, ranks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_up_along_the_last_dimension() {
        let all: Vec<Vec<usize>> = (0..6).map(|rank| coordinate(&[3, 2], rank)).collect();
        assert_eq!(all, [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]);
    }

    #[test]
    fn sizes_and_names_that_do_not_fit_are_named() {
        let told = |dimensions: &[(&str, usize)]| check(dimensions, 4).unwrap_err().to_string();
        assert!(check(&[("a", 2), ("b", 1), ("c", 2)], 4).is_ok());
        assert!(told(&[("a", 2), ("b", 3)]).contains("a=2 x b=3 needs 6 ranks, but the group has 4"));
        assert!(told(&[("a", 0)]).contains("needs 0 ranks"));
        assert!(told(&[("a", usize::MAX), ("b", 2)]).contains("needs too many ranks"));
        assert!(told(&[("a", 2), ("a", 2)]).contains("the name \"a\" is given twice"));
        assert!(told(&[("", 4)]).contains("dimension 0 has no name"));
        assert!(told(&[]).contains("the dimensions [] cannot be a mesh: give at least one"));
    }
}
