//! Tokens one after the other.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use overdrive_ffi::MappedFile;

use super::{TokenDtype, TokenWindows};
use crate::DataError;
use crate::local::map;

/// The most that is read at once, as int64. The length may come from an index, which may be wrong.
const MAX_READ_BYTES: u64 = 1 << 30;

/// A file that holds tokens and nothing else, such as nanoGPT's `train.bin`; clones share it.
///
/// It is memory-mapped: opening takes no time, whatever its length, and the operating system keeps in memory what is
/// used, once for all processes. It must not get shorter while it is open, see [`MappedFile`]. Of a URL, the whole file is
/// fetched into the cache when it is opened, and mapped there.
///
/// ```no_run
/// use overdrive_dataload::{DataLoader, Dataset, RandomSampler, TokenFile};
///
/// let data = TokenFile::open("data/openwebtext/train.bin")?.windows(1024)?;
/// // As nanoGPT draws: 100 steps of 12 windows, each anywhere in the file.
/// let anywhere = RandomSampler::new(data.len(), 1337).replacement(true).num_samples(100 * 12)?;
/// let loader = DataLoader::builder(data).batch_size(12).sampler(anywhere).build()?;
/// for batch in &loader {
///     let (inputs, targets) = batch?;
///     assert_eq!((inputs.size(), targets.size()), (vec![12, 1024], vec![12, 1024]));
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `numpy.memmap("train.bin", dtype=numpy.uint16, mode="r")` of nanoGPT's `train.py`.
#[derive(Clone, Debug)]
#[doc(alias = "memmap")]
pub struct TokenFile {
    map: Arc<MappedFile>,
    path: Arc<Path>,
    dtype: TokenDtype,
}

impl TokenFile {
    /// A file of 16-bit tokens, as nanoGPT writes it.
    ///
    /// # Errors
    /// As [`with_dtype`](Self::with_dtype).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::with_dtype(path, TokenDtype::default())
    }

    /// A file of tokens that are stored as `dtype`.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Remote`]; [`DataError::Layout`] for what is no regular file, or has an incomplete
    /// last token.
    pub fn with_dtype(path: impl AsRef<Path>, dtype: TokenDtype) -> Result<Self, DataError> {
        let path = path.as_ref();
        let (map, path) = (map(path)?, Arc::from(path));
        if !map.len().is_multiple_of(dtype.size()) {
            let expected = format!("a multiple of {} bytes, which a token of {dtype:?} takes", dtype.size());
            return Err(DataError::layout(&path, expected, format!("{} bytes", map.len())));
        }
        Ok(Self { map: Arc::new(map), path, dtype })
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        self.map.len() / self.dtype.size()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How the tokens are stored.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the tokens in `range`.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a range that reaches beyond the file; [`DataError::TooLarge`] for more
    /// than 2^27 tokens.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<i64>, DataError> {
        let (len, end) = (self.len(), range.end.max(range.start));
        let beyond = DataError::IndexOutOfRange { index: end.saturating_sub(1), len };
        if end > len {
            return Err(beyond);
        }
        let bytes = range.len() as u64 * size_of::<i64>() as u64;
        DataError::check_bytes(MAX_READ_BYTES, bytes, "a sequence of tokens, as int64,", &self.path)?;
        let mut stored = vec![0; range.len() * self.dtype.size()];
        if self.map.read(range.start * self.dtype.size(), &mut stored) {
            Ok(self.dtype.widen(&stored))
        } else {
            Err(beyond)
        }
    }

    /// Windows of `block_size` tokens, one from each token on, with the tokens that follow as targets.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `block_size` of 0; [`DataError::Layout`] for a file without a whole window and
    /// the token that follows it.
    pub fn windows(self, block_size: usize) -> Result<TokenWindows, DataError> {
        TokenWindows::new(self, block_size)
    }
}
