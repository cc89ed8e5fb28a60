//! The files of a store: those that match a pattern with wildcards, and those in a folder.

use std::path::{Path, PathBuf};

use futures_util::TryStreamExt;
use glob::{MatchOptions, Pattern};
use object_store::path::Path as Key;

use super::fetch::tried;
use super::store::{Store, failed, locate, wait};
use super::url;
use super::version::Version;
use crate::DataError;
use crate::read::Scheme;
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
    let mut found = Vec::new();
    for (key, _) in list(&store, (!folder.is_empty()).then_some(&prefix), pattern)? {
        if compiled.matches_with(key.as_ref(), options) {
            found.push(PathBuf::from(format!("{place}{key}")));
            limit(found.len())?;
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The files below a folder, in no order, and as the list describes them.
pub(crate) fn below(folder: &Path) -> Result<Vec<(PathBuf, Version)>, DataError> {
    let text = url(folder)?.trim_end_matches('/');
    if Scheme::of(folder) == Some(Scheme::Web) {
        let expected = "a folder of a store (`s3://`, `gs://`, `az://`), as web servers do not list files";
        return Err(DataError::layout(folder, expected, "an address of the web"));
    }
    // A whole bucket is a folder too.
    let place = if text.matches('/').count() == 2 { format!("{text}/") } else { text.to_owned() };
    let (store, prefix) = locate(&place)?;
    let mut found = Vec::new();
    for (key, version) in list(&store, (!prefix.as_ref().is_empty()).then_some(&prefix), text)? {
        // What has the name of the folder is none of its files.
        let Some(parts) = key.prefix_match(&prefix) else { continue };
        let name: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
        if !name.is_empty() {
            found.push((PathBuf::from(format!("{text}/{}", name.join("/"))), version));
        }
    }
    Ok(found)
}

/// All files of a store, or those in a folder; `what` names them in errors.
fn list(store: &Store, folder: Option<&Key>, what: &str) -> Result<Vec<(Key, Version)>, DataError> {
    let listed = move || async move {
        let files = store.list(folder).map_ok(|meta| {
            let version = Version::from(&meta);
            (meta.location, version)
        });
        files.try_collect().await
    };
    wait(tried(listed))?.map_err(failed(what))
}

/// The server or bucket with its slash, and the pattern of keys.
fn parts(pattern: &str) -> Result<(&str, &str), DataError> {
    let start = pattern.find("://").map(|at| at + 3).and_then(|from| Some(from + pattern[from..].find('/')? + 1));
    let start = start.ok_or_else(|| DataError::option("shards", "a bucket and a name", pattern))?;
    let (place, keys) = pattern.split_at(start);
    match Scheme::of(Path::new(place)) == Some(Scheme::Web) {
        true => Err(DataError::option(
            "shards",
            "names without `*`, `?` and `[`, as web servers do not list files",
            pattern,
        )),
        false => Ok((place, keys)),
    }
}
