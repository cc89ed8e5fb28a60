//! `.libtorch/` in the workspace: checks and makes it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::libtorch::{self, Libtorch};
use crate::pip;
use crate::python::Python;
use crate::setup::{Options, PARITY_REQUIREMENTS, REQUIREMENTS};
use crate::workspace::{self, Workspace};

/// The oldest Python that torch 2.11.0 has wheels for.
const OLDEST_PYTHON: (u32, u32) = (3, 10);
const CPU_INDEX: &str = "https://download.pytorch.org/whl/cpu";

/// `.libtorch/` in the workspace. It has three forms: a virtual environment that setup made, complete once it has the
/// stamp; a link to the torch of a python3; or a libtorch that the user put there by hand.
pub struct Home(PathBuf);

impl Home {
    pub fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    fn join(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// Whether setup made it, or began to.
    pub fn is_venv(&self) -> bool {
        self.join("pyvenv.cfg").exists()
    }

    /// The libtorch in it, if it is complete. Checks only a few files, because every command calls this.
    pub fn ready(&self, requirements: &str) -> Option<Libtorch> {
        let found = libtorch::inspect(&self.join("torch")).ok()?;
        // The stamp holds the installed requirements. It is written last, and is stale as soon as they change.
        let stamped = || fs::read_to_string(self.join("stamp")).is_ok_and(|stamp| stamp == requirements);
        (!self.is_venv() || (stamped() && self.join("bin/python").exists())).then_some(found)
    }

    /// An error for an unusable libtorch that the user put there by hand: setup must not delete it.
    pub fn refuse_foreign(&self) -> Result<()> {
        let torch = self.join("torch");
        if !self.is_venv()
            && torch.is_dir()
            && !torch.is_symlink()
            && let Err(defect) = libtorch::inspect(&torch)
        {
            bail!(
                "{} cannot be used: {defect}\nremedy: remove .libtorch/ and run `cargo xtask setup`",
                torch.display()
            );
        }
        Ok(())
    }

    fn clear(&self) -> Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error)
                .context("cannot remove the unusable .libtorch/\nremedy: remove it by hand and run this again"),
            _ => Ok(()),
        }
    }

    /// Links to the torch of a python3, and writes `bin/python`, which runs that python3.
    pub fn adopt(&self, python: &Path, torch: &Path) -> Result<()> {
        self.clear()?;
        let wrapper = self.join("bin/python");
        fs::create_dir_all(self.join("bin")).context("cannot make .libtorch/")?;
        // A script, not a link: a Python in a virtual environment finds the environment by its own path.
        let quoted = python.display().to_string().replace('\'', r"'\''");
        fs::write(&wrapper, format!("#!/bin/sh\nexec '{quoted}' \"$@\"\n"))
            .context("cannot write .libtorch/bin/python")?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
            .context("cannot write .libtorch/bin/python")?;
        symlink(torch, self.join("torch")).context("cannot link .libtorch/torch")
    }

    /// Makes the virtual environment, or completes one left by an interrupted run or older requirements.
    pub fn make(&self, ws: &Workspace, python: &Python, requirements: &str, options: Options) -> Result<()> {
        let found = python.version;
        if found < OLDEST_PYTHON {
            bail!(
                "python3 is {}.{}, but torch {} needs 3.10 or newer\n\
                 remedy: put a newer python3 first on the PATH, or set LIBTORCH to a libtorch {2} folder",
                found.0,
                found.1,
                libtorch::VERSION
            );
        }
        let torch = match self.complete(ws, requirements, options)? {
            Some(torch) => torch,
            None => self.remake(ws, python, options)?,
        };
        let link = self.join("torch");
        let relative = torch.strip_prefix(&self.0).unwrap_or(&torch);
        if fs::read_link(&link).ok().as_deref() != Some(relative) {
            fs::remove_file(&link).ok();
            symlink(relative, &link).context("cannot link .libtorch/torch")?;
        }
        fs::write(self.join("stamp"), requirements).context("cannot write .libtorch/stamp")
    }

    /// Completes an existing environment. `None` if it has to be made anew.
    fn complete(&self, ws: &Workspace, requirements: &str, options: Options) -> Result<Option<PathBuf>> {
        if !self.is_venv() || !workspace::runs(self.python(ws).args(["-m", "pip", "--version"])) {
            return Ok(None);
        }
        let stale = fs::read_to_string(self.join("stamp")).is_ok_and(|stamp| stamp != requirements);
        eprintln!("{} .libtorch/", if stale { "updating" } else { "completing" });
        self.install(ws, options)?;
        Ok(self.verify(ws).inspect_err(|error| eprintln!(".libtorch/ is damaged: {error}")).ok())
    }

    fn remake(&self, ws: &Workspace, python: &Python, options: Options) -> Result<PathBuf> {
        if !python.venv {
            bail!(
                "{} has no venv module (with ensurepip), and `.libtorch/` is a virtual environment\n\
                 remedy: install it (Debian, Ubuntu: apt install python3-venv), or set LIBTORCH to a \
                 libtorch {} folder",
                python.executable.display(),
                libtorch::VERSION
            );
        }
        eprintln!("making .libtorch/ with pip: a few minutes, about 5 GB on disk (less with `setup --cpu`)");
        self.clear()?;
        workspace::succeed(ws.command(&python.executable).args(["-m", "venv"]).arg(&self.0))
            .context("cannot make the virtual environment .libtorch/")?;
        self.install(ws, options)?;
        self.verify(ws)
    }

    /// Installs what only parity needs, into an environment that setup made. With another Python, the cases that lack a
    /// package are skipped and say so.
    pub fn complete_for_parity(&self, ws: &Workspace) -> Result<()> {
        let requirements = fs::read_to_string(ws.join(PARITY_REQUIREMENTS)).context("cannot read the requirements")?;
        let stamp = self.join("stamp-parity");
        if !self.is_venv() || fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == requirements) {
            return Ok(());
        }
        eprintln!("installing the packages that parity compares with");
        if !pip::install(
            self.pip_install(ws).arg("--requirement").arg(PARITY_REQUIREMENTS),
            &ws.join("target/pip.log"),
        )? {
            bail!("pip could not install {PARITY_REQUIREMENTS}; its last lines are above\nremedy: check the network");
        }
        fs::write(&stamp, requirements).context("cannot write .libtorch/stamp-parity")
    }

    fn pip_install(&self, ws: &Workspace) -> Command {
        let mut command = self.python(ws);
        command.args(["-m", "pip", "install", "--disable-pip-version-check"]);
        command
    }

    /// The environment's Python in isolated mode, without PYTHONPATH and the user's packages.
    fn python(&self, ws: &Workspace) -> Command {
        let mut command = ws.command(self.join("bin/python"));
        command.arg("-I");
        command
    }

    fn install(&self, ws: &Workspace, options: Options) -> Result<()> {
        let log = ws.join("target/pip.log");
        if options.cpu {
            let requirements = fs::read_to_string(ws.join(REQUIREMENTS)).context("cannot read the requirements")?;
            let mut cpu = self.pip_install(ws);
            cpu.args(["--retries", "1", "--timeout", "15", "--index-url", CPU_INDEX]).args(torch_lines(&requirements));
            if !pip::install(&mut cpu, &log)? {
                eprintln!("PyTorch's CPU wheel index could not serve torch: using pip's default index instead");
            }
        }
        if !pip::install(self.pip_install(ws).arg("--requirement").arg(REQUIREMENTS), &log)? {
            bail!(
                "pip could not install libtorch; its last lines are above\n\
                 remedy: check the network, pip's configuration (`pip config list`, with the login if an index needs \
                 one) and that 6 GB of disk are free, then run `cargo xtask setup` again (remove .libtorch/ to start \
                 over); without a network, set LIBTORCH to a libtorch {} folder",
                libtorch::VERSION
            );
        }
        Ok(())
    }

    /// Checks every installed file, and returns the folder of the installed torch.
    fn verify(&self, ws: &Workspace) -> Result<PathBuf> {
        let output = self.python(ws).args(["-c", include_str!("verify.py")]).output().context("cannot start Python")?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    }
}

/// The requirements that PyTorch's index has as CPU builds.
fn torch_lines(requirements: &str) -> Vec<&str> {
    requirements.lines().filter(|line| line.starts_with("torch")).collect()
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    /// A `.libtorch/` with a torch of the version, and no virtual environment around it.
    fn home(version: &str) -> (tempfile::TempDir, Home) {
        let temp = tempfile::tempdir().unwrap();
        let home = Home(temp.path().join(".libtorch"));
        let torch = home.join("torch");
        let library = |name: &str| torch.join(format!("lib/lib{name}.{}", env::consts::DLL_EXTENSION));
        for file in [library("torch_cpu"), library("c10"), torch.join("include/ATen/ATen.h")] {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        fs::write(torch.join("version.py"), format!("__version__ = '{version}'\n")).unwrap();
        (temp, home)
    }

    #[test]
    fn a_libtorch_of_the_user_is_used_or_refused_but_never_deleted() {
        let (_temp, right) = home("2.11.0");
        assert!(right.ready("torch==2.11.0").is_some() && right.refuse_foreign().is_ok());
        let (_temp, wrong) = home("2.9.1");
        assert!(wrong.ready("torch==2.11.0").is_none());
        assert!(wrong.refuse_foreign().unwrap_err().to_string().contains("2.9.1"));
    }

    #[test]
    fn an_environment_is_ready_once_stamped_with_these_requirements() {
        let (_temp, home) = home("2.11.0+cpu");
        fs::write(home.join("pyvenv.cfg"), "").unwrap();
        fs::create_dir_all(home.join("bin")).unwrap();
        fs::write(home.join("bin/python"), "").unwrap();
        assert!(home.ready("torch==2.11.0").is_none(), "interrupted before the stamp");
        fs::write(home.join("stamp"), "torch==2.10.0").unwrap();
        assert!(home.ready("torch==2.11.0").is_none(), "made from older requirements");
        fs::write(home.join("stamp"), "torch==2.11.0").unwrap();
        assert!(home.ready("torch==2.11.0").is_some());
        fs::remove_file(home.join("bin/python")).unwrap();
        assert!(home.ready("torch==2.11.0").is_none(), "its Python is gone");
    }

    #[test]
    fn adopting_links_torch_and_wraps_python() {
        let (temp, own) = home("2.11.0");
        let adopted = Home(temp.path().join("adopted"));
        adopted.adopt(Path::new("/bin/echo"), &own.join("torch")).unwrap();
        assert!(adopted.ready("anything").is_some());
        let output = Command::new(adopted.join("bin/python")).args(["two words"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "two words\n");
    }

    #[test]
    fn the_cpu_index_is_asked_for_torch_only() {
        let text = "# torch\ntorch==2.11.0\ntorchvision==0.26.0\nnumpy==2\n";
        assert_eq!(torch_lines(text), ["torch==2.11.0", "torchvision==0.26.0"]);
    }
}
