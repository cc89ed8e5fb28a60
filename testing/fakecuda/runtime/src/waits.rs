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
            let names = functions(&Backtrace::force_capture().to_string());
            self.add(format!("{what}\n") + &names.iter().map(|name| format!("    {name}\n")).collect::<String>());
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

/// The names in a backtrace's text: the program's from the one that waited to the test's, and then those of libraries
/// in C++. The stand-in's own are left out.
fn functions(trace: &str) -> Vec<String> {
    let of_line = |line: &str| {
        let (number, name) = line.trim_start().split_once(": ")?;
        number.parse::<u32>().ok().map(|_| name.to_owned())
    };
    let names: Vec<String> = trace.lines().filter_map(of_line).collect();
    let own = |name: &String| name.contains("overdrive_fakecuda") || name.contains("std::backtrace");
    let first = names.iter().rposition(own).map_or(0, |last| last + 1);
    let begins = |name: &String| BEGINNINGS.iter().any(|beginning| name.starts_with(beginning));
    let names: Vec<&String> = names[first..].iter().take_while(|name| !begins(name)).collect();
    let end = names.iter().rposition(|name| *name == CALL).unwrap_or(names.len());
    let is_rust = |name: &&&String| name.contains("::");
    let (program, libraries): (Vec<&&String>, Vec<_>) = names[..end].iter().partition(is_rust);
    let told = program.into_iter().take(FUNCTIONS).chain(libraries.into_iter().take(FUNCTIONS));
    told.map(|name| demangled(name.strip_prefix(BEHIND).unwrap_or(name))).collect()
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
                     2: cudaStreamSynchronize\n             at file.rs:1\n   3: _ZN2at4itemEv\n   4: tch::item\n   \
                     5: gpu::a_test\n   6: core::ops::function::FnOnce::call_once\n   7: gpu::checked\n   \
                     8: test::run\n   9: main\n";
        let expected = ["tch::item", "gpu::a_test", "cudaStreamSynchronize", &demangled("_ZN2at4itemEv")];
        assert_eq!(functions(trace), expected);
        assert_eq!(functions(&trace.replace("cudaS", "fc_behind_cudaS")), expected);
        assert_eq!(functions("0: main\n1: __libc_start_main\n"), ["main", "__libc_start_main"]);
    }
}
