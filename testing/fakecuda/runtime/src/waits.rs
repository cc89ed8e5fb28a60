//! Where the host waits: each wait with the functions that led to it.

use std::backtrace::Backtrace;
use std::ffi::{CStr, CString, c_char, c_void};

/// The waits since tracing began or was reset, in words.
#[derive(Default)]
pub struct Waits {
    pub are_traced: bool,
    pub texts: Vec<String>,
}

/// More than these would only repeat themselves.
const KEPT: usize = 1000;
/// How many functions are told of each wait, from the one that called the stand-in.
const FUNCTIONS: usize = 40;
/// What the linked C functions are called behind their entries (`entries.rs` of the package that links them).
const BEHIND: &str = "fc_behind_";

impl Waits {
    /// Notes who waits, if that is wanted.
    pub fn note(&mut self, what: &str) {
        if !self.are_traced || self.texts.len() >= KEPT {
            return;
        }
        let trace = Backtrace::force_capture().to_string();
        let mut text = format!("{what}\n");
        for name in functions(&trace) {
            text += &format!("    {name}\n");
        }
        self.texts.push(text);
    }
}

/// The names in a backtrace's text, without the stand-in's own.
fn functions(trace: &str) -> Vec<String> {
    let of_line = |line: &str| {
        let (number, name) = line.trim_start().split_once(": ")?;
        number.parse::<u32>().ok().map(|_| name.to_owned())
    };
    let names: Vec<String> = trace.lines().filter_map(of_line).collect();
    let own = |name: &String| name.contains("overdrive_fakecuda") || name.contains("std::backtrace");
    let first = names.iter().rposition(own).map_or(0, |last| last + 1);
    names[first..].iter().take(FUNCTIONS).map(|name| demangled(name.strip_prefix(BEHIND).unwrap_or(name))).collect()
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
    fn a_wait_has_the_names_of_its_callers_only_when_they_are_wanted() {
        let mut waits = Waits::default();
        waits.note("stream");
        assert!(waits.texts.is_empty());
        waits.are_traced = true;
        waits.note("stream");
        assert_eq!(waits.texts.len(), 1);
        assert!(waits.texts[0].starts_with("stream\n    "), "{}", waits.texts[0]);
    }

    #[test]
    fn functions_begin_behind_the_stand_in() {
        let trace = "   0: std::backtrace::Backtrace::create\n   1: overdrive_fakecuda_runtime::waits::note\n   \
                     2: cudaStreamSynchronize\n             at file.rs:1\n   3: main\n";
        assert_eq!(functions(trace), ["cudaStreamSynchronize", "main"]);
        assert_eq!(functions(&trace.replace("cudaS", "fc_behind_cudaS")), ["cudaStreamSynchronize", "main"]);
    }
}
