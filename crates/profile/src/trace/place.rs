//! Where to write a file: follows links, and checks whether what is there may be replaced.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::ProfileError;
use crate::error::When as _;

/// How many links to a missing file are followed; Linux's own limit.
const MOST_LINKS: usize = 40;
const ACTION: &str = "write there";

/// The path to rename a new file to, so that links stay links.
///
/// # Errors
/// `Io` if something other than a regular file is there: the rename would replace a device, a pipe or a folder.
pub(super) fn of(target: &Path) -> Result<PathBuf, ProfileError> {
    let mut place = target.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::metadata(&place) {
            Ok(there) if there.is_file() => {
                return if place.is_symlink() { fs::canonicalize(&place).when(ACTION, target) } else { Ok(place) };
            }
            Ok(there) => return Err(not_a_file(there.file_type())).when(ACTION, target),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).when(ACTION, target),
        }
        if !place.is_symlink() {
            return Ok(place);
        }
        let next = fs::read_link(&place).when(ACTION, target)?;
        // Relative to the link's folder, unless it is absolute.
        place = place.parent().map_or(next.clone(), |folder| folder.join(&next));
    }
    Err(io::Error::other("too many links")).when(ACTION, target)
}

fn not_a_file(found: fs::FileType) -> io::Error {
    let what = match found {
        it if it.is_dir() => "a folder",
        it if it.is_fifo() => "a named pipe",
        it if it.is_socket() => "a socket",
        it if it.is_char_device() || it.is_block_device() => "a device",
        _ => "something else",
    };
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("it is {what}, and would be replaced: take a regular file or a new name"),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::super::replace;
    use super::*;

    fn write(target: &Path) -> Result<(), ProfileError> {
        replace(target, |out| out.write_all(b"new"))
    }

    #[test]
    fn anything_but_a_regular_file_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        mkfifoat(CWD, at("pipe"), Mode::from(0o600)).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        symlink("pipe", at("link")).unwrap();
        symlink("round", at("round")).unwrap();
        // Nothing is written to it.
        assert!(of(Path::new("/dev/null")).unwrap_err().to_string().contains("a device"));
        for (name, what) in [
            ("pipe", "a named pipe"),
            ("socket", "a socket"),
            ("folder", "a folder"),
            ("link", "a named pipe"),
            ("round", ""),
        ] {
            let error = write(&at(name)).expect_err(name);
            assert!(matches!(&error, ProfileError::Io { path, .. } if *path == at(name)), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        }
        assert!(fs::metadata(at("pipe")).unwrap().file_type().is_fifo());
        assert!(fs::metadata(at("socket")).unwrap().file_type().is_socket());
        assert!(at("link").is_symlink() && at("round").is_symlink());
        // No temporary file is left.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[test]
    fn links_stay_and_what_they_point_to_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("elsewhere")).unwrap();
        fs::write(at("elsewhere/old"), "old").unwrap();
        symlink("elsewhere/old", at("link")).unwrap();
        symlink("link", at("link to the link")).unwrap();
        // A link to a link to a missing file.
        symlink("not yet", at("elsewhere/dangling")).unwrap();
        symlink("elsewhere/dangling", at("dangling")).unwrap();
        for (link, target) in
            [("link", "elsewhere/old"), ("link to the link", "elsewhere/old"), ("dangling", "elsewhere/not yet")]
        {
            let _ = fs::write(at("elsewhere/old"), "old");
            write(&at(link)).unwrap();
            assert!(at(link).is_symlink(), "{link}");
            assert_eq!(fs::read_to_string(at(target)).unwrap(), "new", "{link}");
        }
        assert!(at("elsewhere/dangling").is_symlink());
        // A file in place of a file, and a new one.
        write(&at("elsewhere/old")).unwrap();
        write(&at("new")).unwrap();
        assert_eq!(fs::read_to_string(at("new")).unwrap(), "new");
    }
}
