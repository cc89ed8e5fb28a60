//! Makes photographs of ImageNet's usual size, once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The number of photographs. The slowest peer needs a second or two for an epoch.
const COUNT: usize = 1024;

/// Makes a folder of photographs in `work`, unless it exists. `photos.py` says where they come from.
///
/// # Errors
/// When Python cannot be run or `photos.py` fails, for example because it cannot download the packages.
pub fn make(python: &Path, work: &Path) -> Result<PathBuf> {
    let folder = work.join("photos");
    if folder.is_dir() {
        return Ok(folder);
    }
    eprintln!("making {COUNT} photographs in {} (about a minute)", folder.display());
    let aside = tempfile::tempdir_in(work)?;
    let made = aside.path().join("photos");
    let output = Command::new(python)
        .args(["-c", include_str!("../../../peers/photos.py")])
        .arg(&made)
        .arg(COUNT.to_string())
        .env_remove("LD_LIBRARY_PATH")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("photos.py failed: {}", message.lines().last().unwrap_or("without a message"));
    }
    fs::rename(&made, &folder)?;
    Ok(folder)
}
