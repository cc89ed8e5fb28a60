//! The environment of Python's libraries that read what `overdrive-dataload` writes, and the other way: `target/formats/`,
//! apart from torch's, whose packages Mosaic's library sees from there.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::libtorch::Libtorch;
use crate::python::{self, Python};
use crate::workspace::{self, Workspace};
use crate::{pip, setup};

const REQUIREMENTS: &str = ".config/formats-requirements.txt";
/// Installed without dependencies.
const MOSAIC: &str = ".config/mosaic-requirements.txt";

/// The Python with these libraries; installs them by pip unless that was done.
pub fn python(ws: &Workspace, libtorch: &Libtorch) -> Result<PathBuf> {
    let torch = python::having_torch(ws, libtorch)?;
    let packages = packages(&torch)?;
    let mut wanted = String::new();
    for file in [REQUIREMENTS, MOSAIC] {
        wanted += &fs::read_to_string(ws.join(file)).with_context(|| format!("cannot read {file}"))?;
    }
    wanted += &format!("# torch: {}\n", packages.display());
    let home = ws.join("target/formats");
    let _lock = setup::lock(ws)?;
    if !is_ready(&home, &wanted) {
        make(ws, &home, &torch, &packages)?;
        fs::write(home.join("stamp"), wanted).context("cannot write target/formats/stamp")?;
    }
    Ok(home.join("bin/python"))
}

/// The folder that this Python's torch is in, and torchvision with it.
fn packages(python: &Python) -> Result<PathBuf> {
    let torch = python.torch.as_ref().and_then(|torch| torch.dir.parent());
    Ok(torch.context("torch is in no folder of packages")?.to_owned())
}

/// The stamp holds what was wanted, and is written last.
fn is_ready(home: &Path, wanted: &str) -> bool {
    fs::read_to_string(home.join("stamp")).is_ok_and(|stamp| stamp == wanted) && home.join("bin/python").exists()
}

/// Always anew: what an interrupted pip has left looks installed. The Python is torch's, which no other can import.
fn make(ws: &Workspace, home: &Path, torch: &Python, packages: &Path) -> Result<()> {
    eprintln!("making target/formats/ with pip: a minute or two, 600 MB on disk");
    workspace::succeed(ws.command(&torch.executable).args(["-m", "venv", "--clear"]).arg(home)).context(
        "cannot make the virtual environment target/formats/\n\
         remedy: install Python's module venv (Debian, Ubuntu: apt install python3-venv)",
    )?;
    install(ws, home, &["--requirement", REQUIREMENTS])?;
    install(ws, home, &["--no-deps", "--requirement", MOSAIC])?;
    // Behind the environment's own packages, which so come first.
    let (major, minor) = torch.version;
    let link = home.join(format!("lib/python{major}.{minor}/site-packages/torch.pth"));
    fs::write(&link, format!("{}\n", packages.display())).with_context(|| format!("cannot write {}", link.display()))
}

fn install(ws: &Workspace, home: &Path, what: &[&str]) -> Result<()> {
    let log = ws.join("target/pip.log");
    let mut install = ws.command(home.join("bin/python"));
    install.args(["-I", "-m", "pip", "install", "--disable-pip-version-check"]).args(what);
    if !pip::install(&mut install, &log)? {
        let lacks = match pip::unknown(&fs::read_to_string(&log).unwrap_or_default()) {
            Some(package) => format!(": its index has no {package}"),
            None => String::new(),
        };
        bail!(
            "pip could not install {}{lacks}; its last lines are above\n\
             remedy: check the network and pip's configuration (`pip config list`)",
            what.last().copied().unwrap_or_default()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_is_ready_once_stamped_with_these_requirements() {
        let home = tempfile::tempdir().unwrap();
        let is_ready = || is_ready(home.path(), "lmdb==3.0.0");
        fs::create_dir(home.path().join("bin")).unwrap();
        fs::write(home.path().join("bin/python"), "").unwrap();
        assert!(!is_ready(), "interrupted before the stamp");
        fs::write(home.path().join("stamp"), "lmdb==2.0.0").unwrap();
        assert!(!is_ready(), "older requirements");
        fs::write(home.path().join("stamp"), "lmdb==3.0.0").unwrap();
        assert!(is_ready());
        fs::remove_file(home.path().join("bin/python")).unwrap();
        assert!(!is_ready(), "its Python is gone");
    }
}
