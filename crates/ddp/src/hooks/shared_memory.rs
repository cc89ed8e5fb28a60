//! Gradients averaged in memory that the ranks of one host share.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::process::{Resource, getrlimit};
use tch::{Device, Kind, TchError, Tensor};

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
/// the gradients' on each rank, and taken when a bucket is first reduced. It has no name in the file system, and ends with
/// the ranks.
///
/// PyTorch has nothing like it for CPUs.
#[derive(Debug)]
pub struct SharedMemory {
    group: ProcessGroup,
    /// By bucket.
    areas: HashMap<usize, Area>,
    /// 1 / ranks, in float64 whatever the gradients' dtype is: rounded to it, a third of bfloat16 is 0.2 % too large. A tensor
    /// without dimensions takes part as a number does.
    share: Tensor,
}

/// The memory of one bucket.
#[derive(Debug)]
struct Area {
    /// Of each rank, by turns: a rank that begins the next pass writes to the other half than those read that end this one.
    halves: [Vec<Tensor>; 2],
    pass: usize,
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
    /// or in several containers; also where the backend is not Gloo. [`DdpError::Lost`] and [`DdpError::TimedOut`] where a rank
    /// is missing.
    ///
    /// In a pass [`DdpError::Unsupported`], on every rank, where the host has less memory than all ranks' gradients take twice.
    /// The limit of a container is not looked at: beyond it, the kernel ends the process.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(group: &ProcessGroup) -> Result<Self, DdpError> {
        if group.backend() == Backend::Nccl {
            return Err(unsupported("NCCL shares memory between the GPUs of a host by itself".to_owned()));
        }
        let share = Tensor::from(1.0 / group.size() as f64);
        let hook = Self { group: group.clone(), areas: HashMap::new(), share };
        let _works = hook.area(1, Kind::Float)?;
        Ok(hook)
    }

    /// Makes and maps the memory of all ranks for so many numbers. The ranks agree about it by collectives, which notice lost
    /// ranks at once.
    fn area(&self, numel: i64, kind: Kind) -> Result<Area, DdpError> {
        let rank = self.group.rank();
        let bytes = kind.elt_size_in_bytes() as u64 * 2 * numel.unsigned_abs();
        // Before any rank takes its own.
        let mut left = Tensor::from(available().map_or(i64::MAX, |left| i64::try_from(left).unwrap_or(i64::MAX)));
        self.group.all_reduce(&mut left, ReduceOp::Min)?;
        let own = Named::new(bytes, self.group.size(), i64::try_from(&left)?.unsigned_abs());
        let told = match &own {
            Ok(own) => own.note(),
            Err(why) => why.clone(),
        };
        let mut note = told.into_bytes();
        note.resize(NOTE, 0);
        let notes = self.group.all_gather(&Tensor::from_slice(&note))?;
        let notes: Vec<Vec<u8>> = notes.iter().map(Vec::try_from).collect::<Result<_, _>>()?;
        let notes: Vec<_> = notes.iter().map(|note| String::from_utf8_lossy(note)).collect();
        let notes = || notes.iter().map(|note| note.trim_end_matches('\0')).enumerate();
        // All ranks read it.
        if let Some((peer, why)) = notes().find(|(_, note)| !note.starts_with('/')) {
            return Err(unsupported(format!("rank {peer} has no memory to share: {why}")));
        }
        let mapped: Result<Vec<Tensor>, DdpError> = notes()
            .map(|(peer, note)| {
                map(note, 2 * numel, kind).map_err(|why| {
                    let peer = format!("the memory of rank {peer}, which has to be on its host");
                    unsupported(format!("rank {rank} cannot map {peer}: {why}"))
                })
            })
            .collect();
        // All ranks have to know whether one cannot.
        let mut can = Tensor::from(i64::from(mapped.is_ok()));
        self.group.all_reduce(&mut can, ReduceOp::Min)?;
        let mapped = mapped?;
        if i64::try_from(&can)? == 0 {
            return Err(unsupported("another rank cannot map the memory of all ranks".to_owned()));
        }
        let half = |start| -> Result<Vec<Tensor>, TchError> {
            mapped.iter().map(|whole| whole.f_narrow(0, start, numel)).collect()
        };
        Ok(Area { halves: [half(0)?, half(numel)?], pass: 0 })
    }
}

/// In bytes: what a rank tells of its memory.
const NOTE: usize = 256;

fn unsupported(reason: String) -> DdpError {
    DdpError::Unsupported { op: "SharedMemory", reason }
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
        // DDP's own division: by the inverse, before the sum, and rounded once.
        let _written = bucket.buffer.f_mul_out(&area.halves[half][rank], &self.share)?;
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
    /// Others open it by the path, until all have mapped it.
    file: OwnedFd,
    name: String,
}

impl Named {
    /// Takes the memory at once: pages that are not there when they are written would end the process. `left` is what the
    /// host has for the memory of all ranks.
    fn new(bytes: u64, ranks: usize, left: u64) -> Result<Self, String> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let failed = |error: rustix::io::Errno| format!("{bytes} bytes: {error}");
        // The system would signal that, which ends the process, or give more than there is, and end one later.
        if let Some(most) = getrlimit(Resource::Fsize).current.filter(|most| bytes > *most) {
            return Err(format!("{bytes} bytes, and `ulimit -f` allows {most}"));
        }
        if bytes.checked_mul(ranks as u64).is_none_or(|all| all > left) {
            return Err(format!("{bytes} bytes for each of {ranks} ranks, and {left} are available on their host"));
        }
        // Another process of the same number may be in another container.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("overdrive-{}-{now}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let text = CString::new(name.clone()).unwrap_or_default();
        let file = memfd_create(text.as_c_str(), MemfdFlags::CLOEXEC).map_err(failed)?;
        if bytes > 0 {
            fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)?;
        }
        Ok(Self { file, name })
    }

    /// What others map it by.
    fn note(&self) -> String {
        format!("/proc/{}/fd/{} {}", process::id(), self.file.as_raw_fd(), self.name)
    }
}

/// Bytes of memory and swap that the host can still give; None where it does not say.
fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix(" kB")?.parse().ok()
    };
    Some((kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) << 10)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let why = Named::new(1 << 16, 4, (1 << 18) - 1).err().unwrap();
        assert_eq!(why, "65536 bytes for each of 4 ranks, and 262143 are available on their host");
        assert!(Named::new(1 << 60, 16, u64::MAX).is_err());
        let left = available().unwrap();
        assert!(Named::new(1 << 60, 1, left).is_err(), "{left}");
        // Nothing is promised that is not there.
        let some = Named::new(1 << 16, 4, 1 << 18).unwrap();
        assert_eq!(rustix::fs::fstat(&some.file).unwrap().st_blocks, (1 << 16) / 512);
    }
}
