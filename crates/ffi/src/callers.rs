//! Finds the place in the user's program that called libtorch.

use std::fmt;
use std::path::{Component, Path};

/// A place in the program that called libtorch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// The function, with its path where it was not inlined.
    pub function: String,
    /// Empty where the program has no debug information.
    pub file: String,
    /// 0 where the file is not known.
    pub line: i64,
}

/// `file:line`, or the function where these are not known.
impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, file, line } = self;
        if file.is_empty() { f.write_str(function) } else { write!(f, "{file}:{line}") }
    }
}

/// Crates that stand between an operator and its caller.
const BETWEEN: [&str; 7] = ["overdrive_", "tch::", "torch_sys::", "core::", "std::", "alloc::", "rust_"];

/// The first caller in a printed backtrace: `12: function` lines, each followed by `at file:line:column` if known.
pub(crate) fn caller_in(backtrace: &str) -> Option<Caller> {
    let mut lines = backtrace.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some((number, function)) = line.split_once(": ") else { continue };
        let place = lines.peek().and_then(|next| next.strip_prefix("at "));
        let path = function.trim_start_matches(['<', '&']);
        // Where something was inlined, functions have no path (`unwrap<tch::Tensor>`): their files tell whose they are.
        let is_named = path.split('<').next().is_some_and(|name| name.contains("::"));
        if number.parse::<usize>().is_err() || !is_named && place.is_none() {
            continue;
        }
        let is_rust = place.is_none_or(|place| place.contains(".rs:"));
        let is_cpp = function.contains('(') || ["at::", "c10::", "torch::"].iter().any(|name| path.starts_with(name));
        let is_between = match place {
            Some(place) if !is_named => is_file_between(place),
            _ => BETWEEN.iter().any(|name| path.starts_with(name)),
        };
        if !is_rust || is_cpp || is_between {
            continue;
        }
        let place = place.and_then(|place| place.rsplit_once(':')?.0.rsplit_once(':'));
        let (file, line) =
            place.and_then(|(file, line)| Some((file.to_owned(), line.parse().ok()?))).unwrap_or_default();
        return Some(Caller { function: function.to_owned(), file, line });
    }
    None
}

/// Whether a file belongs to the crates that stand between.
fn is_file_between(place: &str) -> bool {
    // A backtrace leaves the current folder out.
    let path = std::env::current_dir().unwrap_or_default().join(place);
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let mut folder = "";
    for part in path.components() {
        let Component::Normal(part) = part else { continue };
        let part = part.to_str().unwrap_or_default();
        // `tch-0.24.0/src`, `library/core/src`, and the crates beside this one.
        let is_known = ["tch-", "torch-sys-", "overdrive-"].iter().any(|name| folder.starts_with(name))
            || ["core", "std", "alloc"].contains(&folder) && place.contains("/library/")
            || own.is_some_and(|own| path.starts_with(own));
        if part == "src" && is_known {
            return true;
        }
        folder = part;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_line_of_the_program_is_found_also_where_functions_have_no_path() {
        let inlined = "\
   0: c10::alloc_cpu(unsigned long, bool)
   1: f_zeros<[i64; 1]>
             at /home/me/.cargo/registry/src/index/tch-0.24.0/src/wrappers/tensor_fallible_generated.rs:39000:13
   2: unwrap<tch::wrappers::tensor::Tensor, tch::error::TchError>
             at /rustc/5980/library/core/src/result.rs:1233:23
   3: begin
             at /home/me/.cargo/registry/src/index/overdrive-memory-0.1.0/src/saved/mod.rs:7:1
   4: train_step
             at ./src/train.rs:168:16
   5: program::main
             at ./src/main.rs:3:5
   6: main
";
        // The test's folder is one of Overdrive's crates.
        let found = |backtrace: &str| caller_in(backtrace).map(|it| (it.to_string(), it.function));
        let expected = |place: &str, function: &str| Some((place.to_owned(), function.to_owned()));
        assert_eq!(found(inlined), expected("./src/main.rs:3", "program::main"));
        let elsewhere = inlined.replace("./src", "/home/me/program/src");
        assert_eq!(found(&elsewhere), expected("/home/me/program/src/train.rs:168", "train_step"));
        let named = elsewhere.replace("train_step", "overdrive_memory::train_step");
        assert_eq!(found(&named), expected("/home/me/program/src/main.rs:3", "program::main"));
        assert_eq!(found("   3: program::main\n"), expected("program::main", "program::main"));
        assert_eq!(found("   0: malloc\n   1: main\n"), None);
    }
}
