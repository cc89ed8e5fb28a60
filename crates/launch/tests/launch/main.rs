//! Tests of the launcher from outside. Ranks are shell scripts, or this program itself, which therefore has its own
//! `main`.
#![forbid(unsafe_code)]

mod binding;
mod elastic;
mod errors;
mod etcd;
mod etcd_tls;
mod failures;
mod fake_etcd;
mod health;
mod launcher;
mod library;
mod lost;
mod node_check;
mod nodes;
mod options;
mod orphans;
mod outputs;
mod port;
mod schedulers;
mod signals;
mod slurm;
mod strangers;
mod terminal;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// A test's name and what it does.
type Test = (&'static str, fn());

fn main() -> ExitCode {
    overdrive_launch::helper();
    library::be_a_rank_if_told();
    if let Some(code) = errors::be_a_rank_if_told() {
        return code;
    }
    signals::restore_ignored();
    let all = [
        outputs::TESTS,
        terminal::TESTS,
        failures::TESTS,
        orphans::TESTS,
        signals::TESTS,
        nodes::TESTS,
        lost::TESTS,
        elastic::TESTS,
        binding::TESTS,
        errors::TESTS,
        etcd::TESTS,
        etcd_tls::TESTS,
        health::TESTS,
        node_check::TESTS,
        strangers::TESTS,
        schedulers::TESTS,
        options::TESTS,
        library::TESTS,
    ];
    let trial = |(name, test): &Test| {
        let test = *test;
        Trial::test(*name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> = all.into_iter().flatten().map(trial).collect();
    let with_tls = || etcd::missing().or_else(etcd_tls::missing);
    for (tests, missing) in
        [(slurm::TESTS, slurm::missing()), (etcd::OF_ETCD, etcd::missing()), (etcd_tls::OF_ETCD, with_tls())]
    {
        for test in tests {
            if let (Some(reason), false) = (&missing, arguments.list) {
                println!("{}: skipped: {reason}", test.0);
            }
            trials.push(trial(test).with_ignored_flag(missing.is_some()));
        }
    }
    libtest_mimic::run(&arguments, trials).exit()
}

/// Lists functions as tests under their names, with the module in front.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        /// Every test of this file.
        pub const TESTS: &[$crate::Test] = &[$((concat!(module_path!(), "::", stringify!($name)), $name as fn())),*];
    };
}
