//! Finds libtorch, or makes `.libtorch/`. Every other command that needs libtorch calls this first.

use std::env;
use std::fs::{self, File, TryLockError};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::ahead::Ahead;
use crate::home::Home;
use crate::libtorch::{self, Libtorch};
use crate::python::{self, Python};
use crate::workspace::{self, Workspace};

pub const REQUIREMENTS: &str = ".config/libtorch-requirements.txt";
pub const PARITY_REQUIREMENTS: &str = ".config/parity-requirements.txt";

/// Find libtorch 2.11.0, or make `.libtorch/` with pip
///
/// Looks at LIBTORCH, then at `.libtorch/` in the workspace, then at a `python3` that imports torch 2.11.0. If there is
/// none, it makes `.libtorch/` as a virtual environment; pip's configuration (indexes, proxies) is honoured. Safe to
/// run again at any time: an interrupted run is continued.
#[derive(Args, Clone, Copy, Default)]
pub struct Options {
    /// Ask PyTorch's CPU wheel index (a fifth of the size, no CUDA), and pip's default index if that fails
    #[arg(long)]
    pub cpu: bool,
}

pub fn run(ws: &Workspace, options: Options) -> Result<ExitCode> {
    let found = ensure(ws, options, &[])?;
    println!("{found}");
    if options.cpu && found.cuda {
        println!(
            "note: this is the CUDA build, which runs on a CPU too; for the smaller CPU build remove .libtorch/ and \
             run this again where PyTorch's CPU wheel index can be reached"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// For other commands: prints nothing when there is nothing to do.
pub fn quietly(ws: &Workspace) -> Result<Libtorch> {
    ensure(ws, Options::default(), &[])
}

/// For parity: with the packages that it compares with.
pub fn for_parity(ws: &Workspace) -> Result<Libtorch> {
    let found = quietly(ws)?;
    if ws.user_libtorch().is_none() {
        Home::new(ws.join(".libtorch")).complete_for_parity(ws)?;
    }
    Ok(found)
}

/// For a command that builds afterwards: while pip installs libtorch, `cargo build` with these arguments compiles what
/// does not need it.
pub fn before_build(ws: &Workspace, build: &[&str]) -> Result<Libtorch> {
    ensure(ws, Options::default(), build)
}

fn ensure(ws: &Workspace, options: Options, build: &[&str]) -> Result<Libtorch> {
    check_compiler(ws)?;
    if let Some(dir) = ws.user_libtorch() {
        if dir.is_relative() {
            bail!(
                "LIBTORCH is {}, a relative path, which build scripts cannot resolve\nremedy: make it absolute",
                dir.display()
            );
        }
        return libtorch::inspect(&dir).map_err(|defect| {
            anyhow::anyhow!(
                "LIBTORCH is {}, but {defect}\n\
                 remedy: point LIBTORCH at a libtorch {} folder (the one with `lib` and `include` in it), or unset it \
                 and run `cargo xtask setup`",
                dir.display(),
                libtorch::VERSION
            )
        });
    }
    let requirements =
        fs::read_to_string(ws.join(REQUIREMENTS)).with_context(|| format!("cannot read {REQUIREMENTS}"))?;
    let home = Home::new(ws.join(".libtorch"));
    if let Some(found) = home.ready(&requirements) {
        return Ok(found);
    }
    let _lock = lock(ws)?;
    // Another setup may have finished while this one waited for the lock.
    if let Some(found) = home.ready(&requirements) {
        return Ok(found);
    }
    home.refuse_foreign()?;
    let python = python::on_path(ws)?;
    if !home.is_venv()
        && let Some(torch) = adoptable(&python)
    {
        eprintln!("using the torch {} of {}", torch.version, python.executable.display());
        home.adopt(&python.executable, &torch.dir)?;
    } else {
        let _ahead = (!build.is_empty()).then(|| Ahead::start(ws, build));
        home.make(ws, &python, &requirements, options)?;
    }
    home.ready(&requirements).context(
        ".libtorch/ was made but has no usable libtorch\nremedy: remove .libtorch/ and run `cargo xtask setup` again",
    )
}

/// Lets only one setup run at a time: two terminals must not run two pips in one environment.
pub fn lock(ws: &Workspace) -> Result<File> {
    let path = ws.join("target/libtorch-setup.lock");
    fs::create_dir_all(ws.join("target")).context("cannot make target/")?;
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    // On a file system without locks, the user has to avoid two setups at once.
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        eprintln!("waiting for another `cargo xtask setup` to finish");
        file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    }
    Ok(file)
}

/// Checks for the compiler with which the cc crate compiles the C++ of torch-sys and `crates/ffi`: CXX, or else `c++`.
fn check_compiler(ws: &Workspace) -> Result<()> {
    let chosen = env::var("CXX").ok().filter(|cxx| !cxx.trim().is_empty());
    let cxx = chosen.as_deref().unwrap_or("c++");
    let mut words = cxx.split_whitespace();
    let runs = words.next().is_some_and(|program| workspace::runs(ws.command(program).args(words).arg("--version")));
    if !runs {
        bail!(
            "no C++ compiler: `{cxx}` does not run\n\
             remedy: install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select \
             --install), or set CXX to one that is installed"
        );
    }
    Ok(())
}

/// The torch of a Python, if the workspace can build with it.
fn adoptable(python: &Python) -> Option<&python::Torch> {
    let torch = python.torch.as_ref()?;
    match libtorch::inspect(&torch.dir) {
        Ok(_) => Some(torch),
        Err(defect) => {
            eprintln!("{} has torch, but {defect}: not using it", python.executable.display());
            None
        }
    }
}
