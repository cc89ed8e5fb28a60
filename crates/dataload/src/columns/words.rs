//! Plain memory that becomes a tensor without a copy.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use overdrive_ffi::HostBuffer;
use tch::{Kind, Tensor};

use crate::DataError;

/// Bytes that are aligned for all number types.
pub(crate) struct Words {
    memory: Memory,
    bytes: usize,
}

enum Memory {
    Plain(Vec<i64>),
    /// Page-locked, for a copy to a device.
    Pinned(HostBuffer),
    #[cfg(feature = "arrow")]
    Arrow(ArrowMemory),
}

/// What an Arrow array had, and nobody shares.
#[cfg(feature = "arrow")]
struct ArrowMemory(arrow_buffer::MutableBuffer);

#[cfg(feature = "arrow")]
impl AsMut<[u8]> for ArrowMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_slice_mut()
    }
}

const WORD_BYTES: usize = size_of::<i64>();

impl Words {
    /// `bytes` zero bytes; the operating system provides the memory when it is first written to.
    pub(crate) fn new(bytes: usize) -> Result<Self, DataError> {
        let length = bytes.div_ceil(WORD_BYTES);
        // An error here, where the allocation below would abort the process.
        Vec::<i64>::new().try_reserve_exact(length).map_err(|error| too_many(bytes, error))?;
        Ok(Self { memory: Memory::Plain(vec![0; length]), bytes })
    }

    /// `bytes` bytes of unspecified content, page-locked when `pinned`.
    pub(crate) fn with(bytes: usize, pinned: bool) -> Result<Self, DataError> {
        match pinned {
            true => Ok(Self { memory: Memory::Pinned(HostBuffer::pinned(bytes)?), bytes }),
            false => Self::new(bytes),
        }
    }

    /// The first `bytes` bytes of an Arrow buffer: copied where others share it, or it is not aligned for `kind`.
    #[cfg(feature = "arrow")]
    pub(crate) fn of_arrow(buffer: arrow_buffer::Buffer, bytes: usize, kind: Kind) -> Result<Self, DataError> {
        let buffer = match buffer.as_ptr().addr().is_multiple_of(kind.elt_size_in_bytes()) {
            true => match buffer.into_mutable() {
                Ok(owned) => return Ok(Self { memory: Memory::Arrow(ArrowMemory(owned)), bytes }),
                Err(shared) => shared,
            },
            false => buffer,
        };
        let mut words = Self::new(bytes)?;
        words.bytes_mut().copy_from_slice(&buffer[..bytes]);
        Ok(words)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Plain(words) => &bytemuck::cast_slice(words)[..self.bytes],
            Memory::Pinned(buffer) => &buffer.as_slice()[..self.bytes],
            #[cfg(feature = "arrow")]
            Memory::Arrow(buffer) => &buffer.0[..self.bytes],
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Plain(words) => &mut bytemuck::cast_slice_mut(words)[..self.bytes],
            Memory::Pinned(buffer) => &mut buffer.as_mut_slice()[..self.bytes],
            #[cfg(feature = "arrow")]
            Memory::Arrow(buffer) => &mut buffer.0[..self.bytes],
        }
    }

    /// Appends `bytes` bytes of unspecified content, and returns them to be written. Only for plain memory: other
    /// memory cannot grow.
    pub(crate) fn extend(&mut self, bytes: usize) -> Result<&mut [u8], DataError> {
        let (start, end) = (self.bytes, self.bytes.saturating_add(bytes));
        let Memory::Plain(words) = &mut self.memory else { return Err(too_many(end, "only plain memory grows")) };
        let missing = end.div_ceil(WORD_BYTES).saturating_sub(words.len());
        words.try_reserve(missing).map_err(|error| too_many(end, error))?;
        words.resize(words.len() + missing, 0);
        self.bytes = end;
        Ok(&mut bytemuck::cast_slice_mut(words)[start..end])
    }

    pub(crate) fn into_tensor(self, kind: Kind, shape: &[i64]) -> Result<Tensor, DataError> {
        match self.memory {
            Memory::Plain(words) => Ok(overdrive_ffi::tensor_from_vec(words, kind, shape)?),
            Memory::Pinned(buffer) => Ok(buffer.into_tensor(kind, shape)?),
            #[cfg(feature = "arrow")]
            Memory::Arrow(buffer) => Ok(overdrive_ffi::tensor_from_owner(buffer, kind, shape)?),
        }
    }
}

fn too_many(bytes: usize, error: impl fmt::Display) -> DataError {
    DataError::other(format!("{bytes} bytes for a column could not be allocated: {error}"))
}

impl Default for Words {
    fn default() -> Self {
        Self { memory: Memory::Plain(Vec::new()), bytes: 0 }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

/// Memory that is reused: allocating fresh memory costs as much as decoding into it.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Vec<i64>>>);

impl Spare {
    /// `bytes` bytes of unspecified content.
    pub(crate) fn take(&self, bytes: usize) -> Result<Words, DataError> {
        self.kept(bytes).map_or_else(|| Words::new(bytes), |words| Ok(Words { memory: Memory::Plain(words), bytes }))
    }

    /// Memory to be [extended](Words::extend), with room for `bytes` bytes if any such is kept.
    pub(crate) fn take_empty(&self, bytes: usize) -> Words {
        Words { memory: Memory::Plain(self.kept(bytes).unwrap_or_default()), bytes: 0 }
    }

    fn kept(&self, bytes: usize) -> Option<Vec<i64>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().enumerate().filter(|(_, words)| words.len() * WORD_BYTES >= bytes);
        let position = fits.min_by_key(|(_, words)| words.len()).map(|(position, _)| position)?;
        Some(kept.swap_remove(position))
    }

    /// Keeps the memory for reuse, at most `most` pieces.
    pub(crate) fn give(&self, words: Words, most: usize) {
        let Memory::Plain(words) = words.memory else { return };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(words);
        if kept.len() > most {
            // The smallest is the least likely to be large enough.
            let smallest = kept.iter().enumerate().min_by_key(|(_, words)| words.len()).map(|(position, _)| position);
            smallest.map(|position| kept.swap_remove(position));
        }
    }
}
