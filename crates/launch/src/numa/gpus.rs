//! The PCI addresses of the GPUs that CUDA sees, in its order, without CUDA.

use std::fs;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::io::Errno;

/// NVIDIA's vendor ID, and the PCI classes of VGA and 3D controllers.
const NVIDIA: &str = "0x10de";
const CLASSES: [&str; 2] = ["0x0300", "0x0302"];

struct Gpu {
    address: String,
    /// `GPU-..`; empty if the driver does not tell.
    uuid: String,
}

/// The addresses of the GPUs that a list like `CUDA_VISIBLE_DEVICES` selects; without a list, of all. They are ordered
/// by address, as in CUDA where all GPUs are of one kind, or with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
pub fn visible(root: &Path, list: Option<&str>) -> Result<Vec<String>, String> {
    let all = all(root);
    let Some(list) = list else { return Ok(all.into_iter().map(|gpu| gpu.address).collect()) };
    // Slurm's word for no GPU.
    if list == "NoDevFiles" {
        return Ok(Vec::new());
    }
    // As CUDA does: what follows an entry that is empty or negative does not count.
    let entries = list.split(',').map(str::trim).take_while(|entry| !entry.is_empty() && !entry.starts_with('-'));
    entries.map(|entry| find(&all, entry)).collect()
}

fn find(all: &[Gpu], entry: &str) -> Result<String, String> {
    let found: Vec<&Gpu> = match (entry.parse::<usize>(), entry.strip_prefix("MIG-")) {
        (Ok(index), _) => all.get(index).into_iter().collect(),
        // Part of a GPU: `MIG-GPU-<UUID>/<instance>/<instance>`, or with newer drivers a UUID of its own.
        (_, Some(part)) => {
            let uuid = part.split('/').next().unwrap_or_default();
            all.iter().filter(|gpu| !uuid.is_empty() && gpu.uuid == uuid).collect()
        }
        // A UUID may be shortened while it is unique.
        _ => all.iter().filter(|gpu| entry.len() > 4 && gpu.uuid.starts_with(entry)).collect(),
    };
    let (what, right) = match found[..] {
        [one] => return Ok(one.address.clone()),
        [] if entry.starts_with("MIG-") => {
            ("is none", "the name of a MIG device does not tell its GPU; leave out --numa-binding")
        }
        [] => ("is none", "give indices or UUIDs"),
        _ => ("fits more than one", "give indices or whole UUIDs"),
    };
    Err(format!("CUDA_VISIBLE_DEVICES has {entry:?}, which {what} of the {} GPUs here; {right}", all.len()))
}

/// The driver's GPUs, which are those of the container in a container; without the driver's list those of the PCI bus.
fn all(root: &Path) -> Vec<Gpu> {
    let of_driver = names(&root.join("proc/driver/nvidia/gpus"));
    let addresses = if of_driver.is_empty() { on_bus(root) } else { of_driver };
    let gpu = |address: String| {
        let file = root.join(format!("proc/driver/nvidia/gpus/{address}/information"));
        let text = fs::read_to_string(file).unwrap_or_default();
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let device = root.join(format!("dev/nvidia{}", value("Device Minor:")));
        may_be_used(&device).then(|| Gpu { address, uuid: value("GPU UUID:").to_owned() })
    };
    addresses.into_iter().filter_map(gpu).collect()
}

/// False for a GPU of another job: the driver lists it, but this job's cgroup forbids its device file. Without a file,
/// which the driver may make later, nothing is known.
fn may_be_used(device: &Path) -> bool {
    matches!(access(device, Access::READ_OK | Access::WRITE_OK), Ok(()) | Err(Errno::NOENT | Errno::NOTDIR))
}

fn on_bus(root: &Path) -> Vec<String> {
    let devices = root.join("sys/bus/pci/devices");
    let is_gpu = |address: &String| {
        let value = |name: &str| fs::read_to_string(devices.join(address).join(name)).unwrap_or_default();
        value("vendor").trim() == NVIDIA && CLASSES.iter().any(|class| value("class").starts_with(class))
    };
    names(&devices).into_iter().filter(is_gpu).collect()
}

/// The names in a folder, sorted; none if there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
