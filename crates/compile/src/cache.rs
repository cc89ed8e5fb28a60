//! Where packages are kept: a folder of the user's, a package for each content.
//!
//! A package is code, so one is loaded only if this user owns it, nobody else may write it, and its bytes are those that
//! were compiled. Whoever can write to the user's own files could run code anyway; damage and foreign files are what this
//! refuses.

use std::fs::{self, File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use overdrive_core::LockedFile;
use overdrive_ffi::check_owner;
use sha2::{Digest, Sha256};

use crate::error::CompileError;
use crate::python;
use crate::record::Record;
use crate::room::{self, COMPILING};

/// The bytes that all files may take together, before the least recently used ones are deleted.
const LIMIT: u64 = 4 << 30;
/// How often it is looked whether another process has compiled a step.
const POLL: Duration = Duration::from_millis(50);

/// The file that says what a package's code calls.
pub(crate) const EXPLAINED: &str = "explain.json";

/// A folder of packages.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    limit: u64,
    /// How long a compilation may take, here or in another process.
    pub(crate) timeout: Duration,
}

/// What a package is made for: everything that its code depends on.
pub(crate) fn key(record: &Record) -> String {
    let mut hasher = Sha256::new();
    for part in [python::TORCH, python::PROGRAM, &record.machine, &record.request.to_string()] {
        hasher.update(part.len().to_le_bytes());
        hasher.update(part);
    }
    hex(&hasher.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// The user's own: `OVERDRIVE_COMPILE_CACHE`, else `overdrive/compile` in `XDG_CACHE_HOME` or `~/.cache`.
    ///
    /// # Errors
    /// When the folder cannot be made, or others may write to it.
    pub(crate) fn of_user(timeout: Duration) -> Result<Self, CompileError> {
        let given = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = given("OVERDRIVE_COMPILE_CACHE")
            .or_else(|| given("XDG_CACHE_HOME").map(|cache| cache.join("overdrive/compile")))
            .or_else(|| given("HOME").map(|home| home.join(".cache/overdrive/compile")))
            .unwrap_or_else(|| std::env::temp_dir().join("overdrive-compile"));
        Self::at(folder, LIMIT, timeout)
    }

    /// A cache in this folder, of at most this many bytes.
    ///
    /// # Errors
    /// As [`of_user`](Self::of_user).
    pub(crate) fn at(folder: PathBuf, limit: u64, timeout: Duration) -> Result<Self, CompileError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(CompileError::cache("cannot make the folder of compiled steps", &folder))?;
        check_owner(&folder)?;
        Ok(Self { folder, limit, timeout })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the package of this key lies, or will.
    pub(crate) fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.pt2"))
    }

    /// The checked package of this key; `None` if there is none.
    ///
    /// # Errors
    /// When it is damaged, foreign or cannot be read.
    pub(crate) fn get(&self, key: &str) -> Result<Option<PathBuf>, CompileError> {
        let path = self.path(key);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CompileError::cache("cannot read the package", path)(error)),
        };
        check_owner(&self.folder)?;
        check_owner(&path)?;
        let refused = |reason: &str| CompileError::Refused { path: path.clone(), reason: reason.to_owned() };
        let wanted = fs::read_to_string(path.with_extension("sha256"))
            .map_err(|_| refused("the file with its checksum is missing"))?;
        let found = digest(&mut file).map_err(CompileError::cache("cannot read the package", &path))?;
        if wanted.trim() != found {
            return Err(refused("its bytes are not those that were compiled"));
        }
        // The order of use, by which packages are deleted. A read-only cache keeps none.
        let _ = file.set_modified(std::time::SystemTime::now());
        Ok(Some(path))
    }

    /// The package of this key, made by `make` if there is none. Of several processes one makes it, the others wait.
    /// `make` gets the file of the record and a folder for what it makes: `step.pt2`, and `explain.json` if it likes. The
    /// record is kept even if it fails. `progress` gets a word for each stage, and a sentence if another process compiles.
    ///
    /// # Errors
    /// Those of `make`; nothing but the record is left behind then. When there is no room, the package is refused, or
    /// another process takes too long.
    pub(crate) fn get_or_make(
        &self,
        key: &str,
        record: &Record,
        progress: &mut dyn FnMut(&str),
        make: impl FnOnce(&Path, &Path, &mut dyn FnMut(&str)) -> Result<(), CompileError>,
    ) -> Result<PathBuf, CompileError> {
        if let Some(found) = self.get(key)? {
            return Ok(found);
        }
        let _lock = self.lock(key, progress)?;
        if let Some(found) = self.get(key)? {
            return Ok(found);
        }
        room::make(&self.folder, self.limit, key);
        let folder = tempfile::Builder::new().prefix(COMPILING).tempdir_in(&self.folder);
        let folder = folder.map_err(CompileError::cache("cannot make a folder in", &self.folder))?;
        let written = folder.path().join("record.json");
        fs::write(&written, record.to_json()).map_err(CompileError::cache("cannot write the record", &written))?;
        let kept = self.path(key).with_extension("json");
        // Whatever the umask: a record that others may write to is refused.
        let own = fs::set_permissions(&written, fs::Permissions::from_mode(0o600));
        own.and_then(|()| fs::rename(&written, &kept)).map_err(CompileError::cache("cannot keep the record", &kept))?;
        make(&kept, folder.path(), progress)?;
        self.keep(key, folder.path())?;
        room::make(&self.folder, self.limit, key);
        Ok(self.path(key))
    }

    /// The lock of a key. Its file has the process that holds it.
    fn lock(&self, key: &str, progress: &mut dyn FnMut(&str)) -> Result<LockedFile, CompileError> {
        let path = self.folder.join(format!("{key}.lock"));
        let began = Instant::now();
        let mut is_said = false;
        loop {
            let opened = File::options().create(true).truncate(false).write(true).open(&path);
            let mut file = opened.map_err(CompileError::cache("cannot make the file", &path))?;
            match file.try_lock() {
                // Whoever makes room may have deleted it meanwhile.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) => {
                    // On a full disk, messages do not name it.
                    let _ = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
                    return Ok(LockedFile::new(file));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(CompileError::cache("cannot lock", path)(error)),
            }
            let who = match fs::read_to_string(&path) {
                Ok(pid) if !pid.is_empty() => format!("process {pid}"),
                _ => "another process".to_owned(),
            };
            if began.elapsed() >= self.timeout {
                return Err(CompileError::TimedOut { who, limit: self.timeout });
            }
            if !is_said {
                progress(&format!("{who} compiles this step: waiting for it"));
                is_said = true;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Moves a finished package into its place. The checksum comes first: a package without one is refused.
    fn keep(&self, key: &str, made: &Path) -> Result<(), CompileError> {
        let cannot = |path: &Path| CompileError::cache("cannot keep the package", path.to_owned());
        let package = made.join("step.pt2");
        let mut file = File::open(&package).map_err(cannot(&package))?;
        fs::set_permissions(&package, fs::Permissions::from_mode(0o600)).map_err(cannot(&package))?;
        let checksum = digest(&mut file).map_err(cannot(&package))?;
        file.sync_all().map_err(cannot(&package))?;
        let path = self.path(key);
        let beside = made.join("step.sha256");
        let mut written = File::create(&beside).map_err(cannot(&beside))?;
        written.write_all(checksum.as_bytes()).and_then(|()| written.sync_all()).map_err(cannot(&beside))?;
        let _ = fs::rename(made.join("explain.json"), path.with_extension(EXPLAINED));
        fs::rename(&beside, path.with_extension("sha256")).map_err(cannot(&path))?;
        fs::rename(&package, &path).map_err(cannot(&path))
    }
}

/// Whether a file is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |about: fs::Metadata| (about.dev(), about.ino());
    file.metadata().map(inode).ok() == fs::metadata(path).map(inode).ok()
}

fn digest(file: &mut File) -> std::io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A cache in a new folder, with a package of this text.
    fn with_package(text: &str) -> (tempfile::TempDir, Cache, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"), LIMIT, Duration::MAX).unwrap();
        let path = cache.get_or_make("key", &record(), &mut |_| (), |_, made, _| package(made, text)).unwrap();
        (folder, cache, path)
    }

    fn write(path: &Path, text: &str) -> Result<(), CompileError> {
        fs::write(path, text).map_err(CompileError::cache("cannot write", path))
    }

    fn package(made: &Path, text: &str) -> Result<(), CompileError> {
        write(&made.join("step.pt2"), text)
    }

    fn record() -> Record {
        Record::new(serde_json::json!({ "operators": [] }))
    }

    fn never(_: &Path, _: &Path, _: &mut dyn FnMut(&str)) -> Result<(), CompileError> {
        panic!("the package is there")
    }

    #[test]
    fn a_package_is_made_once_and_found_again() {
        let (_folder, cache, path) = with_package("code");
        assert_eq!(cache.get_or_make("key", &record(), &mut |_| (), never).unwrap(), path);
        assert_eq!(fs::read_to_string(path).unwrap(), "code");
    }

    #[test]
    fn damaged_foreign_and_unfinished_packages_are_refused() {
        let refused = |spoil: &dyn Fn(&Path)| {
            let (_folder, cache, path) = with_package("code");
            spoil(&path);
            cache.get_or_make("key", &record(), &mut |_| (), never).expect_err("it should be refused").to_string()
        };
        let text = refused(&|path| fs::write(path, "cone").unwrap());
        assert!(text.contains("its bytes are not those that were compiled") && text.contains("delete it"), "{text}");
        let text = refused(&|path| fs::remove_file(path.with_extension("sha256")).unwrap());
        assert!(text.contains("checksum is missing"), "{text}");
        let text = refused(&|path| fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap());
        assert!(text.contains("others may write to it"), "{text}");
        let text = refused(&|path| {
            fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        });
        assert!(text.contains("others may write to it"), "{text}");
    }

    #[test]
    fn a_failed_compilation_leaves_its_record_and_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned(), LIMIT, Duration::MAX).unwrap();
        let failed = cache.get_or_make("key", &record(), &mut |_| (), |_, made, _| {
            package(made, "half")?;
            Err(CompileError::NoCompiler { compiler: "c++".to_owned() })
        });
        assert!(matches!(failed, Err(CompileError::NoCompiler { .. })));
        let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["key.json", "key.lock"]);
        cache.get_or_make("key", &record(), &mut |_| (), |_, made, _| package(made, "whole")).unwrap();
    }

    #[test]
    fn of_several_that_need_a_package_one_makes_it() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned(), LIMIT, Duration::MAX).unwrap();
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let package = cache.get_or_make("key", &record(), &mut |_| (), |_, folder, _| {
                        made.fetch_add(1, Ordering::SeqCst);
                        super::tests::package(folder, "code")
                    });
                    assert_eq!(fs::read_to_string(package.unwrap()).unwrap(), "code");
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn who_holds_the_lock_is_named_and_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned(), LIMIT, Duration::from_millis(1)).unwrap();
        let _held = cache.lock("key", &mut |_| ()).unwrap();
        let error = cache.get_or_make("key", &record(), &mut |_| (), never).expect_err("a limit").to_string();
        assert!(error.contains(&format!("process {} has not compiled", std::process::id())), "{error}");
    }
}
