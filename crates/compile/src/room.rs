//! Room in the folder of packages.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use overdrive_core::LockedFile;

/// The folders of compilations that are under way.
pub(crate) const COMPILING: &str = "overdrive-compiling-";
/// What nothing was made in for so long is in nobody's use: such a folder was left by a process that was killed.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// The compiled headers, which all compilations use.
const HEADERS: &str = "inductor-headers";
/// What Python has found out about the processor's vectors.
const VECTORS: &str = "vectors-";
/// The files of a step, in the order in which they are deleted: without its package there is none, and the lock is held
/// until the end.
const KINDS: [&str; 5] = ["pt2", "sha256", "json", "explain.json", "lock"];

/// The files of a step, or others that belong together.
#[derive(Default)]
struct Files {
    bytes: u64,
    used: Option<SystemTime>,
    paths: Vec<PathBuf>,
}

/// What a file of the cache belongs to; `None` for one that is not the cache's.
fn owner(name: &str) -> Option<&str> {
    if name == HEADERS || name.strip_prefix(VECTORS).is_some_and(is_checksum) {
        return Some(name);
    }
    let (key, kind) = name.split_once('.')?;
    (is_checksum(key) && KINDS.contains(&kind)).then_some(key)
}

fn is_checksum(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether it is the folder of a compilation: `overdrive-compiling-` and the six letters and digits of a temporary folder.
fn is_compilation(path: &Path, name: &str) -> bool {
    let is_drawn = |drawn: &str| drawn.len() == 6 && drawn.bytes().all(|byte| byte.is_ascii_alphanumeric());
    name.strip_prefix(COMPILING).is_some_and(is_drawn) && path.is_dir()
}

/// Deletes what was used least recently, with all that belongs to it, until the cache's files in this folder take at most
/// `limit` bytes, and what killed compilations have left. The files of `key`, those that other processes make, and those of
/// others stay.
pub(crate) fn make(folder: &Path, limit: u64, key: &str) {
    let mut steps: HashMap<String, Files> = HashMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if is_compilation(&path, &name) {
            if size(&path).is_some_and(|(_, used)| is_abandoned(used)) {
                remove(&path);
            }
            continue;
        }
        let Some((owner, (bytes, used))) = owner(&name).and_then(|owner| Some((owner, size(&path)?))) else { continue };
        let files = steps.entry(owner.to_owned()).or_default();
        files.bytes += bytes;
        files.used = files.used.max(Some(used));
        files.paths.push(path);
    }
    let mut total: u64 = steps.values().map(|files| files.bytes).sum();
    let mut steps: Vec<(String, Files)> = steps.into_iter().collect();
    steps.sort_by_key(|(_, files)| files.used);
    for (name, files) in steps {
        if total <= limit {
            break;
        }
        if name != key && (name != HEADERS || files.used.is_some_and(is_abandoned)) && delete(folder, &name, &files) {
            total -= files.bytes;
        }
    }
}

/// Deletes the files of a step, unless a process makes them.
fn delete(folder: &Path, name: &str, files: &Files) -> bool {
    let _lock = match File::options().write(true).open(folder.join(format!("{name}.lock"))) {
        Ok(file) if file.try_lock().is_err() => return false,
        opened => opened.ok().map(LockedFile::new),
    };
    let mut paths: Vec<&PathBuf> = files.paths.iter().collect();
    paths.sort_by_key(|path| {
        let kind = path.file_name().and_then(|name| Some(name.to_str()?.split_once('.')?.1));
        KINDS.iter().position(|known| kind == Some(*known))
    });
    paths.into_iter().for_each(|path| remove(path));
    true
}

fn remove(path: &Path) {
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

fn is_abandoned(used: SystemTime) -> bool {
    used.elapsed().is_ok_and(|age| age > ABANDONED)
}

/// The bytes of a file, or of all in a folder, and when something was written last.
fn size(path: &Path) -> Option<(u64, SystemTime)> {
    let about = fs::symlink_metadata(path).ok()?;
    let own = (about.len(), about.modified().ok()?);
    if !about.is_dir() {
        return Some(own);
    }
    let inside = fs::read_dir(path).ok()?.flatten().filter_map(|entry| size(&entry.path()));
    Some(inside.fold(own, |(bytes, used), (more, later)| (bytes + more, used.max(later))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of these names, all used as many days ago as is said.
    fn folder_with(files: &[(&str, u64)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, days) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "10 letters").unwrap();
            let used = SystemTime::now() - ABANDONED * *days as u32 - Duration::from_secs(1);
            for path in path.ancestors().take_while(|path| *path != folder.path()) {
                File::open(path).unwrap().set_modified(used).unwrap();
            }
        }
        folder
    }

    fn left(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A key that is this letter all through.
    fn key(letter: &str) -> String {
        letter.repeat(64)
    }

    #[test]
    fn all_that_belongs_to_the_least_recently_used_steps_goes_until_the_rest_fits() {
        let of = |letter: &str, days| {
            ["pt2", "sha256", "json", "lock"].map(|kind| (format!("{}.{kind}", key(letter)), days))
        };
        let files: Vec<_> = [of("a", 4), of("b", 3), of("c", 2), of("d", 1)].concat();
        let files: Vec<_> = files.iter().map(|(name, days)| (name.as_str(), *days)).collect();
        let folder = folder_with(&files);
        make(folder.path(), 160, &key("d"));
        assert_eq!(left(folder.path()).len(), 16, "they fit");
        make(folder.path(), 159, &key("d"));
        assert!(left(folder.path()).iter().all(|name| !name.starts_with('a')) && left(folder.path()).len() == 12);
        // The files of the key given stay, and those whose lock another process holds.
        let made = File::options().write(true).open(folder.path().join(key("b") + ".lock")).unwrap();
        made.try_lock().unwrap();
        make(folder.path(), 0, &key("d"));
        let kept = left(folder.path());
        assert!(kept.len() == 8 && kept.iter().all(|name| name.starts_with(['b', 'd'])), "{kept:?}");
    }

    #[test]
    fn records_and_headers_count_and_headers_in_use_stay() {
        let (old, new) = (key("a") + ".json", key("b") + ".pt2");
        let folder = folder_with(&[(&old, 3), ("inductor-headers/all.h.gch", 0), (&new, 0)]);
        make(folder.path(), 10, &key("b"));
        assert_eq!(left(folder.path()), [new.as_str(), "inductor-headers"]);
        let folder = folder_with(&[(&old, 1), ("inductor-headers/all.h.gch", 2), (&new, 0)]);
        make(folder.path(), 20, &key("b"));
        assert_eq!(left(folder.path()), [old.as_str(), &new]);
    }

    /// The folder may be one with other things in it.
    #[test]
    fn what_is_not_the_caches_stays() {
        let others = [
            ".bashrc",
            "compiling-notes",
            "compiling-thesis/main.tex",
            "data/train.bin",
            "headers/all.h",
            "model.pt2",
            "notes.json",
            "step.lock",
            "vectors-mine",
        ];
        let mut files: Vec<(&str, u64)> = others.iter().map(|name| (*name, 9)).collect();
        let step = [key("a") + ".pt2", key("a") + ".explain.json", format!("vectors-{}", key("b"))];
        files.extend(step.iter().map(|name| (name.as_str(), 9)));
        let folder = folder_with(&files);
        make(folder.path(), 0, "");
        let kept = others.map(|name| name.split('/').next().unwrap_or(name));
        assert_eq!(left(folder.path()), kept);
    }

    #[test]
    fn what_a_killed_compilation_left_is_deleted_a_day_later() {
        let folder =
            folder_with(&[("overdrive-compiling-a1B2c3/step.pt2", 1), ("overdrive-compiling-d4E5f6/step.pt2", 0)]);
        make(folder.path(), u64::MAX, "key");
        assert_eq!(left(folder.path()), ["overdrive-compiling-d4E5f6"]);
    }
}
