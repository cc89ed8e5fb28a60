//! Runs pip and shows one line for each large package instead of pip's own pages, which go to a log.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace;

/// Smaller packages are downloaded too soon to need a line.
const LARGE_MB: f64 = 10.0;
/// How many of pip's last lines are shown when it fails.
const LAST: usize = 15;

/// Runs `pip install ..`, whose whole output is written to `log`. Returns whether it succeeded; if not, shows pip's last
/// lines.
pub fn install(command: &mut Command, log: &Path) -> Result<bool> {
    let mut file = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    let mut last = Vec::new();
    // An index that needs a login must be an error: nobody would see pip ask for it.
    let status = workspace::lines(command.args(["--progress-bar=off", "--no-input"]), |line| {
        // A full disk must not end the installation because of its log.
        let _ = writeln!(file, "{line}");
        if let Some(part) = part(line) {
            eprintln!("  {part}");
        }
        last.push(line.to_owned());
        if last.len() > LAST {
            last.remove(0);
        }
    })?;
    if !status.success() {
        last.iter().for_each(|line| eprintln!("{line}"));
        eprintln!("pip's whole output: {}", log.display());
    }
    Ok(status.success())
}

/// The package that pip's index does not have, or not in this version, if that is why pip failed.
pub fn unknown(log: &str) -> Option<&str> {
    let reason = log.lines().find_map(|line| line.split_once("No matching distribution found for "))?.1;
    // "lmdb==3.0.0 (from -r requirements.txt (line 3))"
    reason.split(" (from").next()
}

/// What to show for a line of pip's output, if anything.
fn part(line: &str) -> Option<String> {
    let line = line.trim();
    if let Some(packages) = line.strip_prefix("Installing collected packages:") {
        let count = packages.split(',').count();
        return Some(format!("unpacking {count} packages, for one to three minutes without another line"));
    }
    // "Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)"
    let (file, size) = line.strip_prefix("Downloading ")?.rsplit_once(" (")?;
    let megabytes: f64 = size.strip_suffix(" MB)")?.parse().ok()?;
    let mut words = file.rsplit('/').next()?.split('-');
    let (name, version) = (words.next()?, words.next()?);
    (megabytes >= LARGE_MB).then(|| format!("{} {version}, {megabytes:.0} MB", name.replace('_', "-")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_packages_and_the_unpacking_have_a_line() {
        let shown = |line| part(line).unwrap_or_default();
        assert_eq!(shown("  Downloading torch-2.11.0-cp311-cp311-linux_x86_64.whl (530.6 MB)"), "torch 2.11.0, 531 MB");
        let from_an_index = "Downloading https://index/nvidia_cublas-13.1.0.3-py3-none-any.whl (423.1 MB)";
        assert_eq!(shown(from_an_index), "nvidia-cublas 13.1.0.3, 423 MB");
        assert_eq!(
            shown("Installing collected packages: mpmath, torch"),
            "unpacking 2 packages, for one to three minutes without another line"
        );
        for other in ["  Downloading pillow-13.0.0-cp311.whl (7.1 MB)", "Downloading x.whl.metadata (30 kB)", "torch"] {
            assert_eq!(part(other), None);
        }
    }

    #[test]
    fn a_package_that_the_index_lacks_is_named() {
        let log = "Looking in indexes: https://index\n\
                   ERROR: Could not find a version that satisfies the requirement lmdb==9 (from versions: 1, 2)\n\
                   ERROR: No matching distribution found for lmdb==9 (from -r formats-requirements.txt (line 3))\n";
        assert_eq!(unknown(log), Some("lmdb==9"));
        assert_eq!(unknown("ERROR: No matching distribution found for lmdb"), Some("lmdb"));
        assert_eq!(unknown("ERROR: Connection refused"), None);
    }

    #[test]
    fn a_failure_is_returned_and_everything_is_in_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("pip.log");
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script, "sh"]);
            install(&mut command, &log).unwrap()
        };
        assert!(shell("echo Downloading; echo a warning >&2"));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "Downloading\na warning\n");
        assert!(shell("echo \"$@\""));
        assert!(std::fs::read_to_string(&log).unwrap().contains("--no-input"), "pip must not ask in secret");
        assert!(!shell("echo ERROR: no such package; exit 1"));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "ERROR: no such package\n");
    }
}
