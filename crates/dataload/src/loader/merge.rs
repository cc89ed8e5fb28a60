//! One state for another number of ranks.

use overdrive_core::{Entry, StateDict, StateError};

use crate::DataLoader;

impl DataLoader<()> {
    /// The states of all ranks' loaders, taken after the same step, as one that the loaders of any number of ranks can read.
    ///
    /// Over a dataset every rank's state is the same, and any of them will do. Of a stream each rank's state holds only the
    /// shards that it reads: those are put together here.
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
    /// [`StateError::Missing`] for no state at all; [`StateError::Mismatch`] when they are not of the same step, or of ranks
    /// that no longer read alike: after bad items that were skipped, or at the end of a stream.
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
                        let expected = format!("{expected}, as on the ranks before");
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
