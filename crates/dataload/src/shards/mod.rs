//! Expands a pattern to the files of a dataset: braces, then globs.

#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
// MDS has its indexes in its shards.
#[cfg_attr(not(any(feature = "tfrecord", feature = "webdataset")), allow(dead_code))]
pub(crate) mod index;
#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
mod list;
mod wildcards;

use std::path::{Path, PathBuf};

#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
pub use list::{IndexedShards, ShardListDataset};

use crate::DataError;
#[cfg(not(feature = "remote"))]
use crate::read::no_remote;
use crate::read::{is_url, require_regular};

/// More files than this are surely a typo, and listing them could fill memory.
const MAX_FILES: usize = 1 << 20;
/// The most bytes of all names together.
const MAX_BYTES: usize = 1 << 28;
/// The most digits of a number in a pattern.
const MAX_WIDTH: usize = 64;
/// The deepest nesting of braces.
const MAX_DEPTH: usize = 32;

/// The files that match a pattern, in the pattern's order.
///
/// `{000..127}` counts (keeping the width), `{0..20..5}` counts in steps, `{train,val}` lists alternatives, and braces
/// nest; then `*`, `?`, `[a-c]` and `**` match files, sorted by name, including names that are not UTF-8. Every file
/// that braces name must exist, and a glob must match at least one file. For file names that contain these characters,
/// use the dataset's `from_files` instead.
///
/// # Errors
/// [`DataError::InvalidOption`] for unbalanced braces, more than 2^20 files or 256 MiB of names; [`DataError::Io`] with
/// the path, for a missing file; [`DataError::Layout`] for a glob without a match, and for a folder or pipe among the
/// matches.
///
/// # Source
/// `braceexpand` as used by Python's webdataset.
pub fn expand_shards(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let files = matching(pattern)?;
    // Who opens one, and when, is not known: it is opened as it is then.
    look_for(&files, false)?;
    Ok(files)
}

/// The same; only a glob's files are known to be there.
pub(crate) fn matching(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for name in expand_braces(pattern)? {
        // If a file with exactly this name exists, it is not a glob.
        let is_plain = !name.contains(['*', '?', '[']);
        if !is_plain && (is_url(Path::new(&name)) || !Path::new(&name).is_file()) {
            glob_into(&name, &mut files)?;
        } else {
            files.push(PathBuf::from(name));
        }
    }
    Ok(files)
}

/// Files that are there, and at least one.
#[cfg(any(feature = "parquet", feature = "tfrecord", feature = "webdataset"))]
pub(crate) fn listed(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Vec<PathBuf>, DataError> {
    let files: Vec<PathBuf> = files.into_iter().map(Into::into).collect();
    if files.is_empty() {
        return Err(DataError::option("shards", "at least one file", 0));
    }
    require(&files)?;
    Ok(files)
}

/// Checks that every file of a dataset is there, so that a missing shard is reported at the start and not hours later.
#[cfg(any(feature = "mds", feature = "parquet", feature = "tfrecord", feature = "webdataset"))]
pub(crate) fn require(files: &[PathBuf]) -> Result<(), DataError> {
    look_for(files, true)
}

/// Whether all of these are files. Those elsewhere, where they `are_opened` next, are opened as they are now.
fn look_for(files: &[PathBuf], are_opened: bool) -> Result<(), DataError> {
    let (remote, local): (Vec<_>, Vec<_>) = files.iter().partition(|path| is_url(path));
    local.into_iter().try_for_each(|path| require_regular(path))?;
    require_remote(remote, are_opened)
}

#[cfg(feature = "remote")]
fn require_remote(files: Vec<&PathBuf>, are_opened: bool) -> Result<(), DataError> {
    if files.is_empty() { Ok(()) } else { crate::remote::require(files, are_opened) }
}

#[cfg(not(feature = "remote"))]
fn require_remote(files: Vec<&PathBuf>, _are_opened: bool) -> Result<(), DataError> {
    files.first().map_or(Ok(()), |path| Err(no_remote(path)))
}

fn glob_into(pattern: &str, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let found = find(pattern)?;
    if found.is_empty() {
        return Err(DataError::layout(Path::new(pattern), "files that match", "none"));
    }
    files.extend(found);
    limit(files.len())
}

fn find(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    if is_url(Path::new(pattern)) {
        #[cfg(feature = "remote")]
        return crate::remote::matching(pattern);
        #[cfg(not(feature = "remote"))]
        return Err(no_remote(Path::new(pattern)));
    }
    wildcards::matching(pattern)
}

/// An error for more files than a pattern may stand for.
pub(crate) fn limit(count: usize) -> Result<(), DataError> {
    match count {
        0..=MAX_FILES => Ok(()),
        _ => Err(DataError::option("shards", format!("at most {MAX_FILES} files"), format!("{count} or more"))),
    }
}

/// Every name that the braces of `pattern` expand to, the last brace varying fastest.
fn expand_braces(pattern: &str) -> Result<Vec<String>, DataError> {
    let pieces = parse(pattern, 0)?;
    // Checked before expanding: a short pattern can stand for more names than memory holds.
    let Size { names, bytes } = Size::of_row(&pieces);
    limit(names)?;
    if bytes > MAX_BYTES {
        return Err(DataError::option("shards", format!("at most {MAX_BYTES} bytes of names"), bytes));
    }
    Ok(expand(&pieces))
}

/// A piece of a pattern.
enum Piece<'a> {
    Text(&'a str),
    Numbers(Numbers),
    /// The alternatives of a brace, separated by commas.
    Either(Vec<Vec<Piece<'a>>>),
}

/// How many names there are, and their bytes.
#[derive(Clone, Copy)]
struct Size {
    names: usize,
    bytes: usize,
}

impl Size {
    /// The size of pieces one after the other.
    fn of_row(pieces: &[Piece<'_>]) -> Self {
        pieces.iter().map(Self::of).fold(Self { names: 1, bytes: 0 }, |row, piece| Self {
            names: row.names.saturating_mul(piece.names),
            bytes: row.bytes.saturating_mul(piece.names).saturating_add(piece.bytes.saturating_mul(row.names)),
        })
    }

    fn of(piece: &Piece<'_>) -> Self {
        match piece {
            Piece::Text(text) => Self { names: 1, bytes: text.len() },
            Piece::Numbers(numbers) => {
                let names = usize::try_from(numbers.count).unwrap_or(usize::MAX);
                Self { names, bytes: names.saturating_mul(numbers.most_digits()) }
            }
            Piece::Either(rows) => {
                rows.iter().map(|row| Self::of_row(row)).fold(Self { names: 0, bytes: 0 }, |all, row| Self {
                    names: all.names.saturating_add(row.names),
                    bytes: all.bytes.saturating_add(row.bytes),
                })
            }
        }
    }
}

fn parse(pattern: &str, depth: usize) -> Result<Vec<Piece<'_>>, DataError> {
    let unbalanced = || DataError::option("shards", "a pattern with balanced braces", pattern);
    if depth > MAX_DEPTH {
        return Err(DataError::option("shards", format!("braces nested at most {MAX_DEPTH} deep"), pattern));
    }
    let (mut pieces, mut rest) = (Vec::new(), pattern);
    while let Some(open) = rest.find(['{', '}']) {
        let close = closing(rest, open).ok_or_else(unbalanced)?;
        pieces.push(Piece::Text(&rest[..open]));
        let inside = &rest[open + 1..close];
        match (sequence(inside)?, parts(inside).as_slice()) {
            (Some(numbers), _) => pieces.push(Piece::Numbers(numbers)),
            // A single word in braces is not a list: the braces are kept.
            (None, [_]) => {
                pieces.push(Piece::Text("{"));
                pieces.extend(parse(inside, depth + 1)?);
                pieces.push(Piece::Text("}"));
            }
            (None, words) => {
                let rows = words.iter().map(|word| parse(word, depth + 1));
                pieces.push(Piece::Either(rows.collect::<Result<_, _>>()?));
            }
        }
        rest = &rest[close + 1..];
    }
    pieces.push(Piece::Text(rest));
    Ok(pieces)
}

fn expand(pieces: &[Piece<'_>]) -> Vec<String> {
    let mut names = vec![String::new()];
    for piece in pieces {
        let words: Vec<String> = match piece {
            Piece::Text(text) => {
                names.iter_mut().for_each(|name| name.push_str(text));
                continue;
            }
            Piece::Numbers(numbers) => numbers.texts().collect(),
            Piece::Either(rows) => rows.iter().flat_map(|row| expand(row)).collect(),
        };
        // A fast path without copying, which matters in a long pattern.
        if let [only] = words.as_slice() {
            names.iter_mut().for_each(|name| name.push_str(only));
            continue;
        }
        names = names.iter().flat_map(|name| words.iter().map(move |word| format!("{name}{word}"))).collect();
    }
    names
}

/// The position of the brace that closes the one at `open`.
fn closing(pattern: &str, open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (position, byte) in pattern.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(position);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts between commas that are not in an inner brace.
fn parts(inside: &str) -> Vec<&str> {
    let mut depth = 0usize;
    inside
        .split(|character| {
            match character {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            character == ',' && depth == 0
        })
        .collect()
}

/// A range of integers.
struct Numbers {
    first: i64,
    last: i64,
    step: u64,
    count: u64,
    width: usize,
}

impl Numbers {
    /// The length of the longest number, with its sign.
    fn most_digits(&self) -> usize {
        self.width.max(self.first.to_string().len()).max(self.last.to_string().len())
    }

    fn texts(&self) -> impl Iterator<Item = String> {
        let &Self { first, last, step, count, width } = self;
        let number = move |index: u64| match first <= last {
            true => first.saturating_add_unsigned(index * step),
            false => first.saturating_sub_unsigned(index * step),
        };
        (0..count).map(move |index| format!("{:0width$}", number(index)))
    }
}

/// Parses `a..b` or `a..b..step` in decimal numbers; `None` when `inside` is something else.
fn sequence(inside: &str) -> Result<Option<Numbers>, DataError> {
    let pieces: Vec<&str> = inside.split("..").collect();
    let (from, to, step) = match *pieces.as_slice() {
        [from, to] => (from, to, "1"),
        [from, to, step] => (from, to, step),
        _ => return Ok(None),
    };
    let (Ok(first), Ok(last), Ok(step)) = (from.parse::<i64>(), to.parse::<i64>(), step.parse::<i64>()) else {
        return Ok(None);
    };
    let step = step.unsigned_abs().max(1);
    let count = (first.abs_diff(last) / step).saturating_add(1);
    let padded = |text: &str| text.trim_start_matches('-').starts_with('0') && text.trim_start_matches('-').len() > 1;
    let width = if padded(from) || padded(to) { from.len().max(to.len()) } else { 0 };
    if width > MAX_WIDTH {
        return Err(DataError::option("shards", format!("numbers of at most {MAX_WIDTH} digits"), width));
    }
    Ok(Some(Numbers { first, last, step, count, width }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn braces(pattern: &str) -> Vec<String> {
        expand_braces(pattern).unwrap()
    }

    #[test]
    fn braces_expand_as_in_a_shell() {
        assert_eq!(braces("a-{08..11}.tar"), ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]);
        assert_eq!(braces("{3..1}"), ["3", "2", "1"]);
        assert_eq!(braces("{0..10..5}"), ["0", "5", "10"]);
        assert_eq!(braces("{-1..1}"), ["-1", "0", "1"]);
        assert_eq!(braces("{a,b{1..2}}/{x,y}"), ["a/x", "a/y", "b1/x", "b1/y", "b2/x", "b2/y"]);
        assert_eq!(braces("{one}-{a..b}"), ["{one}-{a..b}"]);
        assert_eq!(braces("{,s}"), ["", "s"]);
        assert_eq!(braces("plain"), ["plain"]);
        assert_eq!(braces("data-{000..127}.tar").len(), 128);
    }

    #[test]
    fn absurd_patterns_are_errors_and_cost_nothing() {
        for pattern in ["{a", "a}", "{a,{b}", "}{", "{0..99999999999}", "{1..1000}{1..1000}{1..1000}"] {
            assert!(matches!(expand_braces(pattern), Err(DataError::InvalidOption { .. })), "{pattern}");
        }
        assert!(expand_braces(&"{".repeat(100_000)).is_err());
        assert!(expand_braces(&"{a,b}".repeat(100_000)).is_err());
        assert!(expand_braces(&format!("{}a{}", "{".repeat(50_000), "}".repeat(50_000))).is_err());
        assert!(expand_braces("{-9223372036854775808..9223372036854775807}").is_err());
        assert_eq!(braces("{9223372036854775806..9223372036854775807}").len(), 2);
        // Few files with long names, and many files: both are refused before expanding.
        assert!(expand_braces(&format!("{}{{1..1000000}}", "a".repeat(100_000))).is_err());
        assert!(expand_braces(&"{1..1000000}".repeat(100_000)).is_err());
        assert_eq!(expand_braces(&format!("{{1..1000}}{}", "{1..1}".repeat(5_000))).unwrap().len(), 1000);
        assert!(expand_braces(&format!("{{{}}}", "{1..1000000},".repeat(100_000))).is_err());
    }

    #[test]
    fn globs_are_sorted_and_missing_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.tar", "a.tar", "c.txt"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        let expand = |pattern: &str| expand_shards(&format!("{}/{pattern}", dir.path().display()));
        let names = |files: Vec<PathBuf>| -> Vec<String> {
            files.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(names(expand("*.tar").unwrap()), ["a.tar", "b.tar"]);
        assert_eq!(names(expand("{b,a}.tar").unwrap()), ["b.tar", "a.tar"]);
        assert_eq!(names(expand("{*.txt,a.tar}").unwrap()), ["c.txt", "a.tar"]);
        assert!(expand("{a..b}.tar").is_err());
        assert!(expand("{a,x}.tar").unwrap_err().to_string().contains("x.tar"));
        assert!(matches!(expand("*.png"), Err(DataError::Layout { .. })));
        std::fs::create_dir(dir.path().join("d.tar")).unwrap();
        for pattern in ["*.tar", "d.tar"] {
            let error = expand(pattern).unwrap_err().to_string();
            assert!(error.ends_with("d.tar: expected a regular file, found a folder"), "{error}");
        }
        assert!(matches!(expand("***"), Err(DataError::InvalidOption { .. })));
    }
}
