//! Turns keys into file names, which must not lead out of the target, and must be valid on every system.

use std::path::PathBuf;

/// Names that Windows treats as devices, whatever their extension.
const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "conin$", "conout$"];
const NUMBERED_DEVICES: [&str; 2] = ["com", "lpt"];
/// The longest name that file systems allow, in bytes.
const LONGEST: usize = 255;

/// A key that cannot be a file name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("key {key:?}: cannot be a file name: {reason}")]
pub struct BadName {
    pub key: String,
    pub reason: &'static str,
}

/// The path of a field's file, relative to the target's folder.
pub fn file_name(key: &str, field: &str) -> Result<PathBuf, BadName> {
    let name = format!("{key}.{field}");
    let bad = |reason| BadName { key: name.clone(), reason };
    if field.contains('/') {
        return Err(bad("the field's name has a slash"));
    }
    if name.rsplit('/').next().is_some_and(|base| base.starts_with('.')) {
        return Err(bad("its last part begins with a dot"));
    }
    let mut path = PathBuf::new();
    for part in name.split('/') {
        path.push(checked(part).map_err(bad)?);
    }
    Ok(path)
}

fn checked(part: &str) -> Result<&str, &'static str> {
    let stem = part.split('.').next().unwrap_or_default().trim_end().to_lowercase();
    let numbered = |device: &&str| {
        stem.strip_prefix(*device)
            .is_some_and(|rest| rest.chars().count() == 1 && !rest.starts_with(char::is_alphabetic))
    };
    if part.is_empty() {
        Err("it is absolute, or a part of it is empty")
    } else if part == "." || part == ".." {
        Err("it leads out of the target's folder")
    } else if part.contains(|c: char| c.is_control() || "<>:\"\\|?*".contains(c)) {
        Err("it has a character that some systems do not allow")
    } else if part.ends_with(['.', ' ']) {
        Err("a part of it ends in a dot or a space")
    } else if DEVICES.contains(&&*stem) || NUMBERED_DEVICES.iter().any(numbered) {
        Err("Windows treats it as a device")
    } else if part.len() > LONGEST {
        Err("a part of it is longer than 255 bytes")
    } else {
        Ok(part)
    }
}

/// A key without dots in its last part, for formats in which the first dot begins the field's name.
///
/// `n01440764_10026.JPEG` becomes `n01440764_10026`; other dots become underscores.
pub fn without_dots(key: &str) -> String {
    let (folder, base) = key.rsplit_once('/').map_or(("", key), |(folder, base)| (folder, base));
    let is_image = |ending: &str| crate::sample::IMAGES.contains(&&*ending.to_lowercase());
    let base = match base.rsplit_once('.') {
        Some((stem, ending)) if is_image(ending) && !stem.is_empty() => stem,
        _ => base,
    };
    // `.` and `..` keep their dots, so that `file_name` refuses them.
    let base = if base.chars().all(|c| c == '.') { base.to_owned() } else { base.replace('.', "_") };
    if key.contains('/') { format!("{folder}/{base}") } else { base }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_are_paths() {
        assert_eq!(file_name("cat/a b-1", "seg.png").unwrap(), PathBuf::from("cat/a b-1.seg.png"));
        assert_eq!(file_name("katze/ü", "jpg").unwrap(), PathBuf::from("katze/ü.jpg"));
        assert_eq!(file_name("community/common", "jpg").unwrap(), PathBuf::from("community/common.jpg"));
    }

    #[test]
    fn names_that_lead_out_or_are_not_portable_are_refused() {
        let long = "x".repeat(300);
        for key in [
            "../a", "a/../b", "/etc/a", "a//b", "", "a/", "./a", "a\0b", "a\\b", "C:a", "con", "a/NUL", "Com1", "lpt9",
            "lpt¹", "a./b", "a /b", "a\nb", "a*", &long, "aux.x/b", "..",
        ] {
            assert!(file_name(key, "jpg").is_err(), "{key:?}");
        }
        for field in ["", "../x", "a/b", "x\0", "jpg "] {
            assert!(file_name("a", field).is_err(), "{field:?}");
        }
    }

    #[test]
    fn dots_are_removed() {
        let all = ["a.JPEG", "x/a.b.png", "a.b/c", "a.b", "..", "x/..", ".jpg"].map(without_dots);
        assert_eq!(all, ["a", "x/a_b", "a.b/c", "a_b", "..", "x/..", "_jpg"]);
    }
}
