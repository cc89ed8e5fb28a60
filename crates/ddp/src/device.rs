//! Which GPU a rank uses.

use overdrive_ffi::c10d::Store;
use overdrive_ffi::cuda;

use crate::error::DdpError;

/// Where a rank runs.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: Option<usize>,
}

/// The GPU that the caller names, or the launcher's local rank; GPU 0 where the process sees one alone; or a guess, as in
/// PyTorch: without one, all ranks of a host would use GPU 0. None without any GPU.
pub(crate) fn choose(named: Option<usize>, place: Place, gpus: usize) -> Result<Option<usize>, DdpError> {
    let is_there = |what: &str, device: usize| match device < gpus || gpus == 0 {
        true => Ok(Some(device)),
        false => Err(DdpError::NoSuchDevice { what: what.to_owned(), device, gpus }),
    };
    if let Some(device) = named {
        return is_there("cuda_device", device);
    }
    match place.local_rank {
        Some(_) if gpus == 1 => Ok(Some(0)),
        Some(device) => is_there("the local rank", device),
        None => Ok(guess(place, gpus)),
    }
}

fn guess(place: Place, gpus: usize) -> Option<usize> {
    let Place { rank, world_size, .. } = place;
    let device = rank.checked_rem(gpus)?;
    if world_size > 1 {
        tracing::warn!(
            rank,
            device,
            "the GPU of this rank is a guess, rank modulo the number of GPUs: set LOCAL_RANK, or call `cuda_device`"
        );
    }
    Some(device)
}

/// Takes a GPU for a rank. NCCL would refuse two ranks on one, but only in the first collective, and say which GPU by its
/// place on the bus.
pub(crate) fn claim(store: &Store, device: usize, rank: usize) -> Result<(), DdpError> {
    // A libtorch without CUDA has its own error, when the group is made.
    let Ok(uuid) = cuda::device_uuid(device) else { return Ok(()) };
    let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let own = rank.to_string();
    let holder = store.compare_set(&format!("gpu/{uuid}"), b"", own.as_bytes())?;
    match String::from_utf8_lossy(&holder).parse() {
        Ok(other) if other != rank => Err(DdpError::SharedDevice { device, rank, other }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_finds_its_gpu() {
        let place = |local_rank| Place { rank: 5, world_size: 8, local_rank };
        let device = |named, local_rank, gpus| choose(named, place(local_rank), gpus).map_err(|it| it.to_string());
        assert_eq!(device(Some(3), Some(1), 4), Ok(Some(3)));
        assert_eq!(device(None, Some(1), 4), Ok(Some(1)));
        // Slurm's `--gpus-per-task` shows each rank its own.
        assert_eq!(device(None, Some(3), 1), Ok(Some(0)));
        assert_eq!(device(None, None, 4), Ok(Some(1)));
        assert_eq!(device(None, None, 0), Ok(None));
        // Without any, libtorch says so.
        assert_eq!(device(None, Some(3), 0), Ok(Some(3)));
        let message = device(None, Some(3), 2).unwrap_err();
        assert!(message.contains("the local rank names GPU 3, but the process sees 2"), "{message}");
        let message = device(Some(1), Some(0), 1).unwrap_err();
        assert!(message.contains("cuda_device names GPU 1, but the process sees 1"), "{message}");
    }
}
