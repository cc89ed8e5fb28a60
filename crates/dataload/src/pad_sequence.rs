//! Pads sequences of different lengths into one batch.

use tch::{Kind, Tensor};

use crate::stack::{Stackable, common_shape, misfits};
use crate::{Collate, DataError};

/// Pads sequences to the longest of their batch, and returns the length of each.
///
/// # Shapes
/// `N` tensors `[L_i, ..]` give `[N, max(L_i), ..]` of their dtype, and int64 `[N]`, the `L_i`. For samples that are
/// pairs of a sequence and a value that [`Stack`](crate::Stack) takes, the stacked values are the third part of the
/// batch.
///
/// ```
/// use overdrive_dataload::{Collate, PadSequence};
/// use tch::Tensor;
///
/// let texts = vec![Tensor::from_slice(&[5_i64, 6, 7]), Tensor::from_slice(&[8_i64])];
/// let (tokens, lengths) = PadSequence::new(-100.0).collate(texts)?;
/// assert_eq!(Vec::<i64>::try_from(tokens.view(-1)).unwrap(), [5, 6, 7, 8, -100, -100]);
/// assert_eq!(Vec::<i64>::try_from(lengths).unwrap(), [3, 1]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Errors
/// [`DataError::EmptyBatch`] for no sequences; [`DataError::ShapeMismatch`] where sequences differ in more than their
/// length; [`DataError::Misfit`] where one is undefined, has no dimension, or another dtype than the first.
///
/// # Source
/// `torch.nn.utils.rnn.pad_sequence(batch_first=True)`, with `torch.nn.utils.rnn.pack_padded_sequence`'s lengths.
#[derive(Clone, Copy, Debug, Default)]
#[doc(alias = "pad_sequence")]
pub struct PadSequence {
    padding_value: f64,
}

impl PadSequence {
    /// Pads with `padding_value`, which is converted to the sequences' dtype.
    pub fn new(padding_value: f64) -> Self {
        Self { padding_value }
    }

    fn pad(&self, sequences: &[Tensor]) -> Result<(Tensor, Tensor), DataError> {
        let kind = sequences.iter().find(|sequence| sequence.defined()).map_or(Kind::Float, Tensor::kind);
        let odd = |sequence: &Tensor| !sequence.defined() || sequence.dim() == 0 || sequence.kind() != kind;
        let positions = (0..sequences.len()).filter(|&position| odd(&sequences[position]));
        let found = sequences.iter().find(|sequence| odd(sequence)).map_or_else(String::new, describe);
        misfits(positions, &format!("a {kind:?} tensor with at least one dimension"), &found)?;
        if sequences.is_empty() {
            return Err(DataError::EmptyBatch);
        }
        let sizes: Vec<Vec<i64>> = sequences.iter().map(Tensor::size).collect();
        let rest = |size: &Vec<i64>| size[1..].iter().map(|&size| size as usize).collect::<Vec<_>>();
        common_shape(&sizes.iter().map(rest).collect::<Vec<_>>())?;
        let lengths: Vec<i64> = sizes.iter().map(|size| size[0]).collect();
        let padded = Tensor::f_pad_sequence(sequences, true, self.padding_value, "right")?;
        Ok((padded, Stackable::stack(lengths)?))
    }
}

fn describe(tensor: &Tensor) -> String {
    match tensor.defined() {
        true => format!("a {:?} tensor of shape {:?}", tensor.kind(), tensor.size()),
        false => "an undefined tensor".to_owned(),
    }
}

impl Collate<Tensor> for PadSequence {
    type Batch = (Tensor, Tensor);

    fn collate(&self, sequences: Vec<Tensor>) -> Result<Self::Batch, DataError> {
        self.pad(&sequences)
    }
}

impl<S: Stackable> Collate<(Tensor, S)> for PadSequence {
    type Batch = (Tensor, Tensor, S::Batch);

    fn collate(&self, samples: Vec<(Tensor, S)>) -> Result<Self::Batch, DataError> {
        let (sequences, others): (Vec<Tensor>, Vec<S>) = samples.into_iter().unzip();
        let (padded, lengths) = self.pad(&sequences)?;
        Ok((padded, lengths, S::stack(others)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn sequences_that_cannot_be_padded_are_named() -> Result<(), DataError> {
        let sequence = |len: i64, width: i64, kind| Tensor::ones([len, width], (kind, Device::Cpu));
        let (padded, lengths, labels) = PadSequence::default()
            .collate(vec![(sequence(1, 2, Kind::Float), 3_i64), (sequence(3, 2, Kind::Float), 4)])?;
        assert_eq!((padded.size(), padded.sum(Kind::Float).double_value(&[])), (vec![2, 3, 2], 8.0));
        assert_eq!((lengths.size(), labels.int64_value(&[1])), (vec![2], 4));
        let uneven = vec![sequence(1, 2, Kind::Float), sequence(1, 2, Kind::Float), sequence(1, 3, Kind::Float)];
        assert!(matches!(PadSequence::default().collate(uneven), Err(DataError::ShapeMismatch { position: 2, .. })));
        let mixed = vec![sequence(1, 2, Kind::Float), sequence(1, 2, Kind::Int64)];
        let error = PadSequence::default().collate(mixed).unwrap_err().to_string();
        assert!(error.contains("position 1") && error.ends_with("found a Int64 tensor of shape [1, 2]"), "{error}");
        assert!(PadSequence::default().collate(vec![Tensor::from(1.0)]).is_err());
        assert!(matches!(PadSequence::default().collate(Vec::<Tensor>::new()), Err(DataError::EmptyBatch)));
        Ok(())
    }
}
