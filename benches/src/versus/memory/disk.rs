//! Saved tensors in files, by a process whose memory is limited so that the plain run does not fit.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use overdrive::memory::{MemoryError, SavedTensors, find_batch_size};
use overdrive_bench_report::{Ratio, Target};
use rustix::fs::{Advice, fadvise, fsync, statfs};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{Model, cost, full_name, prepare};
use crate::versus::peer::Peer;
use crate::versus::turns::{Case, Findings, Turns};

/// Of Linux's `magic.h`.
const TMPFS: u64 = 0x0102_1994;
/// Tells the process how many bytes of memory it may take beyond those of the model; none if it is not limited.
const TOLD: &str = "OVERDRIVE_VERSUS_MEMORY_LIMIT";
/// The system's page cache. Root may drop it.
const CACHES: &str = "/proc/sys/vm/drop_caches";

/// Saved tensors in files of this folder, which is not in memory.
struct OnDisk {
    saved: SavedTensors,
    folder: PathBuf,
}

/// An error for a folder that is in memory.
pub fn is_on_a_disk(folder: &Path) -> Result<()> {
    let kind = statfs(folder).with_context(|| folder.display().to_string())?.f_type;
    ensure!(kind as u64 != TMPFS, "{} is in memory (tmpfs): name another folder by TMPDIR", folder.display());
    Ok(())
}

impl OnDisk {
    fn new(folder: &Path) -> Result<Self> {
        is_on_a_disk(folder)?;
        Ok(Self { saved: SavedTensors::on_disk(folder)?, folder: folder.to_owned() })
    }

    /// A forward and a backward pass. In between all files are written to the disk and leave the system's cache, so that
    /// they are read from the disk. Both count; so do the files that the thread has not written by then.
    fn pass(&self, model: &Model) -> Result<()> {
        let loss = {
            let _guard = self.saved.begin()?;
            model.loss()?
        };
        for folder in fs::read_dir(&self.folder)? {
            for file in fs::read_dir(folder?.path())? {
                let file = File::open(file?.path())?;
                fsync(&file)?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
            }
        }
        // Without the right to do it, the advice has to be enough.
        let _ = fs::write(CACHES, "1");
        Ok(loss.f_backward()?)
    }
}

/// A number of a file of `/proc/self`.
pub fn told_by_system(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(Path::new("/proc/self").join(file))?;
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
    found.with_context(|| format!("/proc/self/{file} has no {name}"))
}

/// Limits the private memory of this process to what it has and so many bytes. More is refused, so that its resident set
/// cannot be larger either; no right is needed for it.
fn limit(bytes: u64) -> Result<()> {
    let most = told_by_system("status", "VmData:")? * 1024 + bytes;
    Ok(setrlimit(Resource::Data, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Answers `disk-time`, `disk-bytes` and `disk-written` with those of a pass, `plain-time` and `plain-bytes` too, and
/// `resident` with the largest resident set so far, in bytes.
pub fn serve() -> Result<()> {
    prepare()?;
    let mut model = Model::new()?;
    let folder = tempfile::tempdir()?;
    let on_disk = OnDisk::new(folder.path())?;
    if let Ok(bytes) = std::env::var(TOLD) {
        limit(bytes.parse().with_context(|| TOLD)?)?;
        match find_batch_size(1, |_| model.pass(None)) {
            Err(MemoryError::TooLarge { .. }) => {}
            other => bail!("the plain run should not fit into the limit: {other:?}"),
        }
    }
    println!("{}", env!("CARGO_PKG_VERSION"));
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let request = line.split(' ').next().unwrap_or_default();
        let written = || told_by_system("io", "write_bytes:");
        let before = written()?;
        let answer = match request.split_once('-') {
            Some(("disk", "written")) => {
                on_disk.pass(&model)?;
                (written()? - before) as f64
            }
            Some(("disk", what)) => cost(what, || on_disk.pass(&model))?,
            Some(("plain", what)) => cost(what, || model.pass(None))?,
            _ => told_by_system("status", "VmHWM:")? as f64 * 1024.0,
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Starts such a process, with a limit or without.
fn start(limit: Option<u64>) -> Result<RefCell<Peer>> {
    let mut command = Command::new(std::env::current_exe()?);
    // Its default, fixed: otherwise glibc keeps freed tensors, and what a limit leaves is in pieces.
    command.arg("memory-disk").env("MALLOC_MMAP_THRESHOLD_", "131072");
    command.env_remove(TOLD).envs(limit.map(|bytes| (TOLD, bytes.to_string())));
    Ok(RefCell::new(Peer::start_together(command, Vec::new())?))
}

/// The pass in a process that has half of the memory that the plain one takes, beside the plain one in a process without a
/// limit.
pub fn compare(findings: &mut Findings, pairs: u32) -> Result<()> {
    let plain = start(None)?;
    let mut needed = 0.0;
    for _ in 0..2 {
        // Of the second pass: the first one makes the gradients.
        needed = plain.borrow_mut().measure("plain-bytes", 1)?;
    }
    let limited = start(Some(needed as u64 / 2))?;
    for (what, of_plain, unit, target) in [
        ("bytes", "plain-bytes", "B", Some(Target::AtMost(0.35))),
        ("time", "plain-time", "s", Some(Target::AtMost(2.0))),
        ("written", "plain-bytes", "B", None),
        ("resident", "resident", "B", None),
    ] {
        let mut turns = Turns::default();
        let of_disk = if what == "resident" { what.to_owned() } else { format!("disk-{what}") };
        let (limited, plain) = (&limited, &plain);
        turns.ours("disk", move || limited.borrow_mut().measure(&of_disk, 1));
        turns.ours("plain", move || plain.borrow_mut().measure(of_plain, 1));
        turns.take(&format!("disk, {what}"), pairs)?;
        let text = match what {
            "written" => {
                "bytes written to the disk in forward and backward, beside the plain run's peak of tensors".to_owned()
            }
            "resident" => "largest resident set of the process".to_owned(),
            _ => format!("{} of forward and backward", full_name(what)),
        };
        let text = format!("{text}; saved tensors on disk, half of the plain run's memory, page cache dropped");
        let case = Case { text: &text, unit, ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, ("disk", "plain"), target)?;
    }
    Ok(())
}
