//! Tests of `overdrive-profile` from outside. It runs shell scripts, or this program itself, which therefore has its
//! own `main`.
#![forbid(unsafe_code)]

mod child;
mod clock;
mod hosts;
mod program;
mod records;
mod run;

use libtest_mimic::{Arguments, Failed, Trial};

/// A test's name and what it does.
type Test = (&'static str, fn());

fn main() {
    child::train_if_told();
    let trial = |(name, test): &Test| {
        let test = *test;
        Trial::test(*name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let all = [run::TESTS, records::TESTS, hosts::TESTS];
    let mut trials: Vec<Trial> = all.into_iter().flatten().map(trial).collect();
    let arguments = Arguments::from_args();
    // Tests that need libfaketime are ignored if it is not installed.
    let no_clock = clock::missing();
    for test in clock::TESTS {
        if let (Some(reason), false) = (&no_clock, arguments.list) {
            println!("{}: skipped: {reason}", test.0);
        }
        trials.push(trial(test).with_ignored_flag(no_clock.is_some()));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// Lists functions as tests under their names, with the module in front.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        /// Every test of this file.
        pub const TESTS: &[$crate::Test] = &[$((concat!(module_path!(), "::", stringify!($name)), $name as fn())),*];
    };
}
