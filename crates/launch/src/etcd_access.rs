//! How the launchers reach etcd: by TLS, and as which user.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::LaunchError;
use crate::launch::Launch;
use crate::secret::read_private;

#[cfg(not(feature = "tls"))]
pub const WITHOUT_TLS: &str = "TLS to etcd: this launcher was built without it; build it with the feature `tls`";

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Access {
    pub tls: Option<Tls>,
    pub user: Option<(String, Password)>,
}

/// Files in PEM.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Tls {
    /// The certificates of the authorities that may have signed etcd's.
    pub authority: PathBuf,
    /// The certificate of this host and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// Never shown.
#[derive(Clone, Deserialize, Eq, PartialEq, Serialize)]
pub struct Password(String);

impl Password {
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(..)")
    }
}

impl Access {
    /// Refuses what cannot work, before anything is started.
    pub fn check(&self) -> Result<(), LaunchError> {
        if self.user.is_some() && self.tls.is_none() {
            return Err(LaunchError::Options(
                "--rdzv-conf user: its password could be read on the way to etcd; give protocol=https and cacert too"
                    .to_owned(),
            ));
        }
        let Some(tls) = &self.tls else { return Ok(()) };
        #[cfg(feature = "tls")]
        let usable = crate::rendezvous::check_tls(tls);
        #[cfg(not(feature = "tls"))]
        let usable: Result<(), String> = Err(format!("{WITHOUT_TLS} ({})", tls.authority.display()));
        usable.map_err(|why| LaunchError::Options(format!("--rdzv-conf: {why}")))
    }
}

impl Launch {
    /// Reaches the [etcd](Self::rdzv_etcd) by TLS. `authority` is a file in PEM with the certificates of the authorities
    /// that may have signed etcd's; those of the system are not used. The files are read again at each connection, so
    /// that they may be replaced while the run goes on.
    ///
    /// A certificate of another authority, for another name, or that has expired is a [`LaunchError::Etcd`].
    ///
    /// # Source
    /// torchrun's `--rdzv-conf protocol=https,cacert=FILE`.
    #[must_use]
    pub fn etcd_tls(mut self, authority: impl AsRef<Path>) -> Self {
        let own = self.plan.etcd.tls.take().and_then(|tls| tls.own);
        self.plan.etcd.tls = Some(Tls { authority: authority.as_ref().to_owned(), own });
        self
    }

    /// Shows etcd a certificate of this host, which an etcd with `--client-cert-auth` asks for. Both files are in PEM. Call
    /// [`etcd_tls`](Self::etcd_tls) too.
    ///
    /// # Source
    /// torchrun's `--rdzv-conf cert=FILE,key=FILE`.
    #[must_use]
    pub fn etcd_certificate(mut self, certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        let authority = self.plan.etcd.tls.take().map(|tls| tls.authority).unwrap_or_default();
        let own = Some((certificate.as_ref().to_owned(), key.as_ref().to_owned()));
        self.plan.etcd.tls = Some(Tls { authority, own });
        self
    }

    /// The user of etcd that the launchers are, where etcd asks for one. It has to be allowed to read and write keys that
    /// begin with `/overdrive-run/`. Only with [`etcd_tls`](Self::etcd_tls), because the password is sent.
    #[must_use]
    pub fn etcd_user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.plan.etcd.user = Some((name.into(), Password(password.into())));
        self
    }

    /// As [`etcd_user`](Self::etcd_user), with the password in a file that only its owner can access. Whitespace at its ends
    /// is no part of it.
    ///
    /// # Errors
    /// [`LaunchError::Options`] for a file that cannot be read, is not text, or that other users can access.
    pub fn etcd_user_file(self, name: impl Into<String>, path: impl AsRef<Path>) -> Result<Self, LaunchError> {
        let path = path.as_ref();
        let text = String::from_utf8(read_private(path, "the password")?)
            .map_err(|_| LaunchError::Options(format!("the password in {} is not text", path.display())))?;
        Ok(self.etcd_user(name, text.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_without_tls_is_refused_and_never_shown() {
        let launch = Launch::new("true").etcd_user("me", "not to be seen");
        assert!(launch.plan.etcd.check().unwrap_err().to_string().contains("give protocol=https and cacert"));
        assert!(!format!("{launch:?}").contains("not to be seen"));
    }
}
