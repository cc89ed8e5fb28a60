//! Hugging Face's tokenizers.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::DataError;
use crate::read::read_file;

/// The most bytes of a `tokenizer.json`; those of today's models have up to 35 MB.
const MAX_BYTES: u64 = 1 << 30;

/// A tokenizer of Hugging Face, from its `tokenizer.json`; clones share it, and threads use it at once.
///
/// Each call tokenizes one text on the calling thread, so that a loader's workers share the work and nothing else starts
/// threads. Truncation and padding that the file asks for are switched off: [`Packing`](crate::Packing) and
/// [`PadSequence`](crate::PadSequence) do that.
///
/// ```no_run
/// use overdrive_dataload::{DataError, DataLoader, IterableDataset, JoinPacks, Packing, Tokenizer, WebDataset};
///
/// let tokenizer = Tokenizer::from_file("gpt2/tokenizer.json")?.end_of_text("<|endoftext|>")?;
/// let texts = WebDataset::open("books-{000..099}.tar")?.select(["txt"]).map(|mut sample| {
///     let text = sample.take("txt").ok_or_else(|| DataError::other("no txt"))?;
///     String::from_utf8(text).map_err(DataError::other)
/// });
/// let packs = Packing::new(texts.map(tokenizer.encoder()), 2048)?;
/// let loader = DataLoader::stream(packs)
///     .batch_size(8)
///     .shuffle(true)
///     .interleave(8)
///     .num_workers(4)
///     .collate(JoinPacks)
///     .build()?;
/// # Ok::<(), DataError>(())
/// ```
///
/// # Source
/// `tokenizers.Tokenizer` of Hugging Face.
#[derive(Clone)]
#[doc(alias = "AutoTokenizer")]
pub struct Tokenizer {
    tokenizer: Arc<tokenizers::Tokenizer>,
    special_tokens: bool,
    end: Option<i64>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a file that is no tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::from_bytes(&read_file(path.as_ref(), None, MAX_BYTES)?, path)
    }

    /// The same from the file's content; `name` is its name in errors.
    ///
    /// # Errors
    /// [`DataError::Layout`] for what is no tokenizer.
    pub fn from_bytes(json: &[u8], name: impl AsRef<Path>) -> Result<Self, DataError> {
        let bad = |error: tokenizers::Error| {
            DataError::layout(name.as_ref(), "a tokenizer.json of Hugging Face", error.to_string())
        };
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(bad)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(bad)?;
        Ok(Self { tokenizer: Arc::new(tokenizer), special_tokens: false, end: None })
    }

    /// Whether the special tokens of the model are added around a text, such as BERT's `[CLS]` and `[SEP]`; off unless
    /// set, unlike in Python.
    pub fn add_special_tokens(mut self, special_tokens: bool) -> Self {
        self.special_tokens = special_tokens;
        self
    }

    /// Ends each text with this token, such as GPT-2's `<|endoftext|>`; none unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a token that the vocabulary does not have.
    pub fn end_of_text(mut self, token: &str) -> Result<Self, DataError> {
        let id = self.token_to_id(token);
        self.end = Some(id.ok_or_else(|| DataError::option("end_of_text", "a token of the vocabulary", token))?);
        Ok(self)
    }

    /// The number of a token, if the vocabulary has it.
    pub fn token_to_id(&self, token: &str) -> Option<i64> {
        self.tokenizer.token_to_id(token).map(i64::from)
    }

    /// How many tokens there are, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// [`DataError::Other`] for a text that the model cannot tokenize.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, DataError> {
        // Without the places of the tokens in the text, which nobody asks for here.
        let encoding = self.tokenizer.encode_fast(text, self.special_tokens);
        let encoding = encoding.map_err(|error| DataError::other(error.to_string()))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).chain(self.end).collect())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a token below 0 or beyond 32 bits; [`DataError::Other`].
    pub fn decode(&self, tokens: &[i64]) -> Result<String, DataError> {
        let id = |&token: &i64| u32::try_from(token).map_err(|_| DataError::option("token", "0 to 2^32 - 1", token));
        let ids = tokens.iter().map(id).collect::<Result<Vec<_>, _>>()?;
        self.tokenizer.decode(&ids, true).map_err(|error| DataError::other(error.to_string()))
    }

    /// A function for [`map`](crate::IterableDataset::map) of a dataset or stream of texts.
    pub fn encoder(&self) -> impl Fn(String) -> Result<Vec<i64>, DataError> + Clone + Send + Sync + use<> {
        let tokenizer = self.clone();
        move |text| tokenizer.encode(&text)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer {{ vocab_size: {} }}", self.vocab_size())
    }
}
