//! What failing tests have said, to be said again at the end: thousands of lines come behind it.

use std::collections::VecDeque;
use std::fmt;

/// Lines before the end of a program that died, a test by SIGSEGV say.
const LAST_LINES: usize = 60;

/// Gathered from the lines that `cargo test` prints.
#[derive(Default)]
pub struct Failures {
    said: Vec<String>,
    /// How many programs ended before their tests did.
    pub died: u64,
    /// The program whose tests run.
    program: String,
    /// Whether its tests have begun and not ended.
    runs: bool,
    /// Whether the lines are those of its failed tests.
    tells: bool,
    last: VecDeque<String>,
}

impl Failures {
    pub fn see(&mut self, line: &str) {
        let words = line.trim_start();
        if line.starts_with("     Running ") || line.starts_with("   Doc-tests ") {
            self.ended();
            (self.program, self.runs) = (words.to_owned(), true);
        } else if line.starts_with("test result: ") {
            (self.runs, self.tells) = (false, false);
        } else if line == "failures:" && !self.tells {
            self.tells = true;
            self.said.push(format!("\n{}", self.program));
        }
        if self.tells {
            self.said.push(line.to_owned());
        }
        self.last.push_back(line.to_owned());
        if self.last.len() > LAST_LINES {
            self.last.pop_front();
        }
    }

    /// The program's lines have ended: without a result, it died.
    pub fn ended(&mut self) {
        if std::mem::take(&mut self.runs) {
            self.died += 1;
            self.said.push(format!("\n{} died; its last lines:", self.program));
            self.said.extend(self.last.iter().cloned());
        }
        self.tells = false;
        self.last.clear();
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.said.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(lines: &str) -> String {
        let mut failures = Failures::default();
        lines.lines().for_each(|line| failures.see(line));
        failures.ended();
        failures.to_string()
    }

    #[test]
    fn what_failed_tests_print_is_kept() {
        let lines = "     Running tests/a.rs (target/a)\nrunning 2 tests\ntest one ... ok\ntest two ... FAILED\n\nfailures:\n\
                     ---- two stdout ----\nleft: 1\n\nfailures:\n    two\n\ntest result: FAILED. 1 passed; 1 failed\n";
        let found = said(lines);
        assert!(
            found.starts_with("\nRunning tests/a.rs (target/a)\nfailures:\n---- two stdout ----\nleft: 1\n"),
            "{found}"
        );
        assert!(!found.contains("test one") && found.ends_with("    two\n\n"), "{found}");
    }

    #[test]
    fn a_program_that_dies_is_told_of_with_its_last_lines() {
        let good = "     Running a\nrunning 1 test\ntest one ... ok\ntest result: ok. 1 passed\n";
        assert_eq!(said(good), "");
        let dies = "     Running b\nrunning 1 test\nterminate called\n";
        let found = said(&format!("{dies}{good}"));
        assert_eq!(found, "\nRunning b died; its last lines:\n     Running b\nrunning 1 test\nterminate called\n");
        assert!(said(dies).ends_with("terminate called\n"));
    }
}
