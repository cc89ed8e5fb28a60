//! The classes of a folder and their files, in torchvision's order.

use std::cmp::Ordering;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::DataError;
use crate::read::{Version, list_remote};

/// The folder of a class.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// In order; of files elsewhere with what the list says of them.
    pub(super) files: Vec<(PathBuf, Option<Version>)>,
}

/// The classes below a folder of this machine.
pub(super) fn local(root: &Path) -> Result<Vec<Folder>, DataError> {
    let listed = sorted_entries(root)?.0.into_iter().map(|path| {
        let mut files = Vec::new();
        list_files(&path, &mut Vec::new(), &mut |file| files.push((file, None)))?;
        Ok(Folder { path, files })
    });
    listed.collect()
}

/// The classes below a folder of a store, which has no folders: they are the names up to a slash.
pub(super) fn remote(root: &Path) -> Result<Vec<Folder>, DataError> {
    let mut files = list_remote(root)?;
    files.sort_unstable_by(|(one, _), (other, _)| in_order(one, other));
    let depth = root.components().count();
    let mut folders: Vec<Folder> = Vec::new();
    for (path, version) in files {
        let mut below = path.components().skip(depth);
        let (Some(Component::Normal(class)), Some(_)) = (below.next(), below.next()) else { continue };
        let folder = root.join(class);
        match folders.last_mut().filter(|last| last.path == folder) {
            Some(last) => last.files.push((path, Some(version))),
            None => folders.push(Folder { path: folder, files: vec![(path, Some(version))] }),
        }
    }
    Ok(folders)
}

/// The order in which [`list_files`] visits files: those of a folder by name, and then those of its sub-folders.
fn in_order(one: &Path, other: &Path) -> Ordering {
    let (mut one, mut other) = (one.components().peekable(), other.components().peekable());
    loop {
        let (Some(left), Some(right)) = (one.next(), other.next()) else {
            return one.peek().is_some().cmp(&other.peek().is_some());
        };
        if left != right {
            let are_folders = one.peek().is_some().cmp(&other.peek().is_some());
            return are_folders.then_with(|| left.as_os_str().cmp(right.as_os_str()));
        }
    }
}

/// The sub-folders and the other files of a folder, each sorted by name.
fn sorted_entries(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), DataError> {
    let (mut folders, mut files) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).map_err(DataError::io(folder))? {
        let entry = entry.map_err(DataError::io(folder))?;
        let kind = entry.file_type().map_err(DataError::io(folder))?;
        let path = entry.path();
        // The directory listing has each entry's type: only for a symbolic link is another system call needed.
        match kind.is_dir() || kind.is_symlink() && path.is_dir() {
            true => folders.push(path),
            false => files.push(path),
        }
    }
    // All begin with the same folder, so comparing the whole path as bytes sorts by name, faster than by component.
    for paths in [&mut folders, &mut files] {
        paths.sort_unstable_by(|one, other| one.as_os_str().cmp(other.as_os_str()));
    }
    Ok((folders, files))
}

/// Visits the files in `folder`, then those in its sub-folders. `above` holds the folders on the way down, so that a
/// symbolic link to one of them does not cause endless recursion.
fn list_files(folder: &Path, above: &mut Vec<PathBuf>, visit: &mut impl FnMut(PathBuf)) -> Result<(), DataError> {
    let real = fs::canonicalize(folder).map_err(DataError::io(folder))?;
    if above.contains(&real) {
        return Ok(());
    }
    above.push(real);
    let (folders, files) = sorted_entries(folder)?;
    files.into_iter().for_each(&mut *visit);
    for folder in folders {
        list_files(&folder, above, visit)?;
    }
    above.pop();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_a_list_is_that_of_folders() {
        let root = tempfile::tempdir().unwrap();
        let names = ["a/z.png", "a/b/c.png", "a/b.png", "a/b/a/x.png", "a-b/1.png", "b.png", "a/a/2.png", "a/b-/0.png"];
        for name in names {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"").unwrap();
        }
        let (mut walked, mut listed) = (Vec::new(), names.map(|name| root.path().join(name)).to_vec());
        list_files(root.path(), &mut Vec::new(), &mut |path| walked.push(path)).unwrap();
        listed.sort_unstable_by(|one, other| in_order(one, other));
        assert_eq!(listed, walked);
    }
}
