//! Binds ranks to the CPUs near their GPUs.

mod gpus;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::error::LaunchError;
use topology::{Cpus, Topology, to_text};

/// Which CPUs a rank may use. The GPU of a rank is the one with its local rank as index, among those that
/// `CUDA_VISIBLE_DEVICES` lists, ordered by PCI address; the NUMA node is the GPU's, which Linux reports in `/sys`.
/// Without GPUs, the ranks are divided among the NUMA nodes.
///
/// CPUs that the launcher itself may not use are left out. A rank's threads and child processes inherit its CPUs.
///
/// # Source
/// `torch.numa.binding.AffinityMode`; torchrun needs GPUs and `numactl` for it.
#[doc(alias = "AffinityMode")]
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum NumaBinding {
    /// `node`: all CPUs of the NUMA node.
    Node,
    /// `socket`: all CPUs of the NUMA nodes on the same processor.
    Socket,
    /// `exclusive`: cores of the NUMA node that no other rank has, an equal share of them for each GPU of the node.
    Exclusive,
    /// `core-complex`: cores of the NUMA node that share their largest cache; each rank has another group, while there
    /// are enough.
    CoreComplex,
}

impl FromStr for NumaBinding {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<Self, LaunchError> {
        Ok(match text {
            "node" => Self::Node,
            "socket" => Self::Socket,
            "exclusive" => Self::Exclusive,
            "core-complex" => Self::CoreComplex,
            _ => {
                return Err(LaunchError::Options(format!(
                    "--numa-binding {text}: give node, socket, exclusive or core-complex"
                )));
            }
        })
    }
}

/// The CPUs of each local rank. `visible` is the ranks' `CUDA_VISIBLE_DEVICES`.
pub fn of_ranks(binding: NumaBinding, nproc: usize, visible: Option<&str>) -> Result<Vec<Binding>, LaunchError> {
    let failed = |reason: String| LaunchError::System { doing: "bind ranks to CPUs".to_owned(), reason };
    let allowed = sched_getaffinity(None).map_err(|error| failed(error.to_string()))?;
    let allowed: Cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    plan(binding, nproc, &Topology::new(Path::new("/"), allowed), visible).map_err(failed)
}

fn plan(
    binding: NumaBinding,
    nproc: usize,
    topology: &Topology,
    visible: Option<&str>,
) -> Result<Vec<Binding>, String> {
    let gpus = gpus::visible(topology.root(), visible)?;
    // The NUMA node of each GPU; without GPUs, of each rank.
    let nodes: Vec<usize> = if gpus.is_empty() {
        let nodes = topology.nodes_with_cpus()?;
        (0..nproc).map(|rank| nodes[rank * nodes.len() / nproc]).collect()
    } else {
        gpus.iter().map(|address| topology.node_of_device(address)).collect::<Result<_, _>>()?
    };
    if nodes.len() < nproc {
        return Err(format!(
            "local rank {} has no GPU: {} are visible here; start fewer ranks, or leave out --numa-binding",
            nodes.len(),
            nodes.len()
        ));
    }
    (0..nproc).map(|rank| Binding::new(binding, rank, &nodes, topology)).collect()
}

/// How many threads each rank may use: its CPUs, divided by the ranks that share some of them.
pub fn threads_of(bindings: &[Binding]) -> Vec<usize> {
    let threads = |own: &Binding| {
        let sharers = bindings.iter().filter(|other| !other.cpus.is_disjoint(&own.cpus)).count();
        (own.cpus.len() / sharers.max(1)).max(1)
    };
    bindings.iter().map(threads).collect()
}

/// The CPUs of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    cpus: Cpus,
}

impl Binding {
    fn new(binding: NumaBinding, rank: usize, nodes: &[usize], topology: &Topology) -> Result<Self, String> {
        let node = nodes[rank];
        let of_node = topology.cpus_of_node(node)?;
        // The ranks or GPUs of the node, and the place of this one among them.
        let same: Vec<usize> = (0..nodes.len()).filter(|other| nodes[*other] == node).collect();
        let place = same.iter().filter(|other| **other < rank).count();
        let cpus = match binding {
            NumaBinding::Node => of_node,
            NumaBinding::Socket => topology.cpus_of_socket(node)?,
            NumaBinding::Exclusive => {
                let cores: Vec<Cpus> = groups(&of_node, |cpu| topology.core_of(cpu))?.into_values().collect();
                // Cores left over go to the first ones.
                let (share, more) = (cores.len() / same.len(), cores.len() % same.len());
                if share == 0 {
                    let cores = if cores.len() == 1 { "1 core".to_owned() } else { format!("{} cores", cores.len()) };
                    return Err(format!(
                        "NUMA node {node} has {cores} for {} ranks or GPUs; --numa-binding exclusive needs one for \
                         each",
                        same.len()
                    ));
                }
                let start = place * share + place.min(more);
                let own = &cores[start..start + share + usize::from(place < more)];
                own.iter().flatten().copied().collect()
            }
            NumaBinding::CoreComplex => {
                let caches = groups(&of_node, |cpu| topology.largest_cache_of(cpu))?;
                let mut caches: Vec<(usize, Cpus)> = caches.into_iter().collect();
                // Those with the most CPUs first.
                caches.sort_by_key(|(first, cpus)| (std::cmp::Reverse(cpus.len()), *first));
                caches.swap_remove(place % caches.len()).1
            }
        };
        Ok(Self { cpus })
    }

    pub fn to_text(&self) -> String {
        to_text(&self.cpus)
    }

    /// Binds the calling thread until the guard is dropped; processes that it starts meanwhile stay bound.
    pub fn enter(&self) -> Result<Entered, LaunchError> {
        let failed = || LaunchError::system(format!("bind a rank to the CPUs {}", self.to_text()));
        let before = sched_getaffinity(None).map_err(|error| failed()(error.into()))?;
        let mut set = CpuSet::new();
        self.cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).map_err(|error| failed()(error.into()))?;
        Ok(Entered { before })
    }
}

pub struct Entered {
    before: CpuSet,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // It was allowed before.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// The CPUs by what they share, which is named by the first CPU that shares it.
fn groups(
    cpus: &Cpus,
    shared: impl Fn(usize) -> Result<Cpus, String>,
) -> Result<BTreeMap<usize, BTreeSet<usize>>, String> {
    let mut groups: BTreeMap<usize, Cpus> = BTreeMap::new();
    for cpu in cpus {
        let first = shared(*cpu)?.first().copied().unwrap_or(*cpu);
        groups.entry(first).or_default().insert(*cpu);
    }
    Ok(groups)
}

#[cfg(test)]
mod tests;
