//! Where this rank's rows are kept: on the device that computes, in host memory, or in files.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;

use overdrive_core::TorchError;
use overdrive_ffi::host_memory::{in_files, open_folder};
use overdrive_ffi::{SideStream, Transfer, empty_pinned};
use tch::{Device, Kind, Tensor};

use crate::error::ShardError;

/// So many means of gradients may be on their way to the host before the device waits for the first one.
const UNDER_WAY: usize = 1;

/// Where a rank keeps its rows of parameters, their gradients and the optimizer's state.
///
/// # Source
/// `torch.distributed.fsdp.CPUOffloadPolicy`; DeepSpeed's `offload_param`
#[doc(alias = "CPUOffloadPolicy")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OffloadPolicy {
    /// On the device of the parameters.
    #[default]
    None,
    /// In host memory. For parameters on a CPU that is the same as `None`.
    Cpu,
    /// In files in this folder, which are mapped into memory, as of [`in_files`](overdrive_ffi::host_memory::in_files):
    /// what is smaller than 256 KiB stays in memory, and so does state that an optimizer makes within its step (tch's,
    /// L-BFGS, the slow weights of `Lookahead`). Each rank may have a folder of its own, or all the same. A folder in a
    /// `tmpfs` is memory. With a GPU, means of gradients are in pinned memory until the backward pass ends.
    Disk(PathBuf),
}

impl OffloadPolicy {
    /// What is the same on all ranks.
    pub(super) fn place(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "the host's memory",
            Self::Disk(_) => "a folder",
        }
    }
}

#[derive(Debug)]
pub(super) struct Home {
    policy: OffloadPolicy,
    /// That of the whole parameters.
    pub(super) device: Device,
    folder: Option<File>,
    /// For copies between the device and the host, if rows are not on the device.
    stream: Option<SideStream>,
    under_way: VecDeque<Transfer>,
}

impl Home {
    pub(super) fn open(policy: &OffloadPolicy, device: Device) -> Result<Self, ShardError> {
        let folder = match policy {
            OffloadPolicy::Disk(path) => {
                let failed = |source| ShardError::Disk { path: path.clone(), source };
                Some(open_folder(path).map_err(failed)?)
            }
            _ => None,
        };
        let stream = match (policy, device) {
            (OffloadPolicy::None, _) => None,
            (_, Device::Cuda(number)) => Some(SideStream::new(number)?),
            _ => None,
        };
        Ok(Self { policy: policy.clone(), device, folder, stream, under_way: VecDeque::new() })
    }

    pub(super) fn policy(&self) -> &OffloadPolicy {
        &self.policy
    }

    pub(super) fn is_on_disk(&self) -> bool {
        self.folder.is_some()
    }

    /// Whether rows have to be copied to the device before they are sent.
    pub(super) fn uploads(&self) -> bool {
        self.stream.is_some()
    }

    /// What `work` makes on the host is kept there.
    pub(super) fn make<T>(&self, work: impl FnOnce() -> T) -> Result<T, TorchError> {
        match &self.folder {
            Some(folder) => in_files(folder, work),
            None => Ok(work()),
        }
    }

    /// A copy of a tensor, for this rank to keep. The host waits for it.
    pub(super) fn keep(&self, tensor: &Tensor) -> Result<Tensor, TorchError> {
        let device = if self.policy == OffloadPolicy::None { tensor.device() } else { Device::Cpu };
        let mut kept = self.make(|| Tensor::f_empty(tensor.size(), (tensor.kind(), device)))??;
        kept.f_copy_(tensor)?;
        Ok(kept)
    }

    /// Memory for rows that are to be sent: on their device, or pinned.
    pub(super) fn staging(&self, bytes: i64, device: Device) -> Result<Tensor, TorchError> {
        match self.uploads() {
            true => empty_pinned(&[bytes], Kind::Uint8),
            false => Ok(Tensor::f_empty([bytes], (Kind::Uint8, device))?),
        }
    }

    /// Starts to copy what was put there to the device. Rows may be changed meanwhile.
    pub(super) fn upload(&self, staged: &Tensor) -> Result<Option<Transfer>, TorchError> {
        let Some(stream) = &self.stream else { return Ok(None) };
        let there = Tensor::f_empty(staged.size(), (staged.kind(), self.device))?;
        stream.copy(staged, &there).map(Some)
    }

    /// Starts to move means of gradients here, from the device. They are here after [`settle`](Self::settle).
    pub(super) fn take(&mut self, means: &Tensor) -> Result<Tensor, TorchError> {
        let Some(stream) = &self.stream else {
            return if self.is_on_disk() { self.keep(means) } else { Ok(means.shallow_clone()) };
        };
        let host = empty_pinned(&means.size(), means.kind())?;
        self.under_way.push_back(stream.copy(means, &host)?);
        if self.under_way.len() > UNDER_WAY {
            self.under_way.pop_front();
        }
        Ok(host)
    }

    /// The means on their way are not needed.
    pub(super) fn forget(&mut self) {
        self.under_way.clear();
    }

    /// Waits until all means are here.
    pub(super) fn synchronize(&mut self) -> Result<(), TorchError> {
        self.forget();
        self.stream.as_ref().map_or(Ok(()), SideStream::synchronize)
    }

    /// Means as they are kept.
    pub(super) fn settle(&self, taken: Tensor) -> Result<Tensor, TorchError> {
        if self.uploads() && self.is_on_disk() { self.keep(&taken) } else { Ok(taken) }
    }
}
