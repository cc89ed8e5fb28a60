//! Finds Python interpreters, among them the one with the PyTorch that `parity`, `bench` and `versus` compare with.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::libtorch::{self, Libtorch};
use crate::workspace::Workspace;

/// What `probe.py` reports about a Python interpreter.
#[derive(Debug, Deserialize)]
pub struct Python {
    pub executable: PathBuf,
    pub version: (u32, u32),
    /// Whether `python -m venv` can make an environment with pip in it.
    pub venv: bool,
    pub torch: Option<Torch>,
    /// Packages that parity and comparisons need, but that are not installed.
    pub lacks: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub struct Torch {
    pub version: String,
    pub dir: PathBuf,
}

impl Python {
    /// Runs `probe.py` with this interpreter; `None` if the program does not exist or does not run.
    pub fn probe(ws: &Workspace, program: impl AsRef<OsStr>) -> Option<Self> {
        let probe = ws.command(program).args(["-c", include_str!("probe.py")]).stderr(Stdio::null()).output().ok()?;
        parse(&String::from_utf8_lossy(&probe.stdout))
    }

    fn has_expected_torch(&self) -> bool {
        self.torch.as_ref().is_some_and(|torch| libtorch::is_expected(&torch.version))
    }
}

/// Parses the last line only, because a torch that warns on import prints before it.
fn parse(output: &str) -> Option<Python> {
    serde_json::from_str(output.lines().last()?).ok()
}

/// The Python for parity and comparisons. If OVERDRIVE_PYTHON is set, it is the only candidate; otherwise the
/// candidates are the Python of the environment that the libtorch folder is in, `.libtorch/bin/python`, and `python3`.
/// The first one with the right torch is taken.
pub fn with_torch(ws: &Workspace, libtorch: &Libtorch) -> Result<PathBuf> {
    Ok(having_torch(ws, libtorch)?.executable)
}

/// The same, with what it reports about itself.
pub fn having_torch(ws: &Workspace, libtorch: &Libtorch) -> Result<Python> {
    let chosen = env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let candidates = match chosen {
        Some(python) => vec![python],
        None => [around(&libtorch.dir), Some(ws.join(".libtorch/bin/python")), Some("python3".into())]
            .into_iter()
            .flatten()
            .collect(),
    };
    let found = candidates.iter().filter_map(|python| Python::probe(ws, python)).find(Python::has_expected_torch);
    let Some(python) = found else {
        let tried: Vec<_> = candidates.iter().map(|python| python.display().to_string()).collect();
        bail!(
            "no Python imports torch {}; tried {}\n\
             remedy: set OVERDRIVE_PYTHON to one that does, or unset LIBTORCH so that `cargo xtask setup` makes one",
            libtorch::VERSION,
            tried.join(", ")
        );
    };
    if !python.lacks.is_empty() {
        let packages = python.lacks.join(" ").replace("PIL", "pillow");
        let python = python.executable.display();
        bail!("{python} has torch but lacks {packages}\nremedy: {python} -m pip install {packages}");
    }
    Ok(python)
}

/// The Python of the environment that holds `<environment>/lib/python3.x/site-packages/torch`.
fn around(torch: &Path) -> Option<PathBuf> {
    let real = torch.canonicalize().ok()?;
    Some(real.ancestors().nth(4)?.join("bin/python3")).filter(|python| python.exists())
}

/// `python3` on the PATH.
pub fn on_path(ws: &Workspace) -> Result<Python> {
    Python::probe(ws, "python3").context(
        "there is no working `python3` on the PATH, whose pip is needed to install libtorch\n\
         remedy: install Python 3.10 or newer (Debian, Ubuntu: apt install python3-venv), or set LIBTORCH to a \
         libtorch 2.11.0 folder",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_s_last_line_is_read() {
        let output = "a warning\n{\"executable\": \"/usr/bin/python3\", \"version\": [3, 11], \"venv\": false, \
                      \"torch\": {\"version\": \"2.11.0+cpu\", \"dir\": \"/t\"}, \"lacks\": [\"PIL\"]}\n";
        let python = parse(output).unwrap();
        assert!(python.has_expected_torch() && !python.venv);
        assert_eq!((python.version, python.lacks), ((3, 11), vec!["PIL".to_owned()]));
        assert!(parse("").is_none());
    }

    #[test]
    fn a_torch_of_another_version_does_not_count() {
        let torch = Some(Torch { version: "2.9.1".into(), dir: "/t".into() });
        let python = Python { executable: "p".into(), version: (3, 11), venv: true, torch, lacks: vec![] };
        assert!(!python.has_expected_torch());
    }
}
