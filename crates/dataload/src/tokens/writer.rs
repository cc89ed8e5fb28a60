//! Writes tokens, as nanoGPT and Megatron store them.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::indexed::{CODES, MAGIC, VERSION};
use super::{IndexedTokens, TokenDtype};
use crate::DataError;
use crate::output::Output;

/// Writes a file of tokens and nothing else, which appears at its path once it is complete.
///
/// ```
/// use overdrive_dataload::{TokenDtype, TokenFile, TokenWriter};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("train.bin");
///
/// let mut writer = TokenWriter::create(&path, TokenDtype::Uint16)?;
/// writer.write(&[464, 3290, 50256])?;
/// writer.finish()?;
/// assert_eq!(TokenFile::open(&path)?.tokens(0..3)?, [464, 3290, 50256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `prepare.py` of nanoGPT's data sets.
pub struct TokenWriter {
    output: Output,
    dtype: TokenDtype,
    /// Kept from one call to the next.
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Starts a file of tokens that are stored as `dtype`.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a name that asks for compression, since such a file cannot be mapped.
    pub fn create(path: impl AsRef<Path>, dtype: TokenDtype) -> Result<Self, DataError> {
        let path = path.as_ref();
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if ["gz", "tgz", "zst"].contains(&ending.as_str()) {
            return Err(DataError::layout(path, "a name of a file that can be mapped", "one that is compressed"));
        }
        Ok(Self { output: Output::create(path)?, dtype, bytes: Vec::new() })
    }

    /// Adds tokens.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a token that `dtype` cannot hold: then none of them is written;
    /// [`DataError::Io`].
    pub fn write(&mut self, tokens: &[i64]) -> Result<(), DataError> {
        self.bytes.clear();
        for &token in tokens {
            let fits = self.dtype.encode(token, &mut self.bytes);
            fits.ok_or_else(|| {
                DataError::option("dtype", format!("one that holds the token {token}"), format!("{:?}", self.dtype))
            })?;
        }
        let written = self.output.write_all(&self.bytes);
        written.map_err(|error| DataError::Io { path: self.output.path().to_owned(), error })
    }

    /// Completes the file and returns its path.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn finish(self) -> Result<PathBuf, DataError> {
        self.output.finish()
    }
}

/// Writes Megatron's pair of files, `.bin` and `.idx`, which appear once they are complete.
///
/// ```
/// use overdrive_dataload::{Dataset, IndexedTokens, IndexedTokensWriter, TokenDtype};
/// # let folder = tempfile::tempdir()?;
/// # let prefix = folder.path().join("corpus_text_document");
///
/// let mut writer = IndexedTokensWriter::create(&prefix, TokenDtype::Uint16)?;
/// writer.write(&[464, 3290, 50256])?;
/// writer.end_document();
/// writer.finish()?;
/// assert_eq!(IndexedTokens::open(&prefix)?.get(0)?, [464, 3290, 50256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `megatron.core.datasets.indexed_dataset.IndexedDatasetBuilder`.
#[doc(alias = "IndexedDatasetBuilder")]
pub struct IndexedTokensWriter {
    tokens: TokenWriter,
    index: PathBuf,
    code: u8,
    lengths: Vec<i32>,
    /// The number of the first sequence of each document.
    documents: Vec<i64>,
}

impl IndexedTokensWriter {
    /// Starts `PREFIX.bin` and `PREFIX.idx`; the path may also be that of one of the two.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::InvalidOption`] for `Uint32`, which the format does not have.
    pub fn create(prefix: impl AsRef<Path>, dtype: TokenDtype) -> Result<Self, DataError> {
        let [index, tokens] = IndexedTokens::files(prefix);
        let code = CODES.iter().find(|(_, of)| *of == dtype).map(|(code, _)| *code);
        let code = code.ok_or_else(|| {
            DataError::option("dtype", "a type that Megatron has, such as Int32", format!("{dtype:?}"))
        })?;
        let tokens = TokenWriter::create(tokens, dtype)?;
        Ok(Self { tokens, index, code, lengths: Vec::new(), documents: vec![0] })
    }

    /// Adds a sequence to the present document.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a token that `dtype` cannot hold, and for 2^31 tokens or more: then nothing is
    /// written; [`DataError::Io`].
    #[doc(alias = "add_item")]
    pub fn write(&mut self, tokens: &[i64]) -> Result<(), DataError> {
        let length = i32::try_from(tokens.len());
        let length = length.map_err(|_| DataError::option("tokens", "less than 2^31", tokens.len()))?;
        self.tokens.write(tokens)?;
        self.lengths.push(length);
        Ok(())
    }

    /// Ends the present document: the next sequence begins another.
    pub fn end_document(&mut self) {
        self.documents.push(self.lengths.len() as i64);
    }

    /// Completes both files, ends the present document if it has sequences, and returns the index's path.
    ///
    /// # Errors
    /// [`DataError::Io`]: then neither file is there.
    pub fn finish(mut self) -> Result<PathBuf, DataError> {
        if self.documents.last() != Some(&(self.lengths.len() as i64)) {
            self.end_document();
        }
        let mut output = Output::create(&self.index)?;
        let size = self.tokens.dtype.size() as i64;
        let starts = self.lengths.iter().scan(0, |at, &length| {
            let start = *at;
            *at += size * i64::from(length);
            Some(start)
        });
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &[self.code]].concat();
        bytes.extend([self.lengths.len(), self.documents.len()].iter().flat_map(|&count| (count as u64).to_le_bytes()));
        bytes.extend(self.lengths.iter().flat_map(|length| length.to_le_bytes()));
        bytes.extend(starts.flat_map(i64::to_le_bytes));
        bytes.extend(self.documents.iter().flat_map(|document| document.to_le_bytes()));
        output.write_all(&bytes).map_err(DataError::io(&self.index))?;
        // The index last: without it the tokens are no dataset.
        let [_, index] = Output::finish_both(self.tokens.output, output)?;
        Ok(index)
    }
}
