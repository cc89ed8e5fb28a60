//! Finds the place in the user's program that called libtorch.

/// Crates that stand between an operator and its caller.
const BETWEEN: [&str; 7] = ["overdrive_", "tch::", "torch_sys::", "core::", "std::", "alloc::", "rust_"];

/// The first caller in a printed backtrace: `12: function` lines, each followed by `at file:line:column` if known.
pub(crate) fn caller_in(backtrace: &str) -> Option<String> {
    let mut lines = backtrace.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some((number, function)) = line.split_once(": ") else { continue };
        let place = lines.peek().and_then(|next| next.strip_prefix("at "));
        if number.parse::<usize>().is_err() || !function.contains("::") {
            continue;
        }
        let path = function.trim_start_matches(['<', '&']);
        let is_rust = place.is_none_or(|place| place.contains(".rs:"));
        let is_cpp = function.contains('(') || ["at::", "c10::", "torch::"].iter().any(|name| path.starts_with(name));
        if !is_rust || is_cpp || BETWEEN.iter().any(|name| path.starts_with(name)) {
            continue;
        }
        return Some(match place {
            Some(place) => place.rsplit_once(':').map_or(place, |(line, _column)| line).to_owned(),
            None => function.to_owned(),
        });
    }
    None
}
