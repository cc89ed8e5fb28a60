//! Installs the Python packages of peers into a virtual environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Returns a Python that can import `modules`: `python` itself if it can, else that of a virtual environment in `work`.
/// The environment also sees the packages of `python`; pip installs `packages` into it if they are missing.
///
/// # Errors
/// When the environment cannot be made, or pip cannot install the packages.
pub fn python_with(python: &Path, work: &Path, modules: &[&str], packages: &[&str]) -> Result<PathBuf> {
    if imports(python, modules) {
        return Ok(python.to_owned());
    }
    let environment = work.join("python");
    let own = environment.join("bin/python");
    if !own.exists() {
        make(python, &environment).context("cannot make a virtual environment")?;
    }
    if !imports(&own, modules) {
        eprintln!("installing {} into {}", packages.join(", "), environment.display());
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"];
        let status = python_command(&own).args(install).args(packages).stdout(Stdio::null()).status()?;
        if !status.success() {
            bail!("pip could not install {}", packages.join(", "));
        }
    }
    Ok(own)
}

fn imports(python: &Path, modules: &[&str]) -> bool {
    let source = format!("import {}", modules.join(", "));
    let status = python_command(python).args(["-c", &source]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// A command without `LD_LIBRARY_PATH`, which names this program's libtorch; Python's torch finds its own.
fn python_command(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").stdin(Stdio::null());
    command
}

/// Makes a virtual environment that also sees the packages of `python`, after its own. They are added by a `.pth` file,
/// because `--system-site-packages` leaves them out if `python` is itself in a virtual environment.
fn make(python: &Path, environment: &Path) -> Result<()> {
    let status = python_command(python).args(["-m", "venv"]).arg(environment).stdout(Stdio::null()).status()?;
    if !status.success() {
        bail!("`{} -m venv` failed", python.display());
    }
    let paths = output_of(python, "import site; print('\\n'.join(site.getsitepackages()))")?;
    let own = output_of(&environment.join("bin/python"), "import sysconfig; print(sysconfig.get_path('purelib'))")?;
    Ok(fs::write(Path::new(&own).join("given.pth"), paths + "\n")?)
}

/// The standard output of the Python program `source`.
fn output_of(python: &Path, source: &str) -> Result<String> {
    let output = python_command(python).args(["-c", source]).output()?;
    if !output.status.success() {
        bail!("{} failed to run `{source}`", python.display());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_that_has_the_modules_is_used_directly() {
        let work = tempfile::tempdir().unwrap();
        let python = Path::new("python3");
        if !imports(python, &["sys"]) {
            println!("skipped: no python3");
            return;
        }
        assert_eq!(python_with(python, work.path(), &["sys", "json"], &[]).unwrap(), python);
        assert!(!imports(python, &["no_such_module_of_anybody"]));
        assert_eq!(fs::read_dir(work.path()).unwrap().count(), 0);
        assert!(python_with(Path::new("/no/python"), work.path(), &["sys"], &[]).is_err());
    }
}
