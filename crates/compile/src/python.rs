//! The Python program that compiles a step.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::error::CompileError;

/// The torch that packages are made with: the one that this libtorch belongs to.
pub(crate) const TORCH: &str = "2.11.0";

/// It travels within the program that uses this crate. The first line keeps `python -c` from taking a `json.py` of the
/// current folder for a module.
pub(crate) const PROGRAM: &str = concat!(
    "import sys; sys.path = [path for path in sys.path if path]\n\n",
    include_str!("python/cuda.py"),
    include_str!("python/draws.py"),
    include_str!("python/formulas.py"),
    include_str!("python/compile.py"),
);

/// Finds a Python with the right torch: `OVERDRIVE_PYTHON`, the one whose torch this libtorch is, `python3`.
///
/// # Errors
/// When none of them has it. `cache` is the folder of records that could be compiled elsewhere.
pub(crate) fn find(cache: &Path) -> Result<PathBuf, CompileError> {
    let mut tried = Vec::new();
    for python in candidates() {
        match version(&python) {
            Ok(found) if found.starts_with(TORCH) => return Ok(python),
            Ok(found) => tried.push(format!("{} has torch {found}", python.display())),
            Err(why) => tried.push(format!("{}: {why}", python.display())),
        }
    }
    Err(CompileError::NoPython { torch: TORCH, tried: tried.join("; "), cache: cache.to_owned() })
}

/// Whether steps can be compiled here: a Python with torch, and a C++ compiler.
///
/// # Errors
/// [`CompileError::NoPython`] and [`CompileError::NoCompiler`].
pub fn check_compiler() -> Result<(), CompileError> {
    find(Cache::of_user(Duration::MAX)?.folder())?;
    compiler().map(drop)
}

/// The C++ compiler: `CXX`, which may have arguments (`ccache g++`), else `g++`.
///
/// # Errors
/// [`CompileError::NoCompiler`]
fn compiler() -> Result<String, CompileError> {
    let given = std::env::var_os("CXX").filter(|given| !given.is_empty()).unwrap_or_else(|| "g++".into());
    let compiler = given.to_string_lossy().into_owned();
    let script = format!("{compiler} --version");
    let started = Command::new("/bin/sh").args(["-c", &script]).stdin(Stdio::null()).output();
    match started {
        Ok(output) if output.status.success() => Ok(compiler),
        _ => Err(CompileError::NoCompiler { compiler }),
    }
}

/// A compiler as one word, which Inductor needs: one with arguments becomes a script in this folder.
fn as_one_word(compiler: &str, folder: &Path) -> Result<PathBuf, CompileError> {
    if !compiler.contains(char::is_whitespace) {
        return Ok(compiler.into());
    }
    // Inductor takes what kind of compiler it is from the name.
    let script = folder.join(if compiler.contains("clang") { "own-clang++" } else { "own-g++" });
    let text = format!("#!/bin/sh\nexec {compiler} \"$@\"\n");
    let made = fs::write(&script, text).and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o700)));
    made.map_err(CompileError::cache("cannot write the script", &script))?;
    Ok(script)
}

fn candidates() -> Vec<PathBuf> {
    if let Some(given) = std::env::var_os("OVERDRIVE_PYTHON").filter(|given| !given.is_empty()) {
        return vec![given.into()];
    }
    let mut found: Vec<PathBuf> =
        std::env::var_os("LIBTORCH").and_then(|torch| owner(Path::new(&torch))).into_iter().collect();
    found.extend(loaded_torch().as_deref().and_then(owner));
    found.push("python3".into());
    found.dedup();
    found
}

/// The interpreter of the environment that a torch folder lies in: `../../../../bin/python3`.
fn owner(torch: &Path) -> Option<PathBuf> {
    // Its own link to torch's folder, and then where that leads.
    let of = |torch: &Path| {
        let python = torch.ancestors().nth(4)?.join("bin/python3");
        python.is_file().then_some(python)
    };
    of(&torch.canonicalize().ok()?)
}

/// The folder of the torch whose libtorch this process has loaded.
fn loaded_torch() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let library = maps
        .lines()
        .find_map(|line| line.split_whitespace().nth(5).filter(|path| path.ends_with("/libtorch_cpu.so")))?;
    Path::new(library).ancestors().nth(2).map(Path::to_path_buf)
}

fn version(python: &Path) -> Result<String, String> {
    // As the program: no module of the current folder.
    let code = "import sys; sys.path = [it for it in sys.path if it]\n\
                from importlib.metadata import version; print(version('torch'))";
    let output = quiet(python).args(["-c", code]).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        false => Err("it has no torch".to_owned()),
    }
}

/// Python as a program of its own: without the loader path and modules of the caller's.
fn quiet(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env_remove("PYTHONPATH").env_remove("PYTHONHOME").stdin(Stdio::null());
    command
}

/// An error if the compiler would get the paths of this folder in pieces: Inductor hands them over in one line, that it
/// splits as a shell does.
fn check_path(folder: &Path) -> Result<(), CompileError> {
    let path = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let splits = |letter: &char| letter.is_whitespace() || ['\'', '"', '\\'].contains(letter);
    match path.to_string_lossy().chars().find(splits) {
        Some(found) => Err(CompileError::UnfitPath { path, found }),
        None => Ok(()),
    }
}

/// Compiles the record at `record` into `folder`, which gets the package `step.pt2` and `explain.json`; the cache keeps
/// what Python finds out about this machine. `progress` gets a word for each stage.
///
/// # Errors
/// When Python cannot be started, takes too long or fails; the end of its standard error is in the message.
pub(crate) fn compile(
    python: &Path,
    record: &Path,
    folder: &Path,
    cache: &Cache,
    progress: &mut dyn FnMut(&str),
) -> Result<(), CompileError> {
    check_path(cache.folder())?;
    let failed = |status: String, output: String| CompileError::Failed { python: python.to_owned(), status, output };
    let compiler = as_one_word(&compiler()?, folder)?;
    let mut command = quiet(python);
    command.args(["-W", "ignore", "-c", PROGRAM]).args([record, folder, cache.folder()]).env("CXX", compiler);
    // Its own cache is of no use here, and lies in a folder that all users share.
    command.env("TORCHINDUCTOR_CACHE_DIR", folder.join("inductor")).env("TMPDIR", folder);
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| failed(error.to_string(), String::new()))?;
    let stderr = child.stderr.take();
    let errors = thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.map(|mut stderr| stderr.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let (said, lines) = mpsc::channel();
    let stdout = child.stdout.take();
    thread::spawn(move || {
        let lines = stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines()).map_while(Result::ok);
        // Until nobody listens.
        let _ = lines.map(|line| said.send(line)).find(Result::is_err);
    });
    let began = Instant::now();
    let mut done = false;
    loop {
        match lines.recv_timeout(cache.timeout.saturating_sub(began.elapsed())) {
            Ok(line) => match line.split_once(' ') {
                Some(("stage", stage)) => progress(stage),
                // What the compiler has started may hold the pipe for longer.
                _ if line == "done" => {
                    done = true;
                    break;
                }
                _ => {}
            },
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                // One that is stopped ends as well.
                let _ = child.kill().and_then(|()| child.wait());
                return Err(CompileError::Ended { python: python.to_owned(), limit: cache.timeout });
            }
        }
    }
    // One that has made the package may still hang at its end.
    let status = loop {
        match child.try_wait().map_err(|error| failed(error.to_string(), String::new()))? {
            Some(status) => break status,
            None if began.elapsed() < cache.timeout => thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill().and_then(|()| child.wait());
                if done {
                    return Ok(());
                }
                return Err(CompileError::Ended { python: python.to_owned(), limit: cache.timeout });
            }
        }
    };
    if status.success() && done {
        return Ok(());
    }
    let output = errors.join().unwrap_or_default();
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    Err(failed(status.to_string(), lines[lines.len().saturating_sub(15)..].join("\n")))
}
