//! What a run may leave behind: processes, ports, files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::moments::processes_with;
use crate::rank::BEGAN;

/// Checks that nothing is left of a run whose launchers have ended.
pub fn nothing(folder: &Path, mark: &str, ports: &[u16]) -> Result<()> {
    let processes = processes_with(mark)?;
    ensure!(processes.is_empty(), "these processes are left: {processes:?}");
    let listening = listening()?;
    // No other program takes them: they are locked, and below those that the system assigns.
    let open: Vec<&u16> = ports.iter().filter(|port| listening.contains(port)).collect();
    ensure!(open.is_empty(), "these ports are open: {open:?}");
    let temporary = names(&folder.join("tmp"))?;
    ensure!(temporary.is_empty(), "these temporary files are left: {temporary:?}");
    let began = names(folder)?.into_iter().filter(|name| name.starts_with(BEGAN));
    let pids: Vec<String> = began.map(|name| Ok(fs::read_to_string(folder.join(name))?)).collect::<Result<_>>()?;
    let shared: Vec<String> = names(Path::new("/dev/shm")).unwrap_or_default();
    let is_own = |name: &String| name.split(['-', '_', '.']).any(|part| pids.iter().any(|pid| pid == part));
    let shared: Vec<&String> = shared.iter().filter(|name| is_own(name)).collect();
    ensure!(shared.is_empty(), "shared memory is left: {shared:?}");
    Ok(())
}

pub fn names(folder: &Path) -> Result<Vec<String>> {
    let names = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut names = names.map(|it| Ok(it?.file_name().to_string_lossy().into_owned())).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// The ports at which this host listens, where the system has `/proc`.
fn listening() -> Result<Vec<u16>> {
    let mut ports = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let Ok(text) = fs::read_to_string(table) else { continue };
        for words in text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()) {
            if let (Some(local), Some(&"0A")) = (words.get(1), words.get(3)) {
                let port = local.rsplit(':').next().unwrap_or_default();
                ports.push(u16::from_str_radix(port, 16).context("a port of /proc/net/tcp")?);
            }
        }
    }
    Ok(ports)
}
