//! Collects the output of failing tests, to print it again at the end: thousands of lines may follow it.

use std::collections::VecDeque;
use std::fmt;

/// How many last lines to show of a program that died, for instance by SIGSEGV.
const LAST_LINES: usize = 60;

/// Collected from the lines that `cargo test` prints.
#[derive(Default)]
pub struct Failures {
    kept: Vec<String>,
    /// How many programs ended before their tests did.
    pub died: u64,
    /// The program whose tests are running.
    program: String,
    /// Whether its tests have begun and not ended.
    is_running: bool,
    /// Whether the current lines are about its failed tests.
    in_failures: bool,
    last: VecDeque<String>,
}

impl Failures {
    pub fn see(&mut self, line: &str) {
        let words = line.trim_start();
        if line.starts_with("     Running ") || line.starts_with("   Doc-tests ") {
            self.ended();
            (self.program, self.is_running) = (words.to_owned(), true);
        } else if line.starts_with("test result: ") {
            (self.is_running, self.in_failures) = (false, false);
        } else if line == "failures:" && !self.in_failures {
            self.in_failures = true;
            self.kept.push(format!("\n{}", self.program));
        }
        if self.in_failures {
            self.kept.push(line.to_owned());
        }
        self.last.push_back(line.to_owned());
        if self.last.len() > LAST_LINES {
            self.last.pop_front();
        }
    }

    /// Call it at the end of a program's output: a program without a result has died.
    pub fn ended(&mut self) {
        if std::mem::take(&mut self.is_running) {
            self.died += 1;
            self.kept.push(format!("\n{} died; its last lines:", self.program));
            self.kept.extend(self.last.iter().cloned());
        }
        self.in_failures = false;
        self.last.clear();
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kept.iter().try_for_each(|line| writeln!(f, "{line}"))
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
    fn a_program_that_dies_is_reported_with_its_last_lines() {
        let good = "     Running a\nrunning 1 test\ntest one ... ok\ntest result: ok. 1 passed\n";
        assert_eq!(said(good), "");
        let dies = "     Running b\nrunning 1 test\nterminate called\n";
        let found = said(&format!("{dies}{good}"));
        assert_eq!(found, "\nRunning b died; its last lines:\n     Running b\nrunning 1 test\nterminate called\n");
        assert!(said(dies).ends_with("terminate called\n"));
    }
}
