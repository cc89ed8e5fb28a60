//! Forked processes end as those that are started do, and both with the program that has made them.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

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
        _ => {
            println!("{}", std::process::id());
            wait()
        }
    }
}

fn wait() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
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

/// Set in a program that makes a process which waits, prints that one's number, and waits.
const MAKE: &str = "OVERDRIVE_TEST_MAKE";

fn make(way: &str) -> ! {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(DO, "wait").env_remove(MAKE);
    let made = if way == "fork" { Process::fork(&command) } else { Process::start(command) }.unwrap();
    let number = loop {
        let [output, _] = made.written().unwrap();
        if output.ends_with('\n') {
            break output;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    print!("{number}");
    wait()
}

/// As ranks that wait for each other, whose test program is killed.
fn processes_end_with_the_program_that_has_made_them() {
    for way in ["fork", "start"] {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let mut program = program.env(MAKE, way).stdout(Stdio::piped()).spawn().unwrap();
        let mut number = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut number).unwrap();
        let state = format!("/proc/{}/stat", number.trim());
        assert!(std::fs::exists(&state).unwrap(), "{way}: {state}");
        program.kill().unwrap();
        program.wait().unwrap();
        let is_there = || std::fs::read_to_string(&state).is_ok_and(|state| !state.contains(") Z "));
        // Longer than a system takes to kill a process: no result depends on it.
        let since = Instant::now();
        while is_there() && since.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_there = is_there();
        if is_there {
            Command::new("kill").args(["-KILL", number.trim()]).status().unwrap();
        }
        assert!(!is_there, "{way}: process {} waits without its program", number.trim());
    }
}

fn main() -> ExitCode {
    if let Some(code) = serve_if_told(forked) {
        return code;
    }
    if std::env::var_os(DO).is_some() {
        return forked();
    }
    if let Ok(way) = std::env::var(MAKE) {
        make(&way);
    }
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = vec![
        trial("forked_processes_end_as_started_ones", forked_processes_end_as_started_ones),
        trial("processes_end_with_the_program_that_has_made_them", processes_end_with_the_program_that_has_made_them),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
