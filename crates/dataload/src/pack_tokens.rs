//! Concatenates sequences of tokens, without padding.

use tch::{Kind, Tensor};

use crate::tensor::tensor_from_bytes;
use crate::{Collate, DataError, TensorBatch};

/// The concatenated tokens of several sequences, with the offsets that attention needs to keep them apart.
#[derive(Debug)]
pub struct PackedTokens {
    /// All tokens, int64 `[T]`.
    pub input_ids: Tensor,
    /// Each token's position in its own sequence, int64 `[T]`.
    pub position_ids: Tensor,
    /// The start of each sequence and the end of the last one, int32 `[N + 1]`.
    #[doc(alias = "cu_seq_lens")]
    pub cu_seqlens: Tensor,
    /// The length of the longest sequence.
    pub max_seqlen: i64,
}

impl TensorBatch for PackedTokens {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        Ok(Self {
            input_ids: change(&self.input_ids)?,
            position_ids: change(&self.position_ids)?,
            cu_seqlens: change(&self.cu_seqlens)?,
            max_seqlen: self.max_seqlen,
        })
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        [&self.input_ids, &self.position_ids, &self.cu_seqlens].into_iter().for_each(visit);
    }
}

/// Concatenates the token sequences of a batch, which [`TokenPacking`](crate::TokenPacking) selects.
///
/// ```
/// use overdrive_dataload::{DataLoader, FnDataset, PackTokens, TokenPacking};
///
/// let lengths = [3, 5, 6, 2];
/// let documents = FnDataset::new(4, move |index| Ok(vec![index as i64; lengths[index]]));
/// let loader = DataLoader::builder(documents)
///     .batch_sampler(TokenPacking::builder(lengths, 8).build()?)
///     .collate(PackTokens::new())
///     .build()?;
/// for batch in &loader {
///     let batch = batch?;
///     assert_eq!((batch.input_ids.size(), batch.cu_seqlens.size()), (vec![8], vec![3]));
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Shapes
/// `N` samples `Vec<i64>` of `T` tokens in total give int64 `[T]`, int64 `[T]` and int32 `[N + 1]`.
///
/// # Source
/// `flash_attn_varlen_func` of flash-attention, which takes `cu_seqlens` and `max_seqlen`;
/// `DataCollatorWithFlattening` of Hugging Face Transformers.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "DataCollatorWithFlattening")]
pub struct PackTokens {
    max_length: usize,
}

impl PackTokens {
    /// Concatenates sequences without truncating them.
    pub fn new() -> Self {
        Self { max_length: usize::MAX }
    }

    /// Truncates each sequence to this many tokens.
    pub fn max_length(mut self, max_length: usize) -> Self {
        self.max_length = max_length;
        self
    }

    /// Joins sequences, as [`collate`](Collate::collate) does.
    pub(crate) fn join(&self, sequences: &[&[i64]]) -> Result<PackedTokens, DataError> {
        if sequences.is_empty() {
            return Err(DataError::EmptyBatch);
        }
        let cut: Vec<&[i64]> = sequences.iter().map(|tokens| &tokens[..tokens.len().min(self.max_length)]).collect();
        let tokens = cut.concat();
        if i32::try_from(tokens.len()).is_err() {
            return Err(DataError::option("tokens in a pack", format!("at most {}, an int32", i32::MAX), tokens.len()));
        }
        let positions: Vec<i64> = cut.iter().flat_map(|tokens| 0..tokens.len() as i64).collect();
        let ends = cut.iter().scan(0, |end, tokens| {
            *end += tokens.len() as i32;
            Some(*end)
        });
        let ends: Vec<i32> = std::iter::once(0).chain(ends).collect();
        let length = tokens.len() as i64;
        Ok(PackedTokens {
            input_ids: tensor_from_bytes(bytemuck::cast_slice(&tokens), Kind::Int64, &[length])?,
            position_ids: tensor_from_bytes(bytemuck::cast_slice(&positions), Kind::Int64, &[length])?,
            cu_seqlens: tensor_from_bytes(bytemuck::cast_slice(&ends), Kind::Int, &[ends.len() as i64])?,
            max_seqlen: cut.iter().map(|tokens| tokens.len()).max().unwrap_or(0) as i64,
        })
    }
}

impl Default for PackTokens {
    fn default() -> Self {
        Self::new()
    }
}

impl Collate<Vec<i64>> for PackTokens {
    type Batch = PackedTokens;

    fn collate(&self, samples: Vec<Vec<i64>>) -> Result<PackedTokens, DataError> {
        self.join(&samples.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<T: tch::kind::Element>(tensor: &Tensor) -> Vec<T>
    where
        Vec<T>: for<'a> TryFrom<&'a Tensor, Error = tch::TchError>,
    {
        assert_eq!(tensor.kind(), T::KIND);
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn sequences_are_joined_and_kept_apart() -> Result<(), DataError> {
        let samples = || vec![vec![7, 8, 9], vec![], vec![1, 2, 3, 4, 5]];
        let packed = PackTokens::new().collate(samples())?;
        assert_eq!(values::<i64>(&packed.input_ids), [7, 8, 9, 1, 2, 3, 4, 5]);
        assert_eq!(values::<i64>(&packed.position_ids), [0, 1, 2, 0, 1, 2, 3, 4]);
        assert_eq!((values::<i32>(&packed.cu_seqlens), packed.max_seqlen), (vec![0, 3, 3, 8], 5));
        let cut = PackTokens::new().max_length(2).collate(samples())?;
        assert_eq!(values::<i64>(&cut.input_ids), [7, 8, 1, 2]);
        assert_eq!((values::<i32>(&cut.cu_seqlens), cut.max_seqlen), (vec![0, 2, 2, 4], 2));
        let moved = cut.map_tensors(&mut |tensor| Ok(tensor.f_neg()?))?;
        let mut first = Vec::new();
        moved.visit_tensors(&mut |tensor| first.push(tensor.int64_value(&[1])));
        assert_eq!((first, moved.max_seqlen), (vec![-8, -1, -2], 2));
        assert!(matches!(PackTokens::default().collate(vec![]), Err(DataError::EmptyBatch)));
        Ok(())
    }
}
