//! Where the host waits: each wait with the functions that led to it.

use std::backtrace::Backtrace;
use std::ffi::{CStr, CString, c_char, c_void};

/// The waits since tracing began or was reset, in words: each with how often it was so.
#[derive(Default)]
pub struct Waits {
    pub are_traced: bool,
    told: Vec<(String, u64)>,
}

/// No test looks at more.
const KEPT: usize = 1000;
/// How many functions are told of a wait: of the program, and of its libraries.
const FUNCTIONS: usize = 40;
/// What the linked C functions are called behind their entries (`entries.rs` of the package that links them).
const BEHIND: &str = "fc_behind_";
/// How a program begins, or a test's: what called it says nothing of the wait.
const BEGINNINGS: [&str; 4] = ["libtest_mimic::", "test::", "std::rt::lang_start", "std::sys::backtrace::__rust_begin"];
/// By this they call the function that they were given.
const CALL: &str = "core::ops::function::FnOnce::call_once";

impl Waits {
    /// Notes who waits, if that is wanted.
    pub fn note(&mut self, what: &str) {
        if self.are_traced {
            self.add(format!("{what}\n") + &lines(&Backtrace::force_capture()));
        }
    }

    fn add(&mut self, wait: String) {
        let has_room = self.told.len() < KEPT;
        match self.told.iter_mut().find(|(told, _)| *told == wait) {
            Some((_, times)) => *times += 1,
            None if has_room => self.told.push((wait, 1)),
            None => {}
        }
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.told.clear();
    }

    /// All of them, in the order in which they came first.
    pub fn text(&self) -> String {
        let times = |times: u64| if times == 1 { String::new() } else { format!("{times} times: ") };
        self.told.iter().map(|(wait, often)| times(*often) + wait).collect()
    }
}

/// The functions in a backtrace, a line each.
pub fn lines(trace: &Backtrace) -> String {
    functions(&trace.to_string()).iter().map(|function| format!("    {function}\n")).collect()
}

/// A function in a backtrace, and the line of its source, where that is known.
struct Frame<'a> {
    name: &'a str,
    place: Option<&'a str>,
}

impl Frame<'_> {
    /// An inlined function's name is without its path.
    fn is_rust(&self) -> bool {
        self.name.contains("::") || self.place.is_some_and(|place| place.contains(".rs:"))
    }

    fn text(&self) -> String {
        let name = demangled(self.name.strip_prefix(BEHIND).unwrap_or(self.name));
        self.place.map_or(name.clone(), |place| format!("{name}, {place}"))
    }
}

fn frames(trace: &str) -> Vec<Frame<'_>> {
    let mut frames: Vec<Frame<'_>> = Vec::new();
    for line in trace.lines().map(str::trim_start) {
        if let Some(place) = line.strip_prefix("at ") {
            // Without the column.
            let place = place.rsplit_once(':').map_or(place, |(place, _)| place);
            frames.last_mut().into_iter().for_each(|frame| frame.place = Some(place));
        } else if let Some((_, name)) = line.split_once(": ").filter(|(number, _)| number.parse::<u32>().is_ok()) {
            frames.push(Frame { name, place: None });
        }
    }
    frames
}

/// The functions in a backtrace's text: the program's from the one that waited to the test's, and then those of
/// libraries in C++. The stand-in's own are left out.
fn functions(trace: &str) -> Vec<String> {
    let frames = frames(trace);
    let own = |frame: &Frame<'_>| frame.name.contains("overdrive_fakecuda") || frame.name.contains("std::backtrace");
    let first = frames.iter().rposition(own).map_or(0, |last| last + 1);
    let begins = |frame: &&Frame<'_>| BEGINNINGS.iter().any(|beginning| frame.name.starts_with(beginning));
    let frames: Vec<&Frame<'_>> = frames[first..].iter().take_while(|frame| !begins(frame)).collect();
    let end = frames.iter().rposition(|frame| frame.name == CALL).unwrap_or(frames.len());
    let (program, libraries): (Vec<&Frame<'_>>, Vec<_>) = frames[..end].iter().partition(|frame| frame.is_rust());
    let told = program.into_iter().take(FUNCTIONS).chain(libraries.into_iter().take(FUNCTIONS));
    told.map(Frame::text).collect()
}

/// The name as C++ has it, if the program has C++'s library.
fn demangled(name: &str) -> String {
    type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut i32) -> *mut c_char;
    let (true, Ok(mangled)) = (name.starts_with("_Z"), CString::new(name)) else { return name.to_owned() };
    // SAFETY: looks for a function that is in libstdc++ with this signature (cxxabi.h), and calls it; it returns null
    // or a text of malloc, which is freed.
    unsafe {
        // A program may have loaded it for its own libraries alone: it is asked by its name.
        let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return name.to_owned();
        }
        let function: *mut c_void = libc::dlsym(library, c"__cxa_demangle".as_ptr());
        libc::dlclose(library);
        if function.is_null() {
            return name.to_owned();
        }
        let function: Demangle = std::mem::transmute(function);
        let (nothing, mut status) = (std::ptr::null_mut(), 0);
        let text = function(mangled.as_ptr(), nothing, std::ptr::null_mut(), &raw mut status);
        if text.is_null() {
            return name.to_owned();
        }
        let own = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_told_only_when_they_are_wanted() {
        let mut waits = Waits::default();
        waits.note("stream");
        assert_eq!(waits.text(), "");
        waits.are_traced = true;
        waits.note("stream");
        assert_eq!(waits.text(), "stream\n", "the stand-in's own functions are left out");
    }

    #[test]
    fn equal_waits_are_told_once() {
        let mut waits = Waits::default();
        ["a\n    f\n", "b\n", "a\n    f\n"].into_iter().for_each(|wait| waits.add(wait.to_owned()));
        assert_eq!(waits.text(), "2 times: a\n    f\nb\n");
        waits.clear();
        assert_eq!(waits.text(), "");
    }

    #[test]
    fn functions_begin_behind_the_stand_in_and_end_with_the_test() {
        let trace = "   0: std::backtrace::Backtrace::create\n   1: overdrive_fakecuda_runtime::waits::note\n   \
                     2: cudaStreamSynchronize\n   3: _ZN2at4itemEv\n   4: tch::item\n   5: update_to\n             \
                     at ./src/scaler.rs:276:9\n   6: gpu::a_test\n   7: core::ops::function::FnOnce::call_once\n   \
                     8: gpu::checked\n   9: test::run\n  10: main\n";
        let program = ["tch::item", "update_to, ./src/scaler.rs:276", "gpu::a_test"];
        let of_library = demangled("_ZN2at4itemEv");
        let expected = [&program[..], &["cudaStreamSynchronize", &of_library]].concat();
        assert_eq!(functions(trace), expected);
        assert_eq!(functions(&trace.replace("cudaS", "fc_behind_cudaS")), expected);
        assert_eq!(functions("0: main\n1: __libc_start_main\n"), ["main", "__libc_start_main"]);
    }
}
