//! Compiles the C++ side against the libtorch that torch-sys has found.

#[path = "build/cuda_headers.rs"]
mod cuda_headers;

use std::path::{Path, PathBuf};

const SOURCES: [&str; 25] = [
    "error",
    "allocations",
    "dispatch",
    "tensor_list",
    "autocast",
    "mapped_files",
    "host_allocator",
    "memory",
    "copy_stream",
    "side_stream",
    "arrivals",
    "timed_event",
    "context",
    "backward_passes",
    "grad_hook",
    "function",
    "saved_tensors",
    "leaves",
    "on_demand",
    "adamw8bit",
    "profiler",
    "profiler_events",
    "keep",
    "record",
    "package",
];

const DISTRIBUTED: [&str; 6] = ["c10d_store", "c10d_gloo", "c10d_group", "c10d_collective", "c10d_reducer", "compress"];

fn main() {
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rustc-check-cfg=cfg(cuda)");
    let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        // torch-sys's `doc-only` feature: nothing to compile or link.
        return;
    };
    let libtorch = lib.parent().unwrap_or(Path::new("/")).to_path_buf();
    let abi = std::env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".to_owned());
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        // Of libtorch's headers: most of each program, a hundred times.
        .debug(false)
        .include("cpp")
        // errno after a square root is not used, and setting it would keep loops with square roots scalar.
        .flag_if_supported("-fno-math-errno")
        // The sources are included by one file, which makes their anonymous namespaces look like those of a header.
        .flag_if_supported("-Wno-subobject-linkage")
        // System headers, so that the warnings we ask for are about our own code.
        .flag("-isystem")
        .flag(libtorch.join("include"))
        .flag("-isystem")
        .flag(libtorch.join("include/torch/csrc/api/include"))
        // libtorch's headers include kineto's without their folder.
        .flag("-isystem")
        .flag(libtorch.join("include/kineto"))
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        // As libtorch was built: its headers' classes have members for debugging that it does not set otherwise.
        .define("NDEBUG", None);
    let mut sources = SOURCES.to_vec();

    let has_cuda = lib.join("libtorch_cuda.so").exists();
    if has_cuda {
        sources.push("keep_cuda");
    }
    let cuda = if has_cuda { find_cuda_headers(&libtorch) } else { None };
    match &cuda {
        Some(folders) => {
            sources.push("cuda");
            for folder in folders {
                build.flag("-isystem").flag(folder);
            }
            println!("cargo::rustc-cfg=cuda");
        }
        None => sources.push("no_cuda"),
    }
    build.file(one_file("overdrive_ffi", &sources));
    #[cfg(feature = "libjpeg-turbo")]
    jpeg(&mut build);
    if std::env::var_os("CARGO_FEATURE_DISTRIBUTED").is_some() {
        distributed(&mut build, &libtorch, cuda.as_deref());
    }
    // Every object is linked, referenced or not: it keeps libtorch_cuda in the program (see keep_cuda.cpp).
    build.link_lib_modifier("+whole-archive").compile("overdrive_ffi");

    println!("cargo::rustc-link-search=native={}", lib.display());
    for name in ["torch_cuda", "c10_cuda", "torch_cpu", "c10"] {
        if lib.join(format!("lib{name}.so")).exists() {
            println!("cargo::rustc-link-lib=dylib={name}");
        }
    }
}

/// A file that includes the sources. Compiling libtorch's headers takes longer than compiling a source, so they are
/// compiled once and not once a source: 13 s in place of 50.
fn one_file(name: &str, sources: &[&str]) -> PathBuf {
    let file = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(format!("{name}.cpp"));
    let text: String = sources.iter().map(|source| format!("#include \"{source}.cpp\"\n")).collect();
    std::fs::write(&file, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    file
}

/// libjpeg-turbo, as pkg-config finds it; `jpeg.cpp` refuses any other libjpeg.
#[cfg(feature = "libjpeg-turbo")]
fn jpeg(build: &mut cc::Build) {
    match pkg_config::probe_library("libjpeg") {
        Ok(library) => build.file("cpp/jpeg.cpp").includes(library.include_paths),
        Err(error) => panic!(
            "{error}\n\nthe feature libjpeg-turbo needs the library's headers\n\
             remedy: apt-get install libjpeg62-turbo-dev (Debian) or libjpeg-turbo8-dev (Ubuntu), or leave it off"
        ),
    };
}

/// c10d: stores, process groups and DDP's reducer.
fn distributed(build: &mut cc::Build, libtorch: &Path, cuda: Option<&[PathBuf]>) {
    let version = std::fs::read_to_string(libtorch.join("include/torch/headeronly/version.h")).unwrap_or_default();
    let number = |name: &str| {
        let line = version.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name));
        line.map(|rest| rest.trim().to_owned())
    };
    let found = (number("TORCH_VERSION_MAJOR"), number("TORCH_VERSION_MINOR"));
    if found != (Some("2".to_owned()), Some("11".to_owned())) {
        panic!(
            "the feature `distributed` needs libtorch 2.11: cpp/gloo_decls mirrors that version's gloo\n\
             found: {found:?} in {}\nremedy: point LIBTORCH at libtorch 2.11.0, or leave the feature off",
            libtorch.join("include/torch/headeronly/version.h").display()
        );
    }
    build.flag("-isystem").flag("cpp/gloo_decls");
    let mut sources = DISTRIBUTED.to_vec();
    // From its package next to torch, or beside CUDA's headers.
    let packages = cuda_headers::site_packages(libtorch).filter(|packages| packages.exists());
    let package = packages.as_ref().map(|packages| packages.join("nccl/include"));
    let mut folders = package.into_iter().chain(cuda.unwrap_or_default().iter().cloned());
    match cuda.and_then(|_| folders.find(|folder| folder.join("nccl.h").exists())) {
        Some(include) => {
            println!("cargo::rerun-if-changed={}", include.join("nccl.h").display());
            build.flag("-isystem").flag(include);
            sources.extend(["c10d_nccl", "c10d_mem_pool"]);
        }
        None => {
            if let Some(packages) = packages {
                println!("cargo::rerun-if-changed={}", packages.display());
            }
            sources.push("c10d_no_nccl");
        }
    }
    build.file(one_file("overdrive_ffi_distributed", &sources));
}

/// CUDA's headers, for a libtorch that has CUDA.
fn find_cuda_headers(libtorch: &Path) -> Option<Vec<PathBuf>> {
    for name in cuda_headers::VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkit = Path::new("/usr/local/cuda");
    let found = cuda_headers::find(libtorch, variable, toolkit);
    for path in cuda_headers::watched(libtorch, variable, toolkit, found.as_deref().ok()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let report = |looked: String| {
        println!(
            "cargo::warning=libtorch has CUDA but its headers were not found: training on a GPU works, but the functions of \
             `overdrive_ffi::cuda` and NCCL return an error"
        );
        for line in looked.lines().filter(|line| !line.is_empty()) {
            println!("cargo::warning=looked in {line}");
        }
        println!(
            "cargo::warning=remedy: pip install 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' next to torch \
             (for CUDA 12: nvidia-cuda-nvcc-cu12, nvidia-cuda-cccl-cu12), or set CUDA_HOME to a toolkit"
        );
    };
    found.map_err(report).ok()
}
