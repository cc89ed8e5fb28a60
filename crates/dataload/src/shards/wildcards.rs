//! Finds the files that match a pattern with wildcards.
//!
//! The `glob` crate decides which names match. Its own directory walk is not used, since it skips names that are not
//! UTF-8.

use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use glob::Pattern;

use super::limit;
use crate::DataError;

/// The most parts between slashes.
const MAX_PARTS: usize = 256;

/// One part of a pattern, between two slashes.
enum Part {
    Name(OsString),
    Matching(Pattern),
    /// `**`: any number of nested folders, or none.
    Folders,
}

/// The files that match, sorted by name.
///
/// Bytes of a name that are not UTF-8 are matched as U+FFFD, the replacement character, which `*` and `?` match.
pub(super) fn matching(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let mut search = Search::default();
    search.walk(Path::new(""), &parse(pattern)?)?;
    let Search { mut files, .. } = search;
    files.sort_unstable();
    // Several `**` in a pattern can find a file more than once.
    files.dedup();
    Ok(files)
}

fn parse(pattern: &str) -> Result<Vec<Part>, DataError> {
    let mut parts: Vec<Part> = Vec::new();
    for component in Path::new(pattern).components() {
        let text = component.as_os_str().to_string_lossy();
        let part = match component {
            Component::Normal(_) if text == "**" => Part::Folders,
            Component::Normal(_) if text.contains(['*', '?', '[']) => {
                let invalid = |error| DataError::option("shards", "a glob pattern", format!("{pattern}: {error}"));
                Part::Matching(Pattern::new(&text).map_err(invalid)?)
            }
            component => Part::Name(component.as_os_str().to_owned()),
        };
        // Two in a row mean the same as one.
        if !matches!((parts.last(), &part), (Some(Part::Folders), Part::Folders)) {
            parts.push(part);
        }
    }
    match parts.len() {
        0..=MAX_PARTS => Ok(parts),
        count => Err(DataError::option("shards", format!("at most {MAX_PARTS} names between slashes"), count)),
    }
}

#[derive(Default)]
struct Search {
    files: Vec<PathBuf>,
    /// The folders on the way down from a `**`, so that a link to one of them does not cause endless recursion.
    above: Vec<PathBuf>,
}

impl Search {
    fn walk(&mut self, path: &Path, parts: &[Part]) -> Result<(), DataError> {
        let Some((part, rest)) = parts.split_first() else {
            self.files.push(path.to_owned());
            return limit(self.files.len());
        };
        match part {
            Part::Name(name) => {
                let path = path.join(name);
                if path.exists() { self.walk(&path, rest) } else { Ok(()) }
            }
            Part::Matching(pattern) => {
                let is_match = |name: &OsString| pattern.matches(&name.to_string_lossy());
                let mut names = names_in(path)?.into_iter().filter(is_match);
                names.try_for_each(|name| self.walk(&path.join(name), rest))
            }
            Part::Folders => {
                let real = fs::canonicalize(here(path)).map_err(DataError::io(path))?;
                if self.above.contains(&real) {
                    return Ok(());
                }
                self.walk(path, rest)?;
                self.above.push(real);
                for folder in names_in(path)?.into_iter().map(|name| path.join(name)).filter(|path| path.is_dir()) {
                    self.walk(&folder, parts)?;
                }
                self.above.pop();
                Ok(())
            }
        }
    }
}

/// The names in a folder; none where `path` is not a folder.
fn names_in(path: &Path) -> Result<Vec<OsString>, DataError> {
    let path = here(path);
    if !path.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(path).map_err(DataError::io(path))?;
    entries.map(|entry| Ok(entry.map_err(DataError::io(path))?.file_name())).collect()
}

/// The current folder for an empty path, where a relative pattern begins.
fn here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"").unwrap();
    }

    /// The files below `root` that match, without `root` itself.
    fn found(root: &Path, pattern: &str) -> Vec<PathBuf> {
        let files = matching(&format!("{}/{pattern}", root.display())).unwrap();
        files.iter().map(|path| path.strip_prefix(root).unwrap().to_owned()).collect()
    }

    #[test]
    fn files_and_order_are_those_of_the_glob_crate() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.tar", "a.tar", "b/x.tar", "b/c/y.tar", "b-1/z.tar", ".hidden.tar", "b/q.txt", "[a].tar"] {
            touch(&dir.path().join(name));
        }
        let patterns = ["*.tar", "*/*.tar", "**/*.tar", "b/**/?.t*", "[ab].tar", "[!a]*", "b*/../a.*", "none*/x"];
        for pattern in patterns.into_iter().chain(["**/**/y.tar", "*/", "b/./*", "b/x.tar/*", "[[]a].tar"]) {
            let whole = format!("{}/{pattern}", dir.path().display());
            let mut expected: Vec<PathBuf> = glob::glob(&whole).unwrap().map(Result::unwrap).collect();
            let files = matching(&whole).unwrap();
            if pattern == "*/" {
                // The crate matches only folders for these; a shard cannot be one.
                expected.extend(files.iter().filter(|path| path.is_file()).cloned());
                expected.sort_unstable();
            }
            assert_eq!(files, expected, "{pattern}");
        }
    }

    #[test]
    fn absurd_patterns_are_errors() {
        for pattern in ["***", "a**", "a/[", &"*/".repeat(MAX_PARTS + 1)] {
            assert!(matches!(matching(pattern), Err(DataError::InvalidOption { .. })), "{pattern}");
        }
        assert!(matching(&"**/".repeat(100_000)).is_ok());
    }

    #[test]
    #[cfg(unix)]
    fn names_that_are_not_utf8_are_files_too() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;

        let dir = tempfile::tempdir().unwrap();
        let odd = |bytes: &'static [u8]| PathBuf::from(OsStr::from_bytes(bytes));
        let files = [odd(b"a-\xff.tar"), odd(b"b.tar"), odd(b"caf\xe9/c.tar")];
        files.iter().for_each(|file| touch(&dir.path().join(file)));
        assert_eq!(found(dir.path(), "*.tar"), files[..2]);
        assert_eq!(found(dir.path(), "a-?.tar"), files[..1]);
        assert_eq!(found(dir.path(), "caf*/*"), files[2..]);
        assert_eq!(found(dir.path(), "**/*.tar"), files);
    }

    #[test]
    #[cfg(unix)]
    fn links_to_parent_folders_do_not_recurse_endlessly() {
        let dir = tempfile::tempdir().unwrap();
        touch(&dir.path().join("b/x.tar"));
        std::os::unix::fs::symlink(dir.path(), dir.path().join("b/up")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("b"), dir.path().join("c")).unwrap();
        assert_eq!(found(dir.path(), "**/*.tar"), [PathBuf::from("b/x.tar"), PathBuf::from("c/x.tar")]);
    }
}
