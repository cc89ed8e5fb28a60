//! Counts the results that test programs print.

use std::fmt;
use std::ops::AddAssign;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub passed: u64,
    pub failed: u64,
    /// Tests that libtest calls ignored, for example because they need a GPU.
    pub skipped: u64,
}

impl Totals {
    /// The counts of a line like `test result: ok. 3 passed; 0 failed; 1 ignored; ..`, and zeros for any other.
    pub fn of_line(line: &str) -> Self {
        let mut totals = Self::default();
        if let Some(result) = line.strip_prefix("test result: ") {
            let words: Vec<_> = result.split_whitespace().map(|word| word.trim_end_matches(';')).collect();
            for pair in words.windows(2) {
                let count = pair[0].parse().unwrap_or(0);
                match pair[1] {
                    "passed" => totals.passed = count,
                    "failed" => totals.failed = count,
                    "ignored" => totals.skipped = count,
                    _ => {}
                }
            }
        }
        totals
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_add_up_and_other_lines_are_ignored() {
        let output = "running 4 tests\n\
                      test passed ... ok\n\
                      test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 5 filtered out\n\
                      test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s\n\
                      all doctests ran in 1.50s; merged doctests compilation took 0.90s";
        let mut totals = Totals::default();
        output.lines().for_each(|line| totals += Totals::of_line(line));
        assert_eq!(totals.to_string(), "13 passed, 1 failed, 2 skipped");
    }
}
