//! Splits long sequences into pieces.

use crate::{DataError, Dataset};

/// A dataset's sequences, with those longer than a limit split into pieces: each piece is a sample.
///
/// With it, no token of a long document is lost in a [`TokenPacking`](crate::TokenPacking) with packs of `max_length`
/// tokens. Each piece reads its whole document; put a cache before it where reading is slow.
///
/// ```
/// use overdrive_dataload::{Dataset, FnDataset, Pieces, TokenPacking};
///
/// let documents = FnDataset::new(2, |index| Ok(vec![index as i64; [2500, 600][index]]));
/// let pieces = Pieces::new(documents, &[2500, 600], 1024)?;
/// assert_eq!(pieces.lengths(), [1024, 1024, 452, 600]);
/// let packing = TokenPacking::builder(pieces.lengths(), 1024).build()?;
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pieces<D> {
    dataset: D,
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    sequence: usize,
    start: usize,
    length: usize,
}

impl<D: Dataset> Pieces<D> {
    /// Splits sequences of these lengths into pieces of at most `max_length`; an empty sequence is one piece. Tokens
    /// beyond the given length of a sequence are dropped.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `max_length` of 0, or a number of lengths that differs from the number of
    /// samples.
    pub fn new(dataset: D, lengths: &[usize], max_length: usize) -> Result<Self, DataError> {
        DataError::at_least_1("max_length", max_length)?;
        if lengths.len() != dataset.len() {
            return Err(DataError::option(
                "lengths",
                format!("one for each of {} samples", dataset.len()),
                lengths.len(),
            ));
        }
        let mut pieces = Vec::with_capacity(lengths.len());
        for (sequence, &whole) in lengths.iter().enumerate() {
            let piece = |start| Piece { sequence, start, length: max_length.min(whole - start) };
            pieces.extend((0..whole.max(1)).step_by(max_length).map(piece));
        }
        Ok(Self { dataset, pieces })
    }

    /// The length of every piece.
    pub fn lengths(&self) -> Vec<usize> {
        self.pieces.iter().map(|piece| piece.length).collect()
    }
}

impl<T, D> Dataset for Pieces<D>
where
    T: Send,
    D: Dataset<Sample = Vec<T>>,
{
    type Sample = Vec<T>;

    fn len(&self) -> usize {
        self.pieces.len()
    }

    fn get(&self, index: usize) -> Result<Vec<T>, DataError> {
        let piece = self.pieces.get(index).ok_or(DataError::IndexOutOfRange { index, len: self.pieces.len() })?;
        let Piece { sequence, start, length } = *piece;
        let mut tokens = self.dataset.get(sequence)?;
        if tokens.len() < start + length {
            let expected = format!("at least {} tokens in sequence {sequence}", start + length);
            return Err(DataError::option("lengths", expected, tokens.len()));
        }
        tokens.truncate(start + length);
        tokens.drain(..start);
        Ok(tokens)
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(self.pieces.get(index)?.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FnDataset;

    fn counting(lengths: &[usize]) -> impl Dataset<Sample = Vec<usize>> + use<> {
        let lengths = lengths.to_vec();
        FnDataset::new(lengths.len(), move |index| Ok((0..lengths[index]).collect()))
    }

    #[test]
    fn pieces_add_up_to_the_sequences() -> Result<(), DataError> {
        let lengths = [5, 0, 4, 9, 1];
        let pieces = Pieces::new(counting(&lengths), &lengths, 4)?;
        assert_eq!(pieces.lengths(), [4, 1, 0, 4, 4, 4, 1, 1]);
        let all: Vec<Vec<usize>> = (0..pieces.len()).map(|index| pieces.get(index)).collect::<Result<_, _>>()?;
        assert!(all.iter().map(Vec::len).eq(pieces.lengths()));
        assert_eq!(all.concat(), lengths.iter().flat_map(|&length| 0..length).collect::<Vec<_>>());
        assert!(matches!(pieces.get(8), Err(DataError::IndexOutOfRange { index: 8, len: 8 })));
        Ok(())
    }

    #[test]
    fn wrong_lengths_are_errors() -> Result<(), DataError> {
        assert!(Pieces::new(counting(&[3, 4]), &[3], 4).is_err());
        assert!(Pieces::new(counting(&[3]), &[3], 0).is_err());
        let error = Pieces::new(counting(&[6]), &[7], 4)?.get(1).unwrap_err();
        assert_eq!(error.to_string(), "lengths: expected at least 7 tokens in sequence 0, found 6");
        Ok(())
    }
}
