//! Checks a libtorch folder: whether it is complete, and has the version that tch was built for.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The libtorch that tch 0.24 expects.
pub const VERSION: &str = "2.11.0";

/// A libtorch folder of the right version.
#[derive(Debug, PartialEq)]
pub struct Libtorch {
    pub dir: PathBuf,
    /// With its build, such as `2.11.0+cu130`.
    pub version: String,
    pub cuda: bool,
}

impl fmt::Display for Libtorch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = if self.cuda { "CPU and CUDA" } else { "CPU only" };
        write!(f, "libtorch {} ({devices}) in {}", self.version, self.dir.display())
    }
}

/// Why a folder is not a libtorch that the workspace can build with.
#[derive(Debug, PartialEq)]
pub enum Defect {
    Missing(PathBuf),
    NoVersion,
    Version(String),
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(path) => write!(f, "{} is missing", path.display()),
            Self::NoVersion => {
                write!(f, "it has neither `build-version` nor `version.py`, so its version is unknown")
            }
            Self::Version(found) => write!(f, "it has libtorch {found}, but tch 0.24 needs {VERSION}"),
        }
    }
}

/// Checks a folder: the version first, because a wrong version explains all other defects.
pub fn inspect(dir: &Path) -> Result<Libtorch, Defect> {
    if !dir.is_dir() {
        return Err(Defect::Missing(dir.to_path_buf()));
    }
    let version = read_version(dir).ok_or(Defect::NoVersion)?;
    if !is_expected(&version) {
        return Err(Defect::Version(version));
    }
    let library = |name: &str| dir.join("lib").join(format!("lib{name}.{}", std::env::consts::DLL_EXTENSION));
    for needed in [library("torch_cpu"), library("c10"), dir.join("include/ATen/ATen.h")] {
        if !needed.is_file() {
            return Err(Defect::Missing(needed));
        }
    }
    Ok(Libtorch { cuda: library("torch_cuda").is_file(), dir: dir.to_path_buf(), version })
}

/// From `build-version` (the C++ archive) or `version.py` (the Python package).
fn read_version(dir: &Path) -> Option<String> {
    let archive = fs::read_to_string(dir.join("build-version")).ok().map(|text| text.trim().to_owned());
    archive.or_else(|| parse_version_py(&fs::read_to_string(dir.join("version.py")).ok()?))
}

/// `__version__ = '2.11.0+cu130'` gives `2.11.0+cu130`.
fn parse_version_py(text: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix("__version__")?.trim_start().strip_prefix('='))?;
    let value = value.trim().trim_matches(['\'', '"']);
    (!value.is_empty()).then(|| value.to_owned())
}

/// The build after the plus (`+cpu`, `+cu130`) is the user's choice.
pub fn is_expected(version: &str) -> bool {
    version.split('+').next() == Some(VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, file: &str, text: &str) {
        let path = dir.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn version_py_is_read() {
        let text = "from typing import Optional\n\n__version__ = '2.11.0+cu130'\ndebug = False\n";
        assert_eq!(parse_version_py(text).as_deref(), Some("2.11.0+cu130"));
        assert_eq!(parse_version_py("debug = False\n"), None);
    }

    #[test]
    fn any_build_of_the_version_is_accepted() {
        assert!(is_expected("2.11.0") && is_expected("2.11.0+cpu"));
        assert!(!is_expected("2.11.1") && !is_expected("2.1.0") && !is_expected("2.11.0a0"));
    }

    #[test]
    fn the_first_defect_of_a_folder_is_reported() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let library = |name: &str| format!("lib/lib{name}.{}", std::env::consts::DLL_EXTENSION);
        assert_eq!(inspect(&dir.join("absent")), Err(Defect::Missing(dir.join("absent"))));
        assert_eq!(inspect(dir), Err(Defect::NoVersion));
        write(dir, "build-version", "2.9.1+cpu\n");
        assert_eq!(inspect(dir), Err(Defect::Version("2.9.1+cpu".into())));
        write(dir, "build-version", "2.11.0+cpu\n");
        assert_eq!(inspect(dir), Err(Defect::Missing(dir.join(library("torch_cpu")))));
        write(dir, &library("torch_cpu"), "");
        write(dir, &library("c10"), "");
        write(dir, "include/ATen/ATen.h", "");
        let found = inspect(dir).unwrap();
        assert!(!found.cuda);
        write(dir, &library("torch_cuda"), "");
        assert!(inspect(dir).unwrap().cuda);
    }
}
