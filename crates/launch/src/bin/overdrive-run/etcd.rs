//! The keys of `--rdzv-conf` that say how etcd is reached: torchrun's, and a user.

use std::env;
use std::path::PathBuf;

use overdrive_launch::{Launch, LaunchError};

use crate::options::refuse;

#[derive(Debug, Default, PartialEq)]
pub struct EtcdConf {
    is_https: bool,
    authority: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    user: Option<String>,
    password_file: Option<PathBuf>,
}

impl EtcdConf {
    /// Takes a key, and says whether it is one of these. `etcd` and `etcd-v2` of torchrun have two names for each file.
    pub fn takes(&mut self, key: &str, value: &str) -> Result<bool, LaunchError> {
        let file = || match value {
            "" => refuse(format!("--rdzv-conf {key}: give a file")),
            path => Ok(Some(PathBuf::from(path))),
        };
        match key {
            "protocol" => match value {
                "http" | "https" => self.is_https = value == "https",
                _ => return refuse(format!("--rdzv-conf protocol={value}: give http or https")),
            },
            "cacert" | "ca_cert" => self.authority = file()?,
            "cert" | "ssl_cert" => self.certificate = file()?,
            "key" | "ssl_cert_key" => self.key = file()?,
            "user" => self.user = Some(value.to_owned()).filter(|name| !name.is_empty()),
            "password_file" => self.password_file = file()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Without etcd none of these has a meaning.
    pub fn refuse_all(&self) -> Result<(), LaunchError> {
        if *self == Self::default() {
            return Ok(());
        }
        refuse(
            "--rdzv-conf protocol, cacert, cert, key, user and password_file are about etcd: give --rdzv-backend etcd too, \
             or leave them out",
        )
    }

    pub fn set(&self, mut launch: Launch) -> Result<Launch, LaunchError> {
        match (&self.authority, self.is_https) {
            (Some(authority), true) => launch = launch.etcd_tls(authority),
            (None, true) => {
                return refuse(
                    "--rdzv-conf protocol=https: give cacert=FILE too, with the authority that has signed etcd's certificate",
                );
            }
            (Some(_), false) => return refuse("--rdzv-conf cacert: give protocol=https too"),
            (None, false) if self.certificate.is_some() || self.key.is_some() => {
                return refuse("--rdzv-conf cert, key: give protocol=https too");
            }
            (None, false) => {}
        }
        match (&self.certificate, &self.key) {
            // A file may have both.
            (Some(certificate), key) => {
                launch = launch.etcd_certificate(certificate, key.as_ref().unwrap_or(certificate));
            }
            (None, Some(_)) => return refuse("--rdzv-conf key: give cert=FILE too, the certificate of this key"),
            (None, None) => {}
        }
        let password = env::var("OVERDRIVE_ETCD_PASSWORD").ok().filter(|it| !it.is_empty());
        match (&self.user, &self.password_file, password) {
            (Some(user), Some(file), _) => launch.etcd_user_file(user, file),
            (Some(user), None, Some(password)) => Ok(launch.etcd_user(user, password)),
            (Some(_), None, None) => refuse(
                "--rdzv-conf user: give password_file=FILE too, which only its owner may access (chmod 600), or the password \
                 in OVERDRIVE_ETCD_PASSWORD",
            ),
            (None, Some(_), _) => refuse("--rdzv-conf password_file: give user=NAME too"),
            (None, None, _) => Ok(launch),
        }
    }
}
