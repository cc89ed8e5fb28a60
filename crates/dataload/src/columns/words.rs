//! Plain memory that becomes a tensor without a copy.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use tch::{Kind, Tensor};

use crate::DataError;

/// Bytes that are aligned for all number types.
#[derive(Clone, Default)]
pub(crate) struct Words {
    words: Vec<i64>,
    bytes: usize,
}

const WORD_BYTES: usize = size_of::<i64>();

impl Words {
    /// `bytes` zero bytes; the operating system provides the memory when it is first written to.
    pub(crate) fn new(bytes: usize) -> Result<Self, DataError> {
        let length = bytes.div_ceil(WORD_BYTES);
        // An error here, where the allocation below would abort the process.
        let probe = Vec::<i64>::new().try_reserve_exact(length);
        probe
            .map_err(|error| DataError::other(format!("{bytes} bytes for a column could not be allocated: {error}")))?;
        Ok(Self { words: vec![0; length], bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }

    pub(crate) fn into_tensor(self, kind: Kind, shape: &[i64]) -> Result<Tensor, DataError> {
        Ok(overdrive_ffi::tensor_from_vec(self.words, kind, shape)?)
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
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().enumerate().filter(|(_, words)| words.len() * WORD_BYTES >= bytes);
        match fits.min_by_key(|(_, words)| words.len()).map(|(position, _)| position) {
            Some(position) => Ok(Words { words: kept.swap_remove(position), bytes }),
            None => Words::new(bytes),
        }
    }

    /// Keeps the memory for reuse, at most `most` pieces.
    pub(crate) fn give(&self, words: Words, most: usize) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(words.words);
        if kept.len() > most {
            // The smallest is the least likely to be large enough.
            let smallest = kept.iter().enumerate().min_by_key(|(_, words)| words.len()).map(|(position, _)| position);
            smallest.map(|position| kept.swap_remove(position));
        }
    }
}
