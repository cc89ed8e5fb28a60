//! Tests of [`super`].

use super::*;

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn folders_are_made_and_an_old_report_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/report.json");
    check_writable(&path).unwrap();
    assert!(!path.exists(), "checking leaves no file");
    write_atomically(&path, b"old").unwrap();
    write_atomically(&path, b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(names(path.parent().unwrap()), ["report.json"]);
}

#[test]
fn a_path_that_cannot_hold_a_file_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = write_atomically(folder.path(), b"x").unwrap_err();
    assert!(matches!(error, WriteError::Folder { .. }), "{error}");

    let file = folder.path().join("file");
    fs::write(&file, "whole").unwrap();
    let below = file.join("report.json");
    for error in [write_atomically(&below, b"x").unwrap_err(), check_writable(&below).unwrap_err()] {
        assert!(error.to_string().starts_with(&below.display().to_string()), "{error}");
    }
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn the_system_s_reason_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "whole").unwrap();
    let error = check_writable(&file.join("report.json")).unwrap_err();
    let reason = std::error::Error::source(&error).unwrap().to_string();
    // Programs print an error with its sources.
    assert!(!error.to_string().contains(&reason), "{error}: {reason}");
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link_and_a_new_file_has_usual_permissions() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let (real, link, plain) = (folder.path().join("real"), folder.path().join("link"), folder.path().join("plain"));
    fs::write(&real, "old").unwrap();
    symlink(&real, &link).unwrap();
    write_atomically(&link, b"new").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read(&real).unwrap(), b"new");

    File::create(&plain).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&real), mode(&plain));
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_is_written_to_and_never_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let error = write_atomically(Path::new("/dev/full"), b"x").unwrap_err();
    assert!(matches!(error, WriteError::Full { .. }), "{error}");
    write_atomically(Path::new("/dev/null"), b"x").unwrap();
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}

#[cfg(target_os = "linux")]
#[test]
fn a_folder_without_permission_is_said_to_be_one() {
    // A file system that refuses the superuser too, as tests often run as one.
    let error = write_atomically(Path::new("/sys/overdrive-report.json"), b"x").unwrap_err();
    assert!(matches!(error, WriteError::Denied { .. }), "{error}");
}

/// A disk of 64 KiB; needs the right to mount, and does nothing without it.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_old_report_whole() {
    let folder = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).arg(folder.path()).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs"]) {
        println!("skipped: no right to mount a small disk");
        return;
    }
    let path = folder.path().join("report.json");
    let outcome = write_atomically(&path, b"old").and_then(|()| write_atomically(&path, &vec![b'x'; 1 << 20]));
    let (left, names) = (fs::read(&path), names(folder.path()));
    assert!(run("umount", &[]));
    assert!(matches!(outcome, Err(WriteError::Full { .. })), "{outcome:?}");
    assert_eq!(left.unwrap(), b"old");
    assert_eq!(names, ["report.json"]);
}
