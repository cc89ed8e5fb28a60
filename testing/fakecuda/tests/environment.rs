//! What the environment asks wrongly is told.

use std::ffi::{CStr, CString, c_char};
use std::process::Command;

use overdrive_fakecuda::LIBRARIES;

const CHILD: &str = "FAKECUDA_ENVIRONMENT_TEST";

/// Begins to use the stand-ins, as a program does that is linked with them, and asks for what is planted.
fn planted() -> String {
    let library = CString::new(format!("{LIBRARIES}/libcudart.so.13")).unwrap();
    // SAFETY: the texts end with a zero byte, the library stays loaded, and its functions have these types
    // (`runtime/src/api`); the second one returns a text.
    unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        let function = |name: &CStr| {
            let found = libc::dlsym(library, name.as_ptr());
            assert!(!found.is_null(), "{name:?}");
            found
        };
        let reset: extern "C" fn() = std::mem::transmute(function(c"fakecuda_reset"));
        let planted: extern "C" fn() -> *const c_char = std::mem::transmute(function(c"fakecuda_planted"));
        reset();
        CStr::from_ptr(planted()).to_string_lossy().into_owned()
    }
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn what_is_asked_wrongly_is_told_once_each() {
    const NAME: &str = "what_is_asked_wrongly_is_told_once_each";
    if std::env::var_os(CHILD).is_some() {
        return print!("planted {}", planted());
    }
    let wrong = [
        ("FAKECUDA_DEVICES", "1000", "is no number up to 64, so it is 1"),
        ("FAKECUDA_BYTES", "16G", "is no number"),
        ("FAKECUDA_NVML", "heat=1", "is not NAME=VALUE"),
    ];
    let plans = "cudaMalloc:2:2; cudaMaloc:1:2; gemm:1:9; lost:99; nonsense";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", NAME, "--nocapture"]).env(CHILD, "1").env("FAKECUDA_FAIL", plans);
    let output = command.envs(wrong.map(|(name, value, _)| (name, value))).output().unwrap();
    let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let wrong = wrong.into_iter().chain([
        ("FAKECUDA_FAIL", "nonsense", "is not NAME:NTH:CODE"),
        ("FAKECUDA_FAIL", "cudaMaloc", "is no function"),
        ("FAKECUDA_FAIL", "lost:99", "is none of 1 devices"),
    ]);
    let lines: Vec<String> = wrong.map(|(name, item, why)| format!("fakecuda: {name}: {item:?} {why}")).collect();
    for line in &lines {
        assert_eq!(told.lines().filter(|it| it.starts_with(line.as_str())).count(), 1, "{line}: {told}");
    }
    assert_eq!(told.lines().filter(|it| it.starts_with("fakecuda: ")).count(), lines.len(), "{told}");
    assert!(text.contains("\"cudaMalloc\" has 2 to go until 2"), "{text}");
}
