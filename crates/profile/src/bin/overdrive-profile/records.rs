//! What a recorded run has left in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use overdrive_profile::RunProfile;

/// `profile.json`, `profile.rank3.json`.
pub fn is_record(name: &str) -> bool {
    is_of("profile", name, ".json")
}

/// `trace.json.gz`, `trace.rank3.json.gz`.
pub fn is_trace(name: &str) -> bool {
    is_of("trace", name, ".json.gz")
}

fn is_of(stem: &str, name: &str, ending: &str) -> bool {
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(ending)) {
        Some("") => true,
        Some(rank) => rank.strip_prefix(".rank").is_some_and(is_number),
        None => false,
    }
}

/// The names in a folder that pass, in order.
pub fn names(folder: &Path, passes: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let cannot = || format!("cannot read the folder {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?.collect::<Result<Vec<_>, _>>().with_context(cannot)?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| passes(name)).collect();
    names.sort();
    Ok(names)
}

/// The ranks' records put together, with a note for each that cannot be read. None where there is none.
///
/// # Errors
/// When all of them are broken, or do not belong together.
pub fn read_ranks(folder: &Path) -> Result<Option<RunProfile>> {
    let mut runs = Vec::new();
    let mut broken = Vec::new();
    for name in names(folder, is_record)? {
        match RunProfile::read_json(folder.join(&name)) {
            Ok(run) => runs.push(run),
            Err(error) => broken.push(format!("{name} is left out: {error}")),
        }
    }
    if runs.is_empty() {
        return if broken.is_empty() { Ok(None) } else { bail!(broken.join("; ")) };
    }
    let mut run = RunProfile::merge_ranks(runs)?;
    run.notes.extend(broken);
    Ok(Some(run))
}

/// The record in a folder, where that of all ranks comes first, or in a file.
pub fn read(path: &Path) -> Result<RunProfile> {
    if !path.is_dir() {
        return Ok(RunProfile::read_json(path)?);
    }
    let merged: PathBuf = path.join("profile.json");
    if merged.exists() {
        return Ok(RunProfile::read_json(merged)?);
    }
    read_ranks(path)?.with_context(|| {
        format!("{} holds no profile.json: `overdrive-profile run --out {0} -- PROGRAM` makes one", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_recorder() {
        assert!(["profile.json", "profile.rank0.json", "profile.rank12.json"].into_iter().all(is_record));
        assert!(["trace.json.gz", "trace.rank1.json.gz"].into_iter().all(is_trace));
        for name in
            ["profile.rank.json", "profile.rankx.json", "my.profile.json", "profilejson", "profile..json", "profile"]
        {
            assert!(!is_record(name), "{name}");
        }
        assert!(!is_trace("trace.json") && !is_trace("profile.json"));
    }
}
