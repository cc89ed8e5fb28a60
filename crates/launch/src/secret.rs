//! The secret that the launchers of one run share.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::LaunchError;

/// In bytes. An attacker who has recorded a greeting can try secrets on it offline, so short ones are refused.
const SHORTEST: usize = 16;
const LONGEST: usize = 4096;

const HOW: &str = "make one with `openssl rand -hex 32`";

#[derive(Clone, Deserialize, Eq, PartialEq, Serialize)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Removes whitespace at both ends: editors and shells add newlines.
    pub fn new(bytes: &[u8]) -> Result<Self, LaunchError> {
        let bytes = bytes.trim_ascii();
        match bytes.len() {
            SHORTEST..=LONGEST => Ok(Self(bytes.to_vec())),
            found => Err(LaunchError::Options(format!(
                "the secret has {found} characters; give {SHORTEST} to {LONGEST} that nobody can guess: {HOW}"
            ))),
        }
    }

    /// Reads the secret from a file that only its owner can access.
    pub fn read(path: &Path) -> Result<Self, LaunchError> {
        Self::new(&read_private(path, "the secret")?)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Reads a short file that only its owner can access. `what` is in it, for messages.
pub fn read_private(path: &Path, what: &str) -> Result<Vec<u8>, LaunchError> {
    let name = path.display();
    let failed = |error: io::Error| LaunchError::Options(format!("cannot read {what} in {name}: {error}"));
    let file = File::open(path).map_err(failed)?;
    // Of the open file, not of the path: another process may replace the file in between.
    let mode = file.metadata().map_err(failed)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(LaunchError::Options(format!(
            "other users can access {what} in {name}, whose mode is {mode:03o}: chmod 600 {name}"
        )));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST as u64 + 64).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Which launchers may join a run of several nodes.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Trust {
    /// The user gave neither a secret nor `--insecure`.
    Undecided,
    /// Those that know the secret.
    Secret(Secret),
    /// All that can reach the endpoint: `--insecure`.
    Anyone,
}

impl Trust {
    /// The HMAC key; without a secret an empty one.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Secret(secret) => secret.bytes(),
            Self::Undecided | Self::Anyone => b"",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
        for mode in [0o644, 0o640, 0o602, 0o610] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let said = Secret::read(&path).unwrap_err().to_string();
            assert!(said.contains(&format!("mode is {mode:o}: chmod 600 ")), "{said}");
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Secret::read(&path).unwrap().bytes(), b"0123456789abcdef0123456789abcdef");
        }
        assert!(Secret::read(&path.join("absent")).unwrap_err().to_string().starts_with("cannot read the secret in "));
    }

    #[test]
    fn secrets_of_wrong_length_are_refused_and_never_shown() {
        for text in ["", " \n", "fifteen letters", &"x".repeat(4097)] {
            let said = Secret::new(text.as_bytes()).unwrap_err().to_string();
            assert!(said.contains("give 16 to 4096") && (text.is_empty() || !said.contains(text)), "{said}");
        }
        let secret = Secret::new(b"sixteen letters!").unwrap();
        assert_eq!(format!("{:?}", Trust::Secret(secret)), "Secret(Secret(..))");
    }
}
