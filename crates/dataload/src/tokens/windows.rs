//! Windows of a fixed length.

use tch::{Kind, Tensor};

use super::TokenFile;
use crate::tensor::tensor_from_bytes;
use crate::{DataError, Dataset};

/// Windows of a [`TokenFile`], with the next token of each as its target; made by [`TokenFile::windows`].
///
/// ```
/// use overdrive_dataload::{Dataset, TokenFile};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("val.bin");
/// # std::fs::write(&path, (0..20).flat_map(|token: u16| token.to_le_bytes()).collect::<Vec<u8>>())?;
///
/// // Every token once, for evaluation.
/// let windows = TokenFile::open(&path)?.windows(4)?.stride(4)?;
/// let (inputs, targets) = windows.get(1)?;
/// assert_eq!(Vec::<i64>::try_from(inputs)?, [4, 5, 6, 7]);
/// assert_eq!(Vec::<i64>::try_from(targets)?, [5, 6, 7, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// A sample is int64 `[block_size]` and int64 `[block_size]`, the second one token later.
///
/// # Source
/// `get_batch` of nanoGPT's `train.py`.
#[derive(Clone, Debug)]
pub struct TokenWindows {
    tokens: TokenFile,
    block_size: usize,
    stride: usize,
}

impl TokenWindows {
    pub(super) fn new(tokens: TokenFile, block_size: usize) -> Result<Self, DataError> {
        DataError::at_least_1("block_size", block_size)?;
        if tokens.len() <= block_size {
            let expected = format!("more than {block_size} tokens, for a window and the token that follows it");
            return Err(DataError::layout(tokens.path(), expected, format!("{} tokens", tokens.len())));
        }
        Ok(Self { tokens, block_size, stride: 1 })
    }

    /// How many tokens after a window's start the next begins, 1 unless set. With `block_size`, every token is an input
    /// once, but for the last ones, which do not fill a window.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0.
    pub fn stride(mut self, stride: usize) -> Result<Self, DataError> {
        DataError::at_least_1("stride", stride)?;
        self.stride = stride;
        Ok(self)
    }
}

impl Dataset for TokenWindows {
    type Sample = (Tensor, Tensor);

    fn len(&self) -> usize {
        // The constructor ensures that there is one.
        1 + (self.tokens.len() - self.block_size - 1) / self.stride
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        DataError::check_index(index, self.len())?;
        let start = index * self.stride;
        let tokens = self.tokens.tokens(start..start + self.block_size + 1)?;
        let tensor =
            |tokens: &[i64]| tensor_from_bytes(bytemuck::cast_slice(tokens), Kind::Int64, &[self.block_size as i64]);
        Ok((tensor(&tokens[..self.block_size])?, tensor(&tokens[1..])?))
    }
}
