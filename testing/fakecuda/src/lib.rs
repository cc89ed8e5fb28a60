//! Tests of CUDA code on a machine without a GPU.
//!
//! [`start`] comes first in a test program's `main` (`harness = false`). Where no GPU is found, it starts the program
//! again with stand-ins for NVIDIA's libraries, on which the unmodified libtorch_cuda runs; then [`Fake::get`] controls
//! them and reads what they counted. On a machine with a GPU, the same tests run on it, and [`Fake::get`] is `None`.
//!
//! A fake device is called fake in its name, and no time that is measured on it is a GPU's.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::{env, fmt, io};

/// The folder of the stand-ins; empty if there are none.
pub const LIBRARIES: &str = env!("FAKECUDA_LIBRARIES");

/// Why there are no stand-ins: libtorch has no CUDA code, or is built for another version of CUDA.
pub const LEFT_OUT: &str = env!("FAKECUDA_LEFT_OUT");

/// The library of `operators/`.
const OPERATORS: &str = "libfakecuda_operators.so";

/// Set in a program that runs on the stand-ins.
const STARTED: &str = "FAKECUDA_STARTED";

/// The device that the tests of this process run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// A real GPU.
    OnGpu,
    /// The stand-ins.
    OnFake,
    /// Nothing: there are no stand-ins ([`LEFT_OUT`], or the program was copied from the machine that has them), or
    /// they are switched off with `FAKECUDA=0`.
    OnNothing,
}

impl fmt::Display for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnGpu => "a GPU",
            Self::OnFake => "a fake GPU",
            Self::OnNothing => "no GPU",
        })
    }
}

/// Whether there are no stand-ins, or they are switched off.
pub fn is_off() -> bool {
    LIBRARIES.is_empty() || env::var("FAKECUDA").is_ok_and(|value| value == "0")
}

/// Whether tests have to run on the stand-ins, because `FAKECUDA=1` is set. Then a test fails that would otherwise be
/// skipped because they, or something that they need, are missing.
pub fn is_required() -> bool {
    env::var("FAKECUDA").is_ok_and(|value| value == "1")
}

/// Whether one of NVIDIA's drivers is loaded.
fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// The libraries to preload, as `LD_PRELOAD` takes them: their names only, because the folder may have a space in its
/// path.
fn preloads(libraries: &Path) -> String {
    let files = std::fs::read_dir(libraries).into_iter().flatten().flatten().map(|file| file.file_name());
    let mut names: Vec<String> = files.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| name != OPERATORS);
    names.sort();
    names.join(":")
}

/// The environment in which a program runs on the stand-ins, with so many devices.
pub fn environment(devices: usize) -> Vec<(&'static str, String)> {
    environment_in(Path::new(LIBRARIES), devices)
}

fn environment_in(libraries: &Path, devices: usize) -> Vec<(&'static str, String)> {
    let rest = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let folder = libraries.to_string_lossy();
    vec![
        ("LD_PRELOAD", preloads(libraries)),
        ("LD_LIBRARY_PATH", if rest.is_empty() { folder.into_owned() } else { format!("{folder}:{rest}") }),
        ("FAKECUDA_DEVICES", devices.to_string()),
        ("FAKECUDA_OPERATORS", libraries.join(OPERATORS).to_string_lossy().into_owned()),
        (STARTED, "1".to_owned()),
    ]
}

/// Starts this program again on stand-ins with so many devices, unless there is a GPU or this was done before.
///
/// Call it before any function of libtorch, and before a second thread starts.
///
/// # Errors
/// When the stand-ins are there and cannot be used: tests must fail then, not be skipped.
pub fn start(devices: usize) -> io::Result<Runs> {
    let runs = runs(is_off(), env::var_os(STARTED).is_some(), has_gpu(), Path::new(LIBRARIES).is_dir());
    if runs == Runs::OnNothing && is_required() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, format!("FAKECUDA=1, but {LEFT_OUT}")));
    }
    if runs == Runs::OnFake {
        start_fake(devices)?;
    }
    Ok(runs)
}

/// Decides what tests run on. A program that was started on the stand-ins has to find them. Stand-ins that are off or
/// missing do not hide a GPU.
fn runs(is_off: bool, is_started: bool, has_gpu: bool, has_stand_ins: bool) -> Runs {
    match (is_started && !is_off, has_gpu, has_stand_ins && !is_off) {
        (true, _, _) | (false, false, true) => Runs::OnFake,
        (false, true, _) => Runs::OnGpu,
        (false, false, false) => Runs::OnNothing,
    }
}

/// As [`start`], but uses the stand-ins even if there is a GPU, because the counts do not depend on it.
///
/// # Errors
/// When there are no stand-ins, or the program cannot be started again.
pub fn start_fake(devices: usize) -> io::Result<()> {
    if Fake::get().is_some() {
        return Ok(());
    }
    if LIBRARIES.is_empty() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, LEFT_OUT));
    }
    if env::var_os(STARTED).is_some() {
        return Err(io::Error::other("the stand-ins for NVIDIA's libraries were not loaded (LD_PRELOAD)"));
    }
    let mut program = Command::new(env::current_exe()?);
    for (name, _) in env::vars_os().filter(|(name, _)| is_of_a_gpu(name)) {
        program.env_remove(name);
    }
    // `exec` returns only if it fails.
    Err(program.args(env::args_os().skip(1)).envs(environment(devices)).exec())
}

/// Whether a variable controls CUDA, NCCL or libtorch's use of them (`CUDA_VISIBLE_DEVICES`,
/// `PYTORCH_CUDA_ALLOC_CONF`). Such settings are made for a GPU; on stand-ins, counts have to be the same for
/// everybody.
fn is_of_a_gpu(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    ["CUDA_", "CUBLAS", "NCCL_", "TORCH_", "PYTORCH_"].iter().any(|beginning| name.starts_with(beginning))
}

/// Whether this program fails, as it should, if it is started on stand-ins that are not loaded. Otherwise tests would
/// be skipped unnoticed.
///
/// # Errors
/// When the program cannot be started.
pub fn fails_without_stand_ins() -> io::Result<bool> {
    let mut program = Command::new(env::current_exe()?);
    let output = program.arg("--list").env_remove("LD_PRELOAD").env(STARTED, "1").output()?;
    Ok(!output.status.success())
}

/// When the work of a stream runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// At once.
    Eager,
    /// Only when something waits for it.
    Lazy,
    /// As lazy; in addition, at each call some of it runs, in an order that follows from this seed.
    Random(u64),
}

/// What was counted: numbers by name.
pub type Counts = BTreeMap<String, u64>;

/// How often the host has waited for the device, in any way.
pub fn waits(counts: &Counts) -> u64 {
    let ways = [
        "waits for a stream",
        "async copies that wait",
        "waits for an event",
        "waits for a device",
        "waits by asking",
        "copies that wait",
        "device frees",
        "pinned frees",
    ];
    ways.iter().filter_map(|way| counts.get(*way)).sum()
}

/// How often the driver was asked for memory, of a device or pinned, in any way.
pub fn allocations(counts: &Counts) -> u64 {
    let ways =
        ["device allocations", "allocations in the order of a stream", "pinned allocations", "host memory pinned"];
    ways.iter().filter_map(|way| counts.get(*way)).sum()
}

/// How many events and streams were created.
pub fn created(counts: &Counts) -> u64 {
    ["events created", "streams created"].iter().filter_map(|what| counts.get(*what)).sum()
}

/// The stand-ins of this process.
#[derive(Clone, Copy, Debug)]
pub struct Fake(());

/// A function of the stand-ins, or of what they replace. CUDA's runtime opens the driver's library without making its
/// functions visible to others.
fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: both texts end with a zero byte; nothing is opened that is not open, and it stays so.
    unsafe {
        let driver = || libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        let in_driver = || Some(driver()).filter(|it| !it.is_null()).map(|it| libc::dlsym(it, name.as_ptr()));
        let found = Some(libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()));
        found.filter(|it| !it.is_null()).or_else(in_driver).filter(|it| !it.is_null())
    }
}

/// Calls a function of the stand-ins.
macro_rules! call {
    ($name:literal($($argument:expr => $kind:ty),*) -> $result:ty) => {{
        let found = $crate::function($name).unwrap_or_else(|| panic!("the stand-ins lack {:?}", $name));
        // SAFETY: the runtime defines the function with these arguments (`runtime/src/api`).
        let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn($($kind),*) -> $result>(found) };
        function($($argument),*)
    }};
}

mod faults;
mod lent;
mod orders;
pub mod runtime;

pub use faults::Calls;
pub use lent::Lent;

fn text(at: *const c_char) -> String {
    // SAFETY: the stand-ins' texts end with a zero byte, and stay until this thread's next call.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

impl Fake {
    /// The stand-ins, if this process runs on them.
    pub fn get() -> Option<Self> {
        function(c"fakecuda_reset").map(|_| Self(()))
    }

    /// Runs all work, and starts to count from 0. Blocks the host until the work has run. Reads of numbers that nobody
    /// computed are kept until the next [`notes`](Self::notes).
    pub fn reset(self) {
        call!(c"fakecuda_reset"() -> ());
    }

    /// What was counted since [`reset`](Self::reset).
    pub fn counts(self) -> Counts {
        let text = text(call!(c"fakecuda_counts"() -> *const c_char));
        let line = |line: &str| {
            let (name, number) = line.rsplit_once(": ")?;
            Some((name.to_owned(), number.parse().ok()?))
        };
        text.lines().filter_map(line).collect()
    }

    /// What was wrong since [`reset`](Self::reset), a line each. Reads of numbers that nobody computed are reported
    /// once, even if `reset` came in between.
    pub fn notes(self) -> Vec<String> {
        text(call!(c"fakecuda_notes"() -> *const c_char)).lines().map(str::to_owned).collect()
    }

    /// The operators (`aten::mm`) whose numbers were computed since [`reset`](Self::reset), sorted.
    pub fn computed(self) -> Vec<String> {
        text(call!(c"fakecuda_computed"() -> *const c_char)).lines().map(str::to_owned).collect()
    }

    /// Sets when work runs, from now on. Work that waits runs now.
    pub fn set_pace(self, pace: Pace) {
        let (number, seed) = match pace {
            Pace::Eager => (0, 0),
            Pace::Lazy => (1, 0),
            Pace::Random(seed) => (2, seed),
        };
        call!(c"fakecuda_set_pace"(number => i32, seed => u64) -> ());
    }

    /// Sets how long each kernel takes by the device's own clock, which events report; 0 unless set.
    pub fn set_launch_cost(self, microseconds: f64) {
        call!(c"fakecuda_launch_cost"(microseconds => f64) -> ());
    }

    /// Sets whether to look for accesses without an order; they are among the [notes](Self::notes).
    pub fn find_races(self, on: bool) {
        call!(c"fakecuda_find_races"(on => bool) -> ());
    }

    /// Sets whether to remember where the host waits for the device.
    pub fn trace_waits(self, on: bool) {
        call!(c"fakecuda_trace_waits"(on => bool) -> ());
    }

    /// Where the host has waited since [`reset`](Self::reset): how often, and the functions that led there. First those
    /// of the program, the innermost first, up to the test, with the lines of their sources; then those of libtorch.
    pub fn waits(self) -> String {
        text(call!(c"fakecuda_waits"() -> *const c_char))
    }

    /// From now on computes the results of operators, by the host's own operators. Without it, kernels are only
    /// counted.
    ///
    /// # Errors
    /// When the library of operators cannot be loaded.
    pub fn compute(self) -> Result<(), String> {
        let path = Path::new(LIBRARIES).join(OPERATORS);
        let path = CString::new(path.to_string_lossy().into_owned()).map_err(|error| error.to_string())?;
        // SAFETY: the library is this package's own; loading it registers operators with libtorch.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: dlopen has failed, so there is a text.
            return Err(text(unsafe { libc::dlerror() }));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_copied_to_another_machine_runs_on_its_gpu_or_on_nothing() {
        assert_eq!(runs(false, false, true, false), Runs::OnGpu);
        assert_eq!(runs(false, false, false, false), Runs::OnNothing);
    }

    #[cfg(has_stand_ins)]
    #[test]
    fn stand_ins_in_a_folder_with_a_space_are_preloaded() {
        let folder = env::temp_dir().join(format!("stand-ins of {}", std::process::id()));
        std::os::unix::fs::symlink(LIBRARIES, &folder).unwrap();
        let maps = Command::new("cat").arg("/proc/self/maps").envs(environment_in(&folder, 1)).output();
        std::fs::remove_file(folder).unwrap();
        let [maps, errors] =
            maps.map(|it| [it.stdout, it.stderr].map(|it| String::from_utf8_lossy(&it).into_owned())).unwrap();
        assert!(maps.contains("/libcudart.so.13") && errors.is_empty(), "{errors}");
    }

    #[test]
    fn a_gpu_comes_before_the_stand_ins_unless_they_were_asked_for() {
        assert_eq!(runs(false, false, true, true), Runs::OnGpu);
        assert_eq!(runs(false, false, false, true), Runs::OnFake);
        assert_eq!([true, false].map(|is_there| runs(false, true, true, is_there)), [Runs::OnFake; 2]);
    }

    #[test]
    fn stand_ins_that_are_off_do_not_hide_a_gpu() {
        assert_eq!([true, false].map(|is_there| runs(true, false, true, is_there)), [Runs::OnGpu; 2]);
        assert_eq!([true, false].map(|is_there| runs(true, false, false, is_there)), [Runs::OnNothing; 2]);
    }
}
