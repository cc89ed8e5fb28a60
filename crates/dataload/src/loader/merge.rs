//! Merges the states of all ranks, to resume with another number of ranks.

use overdrive_core::{Entry, StateDict, StateError};

use crate::DataLoader;

impl DataLoader<()> {
    /// Merges the states of all ranks' loaders, taken after the same step, into one that loaders of any number of ranks
    /// can load.
    ///
    /// For a dataset and for Parquet's batches, every rank's state is the same, and any of them will do. For a stream,
    /// each rank's state holds only its own lanes, which are merged here.
    ///
    /// ```
    /// use overdrive_dataload::{DataError, DataLoader, FnStream};
    /// use overdrive_core::Stateful;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rank = |rank, of| -> Result<DataLoader<Vec<usize>>, DataError> {
    ///     let counts = FnStream::new(4, |shard| Ok((0..9).map(move |i| Ok(shard * 10 + i))));
    ///     let stream = DataLoader::stream(counts).batch_size(4 / of).rank(rank, of).batches_per_epoch(9);
    ///     stream.collate(|samples: Vec<usize>| Ok(samples)).build()
    /// };
    /// let two = [rank(0, 2)?, rank(1, 2)?];
    /// two.iter().for_each(|rank| drop(rank.iter().next()));
    /// let state = DataLoader::merge_states(&[two[0].state_dict()?, two[1].state_dict()?])?;
    /// let mut one = rank(0, 1)?;
    /// one.load_state_dict(&state)?;
    /// assert_eq!(one.iter().next().unwrap()?, [1, 11, 21, 31]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`StateError::Missing`] for an empty slice; [`StateError::Mismatch`] when the states are not of the same step,
    /// or the ranks are no longer in step: after bad items were skipped, or at the end of a stream.
    pub fn merge_states(states: &[StateDict]) -> Result<StateDict, StateError> {
        let mut merged = StateDict::new();
        let first = states.first().ok_or_else(|| StateError::Missing { key: "epoch".to_owned() })?;
        for state in states {
            if let Some((key, _)) = first.iter().find(|(key, _)| !of_one_rank(key) && state.get(key).is_err()) {
                return Err(StateError::Missing { key: key.to_owned() });
            }
            for (key, entry) in state.iter() {
                let found = text(entry);
                match merged.get(key).map(text) {
                    Err(_) => merged.insert(key, copy(entry)),
                    Ok(expected) if expected == found => {}
                    Ok(expected) => {
                        let expected = format!("{expected}, as in the states of earlier ranks");
                        return Err(StateError::Mismatch { key: key.to_owned(), expected, found });
                    }
                }
            }
        }
        Ok(merged)
    }
}

fn of_one_rank(key: &str) -> bool {
    key.starts_with("lane.")
}

fn text(entry: &Entry) -> String {
    match entry {
        Entry::Int(number) => number.to_string(),
        Entry::Text(text) => text.clone(),
        other => format!("{other:?}"),
    }
}

fn copy(entry: &Entry) -> Entry {
    match entry {
        Entry::Int(number) => Entry::Int(*number),
        other => Entry::Text(text(other)),
    }
}
