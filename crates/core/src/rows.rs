//! Parts of a state that several ranks have: rows of its tensors.

use std::ops::Range;

use overdrive_ffi::Error as TorchError;
use tch::{Kind, Tensor};

use crate::state::{Entry, StateDict, StateError, mismatch};

/// Where a rank's tensor is in the whole one: some rows, on dimension 0, as many as the rank's tensor has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first of them.
    pub first: i64,
    /// The whole tensor's shape.
    pub whole: Vec<i64>,
}

/// Which part of a whole state a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The number of the part, from 0 on.
    pub rank: usize,
    /// How many parts there are.
    pub ranks: usize,
    /// What is parted.
    pub by: ShardedBy,
}

/// How a state is parted over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardedBy {
    /// Each rank has some rows of each tensor.
    Rows,
    /// Each rank has some whole tensors.
    Tensors,
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = match self.by {
            ShardedBy::Rows => "rows",
            ShardedBy::Tensors => "tensors",
        };
        write!(f, "rank {} of {}, by {by}", self.rank, self.ranks)
    }
}

impl Rows {
    /// All rows of a tensor of this shape; one without dimensions has one row.
    pub fn all(shape: &[i64]) -> Range<i64> {
        0..shape.first().copied().unwrap_or(1)
    }
}

impl StateDict {
    /// An empty part of a whole state. All ranks' parts together are the whole: what is in several of them is the same
    /// there, but for rows.
    pub fn of_shard(shard: Shard) -> Self {
        Self { shard: Some(shard), ..Self::default() }
    }

    /// Which part of a whole state this is; `None` for a whole state.
    pub fn shard(&self) -> Option<Shard> {
        self.shard
    }

    /// An error if this is the part of another rank than `own`, or of one of several where whole states alone are loaded.
    ///
    /// # Errors
    /// [`StateError::Mismatch`]
    pub fn check_shard(&self, own: Option<Shard>) -> Result<(), StateError> {
        let Some(found) = self.shard.filter(|&found| Some(found) != own) else { return Ok(()) };
        let expected = match own {
            Some(own) => format!("the part of {own}"),
            None if found.ranks == 1 => return Ok(()),
            None => "a whole state".to_owned(),
        };
        let hint = "for other ranks, load it by a `Checkpoint`, or load what `consolidate_state_dict` has made";
        let (expected, found) = (format!("{expected}; {hint}"), format!("that of {found}"));
        Err(StateError::Mismatch { key: "*".to_owned(), expected, found })
    }

    /// Inserts some rows of a tensor.
    pub fn insert_rows(&mut self, key: impl Into<String>, tensor: Tensor, rows: Rows) {
        let key = key.into();
        self.entries.insert(key.clone(), Entry::Tensor(tensor));
        self.rows.insert(key, rows);
    }

    /// Which rows the tensor of this name is; `None` for a whole one.
    pub fn rows(&self, key: &str) -> Option<&Rows> {
        self.rows.get(key)
    }

    /// These rows of the tensor of this name, which is there whole or has at least these rows. `whole`: the shape that
    /// the whole tensor should have. The data is shared.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`], libtorch's.
    pub fn tensor_rows(&self, key: &str, whole: &[i64], rows: Range<i64>, kind: Kind) -> Result<Tensor, StateError> {
        let expected = || format!("rows {} to {} of a {kind:?} tensor of shape {whole:?}", rows.start, rows.end);
        let (tensor, first) = match (self.get(key)?, self.rows(key)) {
            (Entry::Tensor(tensor), Some(own)) if own.whole == whole && tensor.kind() == kind => (tensor, own.first),
            (Entry::Tensor(_), None) => (self.tensor(key, whole, kind)?, 0),
            (Entry::Tensor(tensor), Some(own)) => {
                let found = format!("rows of a {:?} tensor of shape {:?}", tensor.kind(), own.whole);
                return Err(StateError::Mismatch { key: key.to_owned(), expected: expected(), found });
            }
            (other, _) => return Err(mismatch(key, &expected(), other)),
        };
        let there = tensor.size().first().copied().unwrap_or(1);
        // A state may say anything about its rows.
        let fits = rows.start.checked_sub(first).zip(rows.end.checked_sub(rows.start));
        let fits = fits.filter(|&(start, count)| start >= 0 && count >= 0 && start <= there && count <= there - start);
        let Some((start, count)) = fits else {
            let found = format!("rows {first} to {}", first.saturating_add(there));
            return Err(StateError::Mismatch { key: key.to_owned(), expected: expected(), found });
        };
        let tensor = tensor.f_detach().map_err(TorchError::from)?;
        if tensor.dim() == 0 {
            return Ok(tensor);
        }
        Ok(tensor.f_narrow(0, start, count).map_err(TorchError::from)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part() -> StateDict {
        let mut state = StateDict::of_shard(Shard { rank: 1, ranks: 3, by: ShardedBy::Rows });
        let rows = Rows { first: 4, whole: vec![9, 2] };
        state.insert_rows("weight", Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).view([3, 2]), rows);
        state.insert("step", Entry::Tensor(Tensor::from(7.0f32)));
        state
    }

    #[test]
    fn rows_that_cannot_be_are_errors() {
        let numbers = || Tensor::zeros([3, 2], (Kind::Float, tch::Device::Cpu));
        for (first, rows) in [(i64::MIN, 4..5), (i64::MAX, 4..5), (4, i64::MIN..i64::MAX), (4, 4..8), (-3, -1..0)] {
            let mut state = StateDict::new();
            state.insert_rows("weight", numbers(), Rows { first, whole: vec![9, 2] });
            let told = state.tensor_rows("weight", &[9, 2], rows.clone(), Kind::Float);
            assert_eq!(told.is_err(), first != -3, "{first}, {rows:?}");
        }
    }

    #[test]
    fn rows_of_rows_and_of_whole_tensors_are_found() {
        let state = part();
        let found = state.tensor_rows("weight", &[9, 2], 5..7, Kind::Float).unwrap();
        assert_eq!(Vec::<f32>::try_from(&found.view([-1])).unwrap(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(state.tensor_rows("step", &[], 0..1, Kind::Float).unwrap().double_value(&[]), 7.0);
        for (whole, rows, kind) in
            [([9, 2], 3..5, Kind::Float), ([9, 2], 6..8, Kind::Float), ([8, 2], 5..6, Kind::Float)]
        {
            let told = state.tensor_rows("weight", &whole, rows, kind);
            assert!(matches!(told, Err(StateError::Mismatch { .. })), "{told:?}");
        }
        assert!(state.tensor_rows("weight", &[9, 2], 5..6, Kind::Double).is_err());
        assert!(state.tensor("weight", &[9, 2], Kind::Float).is_err(), "some rows are not the whole");
    }

    #[test]
    fn nested_states_keep_their_rows_and_whose_part_they_are() {
        let mut outer = StateDict::new();
        outer.insert_nested("inner", part());
        assert_eq!(outer.rows("inner.weight"), Some(&Rows { first: 4, whole: vec![9, 2] }));
        let own = Shard { rank: 1, ranks: 3, by: ShardedBy::Rows };
        assert_eq!(outer.shard(), Some(own));
        let inner = outer.nested("inner");
        assert_eq!((inner.rows("weight"), inner.shard()), (part().rows("weight"), None));
        let outer = outer.copied().unwrap();
        assert!(outer.check_shard(Some(own)).is_ok());
        for other in [None, Some(Shard { ranks: 2, ..own }), Some(Shard { by: ShardedBy::Tensors, ..own })] {
            let told = outer.check_shard(other).unwrap_err().to_string();
            assert!(told.contains("that of rank 1 of 3, by rows"), "{told}");
        }
        assert!(inner.check_shard(None).is_ok());
        assert!(StateDict::of_shard(Shard { rank: 0, ranks: 1, ..own }).check_shard(None).is_ok(), "all of it");
        let mut replaced = inner;
        replaced.insert("weight", Entry::Int(1));
        assert_eq!(replaced.rows("weight"), None);
    }
}
