//! The environment of Python's libraries that read what `overdrive-dataload` writes, and the other way: `target/formats/`,
//! apart from torch's.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::python;
use crate::workspace::{self, Workspace};
use crate::{pip, setup};

const REQUIREMENTS: &str = ".config/formats-requirements.txt";

/// The Python with these libraries; installs them by pip unless that was done.
pub fn python(ws: &Workspace) -> Result<PathBuf> {
    let requirements =
        fs::read_to_string(ws.join(REQUIREMENTS)).with_context(|| format!("cannot read {REQUIREMENTS}"))?;
    let home = ws.join("target/formats");
    let _lock = setup::lock(ws)?;
    if !is_ready(&home, &requirements) {
        make(ws, &home, &requirements)?;
    }
    Ok(home.join("bin/python"))
}

/// The stamp holds the installed requirements, and is written last.
fn is_ready(home: &Path, requirements: &str) -> bool {
    fs::read_to_string(home.join("stamp")).is_ok_and(|stamp| stamp == requirements) && home.join("bin/python").exists()
}

/// Always anew: what an interrupted pip has left looks installed.
fn make(ws: &Workspace, home: &Path, requirements: &str) -> Result<()> {
    eprintln!("making target/formats/ with pip: about a minute, 400 MB on disk");
    let python = python::on_path(ws)?;
    workspace::succeed(ws.command(&python.executable).args(["-m", "venv", "--clear"]).arg(home)).context(
        "cannot make the virtual environment target/formats/\n\
         remedy: install Python's module venv (Debian, Ubuntu: apt install python3-venv)",
    )?;
    let log = ws.join("target/pip.log");
    let mut install = ws.command(home.join("bin/python"));
    install.args(["-I", "-m", "pip", "install", "--disable-pip-version-check", "--requirement", REQUIREMENTS]);
    if !pip::install(&mut install, &log)? {
        let lacks = match pip::unknown(&fs::read_to_string(&log).unwrap_or_default()) {
            Some(package) => format!(": its index has no {package}"),
            None => String::new(),
        };
        bail!(
            "pip could not install {REQUIREMENTS}{lacks}; its last lines are above\n\
             remedy: check the network and pip's configuration (`pip config list`)"
        );
    }
    fs::write(home.join("stamp"), requirements).context("cannot write target/formats/stamp")
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
