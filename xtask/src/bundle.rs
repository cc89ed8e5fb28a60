//! Ready-built programs for a GPU box that has Python's PyTorch, but neither Rust nor a network.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::libtorch::Libtorch;
use crate::workspace::{self, Workspace};
use crate::{artifacts, setup};

const LARGEST_BUNDLE: u64 = 40_000_000;

/// Data and scripts that are copied unchanged.
const FOLDERS: [&str; 3] = ["data/mnist", "data/text", "parity/cases"];
/// A script that a parity case runs.
const FILES: [&str; 1] = ["docs/export_pt.py"];

/// Build a folder of programs for a GPU box that has PyTorch but no Rust
///
/// The folder holds stripped release builds of the bench, the comparisons, the parity cases and the GPU tests, their
/// data, and a `run.sh` that runs them all within a time limit and writes one JSON and one HTML file.
#[derive(Args)]
pub struct Options {
    /// The folder to make; an earlier bundle in it is replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let out = std::path::absolute(&options.out).context("cannot find the current folder")?;
    refuse_foreign(&out)?;
    let libtorch = setup::quietly(ws)?;
    // Filled next to its final path and then moved there, so that an interrupted run leaves no bundle that looks
    // complete.
    let mut partial = out.clone().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    remove(&partial)?;
    fill(ws, &libtorch, &partial).inspect_err(|_| drop(remove(&partial)))?;
    remove(&out)?;
    fs::rename(&partial, &out).with_context(|| format!("cannot move the bundle to {}", out.display()))?;
    println!(
        "{}: {:.1} MB; copy it to the GPU box and start run.sh there (--help)",
        out.display(),
        size(&out)? as f64 / 1e6
    );
    Ok(ExitCode::SUCCESS)
}

fn fill(ws: &Workspace, libtorch: &Libtorch, folder: &Path) -> Result<()> {
    let programs = [
        "build",
        "--release",
        "--package",
        "overdrive-bench",
        "--package",
        "overdrive-benches",
        "--package",
        "overdrive-parity",
        "--bins",
    ];
    let gpu_tests = ["test", "--release", "--no-run", "--package", "overdrive-gpu-tests", "--test", "gpu"];
    let mut built = artifacts::build(ws, &programs)?;
    built.extend(artifacts::build(ws, &gpu_tests)?);
    fs::create_dir_all(folder.join("bin")).with_context(|| format!("cannot make {}", folder.display()))?;
    for (target, name) in [
        ("overdrive-bench", "overdrive-bench"),
        ("overdrive-versus", "overdrive-versus"),
        ("overdrive-parity", "overdrive-parity"),
        ("gpu", "overdrive-gpu-tests"),
    ] {
        let program = built.iter().find(|program| program.name == target);
        let program = &program.with_context(|| format!("`{target}` was not built"))?.path;
        let copy = folder.join("bin").join(name);
        copy_file(program, &copy)?;
        workspace::succeed(ws.command("strip").arg(&copy)).context("cannot strip; remedy: install binutils")?;
        check_cuda(ws, libtorch, &copy)?;
        // To a quarter of its size. `run.sh` unpacks it by the box's Python.
        workspace::succeed(ws.command("xz").arg("-9").arg(&copy)).context("cannot pack; remedy: install xz-utils")?;
    }
    for path in FOLDERS {
        copy_folder(&ws.join(path), &folder.join(path))?;
    }
    for path in FILES {
        let copy = folder.join(path);
        if let Some(parent) = copy.parent() {
            fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        copy_file(&ws.join(path), &copy)?;
    }
    for (name, text, mode) in [
        ("run.sh", include_str!("../bundle/run.sh"), 0o755),
        ("collect.py", include_str!("../bundle/collect.py"), 0o644),
    ] {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(|| format!("cannot write {name}"))?;
    }
    let bytes = size(folder)?;
    if bytes > LARGEST_BUNDLE {
        bail!("the bundle has {bytes} bytes, but should have at most {LARGEST_BUNDLE}");
    }
    Ok(())
}

/// The linker drops libtorch_cuda by default, because no symbol of it is used, and the program then finds no GPU.
fn check_cuda(ws: &Workspace, libtorch: &Libtorch, program: &Path) -> Result<()> {
    let dynamic = workspace::capture(ws.command("readelf").env("LC_ALL", "C").arg("--dynamic").arg(program))
        .context("cannot look at the programs that were built; remedy: install binutils")?;
    let needed = needed(&dynamic);
    if !libtorch.cuda {
        eprintln!("note: this libtorch is CPU only, so {} will not use a GPU", program.display());
    } else if !needed.contains(&"libtorch_cuda.so") {
        bail!(
            "{} does not load libtorch_cuda.so and would see no GPU; it loads {}\n\
             remedy: see how crates/ffi/build.rs links it",
            program.display(),
            needed.join(", ")
        );
    }
    Ok(())
}

/// The libraries in what `readelf --dynamic` prints: `0x1 (NEEDED)  Shared library: [libc10.so]`.
fn needed(dynamic: &str) -> Vec<&str> {
    let name = |line: &'_ str| -> Option<(usize, usize)> { Some((line.find('[')? + 1, line.rfind(']')?)) };
    let lines = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    lines.filter_map(|line| name(line).map(|(from, to)| &line[from..to])).collect()
}

/// Replaces an earlier bundle, and nothing else.
fn refuse_foreign(out: &Path) -> Result<()> {
    let occupied = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if out.is_file() || (occupied && !out.join("collect.py").exists()) {
        bail!("{} exists and is not a bundle\nremedy: name an empty or a new folder", out.display());
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for (path, is_folder) in entries(from)? {
        let name = path.file_name().unwrap_or_default();
        if is_folder && name != "__pycache__" {
            copy_folder(&path, &to.join(name))?;
        } else if !is_folder {
            copy_file(&path, &to.join(name))?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for (path, is_folder) in entries(folder)? {
        let file = || fs::metadata(&path).with_context(|| format!("cannot look at {}", path.display()));
        bytes += if is_folder { size(&path)? } else { file()?.len() };
    }
    Ok(bytes)
}

fn entries(folder: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let read = || -> std::io::Result<Vec<_>> {
        fs::read_dir(folder)?.map(|entry| entry.map(|it| (it.path(), it.path().is_dir()))).collect()
    };
    read().with_context(|| format!("cannot read {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_libraries_are_read() {
        let dynamic = "Dynamic section at offset 0x2d58 contains 29 entries:\n\
                       \x20 Tag        Type                         Name/Value\n\
                       \x200x0000000000000001 (NEEDED)             Shared library: [libtorch_cuda.so]\n\
                       \x200x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n\
                       \x200x000000000000001d (RUNPATH)            Library runpath: [/opt/lib]\n";
        assert_eq!(needed(dynamic), ["libtorch_cuda.so", "libc.so.6"]);
    }

    #[test]
    fn only_an_earlier_bundle_is_replaced() {
        let temp = tempfile::tempdir().unwrap();
        assert!(refuse_foreign(&temp.path().join("new")).is_ok() && refuse_foreign(temp.path()).is_ok());
        fs::write(temp.path().join("thesis.tex"), "").unwrap();
        assert!(refuse_foreign(temp.path()).is_err());
        fs::write(temp.path().join("collect.py"), "").unwrap();
        assert!(refuse_foreign(temp.path()).is_ok());
    }

    #[test]
    fn a_folder_is_copied_without_python_s_caches() {
        let temp = tempfile::tempdir().unwrap();
        let from = temp.path().join("from");
        fs::create_dir_all(from.join("deep/__pycache__")).unwrap();
        fs::write(from.join("deep/a.py"), "1234").unwrap();
        fs::write(from.join("deep/__pycache__/a.pyc"), "12345678").unwrap();
        let to = temp.path().join("to");
        copy_folder(&from, &to).unwrap();
        assert_eq!(size(&to).unwrap(), 4);
    }
}
