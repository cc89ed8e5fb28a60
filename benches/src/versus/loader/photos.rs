//! Photographs of ImageNet's usual size, made once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// So many that an epoch takes the slowest peer a second or two.
const COUNT: usize = 1024;

/// The folder of photographs below `work`; `photos.py` says where they are from.
///
/// # Errors
/// When the packages cannot be fetched.
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
        bail!("no photographs: {}", message.lines().last().unwrap_or("photos.py said nothing"));
    }
    fs::rename(&made, &folder)?;
    Ok(folder)
}
