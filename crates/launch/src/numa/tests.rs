use std::fs;

use tempfile::TempDir;

use super::*;

/// Two processors with two NUMA nodes each. A node has 4 cores of two threads, the second threads of all cores last,
/// and two caches of level 3. GPUs 0 and 1 are on node 0, GPU 2 on node 1, GPU 3 on node 3.
struct Host {
    root: TempDir,
}

const GPU_NODES: [(&str, &str); 4] =
    [("0000:07:00.0", "0"), ("0000:0f:00.0", "0"), ("0000:47:00.0", "1"), ("0000:dc:00.0", "3")];

impl Host {
    fn new() -> Self {
        let host = Self { root: TempDir::new().unwrap() };
        host.write("sys/devices/system/node/online", "0-3\n");
        for node in 0..4 {
            let (first, second) = (node * 4, 16 + node * 4);
            let path = format!("sys/devices/system/node/node{node}/cpulist");
            host.write(&path, &format!("{first}-{},{second}-{}\n", first + 3, second + 3));
        }
        for cpu in 0..32 {
            let (core, folder) = (cpu % 16, format!("sys/devices/system/cpu/cpu{cpu}"));
            if cpu > core {
                // The two threads of a core have the same in all files.
                let path = host.root.path().join(folder);
                std::os::unix::fs::symlink(format!("cpu{core}"), path).unwrap();
                continue;
            }
            host.write(&format!("{folder}/topology/physical_package_id"), &format!("{}\n", core / 8));
            host.write(&format!("{folder}/topology/thread_siblings_list"), &format!("{core},{}\n", core + 16));
            let pair = core / 2 * 2;
            let shared = format!("{pair}-{},{}-{}\n", pair + 1, pair + 16, pair + 17);
            let alone = format!("{core},{}\n", core + 16);
            for (index, level, kind, shared) in
                [(0, 1, "Data", &alone), (1, 9, "Instruction", &alone), (3, 3, "Unified", &shared)]
            {
                host.write(&format!("{folder}/cache/index{index}/level"), &format!("{level}\n"));
                host.write(&format!("{folder}/cache/index{index}/type"), &format!("{kind}\n"));
                host.write(&format!("{folder}/cache/index{index}/shared_cpu_list"), shared);
            }
        }
        host
    }

    fn with_gpus() -> Self {
        let host = Self::new();
        for (number, (address, node)) in GPU_NODES.into_iter().enumerate() {
            let folder = format!("sys/bus/pci/devices/{address}");
            host.write(&format!("{folder}/numa_node"), &format!("{node}\n"));
            host.write(&format!("{folder}/vendor"), "0x10de\n");
            host.write(&format!("{folder}/class"), "0x030200\n");
            let text = format!(
                "Model: \t\t NVIDIA H100\nIRQ:   \t\t 7\nGPU UUID: \t GPU-{number}a-b\nDevice Minor: \t {number}\n"
            );
            host.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &text);
        }
        // A bridge, and the sound of a GPU.
        for (address, vendor, class) in [("0000:00:01.0", "0x8086", "0x060400"), ("0000:07:00.1", "0x10de", "0x040300")]
        {
            host.write(&format!("sys/bus/pci/devices/{address}/vendor"), vendor);
            host.write(&format!("sys/bus/pci/devices/{address}/class"), class);
        }
        host
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_dir_all(self.root.path().join(path)).unwrap();
    }

    fn plan(
        &self,
        binding: NumaBinding,
        nproc: usize,
        allowed: &str,
        visible: Option<&str>,
    ) -> Result<Vec<String>, String> {
        let topology = Topology::new(self.root.path(), topology::parse(allowed).unwrap());
        Ok(plan(binding, nproc, &topology, visible)?.iter().map(Binding::to_text).collect())
    }

    fn all(&self, binding: NumaBinding, nproc: usize) -> Vec<String> {
        self.plan(binding, nproc, "0-31", None).unwrap()
    }
}

use NumaBinding::{CoreComplex, Exclusive, Node, Socket};

#[test]
fn ranks_get_the_cpus_of_their_gpus_nodes() {
    let host = Host::with_gpus();
    assert_eq!(host.all(Node, 4), ["0-3,16-19", "0-3,16-19", "4-7,20-23", "12-15,28-31"]);
    assert_eq!(host.all(Socket, 4), ["0-7,16-23", "0-7,16-23", "0-7,16-23", "8-15,24-31"]);
    // A node's cores are divided among all its GPUs, also those without a rank; both threads of a core stay together.
    assert_eq!(host.all(Exclusive, 4), ["0-1,16-17", "2-3,18-19", "4-7,20-23", "12-15,28-31"]);
    assert_eq!(host.all(Exclusive, 1), ["0-1,16-17"]);
    assert_eq!(host.all(CoreComplex, 4), ["0-1,16-17", "2-3,18-19", "4-5,20-21", "12-13,28-29"]);
}

#[test]
fn threads_are_those_of_the_ranks_own_cpus() {
    let host = Host::with_gpus();
    let threads = |binding, nproc| {
        let topology = Topology::new(host.root.path(), topology::parse("0-31").unwrap());
        threads_of(&plan(binding, nproc, &topology, None).unwrap())
    };
    // The first two ranks share the CPUs of a node.
    assert_eq!(threads(Node, 4), [4, 4, 8, 8]);
    assert_eq!(threads(Socket, 4), [5, 5, 5, 16]);
    assert_eq!(threads(Exclusive, 4), [4, 4, 8, 8]);
    assert_eq!(threads(Node, 1), [8]);
}

#[test]
fn without_gpus_ranks_are_divided_among_the_nodes() {
    let host = Host::new();
    assert_eq!(host.all(Node, 2), ["0-3,16-19", "8-11,24-27"]);
    assert_eq!(host.all(Socket, 2), ["0-7,16-23", "8-15,24-31"]);
    assert_eq!(
        host.all(Exclusive, 6),
        ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-9,24-25", "10-11,26-27", "12-15,28-31"]
    );
    // More ranks than groups of cores: they begin again with the first.
    assert_eq!(host.all(CoreComplex, 12)[..3], ["0-1,16-17", "2-3,18-19", "0-1,16-17"]);
    // The first ranks of a node get the cores that are left over.
    let three = host.plan(Exclusive, 3, "0-3,16-19", None).unwrap();
    assert_eq!(three, ["0-1,16-17", "2,18", "3,19"]);
    // A kernel without NUMA.
    host.remove("sys/devices/system/node");
    assert_eq!(host.all(Node, 2), ["0-31", "0-31"]);
    // It tells no node of a GPU either.
    let host = Host::with_gpus();
    host.remove("sys/devices/system/node");
    for (address, _) in GPU_NODES {
        fs::remove_file(host.root.path().join(format!("sys/bus/pci/devices/{address}/numa_node"))).unwrap();
    }
    assert_eq!(host.all(Node, 2), ["0-31", "0-31"]);
}

#[test]
fn only_cpus_that_the_launcher_may_use_are_used() {
    let host = Host::with_gpus();
    assert_eq!(host.plan(Node, 2, "2-5", None).unwrap(), ["2-3", "2-3"]);
    assert_eq!(host.plan(Exclusive, 2, "2-5", None).unwrap(), ["2", "3"]);
    // A group of cores with more CPUs comes first.
    assert_eq!(host.plan(CoreComplex, 2, "1-3,18", None).unwrap(), ["2-3,18", "1"]);
    let why = host.plan(Node, 3, "0-3", None).unwrap_err();
    assert_eq!(why, "this process may use no CPU of NUMA node 1, only 0-3");
    let why = host.plan(Exclusive, 1, "0", None).unwrap_err();
    assert_eq!(why, "NUMA node 0 has 1 core for 2 ranks or GPUs; --numa-binding exclusive needs one for each");
    assert_eq!(Host::new().plan(Node, 2, "12,20", None).unwrap(), ["20", "12"]);
}

#[test]
fn cuda_visible_devices_is_read_as_cuda_reads_it() {
    let host = Host::with_gpus();
    let nodes = |list: &str| host.plan(Node, 1, "0-31", Some(list));
    assert_eq!(nodes("3").unwrap(), ["12-15,28-31"]);
    assert_eq!(nodes("GPU-2a").unwrap(), ["4-7,20-23"]);
    assert_eq!(host.plan(Node, 2, "0-31", Some("2, 0,-1,1")).unwrap(), ["4-7,20-23", "0-3,16-19"]);
    for unknown in ["4", "GPU-9", "GPU-", "MIG-2a"] {
        assert!(nodes(unknown).unwrap_err().contains(&format!("CUDA_VISIBLE_DEVICES has {unknown:?}")), "{unknown}");
    }
    // Part of a GPU, as older drivers name it. Newer names do not tell the GPU.
    assert_eq!(nodes("MIG-GPU-2a-b/1/0").unwrap(), ["4-7,20-23"]);
    let why = nodes("MIG-2a").unwrap_err();
    assert!(why.ends_with("the name of a MIG device does not tell its GPU; leave out --numa-binding"), "{why}");
    // CUDA takes a shortened UUID only if one GPU has it.
    host.write("proc/driver/nvidia/gpus/0000:07:00.0/information", "GPU UUID: \t GPU-2ax\n");
    let why = nodes("GPU-2a").unwrap_err();
    assert!(why.contains("which fits more than one of the 4 GPUs here; give indices or whole UUIDs"), "{why}");
    let why = host.plan(Node, 3, "0-31", Some("0,1")).unwrap_err();
    assert!(why.starts_with("local rank 2 has no GPU: 2 are visible here"), "{why}");
    // No GPU is visible, so that the ranks compute on CPUs.
    for none in ["", "NoDevFiles"] {
        assert_eq!(host.plan(Node, 2, "0-31", Some(none)).unwrap(), ["0-3,16-19", "8-11,24-27"]);
    }
    // Without the driver's list, the PCI bus tells.
    host.remove("proc/driver/nvidia");
    assert_eq!(nodes("3").unwrap(), ["12-15,28-31"]);
    // -1: the host has one node.
    host.write("sys/bus/pci/devices/0000:dc:00.0/numa_node", "-1\n");
    assert_eq!(nodes("3").unwrap(), ["0-3,16-19"]);
}

#[test]
fn gpus_that_the_job_may_not_use_do_not_count() {
    let host = Host::with_gpus();
    host.write("dev/nvidia1", "");
    // GPU 1 may be used; of the others no file tells.
    assert_eq!(host.all(Node, 4)[2], "4-7,20-23");
    // Root may open files of any mode, but not a link to itself.
    for number in [0, 2] {
        let file = format!("nvidia{number}");
        std::os::unix::fs::symlink(&file, host.root.path().join("dev").join(&file)).unwrap();
    }
    assert_eq!(host.all(Node, 2), ["0-3,16-19", "12-15,28-31"]);
    // Slurm counts only the job's GPUs.
    assert_eq!(host.plan(Node, 1, "0-31", Some("1")).unwrap(), ["12-15,28-31"]);
    let why = host.plan(Node, 3, "0-31", None).unwrap_err();
    assert!(why.starts_with("local rank 2 has no GPU: 2 are visible here"), "{why}");
}

#[test]
fn what_cannot_be_read_is_named() {
    let host = Host::with_gpus();
    let broken = |path: &str, text: Option<&str>, binding: NumaBinding| {
        let file = host.root.path().join(path);
        let before = fs::read_to_string(&file).unwrap();
        match text {
            Some(text) => fs::write(&file, text).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        let why = host.plan(binding, 1, "0-31", None).unwrap_err();
        assert!(why.contains(path), "{why}");
        fs::write(&file, before).unwrap();
    };
    broken("sys/bus/pci/devices/0000:07:00.0/numa_node", None, Node);
    broken("sys/bus/pci/devices/0000:07:00.0/numa_node", Some("none"), Node);
    for text in [None, Some("3-1"), Some("0-99999999"), Some("0-x"), Some("\u{0}")] {
        broken("sys/devices/system/node/node0/cpulist", text, Node);
    }
    broken("sys/devices/system/cpu/cpu0/topology/physical_package_id", None, Socket);
    broken("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", Some("?"), Exclusive);
    broken("sys/devices/system/cpu/cpu0/cache/index3/level", Some("high"), CoreComplex);
    host.remove("sys/devices/system/cpu/cpu0/cache");
    assert!(host.plan(CoreComplex, 1, "0-31", None).unwrap_err().contains("cpu0/cache: "));
    assert!("socket".parse() == Ok(Socket) && "core-complex".parse() == Ok(CoreComplex));
    let why = "Node".parse::<NumaBinding>().unwrap_err().to_string();
    assert_eq!(why, "--numa-binding Node: give node, socket, exclusive or core-complex");
}

#[test]
fn lists_of_cpus_are_read_and_written() {
    for text in ["", "0", "0-2,4", "1,3,5-7"] {
        assert_eq!(to_text(&topology::parse(text).unwrap()), text);
    }
    assert_eq!(to_text(&topology::parse(" 4, 0-1 ,2,").unwrap()), "0-2,4");
}

/// This thread's own CPUs.
fn own() -> Cpus {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

#[test]
fn a_thread_is_bound_until_the_guard_is_dropped() {
    let before = own();
    let one = Binding { cpus: before.iter().copied().take(1).collect() };
    let entered = one.enter().unwrap();
    assert_eq!(own(), one.cpus);
    drop(entered);
    assert_eq!(own(), before);
    // CPUs that this process may not use.
    let none = Binding { cpus: [CpuSet::MAX_CPU - 1].into() };
    assert!(none.enter().err().unwrap().to_string().contains("cannot bind a rank to the CPUs 1023"));
    assert_eq!(own(), before);
}
