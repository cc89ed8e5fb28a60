//! The files of a store: those that match a pattern with wildcards, and those in a folder.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path as Key;

use super::fetch::tried;
use super::store::{Store, failed, locate, wait};
use super::url;
use super::version::Version;
use crate::DataError;
use crate::read::Scheme;
use crate::shards::limit;

/// The most pages of a list. Most stores give a thousand files each.
const MAX_PAGES: usize = 1 << 16;
/// The most pages in a row without a file, which a store gives where many files were removed.
const MAX_EMPTY: usize = 1000;
/// The most bytes of what is kept of a list: 4 GiB, enough for 20 million files.
const MAX_BYTES: u64 = 1 << 32;
/// What a file of a list takes beside its name, about.
const BESIDE_NAME: u64 = 128;

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
    let matches = |key: Key, _| {
        let is_match = compiled.matches_with(key.as_ref(), options);
        is_match.then(|| PathBuf::from(format!("{place}{key}")))
    };
    let mut found = list(&store, (!folder.is_empty()).then_some(&prefix), pattern, matches)?;
    limit(found.len())?;
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
    list(&store, (!prefix.as_ref().is_empty()).then_some(&prefix), text, |key, version| {
        // What has the name of the folder is none of its files.
        let name: Vec<_> = key.prefix_match(&prefix)?.map(|part| part.as_ref().to_owned()).collect();
        (!name.is_empty()).then(|| (PathBuf::from(format!("{text}/{}", name.join("/"))), version))
    })
}

/// What `keep` makes of the files of a store, or of those in a folder; `what` names them in errors.
fn list<T: Send>(
    store: &Store,
    folder: Option<&Key>,
    what: &str,
    keep: impl Fn(Key, Version) -> Option<T> + Send,
) -> Result<Vec<T>, DataError> {
    let pages = store.pages().ok_or_else(|| DataError::layout(Path::new(what), "a store", "a web server"))?;
    wait(every_page(pages, folder, what, keep))?
}

/// Asks for page after page. A list that never ends is an error, and takes no more memory than one that does.
async fn every_page<T>(
    pages: &dyn PaginatedListStore,
    folder: Option<&Key>,
    what: &str,
    keep: impl Fn(Key, Version) -> Option<T>,
) -> Result<Vec<T>, DataError> {
    let prefix = folder.map(|folder| format!("{folder}/"));
    let (mut found, mut seen, mut page_token) = (Vec::new(), Seen::default(), None::<String>);
    loop {
        let (prefix, token) = (&prefix, &page_token);
        let asked = || {
            let options = PaginatedListOptions { page_token: token.clone(), ..PaginatedListOptions::default() };
            pages.list_paginated(prefix.as_deref(), options)
        };
        let page = tried(asked).await.map_err(failed(what))?;
        let files = page.result.objects;
        if page.page_token.is_some() {
            let endless = |found| DataError::layout(Path::new(what), "a list of files that ends", found);
            seen.page(files.first().map(|first| &first.location)).map_err(endless)?;
        }
        for file in files {
            let version = Version::from(&file);
            let name = file.location.as_ref().len() as u64;
            if let Some(kept) = keep(file.location, version) {
                seen.kept(name, what)?;
                found.push(kept);
            }
        }
        page_token = page.page_token;
        if page_token.is_none() {
            return Ok(found);
        }
    }
}

/// What a list had so far.
#[derive(Default)]
struct Seen {
    /// The pages that are followed by others.
    pages: usize,
    /// Those without a file since the last one that has some.
    empty: usize,
    /// What the pages began with, which no other page does.
    first: HashSet<u64, RandomState>,
    /// Of what is kept.
    bytes: u64,
}

impl Seen {
    /// One more page, and its first file; an error says why the list has no end.
    fn page(&mut self, first: Option<&Key>) -> Result<(), String> {
        self.pages += 1;
        self.empty = if first.is_none() { self.empty + 1 } else { 0 };
        match first {
            _ if self.pages > MAX_PAGES => Err(format!("more than {MAX_PAGES} pages")),
            None if self.empty > MAX_EMPTY => Err(format!("more than {MAX_EMPTY} pages without a file")),
            Some(key) if !self.first.insert(self.first.hasher().hash_one(key)) => {
                Err(format!("two pages that begin with {key}"))
            }
            _ => Ok(()),
        }
    }

    /// One more file is kept, whose name has so many bytes.
    fn kept(&mut self, name: u64, what: &str) -> Result<(), DataError> {
        self.bytes += name + BESIDE_NAME;
        DataError::check_bytes(MAX_BYTES, self.bytes, "the list of files", Path::new(what))
    }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use futures_util::future::BoxFuture;
    use object_store::list::PaginatedListResult;
    use object_store::{ListResult, ObjectMeta};

    use super::*;

    /// Gives this file on page `n`, and says that there is another page.
    struct Endless(AtomicUsize, fn(usize) -> Option<String>);

    impl PaginatedListStore for Endless {
        // What `async fn` in this trait stands for.
        fn list_paginated<'store, 'prefix, 'answer>(
            &'store self,
            _prefix: Option<&'prefix str>,
            options: PaginatedListOptions,
        ) -> BoxFuture<'answer, object_store::Result<PaginatedListResult>>
        where
            'store: 'answer,
            'prefix: 'answer,
        {
            let number = self.0.fetch_add(1, Relaxed);
            assert_eq!(options.page_token, (number > 0).then(|| number.to_string()));
            let objects = self.1(number).into_iter().map(|name| ObjectMeta {
                location: Key::from(name),
                last_modified: std::time::UNIX_EPOCH.into(),
                size: 1,
                e_tag: None,
                version: None,
            });
            let (common_prefixes, extensions) = (Vec::new(), Default::default());
            let result = ListResult { objects: objects.collect(), common_prefixes, extensions };
            Box::pin(async move { Ok(PaginatedListResult { result, page_token: Some((number + 1).to_string()) }) })
        }
    }

    #[test]
    fn a_list_without_an_end_is_an_error() {
        let found = |file: fn(usize) -> Option<String>| {
            let store = Endless(AtomicUsize::new(0), file);
            let error = wait(every_page(&store, None, "s3://bucket/a", |key, _| Some(key))).unwrap().unwrap_err();
            assert!(matches!(&error, DataError::Layout { .. }), "{error}");
            error.to_string()
        };
        let expected = |found: &str| format!("s3://bucket/a: expected a list of files that ends, found {found}");
        assert_eq!(found(|number| Some(format!("a/{number}"))), expected("more than 65536 pages"));
        assert_eq!(found(|_| None), expected("more than 1000 pages without a file"));
        assert_eq!(found(|number| Some(format!("a/{}", number % 7))), expected("two pages that begin with a/0"));
        // Some pages may be empty.
        assert_eq!(found(|number| (number % 900 == 0).then(|| number.to_string())), expected("more than 65536 pages"));
    }

    #[test]
    fn names_that_fill_memory_are_an_error() {
        let (mut seen, what) = (Seen::default(), "s3://bucket/a");
        assert!((0..4000).all(|_| seen.kept(1 << 20, what).is_ok()));
        let error = (0..96).find_map(|_| seen.kept(1 << 20, what).err()).unwrap();
        assert!(matches!(error, DataError::TooLarge { limit: MAX_BYTES, .. }), "{error}");
    }
}
