//! What Linux reports in `/sys` about CPUs, their NUMA nodes, cores and caches.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub type Cpus = BTreeSet<usize>;

/// More CPUs than any host has: a larger number in a list is damaged text.
const MOST_CPUS: usize = 1 << 16;

pub struct Topology {
    root: PathBuf,
    /// The CPUs that this process may use.
    allowed: Cpus,
}

impl Topology {
    /// Of the folder in which `sys` and `proc` are.
    pub fn new(root: &Path, allowed: Cpus) -> Self {
        Self { root: root.to_owned(), allowed }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The NUMA node of a PCI device like `0000:dc:00.0`.
    pub fn node_of_device(&self, address: &str) -> Result<usize, String> {
        if !self.has_nodes() {
            return Ok(0);
        }
        let path = self.root.join(format!("sys/bus/pci/devices/{address}/numa_node"));
        let text = read(&path)?;
        let number: i64 = text.parse().map_err(|_| format!("{} has {text:?}, not a number", path.display()))?;
        // -1 on hosts with one node.
        Ok(usize::try_from(number).unwrap_or(0))
    }

    /// The NUMA nodes with CPUs that this process may use.
    pub fn nodes_with_cpus(&self) -> Result<Vec<usize>, String> {
        let mut found = Vec::new();
        for node in self.nodes()? {
            if !self.allowed_of_node(node)?.is_empty() {
                found.push(node);
            }
        }
        if found.is_empty() { Err("no NUMA node has CPUs that this process may use".to_owned()) } else { Ok(found) }
    }

    fn nodes(&self) -> Result<Vec<usize>, String> {
        match self.has_nodes() {
            true => Ok(list(&self.root.join("sys/devices/system/node/online"))?.into_iter().collect()),
            false => Ok(vec![0]),
        }
    }

    /// Kernels without NUMA have no such folder: then there is one node with all CPUs.
    fn has_nodes(&self) -> bool {
        self.root.join("sys/devices/system/node").is_dir()
    }

    fn allowed_of_node(&self, node: usize) -> Result<Cpus, String> {
        if !self.has_nodes() {
            return Ok(self.allowed.clone());
        }
        let all = list(&self.root.join(format!("sys/devices/system/node/node{node}/cpulist")))?;
        Ok(&all & &self.allowed)
    }

    /// The CPUs of a node that this process may use.
    pub fn cpus_of_node(&self, node: usize) -> Result<Cpus, String> {
        let cpus = self.allowed_of_node(node)?;
        if cpus.is_empty() {
            let allowed = to_text(&self.allowed);
            return Err(format!("this process may use no CPU of NUMA node {node}, only {allowed}"));
        }
        Ok(cpus)
    }

    /// The CPUs of all nodes on the processor of a node.
    pub fn cpus_of_socket(&self, node: usize) -> Result<Cpus, String> {
        let socket = self.socket_of(&self.cpus_of_node(node)?)?;
        let mut found = Cpus::new();
        for other in self.nodes_with_cpus()? {
            let cpus = self.allowed_of_node(other)?;
            if self.socket_of(&cpus)? == socket {
                found.extend(cpus);
            }
        }
        Ok(found)
    }

    fn socket_of(&self, cpus: &Cpus) -> Result<String, String> {
        let cpu = cpus.first().copied().unwrap_or_default();
        read(&self.cpu(cpu).join("topology/physical_package_id"))
    }

    /// The CPUs of the same core.
    pub fn core_of(&self, cpu: usize) -> Result<Cpus, String> {
        list(&self.cpu(cpu).join("topology/thread_siblings_list"))
    }

    /// The CPUs that share the cache of the highest level.
    pub fn largest_cache_of(&self, cpu: usize) -> Result<Cpus, String> {
        let folder = self.cpu(cpu).join("cache");
        let entries = fs::read_dir(&folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
        let mut largest: Option<(u32, PathBuf)> = None;
        for path in entries.flatten().map(|entry| entry.path()) {
            let kind = fs::read_to_string(path.join("type")).unwrap_or_default();
            if !["Unified", "Data"].contains(&kind.trim()) {
                continue;
            }
            let text = read(&path.join("level"))?;
            let level = text.parse().map_err(|_| format!("{}/level has {text:?}, not a number", path.display()))?;
            if largest.as_ref().is_none_or(|(highest, _)| level > *highest) {
                largest = Some((level, path));
            }
        }
        match largest {
            Some((_, path)) => list(&path.join("shared_cpu_list")),
            None => Err(format!("{} names no cache of data", folder.display())),
        }
    }

    fn cpu(&self, cpu: usize) -> PathBuf {
        self.root.join(format!("sys/devices/system/cpu/cpu{cpu}"))
    }
}

fn read(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// A list of CPUs in a file, like `0-2,4`.
fn list(path: &Path) -> Result<Cpus, String> {
    let text = read(path)?;
    parse(&text).ok_or_else(|| format!("{} has {text:?}, not a list like 0-2,4", path.display()))
}

pub fn parse(text: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MOST_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// `0-2,4`.
pub fn to_text(cpus: &Cpus) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => ranges.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    let ranges: Vec<String> = ranges.into_iter().map(text).collect();
    ranges.join(",")
}
