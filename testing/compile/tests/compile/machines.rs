//! Machines that lack a program or a library, or have another version of it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_compile as compile;
use sha2::{Digest, Sha256};

use crate::processes::{TIMEOUT, end, start_by};

fn this_program() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

/// The output of a process that trains with this command, with its errors.
fn train(command: Command, cache: &Path) -> (String, String) {
    end(start_by(command, cache))
}

/// Makes a program that answers like a Python with this version of torch (an empty one: without torch), and compiles by
/// these lines.
fn python(folder: &Path, torch: &str, compiles: &str) -> PathBuf {
    let path = folder.join("python3");
    let answer = if torch.is_empty() { "exit 1".to_owned() } else { format!("echo {torch}") };
    let text = format!("#!/bin/sh\ncase \"$2\" in *importlib*) {answer};; *) {compiles};; esac\n");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path
}

#[test]
fn a_python_with_another_torch_or_without_is_named() {
    let _alone = crate::alone();
    for (torch, expected) in [("2.10.0+cpu", "has torch 2.10.0+cpu"), ("", "it has no torch")] {
        let folder = tempfile::tempdir().unwrap();
        let python = python(folder.path(), torch, "exit 1");
        let mut command = this_program();
        command.env("OVERDRIVE_PYTHON", &python);
        let (line, errors) = train(command, &folder.path().join("cache"));
        assert!(line.contains("compiled: no Python with torch 2.11.0 was found"), "{line}");
        assert!(line.contains(&*python.to_string_lossy()) && line.contains(expected), "{line}");
        assert!(line.contains("OVERDRIVE_PYTHON") && errors.contains("not compiled"), "{line}\n{errors}");
    }
}

/// Where CUDA's headers are found for a package for a GPU. Stand-ins replace torch's modules.
#[test]
fn headers_of_cuda_are_found_or_named() {
    const CUDA: &str = include_str!("../../../../crates/compile/src/python/cuda.py");
    const ASK: &str = "find_cuda('/none')\nprint(cpp_extension.CUDA_HOME)\n";
    const TORCH: &str = "import os, types\n__version__ = '2.11.0+cpu'\n\
                         version = types.SimpleNamespace(cuda=os.environ.get('TORCH_CUDA'))\n\
                         cuda = types.SimpleNamespace(init=lambda: None)\n";
    let folder = tempfile::tempdir().unwrap();
    let path = |of: &str| folder.path().join(of);
    let write = |of: &str, text: &str| {
        fs::create_dir_all(path(of).parent().unwrap()).unwrap();
        fs::write(path(of), text).unwrap();
    };
    write("site/torch/__init__.py", TORCH);
    write("site/torch/utils/__init__.py", "");
    write("site/torch/utils/cpp_extension.py", "import os\nCUDA_HOME = os.environ['CUDA_HOME']\n");
    let ask = |cuda: Option<&str>| {
        let mut command = Command::new("python3");
        command.args(["-c", &[CUDA, ASK].concat()]).env("PYTHONPATH", path("site")).env_remove("TORCH_CUDA");
        command.envs(cuda.map(|version| ("TORCH_CUDA", version))).env("CUDA_HOME", path("toolkit"));
        let output = command.output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned()).concat()
    };
    assert!(ask(None).contains("without CUDA (2.11.0+cpu): set OVERDRIVE_PYTHON"), "{}", ask(None));
    let nowhere = ask(Some("13.0"));
    assert!(nowhere.contains("toolkit nor in") && nowhere.contains("nvidia/cu13: set CUDA_HOME"), "{nowhere}");
    // A toolkit without headers, as in images that only run programs.
    write("site/nvidia/cu13/include/cuda.h", "");
    assert_eq!(ask(Some("13.0")), path("site/nvidia/cu13").to_string_lossy());
    write("toolkit/include/cuda.h", "");
    assert_eq!(ask(Some("13.0")), path("toolkit").to_string_lossy());
}

/// The whole step fails to compile once, and then its loss alone.
#[test]
fn a_failed_compilation_is_not_tried_again() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let tries = folder.path().join("tries");
    let failing = format!("echo once >> {}; echo the reason >&2; exit 3", tries.display());
    let mut command = this_program();
    command.env("OVERDRIVE_PYTHON", python(folder.path(), "2.11.0", &failing));
    let (line, errors) = train(command, &folder.path().join("cache"));
    assert!(line.contains("could not compile the step (exit status: 3)"), "{line}");
    assert!(errors.contains("the reason"), "{errors}");
    assert_eq!(fs::read_to_string(tries).unwrap().lines().count(), 2);
}

#[test]
fn a_python_that_never_ends_is_ended() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = this_program();
    let python = python(folder.path(), "2.11.0", "echo $$ >> \"$0.pids\"; kill -STOP $$");
    command.env("OVERDRIVE_PYTHON", &python).env(TIMEOUT, "10");
    let (line, _) = train(command, &folder.path().join("cache"));
    assert!(line.contains("python3 was ended, since it has not compiled the step in 10s: allow more time"), "{line}");
    let pids = fs::read_to_string(folder.path().join("python3.pids")).unwrap();
    assert!(pids.lines().all(|pid| !Path::new("/proc").join(pid).exists()), "{pids}");
    let left = fs::read_dir(folder.path().join("cache")).unwrap();
    assert!(!left.flatten().any(|it| it.file_name().to_string_lossy().contains("compiling-")));
}

/// Inductor calls `openssl` to compute the checksums of headers that it precompiles.
#[test]
fn a_machine_without_openssl_compiles() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (programs, cache) = (folder.path().join("bin"), folder.path().join("cache"));
    fs::create_dir(&programs).unwrap();
    for found in std::env::split_paths(&std::env::var_os("PATH").unwrap()) {
        for entry in fs::read_dir(found).into_iter().flatten().flatten() {
            // Of programs with the same name, the first one in `PATH` counts.
            let _ = symlink(entry.path(), programs.join(entry.file_name()));
        }
    }
    let _ = fs::remove_file(programs.join("openssl"));
    let mut command = this_program();
    command.env("PATH", &programs);
    let (line, errors) = train(command, &cache);
    assert!(line.ends_with("compiled: yes"), "{line}\n{errors}");
}

#[test]
fn a_cache_whose_path_the_compiler_gets_in_pieces_is_refused_by_name() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("my cache");
    let (line, _) = train(this_program(), &cache);
    assert!(line.contains("my cache, has ' ' in its path") && line.contains("OVERDRIVE_COMPILE_CACHE"), "{line}");
    // A package in the cache is used; here it is one that was made elsewhere for the same record.
    let elsewhere = folder.path().join("cache");
    fs::rename(&cache, &elsewhere).unwrap();
    compile::prepare(&elsewhere, |_, prepared| _ = prepared.unwrap()).unwrap();
    fs::rename(&elsewhere, &cache).unwrap();
    let (line, _) = train(this_program(), &cache);
    assert!(line.ends_with("compiled: yes"), "{line}");
}

#[test]
fn a_package_that_has_its_checksum_and_cannot_be_loaded_is_named() {
    let _alone = crate::alone();
    let cache = tempfile::tempdir().unwrap();
    let without_python = || {
        let mut command = this_program();
        command.env("OVERDRIVE_PYTHON", "/no/python");
        train(command, cache.path())
    };
    without_python();
    for entry in fs::read_dir(cache.path()).unwrap().flatten() {
        let record = entry.path();
        if record.extension().is_some_and(|extension| extension == "json") {
            let text = "no package";
            let bytes = Sha256::digest(text);
            fs::write(record.with_extension("pt2"), text).unwrap();
            let checksum: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            fs::write(record.with_extension("sha256"), checksum).unwrap();
            for made in ["pt2", "sha256"] {
                fs::set_permissions(record.with_extension(made), fs::Permissions::from_mode(0o600)).unwrap();
            }
        }
    }
    let (line, errors) = without_python();
    assert!(line.contains(".pt2 is refused: libtorch cannot load it") && line.contains("delete it"), "{line}");
    assert!(errors.contains("not compiled"), "{errors}");
}

/// The process has no `PATH`, and no variable that names a Python or libtorch.
#[test]
fn an_environment_without_programs_runs_a_package_that_was_prepared_elsewhere() {
    let Some(_alone) = crate::compiling() else { return };
    let cache = tempfile::tempdir().unwrap();
    let bare = || {
        let mut command = this_program();
        command.env("PATH", "").env_remove("OVERDRIVE_PYTHON").env_remove("LIBTORCH").env_remove("CXX");
        train(command, cache.path())
    };
    let (line, errors) = bare();
    assert!(line.contains("not found: install g++") || line.contains("no Python with torch"), "{line}");
    assert!(errors.contains("not compiled"), "{errors}");
    compile::prepare(cache.path(), |_, prepared| _ = prepared.unwrap()).unwrap();
    let (prepared, _) = bare();
    assert!(prepared.ends_with("compiled: yes"), "{prepared}");
    assert_eq!(prepared.split(',').next(), line.split(',').next(), "the losses");
}
