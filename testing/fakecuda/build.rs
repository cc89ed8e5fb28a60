//! Links the stand-in libraries that libtorch_cuda is made to load.
//!
//! The runtime is a Rust package of its own, a static library. A version script gives each of its names the version of
//! the library that libtorch looks for it in, which rustc cannot do; so cargo builds the static library here, and the C
//! compiler links it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[path = "../../crates/ffi/build/cuda_headers.rs"]
mod cuda_headers;
mod entries;
mod libtorch;

use libtorch::RUNTIME as WHOLE;

/// The file name of each library that is stood in for, and the beginnings of its names. [`WHOLE`] defines everything; the
/// others are empty, and only bear their names.
const LIBRARIES: [(&str, &[&str]); 8] = [
    ("libcublasLt.so.13", &["cublasLt"]),
    ("libcublas.so.13", &["cublas"]),
    ("libcudnn.so.9", &["cudnn"]),
    ("libcupti.so.13", &["cupti"]),
    ("libnccl.so.2", &["nccl", "pnccl"]),
    ("libnvidia-ml.so.1", &["nvml"]),
    ("libcudart.so.13", &["cuda", "__cuda", "fakecuda_"]),
    ("libcuda.so.1", &["cu"]),
];

/// The library of `operators/`.
const OPERATORS: &str = "libfakecuda_operators.so";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=entries.rs");
    println!("cargo::rerun-if-changed=libtorch.rs");
    println!("cargo::rerun-if-changed=runtime");
    println!("cargo::rerun-if-changed=operators");
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    println!("cargo::rustc-check-cfg=cfg(has_stand_ins)");
    let built = match env::var_os("LIBTORCH").map(PathBuf::from) {
        Some(torch) => includes(&torch).map(|includes| build(&torch, &includes)),
        None => Err("LIBTORCH is not set".to_owned()),
    };
    let (libraries, left_out) = match built {
        Ok(libraries) => {
            println!("cargo::rustc-cfg=has_stand_ins");
            (libraries.display().to_string(), String::new())
        }
        Err(why) => (String::new(), why.replace('\n', "; ")),
    };
    println!("cargo::rustc-env=FAKECUDA_LIBRARIES={libraries}");
    println!("cargo::rustc-env=FAKECUDA_LEFT_OUT={left_out}");
}

/// The folders of headers to build with.
///
/// # Errors
/// Why the stand-ins are left out. A warning says so too where libtorch has CUDA code.
fn includes(torch: &Path) -> Result<Vec<PathBuf>, String> {
    for name in cuda_headers::VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkit = Path::new("/usr/local/cuda");
    let found = libtorch::check(torch).and_then(|()| {
        let found = cuda_headers::find(torch, variable, toolkit);
        for path in cuda_headers::watched(torch, variable, toolkit, found.as_deref().ok()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        found.map_err(|looked| format!("CUDA's headers were not found{looked}"))
    });
    if let Err(why) = found.as_ref()
        && torch.join("lib/libtorch_cuda.so").exists()
    {
        println!("cargo::warning=tests of CUDA code without a GPU are left out: {}", why.replace('\n', "; "));
    }
    let own = [torch.join("include"), torch.join("include/torch/csrc/api/include")];
    Ok(own.into_iter().chain(found?).collect())
}

/// Builds the stand-ins, and returns their folder.
fn build(torch: &Path, includes: &[PathBuf]) -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let libraries = out.join("libraries");
    fs::create_dir_all(&libraries).unwrap_or_else(|error| panic!("cannot make {}: {error}", libraries.display()));

    let runtime = build_runtime(&out);
    let has = names(&runtime, &["--defined-only", "--extern-only"]);
    let mut wanted = has.clone();
    for library in libraries_of(torch) {
        wanted.extend(names(&library, &["--dynamic", "--undefined-only"]));
    }
    let (runtime, entries) = entries::put_before(&runtime, &has, &out);
    link(&out, &libraries, (&runtime, entries), &by_library(&wanted), &has);
    build_operators(&out, &libraries, &torch.join("lib"), includes);
    libraries
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The runtime as a static library. Cargo's lock of the outer target folder is not ours: this one is within `out`.
fn build_runtime(out: &Path) -> PathBuf {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = out.join("runtime");
    let mut command = Command::new(cargo);
    command.args(["rustc", "--quiet", "--release", "--lib", "--crate-type", "staticlib"]);
    command.arg("--manifest-path").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/runtime/Cargo.toml"));
    command.arg("--target-dir").arg(&target);
    // What the outer cargo set for this script, or a wrapper of clippy's, is not for the inner one.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_ENCODED") || text.starts_with("CARGO_CFG") || text.starts_with("RUSTC_W") {
            command.env_remove(&name);
        }
    }
    run(&mut command);
    target.join("release/liboverdrive_fakecuda_runtime.a")
}

/// The library that computes what operators do; it is loaded into a program with libtorch.
fn build_operators(out: &Path, libraries: &Path, lib: &Path, includes: &[PathBuf]) {
    // libtorch's headers take long to compile: once for all sources.
    let one_file = out.join("all.cpp");
    let sources = ["emulated", "libraries", "convolutions", "decided", "operators"];
    write(&one_file, &sources.map(|source| format!("#include \"{source}.cpp\"\n")).concat());
    let mut build = cc::Build::new();
    build.cpp(true).cargo_metadata(false).debug(false).opt_level(1).warnings(false);
    let mut command = build.get_compiler().to_command();
    command.args(["-std=c++17", "-fPIC", "-shared", "-Wno-subobject-linkage"]);
    command.arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/operators"));
    for include in includes {
        command.arg("-isystem").arg(include);
    }
    command.arg(&one_file).arg("-o").arg(libraries.join(OPERATORS)).arg("-L").arg(lib).arg("-L").arg(libraries);
    command.args(["-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda", "-ltorch_cpu", "-lc10", &format!("-l:{WHOLE}")]);
    run(command.arg("-Wl,-rpath,$ORIGIN").arg(format!("-Wl,-rpath,{}", lib.display())));
}

/// libtorch's own libraries, and those of NVIDIA's that are not stood in for.
fn libraries_of(torch: &Path) -> Vec<PathBuf> {
    let mut folders = vec![torch.join("lib")];
    if let Ok(packages) = fs::read_dir(torch.join("../nvidia")) {
        folders.extend(packages.flatten().map(|package| package.path().join("lib")));
    }
    let files = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let stands_in = |name: &str| LIBRARIES.iter().any(|(library, _)| name == *library);
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains(".so") && !stands_in(&name) && !name.starts_with("libcudnn_")
    };
    let mut libraries: Vec<PathBuf> = files.map(|file| file.path()).filter(is_library).collect();
    libraries.sort();
    libraries
}

/// The names in a library that belong to one of [`LIBRARIES`].
fn names(library: &Path, options: &[&str]) -> BTreeSet<String> {
    let text = run(Command::new("nm").args(options).arg(library));
    let words = text.lines().filter_map(|line| line.split_whitespace().last());
    let own = words.map(|word| word.split('@').next().unwrap_or(word));
    own.filter(|name| library_of(name).is_some()).map(str::to_owned).collect()
}

fn library_of(name: &str) -> Option<&'static str> {
    let begins = |beginning: &&str| {
        let rest = name.strip_prefix(beginning);
        // `cuInit`, not `cublas...` or `current`; `fakecuda_reset` goes on with a small letter.
        rest.is_some_and(|rest| beginning.ends_with('_') || rest.starts_with(|it: char| it.is_ascii_uppercase()))
    };
    LIBRARIES.iter().find(|(_, beginnings)| beginnings.iter().any(begins)).map(|(library, _)| *library)
}

fn by_library(names: &BTreeSet<String>) -> BTreeMap<&'static str, Vec<&str>> {
    let mut all: BTreeMap<_, Vec<_>> = LIBRARIES.iter().map(|(library, _)| (*library, Vec::new())).collect();
    for name in names {
        if let Some(library) = library_of(name) {
            all.entry(library).or_default().push(name.as_str());
        }
    }
    all
}

/// Links the library that defines all names, and the empty ones. Names that the runtime lacks say so and fail.
fn link(
    out: &Path,
    libraries: &Path,
    (runtime, entries): (&Path, Option<PathBuf>),
    names: &BTreeMap<&'static str, Vec<&str>>,
    has: &BTreeSet<String>,
) {
    let (mut script, mut stubs) = (String::new(), "int fakecuda_missing(const char *name);\n".to_owned());
    for (library, names) in names {
        let global: String = names.iter().map(|name| format!("{name};")).collect();
        let global = if global.is_empty() { "fakecuda_nothing;".to_owned() } else { global };
        script += &version(library, &global);
        for name in names.iter().filter(|name| !has.contains(**name)) {
            stubs += &format!("int {name}(void) {{ return fakecuda_missing(\"{name}\"); }}\n");
        }
    }
    script += "hidden { local: *; };\n";
    let (map, source, object) = (out.join("all.map"), out.join("stubs.c"), out.join("stubs.o"));
    write(&map, &script);
    write(&source, &stubs);
    let compiler = || cc::Build::new().cargo_metadata(false).get_compiler().to_command();
    run(compiler().args(["-fPIC", "-w", "-O1", "-c"]).arg(&source).arg("-o").arg(&object));
    let shared = |name: &str, map: &Path| {
        let mut command = compiler();
        command.args(["-shared", "-fPIC", "-o"]).arg(libraries.join(name));
        command.arg(format!("-Wl,-soname,{name}")).arg(format!("-Wl,--version-script={}", map.display()));
        command
    };
    let mut whole = shared(WHOLE, &map);
    whole.arg("-Wl,--whole-archive").arg(runtime).arg("-Wl,--no-whole-archive").arg(&object).args(entries);
    run(whole.args(["-lpthread", "-ldl", "-lm", "-lrt", "-lgcc_s"]));
    for (library, _) in LIBRARIES.iter().filter(|(library, _)| *library != WHOLE) {
        let (own, empty) = (out.join("one.map"), out.join("empty.c"));
        // The loader looks for the version in the file of this name first, and then for the name everywhere.
        write(&own, &version(library, "*;"));
        write(&empty, "");
        // A program that opens the library by its name finds the functions in the one that this one needs.
        let needs = ["-Wl,--no-as-needed", "-L.", &format!("-l:{WHOLE}"), "-Wl,-rpath,$ORIGIN"];
        run(shared(library, &own).arg("-x").arg("c").arg(&empty).current_dir(libraries).args(needs));
    }
}

/// A node of a version script. No library that has a dash in its name is referred to with a version.
fn version(library: &str, global: &str) -> String {
    format!("{} {{ global: {global} }};\n", library.replace('-', "_"))
}
