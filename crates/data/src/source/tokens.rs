//! Sequences of Megatron's tokens.

use std::path::Path;

use anyhow::{Result, bail};
use overdrive_dataload::{Dataset, IndexedTokens};

use super::Source;
use crate::sample::{Draft, TOKENS};

pub fn open(path: &Path) -> Result<Source> {
    let data = IndexedTokens::open(path)?;
    let total = Some(data.len() as u64);
    let samples = (0..data.len()).map(move |index| {
        // A list of JSON, which lines of JSON hold as such.
        let tokens = serde_json::to_vec(&data.get(index)?)?;
        let mut draft = Draft::default();
        draft.add(format!("{}.json", TOKENS[0]), tokens)?;
        Ok(draft.finish(index))
    });
    Ok(Source { total, samples: Box::new(samples) })
}

/// A file without an index has no samples.
pub fn refuse(path: &Path) -> Result<Source> {
    bail!(
        "{}: a file of tokens does not say where a sample ends, so that it cannot be converted; with an index beside \
         it, state --from megatron",
        path.display()
    )
}
