//! Finds the files of a store that match a pattern with wildcards.

use std::path::PathBuf;

use futures_util::TryStreamExt;
use glob::{MatchOptions, Pattern};
use object_store::path::Path as Key;

use super::store::{failed, locate, wait};
use crate::DataError;
use crate::shards::limit;

/// The files that match, sorted by name. Web servers do not list their files.
pub(crate) fn matching(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let (place, keys) = parts(pattern)?;
    let invalid = |error| DataError::option("shards", "a glob pattern", format!("{pattern}: {error}"));
    let compiled = Pattern::new(keys).map_err(invalid)?;
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    // All up to the folder that holds the first wildcard.
    let plain = &keys[..keys.find(['*', '?', '[']).unwrap_or(keys.len())];
    let folder = plain.rsplit_once('/').map_or("", |(folder, _)| folder);
    let (store, _) = locate(&format!("{place}{keys}"))?;
    let prefix =
        Key::parse(folder).map_err(|error| DataError::option("shards", "a folder", format!("{pattern}: {error}")))?;
    let mut found = wait(async {
        let mut listed = store.list((!folder.is_empty()).then_some(&prefix));
        let mut found = Vec::new();
        while let Some(meta) = listed.try_next().await.map_err(failed(pattern))? {
            if compiled.matches_with(meta.location.as_ref(), options) {
                found.push(PathBuf::from(format!("{place}{}", meta.location)));
                limit(found.len())?;
            }
        }
        Ok::<_, DataError>(found)
    })??;
    found.sort_unstable();
    Ok(found)
}

/// The server or bucket with its slash, and the pattern of keys.
fn parts(pattern: &str) -> Result<(&str, &str), DataError> {
    let start = pattern.find("://").map(|at| at + 3).and_then(|from| Some(from + pattern[from..].find('/')? + 1));
    let start = start.ok_or_else(|| DataError::option("shards", "a bucket and a name", pattern))?;
    let (place, keys) = pattern.split_at(start);
    match place.starts_with("http") {
        true => Err(DataError::option(
            "shards",
            "names without `*`, `?` and `[`, as web servers do not list files",
            pattern,
        )),
        false => Ok((place, keys)),
    }
}
