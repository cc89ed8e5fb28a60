//! Two hosts, simulated by network namespaces that are joined by a cable of 200 Mbit/s each way.

use std::path::Path;
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

/// The name of the cable's end on each host.
pub const CABLE: &str = "od0";
const RATE: &str = "200mbit";

/// The names of the two hosts, which are removed when this is dropped.
pub struct Hosts([String; 2]);

impl Hosts {
    pub fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static CLEANED: Once = Once::new();
        CLEANED.call_once(remove_left);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("overdrive-{}-{number}{end}", std::process::id());
        let mut hosts = Self([String::new(), String::new()]);
        for (host, end) in hosts.0.iter_mut().zip(["a", "b"]) {
            run("ip", &["netns", "add", &name(end)])?;
            // From here on there is a namespace to remove.
            *host = name(end);
        }
        let [a, b] = &hosts.0;
        run("ip", &["link", "add", CABLE, "netns", a, "type", "veth", "peer", "name", CABLE, "netns", b])?;
        for (host, address) in [(a, hosts.address(0)), (b, hosts.address(1))] {
            run("ip", &["-n", host, "address", "add", &format!("{address}/30"), "dev", CABLE])?;
            run("ip", &["-n", host, "link", "set", "lo", "up"])?;
            run("ip", &["-n", host, "link", "set", CABLE, "up"])?;
            let limit = ["-n", host, "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", RATE];
            run("tc", &[&limit[..], &["burst", "128kb", "latency", "100ms"]].concat())?;
        }
        Ok(hosts)
    }

    /// A host's address, which exists only in these two namespaces.
    pub fn address(&self, host: usize) -> &'static str {
        ["10.77.0.1", "10.77.0.2"][host]
    }

    /// A command that executes `program` on a host.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[host]]).arg(program);
        command
    }

    /// From now on nothing crosses the cable, and no connection closes.
    pub fn cut(&self, host: usize) -> Result<()> {
        run("ip", &["-n", &self.0[host], "link", "set", CABLE, "down"])
    }

    /// Ends a cut.
    pub fn mend(&self, host: usize) -> Result<()> {
        run("ip", &["-n", &self.0[host], "link", "set", CABLE, "up"])
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in self.0.iter().filter(|host| !host.is_empty()) {
            if let Err(error) = run("ip", &["netns", "delete", host]) {
                println!("{host} is left over: {error:#}");
            }
        }
    }
}

/// Removes the namespaces of tests that were killed: those whose name has the number of no process.
fn remove_left() {
    // Where `ip` has them.
    let Ok(names) = std::fs::read_dir("/run/netns") else { return };
    for name in names.flatten().filter_map(|name| name.file_name().into_string().ok()) {
        let owner = name.strip_prefix("overdrive-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
            // Another test may be faster.
            let _ = run("ip", &["netns", "delete", &name]);
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

/// Why simulated hosts are not possible here.
pub fn missing() -> Option<String> {
    Hosts::new().err().map(|error| format!("no network namespaces: {error:#}"))
}
