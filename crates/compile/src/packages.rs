//! Packages apart from the steps that use them: made for another machine, and explained.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::cache::{self, Cache, EXPLAINED};
use crate::error::CompileError;
use crate::python;
use crate::record::{Record, machine};

/// The package of a record, compiled if it is not in the cache. `progress` gets a word for each stage.
pub(crate) fn package(cache: &Cache, record: &Record, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, CompileError> {
    cache.get_or_make(&cache::key(record), record, progress, |written, made, progress| {
        let python = python::find(cache.folder())?;
        python::compile(&python, written, made, cache, progress)
    })
}

/// What [`prepare`] did with a record.
#[derive(Debug)]
#[non_exhaustive]
pub enum Prepared {
    /// It had its package.
    Present,
    /// It was compiled.
    Compiled,
}

/// Compiles all records in a folder that have no package. A program without Python leaves its record in its cache
/// (`OVERDRIVE_COMPILE_CACHE`); this makes the packages where there is one, for a processor of the same kind.
///
/// Each record is handed to `said` with its name and what was done with it.
///
/// # Errors
/// When the folder cannot be read, or others may write to it.
pub fn prepare(folder: &Path, mut said: impl FnMut(&str, Result<Prepared, CompileError>)) -> Result<(), CompileError> {
    // First, because a cache makes its folder, and a misspelt one should stay absent.
    let records = records(folder)?;
    let cache = Cache::at(folder.to_owned(), u64::MAX, Duration::MAX)?;
    for (name, path) in records {
        said(&name, prepare_one(&cache, &name, &path));
    }
    Ok(())
}

fn prepare_one(cache: &Cache, name: &str, path: &Path) -> Result<Prepared, CompileError> {
    let refused = |reason: &str| CompileError::RecordRefused { path: path.to_owned(), reason: reason.to_owned() };
    overdrive_ffi::check_owner(path)?;
    let record = read(path)?.ok_or_else(|| refused("it is no record of a step"))?;
    if record.machine != machine(&record.request) {
        return Err(refused(
            "it was recorded on another kind of processor or GPU, and a package runs only on the kind that it is made on: \
             prepare it on a machine of that kind",
        ));
    }
    if cache::key(&record) != name {
        return Err(refused("it was recorded by another version of overdrive-compile"));
    }
    if cache.get(name)?.is_some() {
        return Ok(Prepared::Present);
    }
    package(cache, &record, &mut |_| ()).map(|_| Prepared::Compiled)
}

/// The records of a folder by name.
fn records(folder: &Path) -> Result<BTreeMap<String, PathBuf>, CompileError> {
    let cannot = || CompileError::cache("cannot read the folder", folder);
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(cannot())? {
        let path = entry.map_err(cannot())?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
        if let Some(name) = name.filter(|name| !name.contains('.')) {
            found.insert(name.to_owned(), path);
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Option<Record>, CompileError> {
    let text = fs::read_to_string(path).map_err(CompileError::cache("cannot read the record", path))?;
    Ok(Record::of_json(&text))
}

/// What the steps in a folder are made of: their operators, which of them Inductor fused into kernels, and which
/// libtorch's own operators still run.
///
/// # Errors
/// When the folder cannot be read.
pub fn explain(folder: &Path) -> Result<String, CompileError> {
    let mut text = String::new();
    for (name, path) in records(folder)? {
        let Some(record) = read(&path)? else { continue };
        let explained = fs::read_to_string(path.with_extension(EXPLAINED)).ok();
        let explained = explained.and_then(|text| serde_json::from_str(&text).ok());
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}\n{}", describe(&record.request, explained.as_ref()));
    }
    Ok(text)
}

fn describe(request: &Value, explained: Option<&Value>) -> String {
    let count = |value: &Value| value.as_array().map_or(0, Vec::len);
    let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
    for operator in request["operators"].as_array().into_iter().flatten() {
        *operators.entry(operator["op"].as_str().unwrap_or_default().trim_start_matches("aten::")).or_default() += 1;
    }
    let mut text = format!(
        "  {} recorded operators over {} tensors from outside, for {} threads: {}\n",
        count(&request["operators"]),
        count(&request["inputs"]),
        request["threads"],
        list(operators)
    );
    let Some(explained) = explained else { return text + "  not compiled yet\n" };
    let fused = explained["fused"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let _ = writeln!(text, "  {} fused kernels:", count(&explained["fused"]));
    fused.for_each(|kernel| {
        let _ = writeln!(text, "    {kernel}");
    });
    let kept = explained["operators"].as_object().into_iter().flatten();
    let kept = kept.filter_map(|(name, times)| Some((name.as_str(), times.as_u64()? as usize))).collect();
    let _ = writeln!(text, "  not fused, run by libtorch: {}", list(kept));
    text
}

/// `a, 3 b`.
fn list(counts: BTreeMap<&str, usize>) -> String {
    let one = |(name, times): (&str, usize)| if times == 1 { name.to_owned() } else { format!("{times} {name}") };
    counts.into_iter().map(one).collect::<Vec<_>>().join(", ")
}
