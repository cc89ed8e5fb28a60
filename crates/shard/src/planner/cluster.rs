//! The ranks to train on, and how fast they are.

use std::path::Path;
use std::time::Instant;

use overdrive_ddp::{ProcessGroup, ReduceOp};
use overdrive_ffi::host_memory::{in_files, open_folder};
use tch::{Device, Kind, Tensor};

use super::workload::{not_negative, positive};
use crate::error::ShardError;

/// The share of a device's memory that the allocator and kernels take.
const RESERVED: f64 = 0.1;
/// Bytes of what is copied, sent and written to measure.
const SAMPLE: i64 = 32 << 20;
/// How often each is measured: the fastest counts.
const TIMES: usize = 4;

/// The ranks to train on, which are all equal.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    pub(super) ranks: usize,
    pub(super) memory_bytes: f64,
    pub(super) link_bytes_per_second: f64,
    pub(super) update_bytes_per_second: f64,
    pub(super) host: Option<Host>,
    pub(super) disk: Option<Disk>,
}

/// The host of a device, for each rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Host {
    pub(super) memory_bytes: f64,
    pub(super) link_bytes_per_second: f64,
    pub(super) update_bytes_per_second: f64,
}

/// A folder for files, for each rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Disk {
    pub(super) free_bytes: f64,
    pub(super) bytes_per_second: f64,
}

impl Cluster {
    /// So many ranks, each with a device of so many bytes, of which 90% are used, that sends so many bytes a second to the
    /// next one. Its memory is read and written at 1 TB/s, and nothing can be offloaded unless
    /// [`host`](Self::host) or [`disk`](Self::disk) says so.
    pub fn new(ranks: usize, memory_bytes: f64, link_bytes_per_second: f64) -> Self {
        let update_bytes_per_second = 1e12;
        Self { ranks, memory_bytes, link_bytes_per_second, update_bytes_per_second, host: None, disk: None }
    }

    /// Bytes a second that a device reads and writes in an optimizer's step.
    #[must_use]
    pub fn update(mut self, bytes_per_second: f64) -> Self {
        self.update_bytes_per_second = bytes_per_second;
        self
    }

    /// For each rank: bytes of its host's memory, bytes a second between it and the device, and bytes a second that the host
    /// reads and writes in an optimizer's step.
    #[must_use]
    pub fn host(mut self, memory_bytes: f64, link_bytes_per_second: f64, update_bytes_per_second: f64) -> Self {
        self.host = Some(Host { memory_bytes, link_bytes_per_second, update_bytes_per_second });
        self
    }

    /// For each rank: bytes of a disk, and bytes a second that are read and written there. Without [`host`](Self::host), ranks
    /// are on CPUs, whose memory is the device's: set it for GPUs.
    #[must_use]
    pub fn disk(mut self, free_bytes: f64, bytes_per_second: f64) -> Self {
        self.disk = Some(Disk { free_bytes, bytes_per_second });
        self
    }

    /// Measures how fast the ranks of a group are: exchanges, updates of memory, and for a GPU the copies from and to the
    /// host. The slowest rank counts. Every rank calls it, with `memory_bytes` of its device, and of the host's memory that a
    /// rank may use.
    ///
    /// # Errors
    /// When memory runs out, and [`ShardError::Ddp`] when a rank has exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks, and for the device.
    pub fn measure(
        group: &ProcessGroup,
        device: Device,
        memory_bytes: f64,
        host_memory_bytes: f64,
    ) -> Result<Self, ShardError> {
        let _no_grad = tch::no_grad_guard();
        let bytes = |device| Tensor::f_ones([SAMPLE / 4], (Kind::Float, device));
        let link = match group.size() {
            1 => f64::INFINITY,
            ranks => {
                let own = bytes(device)?;
                let mut all = Tensor::f_empty([SAMPLE / 4 * ranks as i64], (Kind::Float, device))?;
                let sent = (ranks - 1) as f64 * SAMPLE as f64;
                sent / fastest(device, || group.all_gather_into(&mut all, &own))?
            }
        };
        let update = |device| -> Result<f64, ShardError> {
            let (mut one, other) = (bytes(device)?, bytes(device)?);
            // Reads both, and writes one.
            Ok(3.0 * SAMPLE as f64 / fastest(device, || one.f_add_(&other).map(drop))?)
        };
        let mut figures = vec![link, update(device)?];
        if device.is_cuda() {
            let (mut there, here) = (bytes(device)?, bytes(Device::Cpu)?.f_pin_memory(device)?);
            let copied = fastest(device, || there.f_copy_(&here))?;
            figures.extend([SAMPLE as f64 / copied, update(Device::Cpu)?]);
        }
        let figures = slowest(group, device, figures)?;
        let cluster = Self::new(group.size(), memory_bytes, figures[0]).update(figures[1]);
        Ok(match figures[2..] {
            [link, update] => cluster.host(host_memory_bytes, link, update),
            _ => cluster,
        })
    }

    /// Measures how fast files in a folder are written and read through the system's cache, and adds it. Every rank calls it.
    ///
    /// # Errors
    /// [`ShardError::Disk`] when the folder cannot be opened, and as [`measure`](Self::measure).
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn measure_disk(self, group: &ProcessGroup, folder: &Path, free_bytes: f64) -> Result<Self, ShardError> {
        let failed = |source| ShardError::Disk { path: folder.to_owned(), source };
        let opened = open_folder(folder).map_err(failed)?;
        let _no_grad = tch::no_grad_guard();
        let from = Tensor::f_ones([SAMPLE / 4], (Kind::Float, Device::Cpu))?;
        let write = || -> Result<(), ShardError> {
            let mut file = in_files(&opened, || from.f_zeros_like())??;
            file.f_copy_(&from)?;
            let _sum = file.f_sum(Kind::Float)?;
            Ok(())
        };
        // Zeros, a copy and a sum.
        let found = 3.0 * SAMPLE as f64 / fastest(Device::Cpu, write)?;
        let device = group.device();
        let figures = slowest(group, device, vec![found])?;
        Ok(self.disk(free_bytes, figures[0]))
    }

    /// The bytes of a device that training may use.
    pub(super) fn usable(&self) -> f64 {
        (1.0 - RESERVED) * self.memory_bytes
    }

    pub(super) fn check(&self) -> Result<(), ShardError> {
        positive("ranks", self.ranks as f64)?;
        positive("memory_bytes of a device", self.memory_bytes)?;
        if self.ranks > 1 {
            positive("link_bytes_per_second", self.link_bytes_per_second)?;
        }
        positive("update_bytes_per_second", self.update_bytes_per_second)?;
        if let Some(host) = self.host {
            not_negative("memory_bytes of a host", host.memory_bytes)?;
            positive("link_bytes_per_second of a host", host.link_bytes_per_second)?;
            positive("update_bytes_per_second of a host", host.update_bytes_per_second)?;
        }
        if let Some(disk) = self.disk {
            not_negative("free_bytes of a disk", disk.free_bytes)?;
            positive("bytes_per_second of a disk", disk.bytes_per_second)?;
        }
        Ok(())
    }
}

/// The seconds of the fastest of several calls.
fn fastest<E: Into<ShardError>>(device: Device, mut work: impl FnMut() -> Result<(), E>) -> Result<f64, ShardError> {
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        let begun = Instant::now();
        work().map_err(Into::into)?;
        if let Device::Cuda(number) = device {
            tch::Cuda::synchronize(number as i64);
        }
        best = best.min(begun.elapsed().as_secs_f64().max(1e-9));
    }
    Ok(best)
}

/// The smallest of all ranks' figures.
fn slowest(group: &ProcessGroup, device: Device, figures: Vec<f64>) -> Result<Vec<f64>, ShardError> {
    let mut all = Tensor::f_from_slice(&figures)?.f_to_device(device)?;
    group.all_reduce(&mut all, ReduceOp::Min)?;
    Ok(Vec::<f64>::try_from(&all.f_to_device(Device::Cpu)?)?)
}
