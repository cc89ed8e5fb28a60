//! Reuses the memory of tensors once no other tensor shares it.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use crate::error::Error;
use crate::host_buffer::HostBuffer;
use crate::memory::storage_of;

/// How many blocks may be idle; beyond that, each call frees one.
const IDLE: usize = 4;

/// Lends memory for batches of about the same size, and reuses it once the last tensor that shares it is dropped.
///
/// The system clears fresh memory page by page, which takes longer than copying a batch into existing memory.
///
/// ```
/// use overdrive_ffi::BufferPool;
/// use tch::Kind;
///
/// # fn main() -> Result<(), overdrive_ffi::Error> {
/// let pool = BufferPool::default();
/// let first = pool.take(1 << 20, false)?.into_tensor(Kind::Uint8, &[1 << 20]).unwrap();
/// let memory = first.data_ptr();
/// drop(first);
/// assert_eq!(pool.take(1 << 20, false)?.as_mut_slice().as_mut_ptr().cast(), memory);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct BufferPool {
    blocks: Mutex<Vec<Block>>,
}

struct Block {
    /// One dimension of uint8. Its memory is not touched as long as another tensor shares it.
    tensor: Tensor,
    /// The address of the memory, to detect whether a user has resized the tensors, which moves them to other memory.
    address: usize,
    bytes: usize,
}

impl Block {
    fn new(bytes: usize) -> Result<Self, Error> {
        let mut buffer = HostBuffer::zeroed(bytes, false)?;
        let address = buffer.as_mut_slice().as_mut_ptr() as usize;
        let tensor = buffer.into_tensor(tch::Kind::Uint8, &[bytes as i64]).map_err(refused)?;
        Ok(Self { tensor, address, bytes })
    }

    /// A buffer of the same memory.
    fn lend(&self, bytes: usize) -> Result<HostBuffer, Error> {
        let tensor = self.tensor.f_narrow(0, 0, bytes as i64).map_err(refused)?;
        let data = NonNull::new(ptr::with_exposed_provenance_mut(self.address)).unwrap_or(NonNull::dangling());
        // SAFETY: the memory was cleared when it was made, so its bytes are initialised, whatever was written since.
        // Only blocks that no other tensor shares are lent, and the tensor just made marks this block as shared.
        Ok(unsafe { HostBuffer::recycled(tensor, data, bytes) })
    }

    fn state(&self) -> Result<State, Error> {
        let storage = storage_of(&self.tensor)?;
        let same = storage.data.expose_provenance() == self.address && storage.bytes == self.bytes;
        Ok(match (same, storage.owners) {
            (false, _) => State::Changed,
            (true, 1) => State::Idle,
            (true, _) => State::Lent,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Lent,
    /// A user has resized the tensors, which moved them to other memory.
    Changed,
}

impl BufferPool {
    /// Memory of this many bytes, with arbitrary old contents. When `pinned`, page-locked memory, which libtorch itself
    /// caches.
    ///
    /// # Errors
    /// `OutOfMemory`; `Cuda` or `Other` for pinned memory without a CUDA device.
    pub fn take(&self, bytes: usize, pinned: bool) -> Result<HostBuffer, Error> {
        if pinned {
            return HostBuffer::pinned(bytes);
        }
        if bytes == 0 {
            return HostBuffer::zeroed(0, false);
        }
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut states = blocks.iter().map(Block::state).collect::<Result<Vec<_>, _>>()?;
        let fits = |block: &Block| (bytes..=bytes.saturating_mul(2)).contains(&block.bytes);
        let idle = |states: &[State]| states.iter().filter(|&&state| state == State::Idle).count();
        let found = (0..blocks.len()).find(|&at| states[at] == State::Idle && fits(&blocks[at]));
        let lent = found.map(|at| blocks[at].lend(bytes)).transpose()?;
        if let Some(at) = found {
            states[at] = State::Lent;
        }
        // Frees one at a time: the next batches may need the others.
        let surplus = states.iter().position(|&state| state == State::Idle).filter(|_| idle(&states) > IDLE);
        let mut at = 0;
        blocks.retain(|_| {
            at += 1;
            states[at - 1] != State::Changed && Some(at - 1) != surplus
        });
        match lent {
            Some(buffer) => Ok(buffer),
            None => {
                // Clearing new memory takes long: do not block other threads meanwhile.
                drop(blocks);
                let block = Block::new(bytes)?;
                let buffer = block.lend(bytes)?;
                self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push(block);
                Ok(buffer)
            }
        }
    }
}

fn refused(error: tch::TchError) -> Error {
    Error::refused(error.to_string())
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "BufferPool {{ blocks: {} }}", blocks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn batch(pool: &BufferPool, bytes: usize, value: u8) -> Tensor {
        let mut buffer = pool.take(bytes, false).unwrap();
        buffer.as_mut_slice().fill(value);
        buffer.into_tensor(Kind::Uint8, &[bytes as i64]).unwrap()
    }

    fn blocks(pool: &BufferPool) -> usize {
        pool.blocks.lock().unwrap().len()
    }

    #[test]
    fn memory_is_reused_only_when_no_tensor_shares_it() {
        let pool = BufferPool::default();
        let first = batch(&pool, 100, 1);
        let (address, row) = (first.data_ptr(), first.narrow(0, 50, 1));
        drop(first);
        let second = batch(&pool, 100, 2);
        assert_eq!(row.int64_value(&[0]), 1, "a view keeps its memory");
        drop(row);
        // The block is taken while it is written to, and then while it is a tensor.
        let buffer = pool.take(90, false).unwrap();
        let other = batch(&pool, 100, 3);
        let third = buffer.into_tensor(Kind::Uint8, &[90]).unwrap();
        assert_eq!(third.data_ptr(), address);
        assert!([&second, &other].iter().all(|tensor| tensor.data_ptr() != address));
        assert_eq!((second.int64_value(&[99]), other.int64_value(&[99]), blocks(&pool)), (2, 3, 3));
    }

    #[test]
    fn autograd_keeps_what_it_needs() {
        let pool = BufferPool::default();
        let weight = Tensor::ones([8], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let mut buffer = pool.take(32, false).unwrap();
        buffer.as_mut_slice().chunks_exact_mut(4).for_each(|place| place.copy_from_slice(&2f32.to_ne_bytes()));
        let loss = (&weight * buffer.into_tensor(Kind::Float, &[8]).unwrap()).sum(Kind::Float);
        pool.take(32, false).unwrap().as_mut_slice().fill(0);
        loss.backward();
        assert_eq!(Vec::<f32>::try_from(weight.grad()).unwrap(), [2.0; 8]);
    }

    #[test]
    fn idle_blocks_are_freed_one_by_one() {
        let pool = BufferPool::default();
        drop((0..20).map(|value| batch(&pool, 1000, value)).collect::<Vec<_>>());
        assert_eq!(blocks(&pool), 20);
        (0..20).for_each(|value| drop(batch(&pool, 1000, value)));
        assert_eq!(blocks(&pool), IDLE + 1);
        (0..20).for_each(|value| drop(batch(&pool, 100_000, value)));
        assert!(blocks(&pool) <= IDLE + 1, "blocks of the new size replace the old ones");
    }

    #[test]
    fn resized_tensors_leave_the_pool() {
        let pool = BufferPool::default();
        let mut batch = batch(&pool, 100, 1);
        let _ = batch.resize_([10_000]);
        drop(batch);
        assert_eq!(pool.take(100, false).unwrap().as_mut_slice(), [0; 100]);
        assert_eq!(blocks(&pool), 1);
    }

    #[test]
    fn threads_never_share_memory() {
        let pool = BufferPool::default();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..200 {
                        let batch = batch(pool, 4096, thread);
                        assert_eq!(batch.min().int64_value(&[]), i64::from(thread));
                        assert_eq!(batch.max().int64_value(&[]), i64::from(thread));
                    }
                });
            }
        });
    }
}
