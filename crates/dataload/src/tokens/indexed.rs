//! Megatron's tokens with an index.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_ffi::MappedFile;

use super::{TokenDtype, TokenFile};
use crate::local::map;
use crate::read::with_ending;
use crate::{DataError, Dataset};

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// The types of tokens.
pub(super) const CODES: [(u8, TokenDtype); 6] = [
    (1, TokenDtype::Uint8),
    (2, TokenDtype::Int8),
    (3, TokenDtype::Int16),
    (4, TokenDtype::Int32),
    (5, TokenDtype::Int64),
    (8, TokenDtype::Uint16),
];
/// Magic, version, type, and the numbers of sequences and of documents' entries.
const HEADER_BYTES: usize = 34;

/// Sequences of tokens of different lengths, in Megatron's pair of files: `.bin` with the tokens, and `.idx` with where
/// each sequence begins and which of them belong to one document.
///
/// Both files are memory-mapped, see [`TokenFile`], which also says how URLs are read. The index is checked when it is opened, in time proportional to its
/// length and without memory for it.
///
/// ```no_run
/// use overdrive_dataload::{DataLoader, IndexedTokens, PackTokens};
///
/// let data = IndexedTokens::open("corpus_text_document")?;
/// println!("{} tokens in {} documents", data.tokens().len(), data.documents());
/// // Whole sequences, packed without padding; or windows that do not heed where they begin.
/// let packed = DataLoader::builder(data.clone()).batch_size(8).collate(PackTokens::new()).build()?;
/// let windows = DataLoader::builder(data.tokens().clone().windows(2048)?.stride(2048)?).batch_size(8).build()?;
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Shapes
/// A sample is a `Vec<i64>` of one sequence's tokens, which [`PackTokens`](crate::PackTokens) takes.
///
/// # Source
/// `megatron.core.datasets.indexed_dataset.IndexedDataset`; the modes of sequences that it can store are not read.
#[derive(Clone, Debug)]
#[doc(alias = "IndexedDataset")]
#[doc(alias = "MMapIndexedDataset")]
pub struct IndexedTokens {
    tokens: TokenFile,
    index: Arc<Index>,
}

impl IndexedTokens {
    /// The paths `PREFIX.idx` and `PREFIX.bin` of a pair; the path may also be that of one of the two.
    pub fn files(prefix: impl AsRef<Path>) -> [PathBuf; 2] {
        let path = prefix.as_ref();
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let named = ["bin", "idx"].iter().any(|known| ending.eq_ignore_ascii_case(known));
        let prefix = if named { path.with_extension("") } else { path.to_owned() };
        [".idx", ".bin"].map(|ending| with_ending(&prefix, ending))
    }

    /// Opens `PREFIX.bin` and `PREFIX.idx`; the path may also be that of one of the two.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Corrupt`] for an index that is truncated, has another version or a type that is
    /// no integer, or points outside of the tokens; [`DataError::Layout`].
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self, DataError> {
        let [index, tokens] = Self::files(prefix);
        let (index, dtype) = Index::open(&index)?;
        let tokens = TokenFile::with_dtype(tokens, dtype)?;
        index.check(&tokens)?;
        Ok(Self { tokens, index: Arc::new(index) })
    }

    /// All tokens, one sequence after the other as they are stored.
    pub fn tokens(&self) -> &TokenFile {
        &self.tokens
    }

    /// How many documents there are.
    pub fn documents(&self) -> usize {
        self.index.boundaries.saturating_sub(1)
    }

    /// The sequences of a document.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`].
    pub fn document(&self, document: usize) -> Result<Range<usize>, DataError> {
        DataError::check_index(document, self.documents())?;
        let [start, end] = [document, document + 1].map(|entry| self.index.boundary(entry) as usize);
        Ok(start..end)
    }
}

impl Dataset for IndexedTokens {
    type Sample = Vec<i64>;

    fn len(&self) -> usize {
        self.index.sequences
    }

    fn get(&self, index: usize) -> Result<Vec<i64>, DataError> {
        DataError::check_index(index, self.index.sequences)?;
        let range = self.index.range(index, &self.tokens);
        self.tokens.tokens(range.ok_or_else(|| self.index.astray(index, &self.tokens))?)
    }
}

/// The file `.idx`: the header, then the sequences' lengths as int32, their offsets in bytes as int64, and the number
/// of the first sequence of each document and of their end as int64.
#[derive(Debug)]
struct Index {
    map: MappedFile,
    path: PathBuf,
    sequences: usize,
    /// One more than there are documents.
    boundaries: usize,
}

impl Index {
    fn open(path: &Path) -> Result<(Self, TokenDtype), DataError> {
        let map = map(path)?;
        let corrupt = |offset, expected: String, found: String| Err(DataError::corrupt(path, offset, expected, found));
        let mut header = [0; HEADER_BYTES];
        if !map.read(0, &mut header) {
            return corrupt(0, format!("a header of {HEADER_BYTES} bytes"), format!("a file of {}", map.len()));
        }
        if !header.starts_with(MAGIC) {
            let found = header[..MAGIC.len()].escape_ascii();
            return corrupt(0, format!("{}, as every index begins", MAGIC.escape_ascii()), found.to_string());
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
        if number(9) != VERSION {
            return corrupt(9, format!("version {VERSION}"), number(9).to_string());
        }
        let Some(&(_, dtype)) = CODES.iter().find(|(code, _)| *code == header[17]) else {
            return corrupt(17, "the code of an integer type: 1 to 5, or 8".to_owned(), header[17].to_string());
        };
        let (sequences, boundaries) = (number(18), number(26));
        let lists = sequences.checked_mul(12).zip(boundaries.checked_mul(8));
        let bytes = lists.and_then(|(lists, documents)| lists.checked_add(documents)?.checked_add(HEADER_BYTES as u64));
        // The modes of the sequences, a byte for each, may follow.
        let fits = |bytes: u64| [Some(bytes), bytes.checked_add(sequences)].contains(&Some(map.len() as u64));
        if !bytes.is_some_and(fits) {
            let expected = format!("a file for {sequences} sequences and {boundaries} boundaries of documents");
            return corrupt(18, expected, format!("one of {} bytes", map.len()));
        }
        let (path, sequences, boundaries) = (path.to_owned(), sequences as usize, boundaries as usize);
        Ok((Self { map, path, sequences, boundaries }, dtype))
    }

    /// The number that is stored at an offset, which `open` has found to lie within the file.
    fn number<const N: usize>(&self, offset: usize, number: fn([u8; N]) -> i64) -> i64 {
        let mut bytes = [0; N];
        if self.map.read(offset, &mut bytes) { number(bytes) } else { -1 }
    }

    fn pointer_offset(&self, sequence: usize) -> usize {
        HEADER_BYTES + 4 * self.sequences + 8 * sequence
    }

    fn boundary_offset(&self, entry: usize) -> usize {
        HEADER_BYTES + 12 * self.sequences + 8 * entry
    }

    fn boundary(&self, entry: usize) -> i64 {
        self.number(self.boundary_offset(entry), i64::from_le_bytes)
    }

    /// How many tokens a sequence has, and at which byte they begin.
    fn sequence(&self, sequence: usize) -> (i64, i64) {
        let length = self.number(HEADER_BYTES + 4 * sequence, |bytes| i32::from_le_bytes(bytes).into());
        (length, self.number(self.pointer_offset(sequence), i64::from_le_bytes))
    }

    /// A sequence's tokens; `None` where they are not in the file.
    fn range(&self, sequence: usize, tokens: &TokenFile) -> Option<Range<usize>> {
        let (length, pointer) = self.sequence(sequence);
        let (length, pointer) = (usize::try_from(length).ok()?, usize::try_from(pointer).ok()?);
        let start = pointer / tokens.dtype().size();
        let end = start.checked_add(length)?;
        (pointer.is_multiple_of(tokens.dtype().size()) && end <= tokens.len()).then_some(start..end)
    }

    fn astray(&self, sequence: usize, tokens: &TokenFile) -> DataError {
        let (length, pointer) = self.sequence(sequence);
        let size = tokens.dtype().size();
        let expected = format!("a sequence within {} tokens of {size} bytes", tokens.len());
        let found = format!("sequence {sequence} with {length} tokens from byte {pointer} on");
        DataError::corrupt(&self.path, self.pointer_offset(sequence) as u64, expected, found)
    }

    /// Checks every entry, so that a sample can only fail where a file changes.
    fn check(&self, tokens: &TokenFile) -> Result<(), DataError> {
        if let Some(sequence) = (0..self.sequences).find(|&sequence| self.range(sequence, tokens).is_none()) {
            return Err(self.astray(sequence, tokens));
        }
        let mut least = 0;
        for entry in 0..self.boundaries {
            let boundary = self.boundary(entry);
            if !(least..=self.sequences as i64).contains(&boundary) {
                let expected = format!("the number of a sequence from {least} to {}", self.sequences);
                let offset = self.boundary_offset(entry) as u64;
                return Err(DataError::corrupt(&self.path, offset, expected, boundary.to_string()));
            }
            least = boundary;
        }
        Ok(())
    }
}
