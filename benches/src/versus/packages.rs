//! The Python packages of peers, in an environment of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A Python that imports `modules`: the one given, if it does, else one in an environment below `work` that sees
/// everything the given one does, into which pip installs `packages`.
///
/// # Errors
/// When pip cannot install them.
pub fn python_with(python: &Path, work: &Path, modules: &[&str], packages: &[&str]) -> Result<PathBuf> {
    if imports(python, modules) {
        return Ok(python.to_owned());
    }
    let environment = work.join("python");
    let own = environment.join("bin/python");
    if !own.exists() {
        make(python, &environment).context("cannot make an environment for Python packages")?;
    }
    if !imports(&own, modules) {
        eprintln!("installing {} into {}", packages.join(", "), environment.display());
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"];
        let status = quiet(&own).args(install).args(packages).stdout(Stdio::null()).status()?;
        if !status.success() {
            bail!("pip could not install {}", packages.join(", "));
        }
    }
    Ok(own)
}

fn imports(python: &Path, modules: &[&str]) -> bool {
    let source = format!("import {}", modules.join(", "));
    let silent = quiet(python).args(["-c", &source]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    silent.is_ok_and(|status| status.success())
}

/// Ours is on the loader path for this program; Python finds its own.
fn quiet(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").stdin(Stdio::null());
    command
}

/// An environment whose packages come before those of `python`, itself perhaps one of an environment: hence the path
/// file, which a plain `--system-site-packages` would pass over.
fn make(python: &Path, environment: &Path) -> Result<()> {
    let status = quiet(python).args(["-m", "venv"]).arg(environment).stdout(Stdio::null()).status()?;
    if !status.success() {
        bail!("`{} -m venv` failed", python.display());
    }
    let paths = ask(python, "import site; print('\\n'.join(site.getsitepackages()))")?;
    let own = ask(&environment.join("bin/python"), "import sysconfig; print(sysconfig.get_path('purelib'))")?;
    Ok(fs::write(Path::new(&own).join("given.pth"), paths + "\n")?)
}

fn ask(python: &Path, source: &str) -> Result<String> {
    let output = quiet(python).args(["-c", source]).output()?;
    if !output.status.success() {
        bail!("{} cannot answer `{source}`", python.display());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_that_has_the_modules_is_taken_as_it_is() {
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
