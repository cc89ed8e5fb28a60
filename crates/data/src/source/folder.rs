//! `root/class/name.jpg`, with other files that share an image's name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{list_store, read_bytes};

use super::Source;
use crate::format::is_url;
use crate::sample::{IMAGES, LABEL, Sample};

/// A sample whose files have not been read yet.
struct Listed {
    key: String,
    label: usize,
    /// Field names and paths.
    files: Vec<(String, PathBuf)>,
}

/// Files of one class, as key, field and path.
type Files = Vec<(String, String, PathBuf)>;

pub fn open(root: &Path) -> Result<Source> {
    let mut listed = Vec::new();
    let mut classes = 0;
    for files in if is_url(root) { classes_of_store(root)? } else { classes_here(root)? } {
        let samples = group(files, classes);
        classes += usize::from(!samples.is_empty());
        listed.extend(samples);
    }
    ensure!(classes > 0, "{}: no image in it; an image folder has one folder per class", root.display());
    let total = Some(listed.len() as u64);
    Ok(Source { total, samples: Box::new(listed.into_iter().map(read)) })
}

fn classes_here(root: &Path) -> Result<Vec<Files>> {
    let class = |folder: PathBuf| {
        let mut files = Vec::new();
        list(&folder, &name(&folder)?, &mut Vec::new(), &mut files)?;
        Ok(files)
    };
    entries(root)?.into_iter().filter(|path| path.is_dir()).map(class).collect()
}

/// A store has no folders: they are the names up to a slash.
fn classes_of_store(root: &Path) -> Result<Vec<Files>> {
    let mut classes: Vec<(String, Files)> = Vec::new();
    for path in list_store(root)? {
        let (below, name) = (path.strip_prefix(root).unwrap_or(&path), name(&path)?);
        let folder = below.parent().and_then(Path::to_str).unwrap_or_default();
        let class = folder.split('/').next().unwrap_or_default().to_owned();
        let Some((stem, field)) = split(&name).filter(|_| !class.is_empty()) else { continue };
        let file = (format!("{folder}/{stem}"), field, path.clone());
        match classes.last_mut() {
            Some((last, files)) if *last == class => files.push(file),
            _ => classes.push((class, vec![file])),
        }
    }
    Ok(classes.into_iter().map(|(_, files)| files).collect())
}

fn read(listed: Listed) -> Result<Sample> {
    let Listed { key, label, files } = listed;
    let read = |(field, path): (String, PathBuf)| Ok((field, read_bytes(path)?));
    let mut fields = files.into_iter().map(read).collect::<Result<Vec<_>>>()?;
    if !fields.iter().any(|(field, _)| field == LABEL) {
        fields.push((LABEL.to_owned(), label.to_string().into_bytes()));
    }
    Ok(Sample { key, fields })
}

/// Groups neighbouring files by key, and keeps the groups that have an image.
fn group(files: Files, label: usize) -> Vec<Listed> {
    let mut samples: Vec<Listed> = Vec::new();
    for (key, field, path) in files {
        match samples.last_mut() {
            Some(last) if last.key == key => last.files.push((field, path)),
            _ => samples.push(Listed { key, label, files: vec![(field, path)] }),
        }
    }
    samples = samples.into_iter().flat_map(split_images).collect();
    samples.retain(|sample| sample.files.iter().any(|(field, _)| IMAGES.iter().any(|image| is_image(field, image))));
    samples
}

/// Images that differ only by a number after a dot (`img.1.jpg`, `img.2.jpg`) are separate samples, not fields of one.
/// Their keys get an underscore in place of the dot, because a key ends at the first dot.
fn split_images(sample: Listed) -> Vec<Listed> {
    let is_any_image = |field: &str| IMAGES.iter().any(|image| is_image(field, image));
    let numbered = |field: &str| field.rsplit_once('.').is_some_and(|(stem, _)| stem.chars().all(is_of_number));
    let images: Vec<_> = sample.files.iter().filter(|(field, _)| is_any_image(field)).collect();
    if images.len() < 2 || !images.iter().all(|(field, _)| numbered(field)) {
        return vec![sample];
    }
    let Listed { key, label, files } = sample;
    let mut split: Vec<Listed> = Vec::new();
    for (field, path) in files {
        let (stem, field) = field.rsplit_once('.').map_or(("", field.as_str()), |(stem, field)| (stem, field));
        let key = if stem.is_empty() { key.clone() } else { format!("{key}_{}", stem.replace('.', "_")) };
        let field = field.to_owned();
        match split.iter_mut().find(|listed| listed.key == key) {
            Some(listed) => listed.files.push((field, path)),
            None => split.push(Listed { key, label, files: vec![(field, path)] }),
        }
    }
    split
}

fn is_of_number(letter: char) -> bool {
    letter.is_ascii_digit() || letter == '.'
}

/// True for `jpg`, and also for `v2.jpg` of a name with more dots.
fn is_image(field: &str, image: &str) -> bool {
    field.rsplit('.').next() == Some(image)
}

/// Lists every file below `folder` as key, field and path; `above` holds the folders on the way down, so that a link to
/// one of them does not cause endless recursion.
fn list(folder: &Path, key: &str, above: &mut Vec<PathBuf>, files: &mut Files) -> Result<()> {
    let real = fs::canonicalize(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    if above.contains(&real) {
        return Ok(());
    }
    above.push(real);
    for path in entries(folder)? {
        let name = name(&path)?;
        if path.is_dir() {
            list(&path, &format!("{key}/{name}"), above, files)?;
        } else if let Some((stem, field)) = split(&name).filter(|_| path.is_file()) {
            files.push((format!("{key}/{stem}"), field, path));
        }
    }
    above.pop();
    Ok(())
}

/// The end of a key, and the field, which a file's name tells; `None` for a hidden file, and one without an extension.
fn split(name: &str) -> Option<(&str, String)> {
    let (stem, field) = name.split_once('.').filter(|(stem, _)| !stem.is_empty())?;
    Some((stem, field.to_lowercase()))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = read.with_context(|| format!("cannot read the folder {}", folder.display()))?;
    paths.sort_unstable();
    Ok(paths)
}

fn name(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    Ok(name.with_context(|| format!("{}: the name is not UTF-8", path.display()))?.to_owned())
}
