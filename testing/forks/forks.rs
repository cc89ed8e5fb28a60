//! Forked processes end as those that are started do.

use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use overdrive_forks::{Process, serve_if_told};

const DO: &str = "OVERDRIVE_TEST_DO";

fn forked() -> ExitCode {
    match std::env::var(DO).as_deref() {
        Ok("print") => {
            println!("out");
            eprintln!("{:?}", std::env::var("HOME"));
            ExitCode::from(7)
        }
        Ok("panic") => panic!("as told"),
        Ok("abort") => std::process::abort(),
        Ok("read") => std::io::stdin().lines().map(|_| ExitCode::FAILURE).next().unwrap_or(ExitCode::SUCCESS),
        _ => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
    }
}

fn forked_processes_end_as_started_ones() {
    let told = |what: &str| {
        let mut command = Command::new("unused");
        command.env(DO, what).env_remove("HOME");
        Process::fork(&command).unwrap()
    };
    let end = |what: &str| {
        let mut one = told(what);
        let status = loop {
            match one.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        (status.to_string(), one.written().unwrap())
    };
    let (status, [output, errors]) = end("print");
    assert_eq!((&*status, &*output, &*errors), ("exit status: 7", "out\n", "Err(NotPresent)\n"));
    let (status, [_, errors]) = end("panic");
    assert!(status == "exit status: 101" && errors.contains("as told"), "{status}: {errors}");
    assert!(end("abort").0.starts_with("signal: 6"));
    assert_eq!(end("read").0, "exit status: 0");
    let mut endless = told("wait");
    assert!(endless.try_wait().unwrap().is_none());
    endless.kill().unwrap();
    assert_eq!(endless.try_wait().unwrap().map(|status| status.to_string()), Some("signal: 9 (SIGKILL)".to_owned()));
    drop(told("wait"));
}

fn main() -> ExitCode {
    if let Some(code) = serve_if_told(forked) {
        return code;
    }
    let test = Trial::test("forked_processes_end_as_started_ones", || {
        forked_processes_end_as_started_ones();
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit_code()
}
