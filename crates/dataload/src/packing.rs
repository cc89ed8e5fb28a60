//! Sequences of tokens packed to one length while they are read.

use std::collections::VecDeque;

use crate::stream::pass_over;
use crate::{Cancellation, Collate, DataError, Deferred, IterableDataset, PackTokens, PackedTokens, Samples};

/// The tokens of one pack, with where its documents begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    /// The tokens of all documents, one after the other.
    pub tokens: Vec<i64>,
    /// How many tokens each document has here. The first may be the rest of a document, and the last the beginning of
    /// one.
    pub lengths: Vec<usize>,
}

/// A stream of documents of tokens, cut into packs of one length while it is read: without padding, and without knowing
/// the lengths before.
///
/// A document that does not fit into its pack is continued in the next one. Packs do not reach beyond their shard: what
/// is left at its end, less than a pack, is left out unless [`keep_last`](Self::keep_last) is set.
///
/// Documents are read, and what an earlier [`map`](IterableDataset::map) does with them is done, by one worker at a time
/// in each of the shards that are open: `interleave` at least as many as there are workers, so that all of them tokenize.
/// Resuming opens a shard at its start and packs it again up to the position, which gives the same packs to the token
/// where the documents are the same: a state is refused for packs of another length, but it does not know the tokenizer.
///
/// A document that cannot be read or made takes the place of a pack. Its error has the document's name or, where the
/// format gives it none, its number in the shard.
///
/// ```
/// use overdrive_dataload::{DataLoader, FnStream, JoinPacks, Packing};
///
/// // Any stream of tokens; with the feature `tokenizers`, `texts.map(tokenizer.encoder())`.
/// let documents = FnStream::new(2, |shard| Ok((1..9).map(move |length| Ok(vec![shard as i64; length]))));
/// let loader = DataLoader::stream(Packing::new(documents, 8)?).batch_size(2).collate(JoinPacks).build()?;
/// for batch in &loader {
///     let batch = batch?;
///     assert_eq!((batch.input_ids.size(), batch.max_seqlen <= 8), (vec![16], true));
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `group_texts` of Hugging Face's `run_clm.py`, with the boundaries of documents kept; `ConstantLengthDataset` of TRL.
#[derive(Clone, Debug)]
#[doc(alias = "ConstantLengthDataset")]
#[doc(alias = "group_texts")]
pub struct Packing<D> {
    documents: D,
    length: usize,
    keep_last: bool,
}

impl<D: IterableDataset<Sample = Vec<i64>>> Packing<D> {
    /// Packs of `length` tokens.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a length of 0.
    pub fn new(documents: D, length: usize) -> Result<Self, DataError> {
        DataError::at_least_1("length", length)?;
        Ok(Self { documents, length, keep_last: false })
    }

    /// Whether the last pack of a shard is kept, although it has fewer tokens; off unless set.
    pub fn keep_last(mut self, keep_last: bool) -> Self {
        self.keep_last = keep_last;
        self
    }
}

impl<D: IterableDataset<Sample = Vec<i64>>> IterableDataset for Packing<D> {
    type Sample = Pack;

    fn shards(&self) -> usize {
        self.documents.shards()
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<Pack>, DataError> {
        let packs = self.packs(shard, position, &Cancellation::default())?;
        Ok(Box::new(packs.map(|pack| pack.and_then(Deferred::get))))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<Pack>>, DataError> {
        Ok(Box::new(self.packs(shard, position, cancelled)?))
    }

    fn read_ahead(&self, shard: usize) {
        self.documents.read_ahead(shard);
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        self.documents.shard_name(shard)
    }

    fn fingerprint(&self) -> u64 {
        // Packs of another length are others.
        let length = (self.length as u64).wrapping_mul(2) + u64::from(self.keep_last);
        self.documents.fingerprint() ^ length.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl<D: IterableDataset<Sample = Vec<i64>>> Packing<D> {
    fn packs(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<Packs, DataError> {
        let documents = self.documents.open_deferred(shard, 0, cancelled)?;
        let (length, keep_last) = (self.length, self.keep_last);
        let mut packs = Packs {
            documents,
            length,
            keep_last,
            cancelled: cancelled.clone(),
            open: Pack::default(),
            full: VecDeque::new(),
            read: 0,
            ended: false,
        };
        pass_over(&mut packs, position, cancelled)?;
        Ok(packs)
    }
}

/// The packs of one shard.
struct Packs {
    documents: Samples<Deferred<Vec<i64>>>,
    length: usize,
    keep_last: bool,
    cancelled: Cancellation,
    /// The pack that is being filled.
    open: Pack,
    /// Packs that one long document filled.
    full: VecDeque<Pack>,
    /// How many documents were read.
    read: u64,
    ended: bool,
}

impl Packs {
    fn add(&mut self, document: &[i64]) {
        let mut rest = document;
        while !rest.is_empty() {
            let (here, after) = rest.split_at(rest.len().min(self.length - self.open.tokens.len()));
            self.open.tokens.extend_from_slice(here);
            self.open.lengths.push(here.len());
            rest = after;
            if self.open.tokens.len() == self.length {
                self.full.push_back(std::mem::take(&mut self.open));
            }
        }
    }

    /// The tokens of a document; the error of a bad one has its name.
    fn document(&self, document: Result<Deferred<Vec<i64>>, DataError>) -> Result<Vec<i64>, Deferred<Pack>> {
        let mut key = None;
        let tokens = document.and_then(|mut document| {
            key = document.take_key();
            document.get()
        });
        tokens.map_err(|error| {
            let bad = Deferred::later(|| Err(error)).at("document", self.read);
            if key.is_some() { bad.with_key(key) } else { bad }
        })
    }
}

impl Iterator for Packs {
    type Item = Result<Deferred<Pack>, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(pack) = self.full.pop_front() {
                return Some(Ok(placed(pack)));
            }
            if self.ended {
                return None;
            }
            if let Err(error) = self.cancelled.check() {
                self.ended = true;
                return Some(Err(error));
            }
            match self.documents.next() {
                Some(Err(DataError::Cancelled)) => return Some(Err(DataError::Cancelled)),
                Some(document) => {
                    let document = self.document(document);
                    self.read += 1;
                    match document {
                        Ok(document) => self.add(&document),
                        // A bad document takes the place of a pack, and the pack that is open goes on behind it.
                        Err(bad) => return Some(Ok(bad)),
                    }
                }
                None => {
                    self.ended = true;
                    let last = std::mem::take(&mut self.open);
                    return (self.keep_last && !last.tokens.is_empty()).then(|| Ok(placed(last)));
                }
            }
        }
    }
}

/// A pack, with the memory that it takes.
fn placed(pack: Pack) -> Deferred<Pack> {
    let bytes = size_of::<i64>() * (pack.tokens.len() + pack.lengths.len());
    Deferred::ready(pack).of_bytes(bytes)
}

/// Joins the packs of a batch, as [`PackTokens`] does sequences.
///
/// # Shapes
/// `N` packs of `T` tokens with `D` documents in total give int64 `[N * T]`, int64 `[N * T]` and int32 `[D + 1]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct JoinPacks;

impl Collate<Pack> for JoinPacks {
    type Batch = PackedTokens;

    fn collate(&self, packs: Vec<Pack>) -> Result<PackedTokens, DataError> {
        let documents = packs.iter().flat_map(|pack| {
            let starts = pack.lengths.iter().scan(0, |at, &length| {
                let start = *at;
                *at += length;
                Some(start..*at)
            });
            starts.map(|range| &pack.tokens[range])
        });
        PackTokens::new().join(&documents.collect::<Vec<_>>())
    }
}
