//! Gradients averaged in memory that the ranks of one host share.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tch::{Device, Kind, Tensor};

use super::CommHook;
use crate::error::DdpError;
use crate::group::{Backend, ProcessGroup};
use crate::work::Work;

/// Averages gradients in memory that all ranks of the group map, where Gloo sends them through sockets of the loopback. For
/// ranks on the CPUs of one host, in one container. The mean is an all-reduce's: on two ranks to the bit, on more but for the
/// order of the sums.
///
/// Each rank writes its gradients once, and reads those of all ranks: it is meant for few ranks. Gloo still tells when all
/// have written, by one number a bucket, so that lost and stalled ranks are noticed as without a hook. The memory is twice
/// the gradients' on each rank. It has no name in the file system, and ends with the ranks.
///
/// PyTorch has nothing like it for CPUs.
#[derive(Debug)]
pub struct SharedMemory {
    group: ProcessGroup,
    /// By bucket.
    areas: HashMap<usize, Area>,
    /// Of this hook among the group's agreements, and how many areas were made: the same on all ranks.
    number: u64,
    made: u64,
}

/// The memory of one bucket.
#[derive(Debug)]
struct Area {
    /// Of each rank, by turns: a rank that begins the next pass writes to the other half than those read that end this one.
    halves: [Vec<Tensor>; 2],
    pass: usize,
    /// Of 1 / ranks, in the bucket's dtype.
    share: Tensor,
    /// Kept while others may not have mapped it yet.
    _own: OwnedFd,
}

/// A bucket that all ranks write.
#[derive(Debug)]
pub struct SharedMemoryInFlight {
    half: usize,
    written: Work,
}

impl SharedMemory {
    /// A hook for this group. Every rank calls it.
    ///
    /// # Errors
    /// On every rank [`DdpError::Unsupported`] if one cannot map the memory of all others, because they are on several hosts
    /// or in several containers; also where the backend is not Gloo. When a rank does not call it within the timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(group: &ProcessGroup) -> Result<Self, DdpError> {
        let unsupported = |reason: String| DdpError::Unsupported { op: "SharedMemory", reason };
        if group.backend() == Backend::Nccl {
            return Err(unsupported("NCCL shares memory between the GPUs of a host by itself".to_owned()));
        }
        let mut hook = Self { group: group.clone(), areas: HashMap::new(), number: group.next_agreement(), made: 0 };
        let mapped = hook.area(1, Kind::Float);
        // All ranks have to know whether one cannot.
        let mut can = Tensor::from(i64::from(mapped.is_ok()));
        group.all_reduce(&mut can, ReduceOp::Min)?;
        match (mapped, i64::try_from(&can)?) {
            (Err(error), _) => Err(error),
            (Ok(_), 0) => Err(unsupported("another rank cannot map the memory of all ranks".to_owned())),
            (Ok(_), _) => Ok(hook),
        }
    }

    /// Makes and maps the memory of all ranks for so many numbers.
    fn area(&mut self, numel: i64, kind: Kind) -> Result<Area, DdpError> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let number = format!("{}.{}", self.number, self.made);
        self.made += 1;
        let own = Named::new(2 * numel * i64::try_from(kind.elt_size_in_bytes()).unwrap_or(8))?;
        let key = |rank: usize| format!("shared memory/{number}/{rank}");
        let store = self.group.store();
        store.set(&key(rank), format!("{} {}", own.path, own.name).as_bytes())?;
        let mut halves = [Vec::with_capacity(ranks), Vec::with_capacity(ranks)];
        for peer in 0..ranks {
            let told = store.get(&key(peer), self.group.timeout())?;
            let whole = map(&String::from_utf8_lossy(&told), 2 * numel, kind).map_err(|why| {
                let reason =
                    format!("rank {rank} cannot map the memory of rank {peer}, which has to be on its host: {why}");
                DdpError::Unsupported { op: "SharedMemory", reason }
            })?;
            halves[0].push(whole.f_narrow(0, 0, numel)?);
            halves[1].push(whole.f_narrow(0, numel, numel)?);
        }
        let share = Tensor::from(1.0 / ranks as f64).f_to_kind(kind)?;
        Ok(Area { halves, pass: 0, share, _own: own.file })
    }
}

impl CommHook for SharedMemory {
    type InFlight = SharedMemoryInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<SharedMemoryInFlight, DdpError> {
        let (numel, kind) = (i64::try_from(bucket.buffer.numel()).unwrap_or(i64::MAX), bucket.buffer.kind());
        if bucket.buffer.device() != Device::Cpu {
            let reason = format!("gradients on {:?}: only CPUs share this memory", bucket.buffer.device());
            return Err(DdpError::Unsupported { op: "SharedMemory", reason });
        }
        let fits = |area: &Area| {
            let first = &area.halves[0][0];
            first.size() == [numel] && first.kind() == kind
        };
        if !self.areas.get(&bucket.index).is_some_and(fits) {
            let area = self.area(numel, kind)?;
            self.areas.insert(bucket.index, area);
        }
        let rank = self.group.rank();
        let area = self.areas.get_mut(&bucket.index).ok_or(DdpError::NoParameters)?;
        let half = area.pass % 2;
        area.pass += 1;
        // DDP's own division: by the inverse, before the sum.
        let _written = bucket.buffer.f_mul_out(&area.halves[half][rank], &area.share)?;
        let written = self.group.all_reduce_async(&mut Tensor::from(0u8), ReduceOp::Max)?;
        Ok(SharedMemoryInFlight { half, written })
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: SharedMemoryInFlight) -> Result<Tensor, DdpError> {
        in_flight.written.wait()?;
        let area = self.areas.get(&bucket.index).ok_or(DdpError::NoParameters)?;
        let mut mean = bucket.buffer.shallow_clone();
        match &area.halves[in_flight.half][..] {
            [] => {}
            [only] => mean.f_copy_(only).map(drop)?,
            [first, second, rest @ ..] => {
                let _sum = first.f_add_out(&mean, second)?;
                rest.iter().try_for_each(|other| mean.f_add_(other).map(drop))?;
            }
        }
        Ok(mean)
    }

    fn buckets_rebuilt(&mut self) {
        self.areas.clear();
    }
}

/// Memory of this process that others can map, by a path and a name that tells whether it is the right one.
struct Named {
    file: OwnedFd,
    path: String,
    name: String,
}

impl Named {
    fn new(bytes: i64) -> Result<Self, DdpError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let system = |error: rustix::io::Errno| DdpError::Unsupported {
            op: "SharedMemory",
            reason: format!("the system gives no memory to share: {error}"),
        };
        // Another process of the same number may be in another container.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("overdrive-{}-{now}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let text = CString::new(name.clone()).unwrap_or_default();
        let file = memfd_create(text.as_c_str(), MemfdFlags::CLOEXEC).map_err(system)?;
        ftruncate(&file, u64::try_from(bytes).unwrap_or(0)).map_err(system)?;
        let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        Ok(Self { file, path, name })
    }
}

/// Maps what another rank has told of: its path and its name.
fn map(told: &str, numel: i64, kind: Kind) -> Result<Tensor, String> {
    let (path, name) = told.split_once(' ').ok_or("it has told nothing of it")?;
    let found = fs::read_link(path).map_err(|error| format!("{path}: {error}"))?;
    if found.to_string_lossy() != format!("/memfd:{name} (deleted)") {
        return Err(format!("{path} is {} here", found.display()));
    }
    Tensor::f_from_file(path, true, numel, (kind, Device::Cpu)).map_err(|error| format!("{path}: {error}"))
}
