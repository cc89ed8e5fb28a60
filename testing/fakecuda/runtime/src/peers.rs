//! What belongs to which device, and which devices may access each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::CudaError;

/// The devices of events, and the pairs of devices with peer access.
#[derive(Default)]
pub struct Peers {
    events: BTreeMap<u64, usize>,
    enabled: BTreeSet<(usize, usize)>,
}

impl Peers {
    /// An event was made while this device was the current one.
    pub fn add_event(&mut self, event: u64, device: usize) {
        self.events.insert(event, device);
    }

    /// An event has ended.
    pub fn end_event(&mut self, event: u64) {
        self.events.remove(&event);
    }

    /// An event may be recorded only in a stream of its own device (CUDA programming guide, "Stream and Event
    /// Behavior").
    pub fn may_record(&self, event: u64, stream_device: usize) -> Result<(), CudaError> {
        match self.events.get(&event) {
            Some(device) if *device != stream_device => Err(CudaError::INVALID_RESOURCE_HANDLE),
            _ => Ok(()),
        }
    }

    /// A device may access another one's memory. As cuda_runtime_api.h has it, not its own, and not twice.
    pub fn enable(&mut self, device: usize, peer: usize) -> Result<(), CudaError> {
        match device == peer {
            true => Err(CudaError::INVALID_DEVICE),
            false if self.enabled.insert((device, peer)) => Ok(()),
            false => Err(CudaError::PEER_ALREADY_ENABLED),
        }
    }

    /// A device may not access another one's memory any more.
    pub fn disable(&mut self, device: usize, peer: usize) -> Result<(), CudaError> {
        if self.enabled.remove(&(device, peer)) { Ok(()) } else { Err(CudaError::PEER_NOT_ENABLED) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_access_is_of_an_ordered_pair_and_is_enabled_once() {
        let mut peers = Peers::default();
        assert_eq!(peers.disable(0, 1), Err(CudaError::PEER_NOT_ENABLED));
        assert_eq!((peers.enable(0, 1), peers.enable(1, 0)), (Ok(()), Ok(())));
        assert_eq!(peers.enable(0, 1), Err(CudaError::PEER_ALREADY_ENABLED));
        assert_eq!((peers.disable(0, 1), peers.enable(0, 1)), (Ok(()), Ok(())));
        assert_eq!(peers.enable(1, 1), Err(CudaError::INVALID_DEVICE));
    }

    #[test]
    fn an_event_is_recorded_on_its_own_device() {
        let mut peers = Peers::default();
        peers.add_event(7, 1);
        assert_eq!((peers.may_record(7, 1), peers.may_record(7, 0)), (Ok(()), Err(CudaError::INVALID_RESOURCE_HANDLE)));
        peers.end_event(7);
        assert_eq!(peers.may_record(7, 0), Ok(()));
    }
}
