//! A number of what a rank saves, by which its part of one run is told from that of another.

use overdrive_ffi::HostBuffer;
use tch::Tensor;

use crate::error::CheckpointError;
use crate::write::{Body, Pending};

/// Bytes at the beginning and at the end of each tensor that count. All of them would take as long as the copy.
const SAMPLE: usize = 64;

impl Pending {
    /// The same number for the same state, and almost certainly another one for that of another run, step or rank: of
    /// names, shapes, plain values, and some bytes of each tensor. Not negative, and so small that those of all ranks can
    /// be added.
    pub fn digest(&self, rank: usize) -> Result<i64, CheckpointError> {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        hash.add(&self.step.to_le_bytes());
        hash.add(&(rank as u64).to_le_bytes());
        for part in &self.parts {
            hash.add(part.name.as_bytes());
            hash.add(&part.header);
            let values = serde_json::to_vec(&part.values);
            hash.add(&values.map_err(|error| CheckpointError::Field { name: part.name.clone(), error })?);
            match &part.body {
                Body::Copied(buffer, _) => {
                    let mut rest = buffer.as_slice();
                    for (_, bytes) in &part.pieces {
                        let (tensor, others) = rest.split_at(*bytes);
                        hash.add(&tensor[..SAMPLE.min(*bytes)]);
                        hash.add(&tensor[bytes.saturating_sub(SAMPLE)..]);
                        rest = others;
                    }
                }
                Body::Live(tensors, _) => tensors.iter().try_for_each(|tensor| hash.add_ends(tensor))?,
            }
        }
        Ok((hash.0 >> 16) as i64)
    }
}

/// FNV-1a.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    fn add_ends(&mut self, tensor: &Tensor) -> Result<(), CheckpointError> {
        let size = tensor.kind().elt_size_in_bytes();
        let count = (SAMPLE / size).min(tensor.numel()) as i64;
        let torch = |error| CheckpointError::Torch(tch::TchError::into(error));
        let flat = tensor.f_contiguous().and_then(|tensor| tensor.f_view(-1)).map_err(torch)?;
        for first in [0, flat.numel() as i64 - count] {
            let mut bytes = HostBuffer::zeroed(count as usize * size, false)?;
            bytes.copy_from(0, &flat.f_narrow(0, first, count).map_err(torch)?)?;
            self.add(bytes.as_slice());
        }
        Ok(())
    }
}
