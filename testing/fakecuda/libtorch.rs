//! Checks whether the stand-ins for CUDA's libraries can be built for a libtorch. Part of the build script.

use std::fs;
use std::path::Path;

/// The CUDA runtime that the stand-in replaces, which libtorch has to need. Other versions have other functions and
/// other layouts of structs.
pub const RUNTIME: &str = "libcudart.so.13";

/// Checks that the stand-ins can be built for the libtorch in this folder.
///
/// # Errors
/// The reason why they cannot be built.
pub fn check(torch: &Path) -> Result<(), String> {
    let lib = torch.join("lib");
    if !lib.join("libtorch_cuda.so").exists() {
        return Err("libtorch has no CUDA code: libtorch_cuda.so is missing".to_owned());
    }
    let core = lib.join("libc10_cuda.so");
    let bytes = fs::read(&core).map_err(|error| format!("cannot read {}: {error}", core.display()))?;
    // An ELF file has the names of the libraries that it needs as plain text.
    if bytes.windows(RUNTIME.len()).any(|name| name == RUNTIME.as_bytes()) {
        return Ok(());
    }
    Err(format!("the stand-ins are for builds of libtorch that load {RUNTIME}, and this one does not"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_files(files: &[(&str, &str)]) -> Result<(), String> {
        let torch = tempfile::tempdir().unwrap();
        fs::create_dir(torch.path().join("lib")).unwrap();
        for (name, text) in files {
            fs::write(torch.path().join("lib").join(name), text).unwrap();
        }
        check(torch.path())
    }

    #[test]
    fn only_a_libtorch_with_cuda_13_has_stand_ins() {
        let cuda = |runtime| ("libc10_cuda.so", runtime);
        let whole = ("libtorch_cuda.so", "");
        assert_eq!(of_files(&[]), Err("libtorch has no CUDA code: libtorch_cuda.so is missing".to_owned()));
        assert_eq!(of_files(&[whole, cuda("\u{7f}ELF\0libcudart.so.13\0libc.so.6")]), Ok(()));
        for other in ["\u{7f}ELF\0libcudart.so.12\0libc.so.6", "\u{7f}ELF", ""] {
            let why = of_files(&[whole, cuda(other)]).unwrap_err();
            assert!(why.contains("libcudart.so.13"), "{why}");
        }
        assert!(of_files(&[whole]).unwrap_err().contains("libc10_cuda.so"));
    }
}
