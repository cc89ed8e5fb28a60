//! The colours in which a terminal shows the ranks' prefixes.

use std::env;

/// Of the standard palette, light ones last: cyan, yellow, green, magenta, blue. Red is left to errors.
const PALETTE: [u8; 10] = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94];

/// What the environment says about colours.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Colors {
    unwanted: bool,
}

impl Colors {
    /// No colours if `NO_COLOR` is set and not empty, or on a terminal that has none.
    ///
    /// # Source
    /// <https://no-color.org>
    pub fn from_environment() -> Self {
        let is_set = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { unwanted: is_set || env::var_os("TERM").is_some_and(|name| name == "dumb") }
    }

    pub fn wanted(self) -> bool {
        !self.unwanted
    }
}

/// The prefix in the colour of its rank. The codes at its end also end a colour that the line before has left on.
pub fn of_rank(prefix: &str, rank: usize) -> String {
    if prefix.is_empty() {
        return String::new();
    }
    format!("\x1b[{}m{prefix}\x1b[0m", PALETTE[rank % PALETTE.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_have_different_colours() {
        assert_eq!(of_rank("[rank0]: ", 0), "\x1b[36m[rank0]: \x1b[0m");
        assert!((0..100).all(|rank| of_rank("x", rank) != of_rank("x", rank + 1)));
        assert_eq!(of_rank("", 3), "");
    }
}
