//! Where CUDA's headers are: in a toolkit, in conda, or in the pip packages next to torch.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// `crt/` and `nv/target` come from packages that torch itself does not install.
const NEEDED: [&str; 4] = ["cuda_runtime_api.h", "crt/host_defines.h", "nv/target", "cublas_v2.h"];

/// The variables that name a folder with CUDA.
pub const VARIABLES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"];

/// The folders to include. A set of headers whose major version is not that of `libtorch` is left out: CUDA's structs
/// change with it.
///
/// # Errors
/// Where it looked and what is missing there, if no set is complete.
pub fn find(
    libtorch: &Path,
    variable: impl Fn(&str) -> Option<PathBuf>,
    toolkit: &Path,
) -> Result<Vec<PathBuf>, String> {
    let major = major_of_libtorch(libtorch);
    let mut looked = String::new();
    for folders in candidates(libtorch, variable, toolkit) {
        let Some(first) = folders.first() else { continue };
        match missing(&folders, major) {
            None => return Ok(folders),
            Some(missing) => write!(looked, "\n{}: {missing}", first.display()).map_err(|error| error.to_string())?,
        }
    }
    Err(looked)
}

/// What cargo has to watch, so that "build again" does: the headers that were found, which may be replaced; or else
/// the folders where a package may put those that are missing. A toolkit in another place is told by a variable.
pub fn watched(
    libtorch: &Path,
    variable: impl Fn(&str) -> Option<PathBuf>,
    toolkit: &Path,
    found: Option<&[PathBuf]>,
) -> Vec<PathBuf> {
    let exist = |paths: Vec<PathBuf>| paths.into_iter().filter(|path| path.exists()).collect();
    match found {
        Some(folders) => {
            exist(NEEDED.into_iter().flat_map(|header| folders.iter().map(move |folder| folder.join(header))).collect())
        }
        None => {
            let looked = candidates(libtorch, variable, toolkit).into_iter().flatten();
            let packages = site_packages(libtorch);
            let outside = looked.filter(|folder| packages.as_ref().is_none_or(|inside| !folder.starts_with(inside)));
            exist(outside.chain(packages.clone()).collect())
        }
    }
}

/// NVIDIA's packages next to torch: its real path, because the workspace's `.libtorch/torch` is a link into a Python
/// installation.
pub fn site_packages(libtorch: &Path) -> Option<PathBuf> {
    Some(libtorch.canonicalize().ok()?.parent()?.join("nvidia"))
}

/// Sets of folders, those that the user names first.
fn candidates(libtorch: &Path, variable: impl Fn(&str) -> Option<PathBuf>, toolkit: &Path) -> Vec<Vec<PathBuf>> {
    let roots = VARIABLES.iter().filter_map(|name| variable(name)).chain([toolkit.to_path_buf()]);
    let of_root = |root: PathBuf| {
        ["include", "targets/x86_64-linux/include", "targets/sbsa-linux/include"].map(|folder| root.join(folder))
    };
    let toolkits = roots.flat_map(of_root).map(|folder| vec![folder.clone(), folder.join("cccl")]);
    let wheels = site_packages(libtorch).into_iter().flat_map(|nvidia| {
        let cuda13 = nvidia.join("cu13/include");
        // In CUDA 12, each library's package has a folder of its own.
        let mut cuda12: Vec<PathBuf> = std::fs::read_dir(&nvidia)
            .into_iter()
            .flatten()
            .flatten()
            .map(|library| library.path().join("include"))
            .filter(|include| include.is_dir() && *include != cuda13)
            .collect();
        cuda12.sort();
        [vec![cuda13.clone(), cuda13.join("cccl")], cuda12]
    });
    let mut found: Vec<_> = toolkits.chain(wheels).collect();
    found.iter_mut().for_each(|folders| folders.retain(|folder| folder.is_dir()));
    found.retain(|folders| !folders.is_empty());
    found
}

/// Why a set of folders cannot be used.
fn missing(folders: &[PathBuf], major: Option<u32>) -> Option<String> {
    let place = |header: &str| folders.iter().map(|folder| folder.join(header)).find(|path| path.exists());
    let absent: Vec<_> = NEEDED.into_iter().filter(|header| place(header).is_none()).collect();
    if !absent.is_empty() {
        return Some(format!("has no {}", absent.join(", ")));
    }
    let text = std::fs::read_to_string(place(NEEDED[0])?).unwrap_or_default();
    let version = text.lines().find_map(|line| line.trim().strip_prefix("#define CUDART_VERSION"));
    let found: Option<u32> = version.and_then(|version| version.trim().parse().ok());
    match (found.map(|version| version / 1000), major) {
        (Some(found), Some(major)) if found != major => Some(format!("is of CUDA {found}, libtorch of CUDA {major}")),
        _ => None,
    }
}

/// The major version of CUDA that a libtorch was built with, by the name of the library that it loads. None if libtorch
/// has the runtime within itself.
fn major_of_libtorch(libtorch: &Path) -> Option<u32> {
    const NAME: &[u8] = b"libcudart.so.";
    let library = std::fs::read(libtorch.join("lib/libc10_cuda.so")).ok()?;
    let at = library.windows(NAME.len()).position(|bytes| bytes == NAME)? + NAME.len();
    let digits: String = library[at..].iter().map(|&byte| char::from(byte)).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITE: &str = "lib/python3.11/site-packages";

    /// A machine in a folder of its own.
    struct Machine(tempfile::TempDir);

    impl Machine {
        /// With a libtorch that loads this CUDA runtime.
        fn new(cuda: &str) -> Self {
            let machine = Self(tempfile::tempdir().expect("a folder"));
            machine.put(
                &format!("{SITE}/torch/lib/libc10_cuda.so"),
                &format!("\u{7f}ELF\0libcudart.so.{cuda}\0libc.so.6"),
            );
            machine
        }

        fn path(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.path(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
            std::fs::write(path, text).expect("it can be written");
        }

        fn put_headers(&self, folder: &str, version: u32, headers: &[&str]) {
            for header in headers {
                let text = format!("#define OTHER 1\n#define CUDART_VERSION  {version}\n");
                self.put(&format!("{folder}/{header}"), if *header == NEEDED[0] { &text } else { "" });
            }
        }

        fn find(&self, variables: &[(&str, &str)]) -> Result<Vec<PathBuf>, String> {
            let variable =
                |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, path)| self.path(path));
            find(&self.path(&format!("{SITE}/torch")), variable, &self.path("usr/local/cuda"))
        }
    }

    #[test]
    fn a_toolkit_is_found_by_each_variable_and_in_its_usual_place() {
        for (name, folder) in [
            ("CUDA_HOME", "opt/cuda/include"),
            ("CUDA_PATH", "opt/cuda/targets/x86_64-linux/include"),
            ("CONDA_PREFIX", "opt/cuda/targets/sbsa-linux/include"),
            ("", "usr/local/cuda/include"),
        ] {
            let machine = Machine::new("13");
            machine.put_headers(folder, 13000, &["cuda_runtime_api.h", "crt/host_defines.h", "cublas_v2.h"]);
            machine.put_headers(&format!("{folder}/cccl"), 0, &["nv/target"]);
            let expected = [machine.path(folder), machine.path(folder).join("cccl")];
            assert_eq!(machine.find(&[(name, "opt/cuda")]).expect(name), expected);
        }
    }

    #[test]
    fn the_packages_next_to_torch_are_found_through_a_link_too() {
        let machine = Machine::new("13");
        let folder = format!("{SITE}/nvidia/cu13/include");
        machine.put_headers(&folder, 13000, &NEEDED);
        std::os::unix::fs::symlink(machine.path(&format!("{SITE}/torch")), machine.path("link")).expect("a link");
        let found = find(&machine.path("link"), |_| None, Path::new("/nowhere")).expect("headers");
        assert_eq!(found, [machine.path(&folder).canonicalize().expect("a path")]);

        let machine = Machine::new("12");
        let packages =
            [("cublas", NEEDED[3]), ("cuda_cccl", NEEDED[2]), ("cuda_nvcc", NEEDED[1]), ("cuda_runtime", NEEDED[0])];
        for (package, header) in packages {
            machine.put_headers(&format!("{SITE}/nvidia/{package}/include"), 12080, &[header]);
        }
        let found = machine.find(&[]).expect("headers");
        let expected = packages.map(|(package, _)| machine.path(&format!("{SITE}/nvidia/{package}/include")));
        assert_eq!(found, expected.map(|path| path.canonicalize().expect("a path")));
    }

    /// Without it, cargo would find nothing changed when the missing packages are there.
    #[test]
    fn what_is_missing_or_may_be_replaced_is_watched() {
        let machine = Machine::new("13");
        let watched = |found: Option<&[PathBuf]>| {
            let variable = |name: &str| (name == "CUDA_HOME").then(|| machine.path("opt/cuda"));
            watched(&machine.path(&format!("{SITE}/torch")), variable, &machine.path("usr/local/cuda"), found)
        };
        assert!(watched(None).is_empty(), "what does not exist would make cargo build each time");
        // torch brings some of the headers; those of the compiler are missing.
        let folder = format!("{SITE}/nvidia/cu13/include");
        machine.put_headers(&folder, 13000, &[NEEDED[0], NEEDED[3]]);
        machine.put_headers("opt/cuda/include", 12040, &NEEDED);
        let packages = machine.path(&format!("{SITE}/nvidia")).canonicalize().expect("a path");
        assert_eq!(watched(None), [machine.path("opt/cuda/include"), packages]);

        machine.put_headers(&folder, 13000, &NEEDED);
        let found = machine.find(&[]).expect("headers");
        assert_eq!(watched(Some(&found)), NEEDED.map(|header| found[0].join(header)));
    }

    #[test]
    fn incomplete_and_foreign_headers_are_left_out_and_named() {
        let machine = Machine::new("13");
        machine.put_headers("opt/cuda/include", 12040, &NEEDED);
        machine.put_headers("usr/local/cuda/include", 13000, &NEEDED[..1]);
        let looked = machine.find(&[("CUDA_HOME", "opt/cuda")]).expect_err("none is complete");
        assert!(looked.contains("opt/cuda/include: is of CUDA 12, libtorch of CUDA 13"), "{looked}");
        assert!(
            looked.contains("usr/local/cuda/include: has no crt/host_defines.h, nv/target, cublas_v2.h"),
            "{looked}"
        );
        // The right ones are taken though wrong ones are named first.
        machine.put_headers("conda/include", 13020, &NEEDED);
        let found = machine.find(&[("CUDA_HOME", "opt/cuda"), ("CONDA_PREFIX", "conda")]);
        assert_eq!(found.expect("headers"), [machine.path("conda/include")]);
        // A libtorch with the runtime within itself does not say its version.
        let machine = Machine::new("");
        machine.put_headers("opt/cuda/include", 12040, &NEEDED);
        assert!(machine.find(&[("CUDA_HOME", "opt/cuda")]).is_ok());
    }
}
