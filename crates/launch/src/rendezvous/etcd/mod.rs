//! A client of etcd, for what an election needs: keys with leases, by the JSON gateway of etcd's version 3.
//!
//! # Source
//! <https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/>

mod base64;
mod http;
#[cfg(feature = "tls")]
mod tls;

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::LaunchError;
use crate::etcd_access::Access;
use crate::lock::lock;
use base64::{from_base64, to_base64};
#[cfg(feature = "tls")]
pub use tls::check;

#[derive(Clone, Debug)]
pub struct Etcd {
    host: String,
    port: u16,
    access: Arc<Access>,
    /// For each call: to connect, to ask and to read the answer.
    timeout: Duration,
    /// What etcd has given for the user and the password.
    token: Arc<Mutex<Option<String>>>,
}

/// What an attempt to set a key has found.
#[derive(Debug, PartialEq)]
pub enum Found {
    /// The key was free and is set.
    Free,
    /// The key has this value already.
    Taken(String),
}

/// Why a call has failed.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    /// It may be over at the next call.
    Passing(String),
    /// It stays until somebody changes certificates, users or passwords.
    Lasting(String),
}

impl From<String> for Trouble {
    fn from(text: String) -> Self {
        Self::Passing(text)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Passing(text) | Self::Lasting(text)) = self;
        f.write_str(text)
    }
}

impl From<Trouble> for LaunchError {
    /// `NodesMissing` may be over at the next call.
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Passing(text) => Self::NodesMissing(text),
            Trouble::Lasting(text) => Self::Etcd(text),
        }
    }
}

/// What etcd says where the user, the password or the user's rights are wrong. Other errors are taken for temporary.
const OF_USERS: [&str; 5] = [
    "authentication failed",
    "user name is empty",
    "user name not found",
    "permission denied",
    "authentication is not enabled",
];

/// What etcd says where a token is too old, or etcd was started again.
const OLD_TOKEN: &str = "invalid auth token";

impl Etcd {
    pub fn new(host: &str, port: u16, access: Access, timeout: Duration) -> Self {
        Self { host: host.to_owned(), port, access: Arc::new(access), timeout, token: Arc::default() }
    }

    pub fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The value of a key, and the own address from which etcd was reached.
    pub fn get(&self, key: &str) -> Result<(Option<String>, IpAddr), Trouble> {
        let (answer, own) = self.call("/v3/kv/range", &json!({"key": to_base64(key.as_bytes())}))?;
        Ok((value(&answer)?, own))
    }

    /// A lease that ends by itself after `time`, rounded up to whole seconds, unless it is renewed.
    pub fn grant(&self, time: Duration) -> Result<String, Trouble> {
        let seconds = (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1).to_string();
        let (answer, _) = self.call("/v3/lease/grant", &json!({"TTL": seconds, "ID": "0"}))?;
        let id = answer.get("ID").and_then(Value::as_str).map(str::to_owned);
        Ok(id.ok_or_else(|| format!("etcd at {} has granted no lease: {answer}", self.place()))?)
    }

    /// Whether the lease still held and was renewed.
    pub fn renew(&self, lease: &str) -> Result<bool, Trouble> {
        let (answer, _) = self.call("/v3/lease/keepalive", &json!({"ID": lease}))?;
        let left = answer.get("result").and_then(|result| result.get("TTL")).and_then(Value::as_str);
        Ok(left.and_then(|text| text.parse::<i64>().ok()).is_some_and(|seconds| seconds > 0))
    }

    /// Ends a lease, and with it the keys that were set with it.
    pub fn revoke(&self, lease: &str) -> Result<(), Trouble> {
        self.call("/v3/lease/revoke", &json!({"ID": lease})).map(|_| ())
    }

    /// Sets a key with a lease if nobody else has set it.
    pub fn set_if_free(&self, key: &str, text: &str, lease: &str) -> Result<Found, Trouble> {
        let (key, text) = (to_base64(key.as_bytes()), to_base64(text.as_bytes()));
        let request = json!({
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": text, "lease": lease}}],
            "failure": [{"request_range": {"key": key}}],
        });
        let (answer, _) = self.call("/v3/kv/txn", &request)?;
        // The gateway leaves out what is false.
        if answer.get("succeeded") == Some(&Value::Bool(true)) {
            return Ok(Found::Free);
        }
        let range = answer.pointer("/responses/0/response_range").unwrap_or(&Value::Null);
        let taken = value(range)?.map(Found::Taken);
        Ok(taken.ok_or_else(|| format!("etcd at {} has answered {answer}", self.place()))?)
    }

    /// Calls as the user, if there is one. A token that etcd no longer knows is replaced once.
    fn call(&self, path: &str, request: &Value) -> Result<(Value, IpAddr), Trouble> {
        let until = Instant::now() + self.timeout;
        let Some((name, password)) = &self.access.user else { return self.ask(path, request, None, until) };
        let mut may_be_old = true;
        loop {
            let known = lock(&self.token).clone();
            let token = match known {
                Some(token) => token,
                None => {
                    may_be_old = false;
                    let asked = json!({"name": name, "password": password.text()});
                    let (answer, _) = self.ask("/v3/auth/authenticate", &asked, None, until)?;
                    let given = answer.get("token").and_then(Value::as_str);
                    let token = given.ok_or_else(|| format!("etcd at {} has given no token", self.place()))?;
                    lock(&self.token).insert(token.to_owned()).clone()
                }
            };
            match self.ask(path, request, Some(&token), until) {
                Err(trouble) if may_be_old && trouble.to_string().contains(OLD_TOKEN) => *lock(&self.token) = None,
                other => return other,
            }
        }
    }

    fn ask(
        &self,
        path: &str,
        request: &Value,
        token: Option<&str>,
        until: Instant,
    ) -> Result<(Value, IpAddr), Trouble> {
        let answer = http::post((&self.host, self.port), self.access.tls.as_ref(), path, request, token, until);
        answer.map_err(|trouble| match trouble {
            Trouble::Passing(why) if OF_USERS.iter().any(|it| why.contains(it)) => {
                let user = match &self.access.user {
                    Some((name, _)) => format!("; the user is {name}"),
                    None => "; it needs a user: give user=NAME in --rdzv-conf".to_owned(),
                };
                Trouble::Lasting(format!("etcd at {}: {why}{user}", self.place()))
            }
            Trouble::Passing(why) if why.is_empty() => Trouble::Passing(format!(
                "etcd at {}: it has not answered within {} s",
                self.place(),
                self.timeout.as_secs_f64()
            )),
            Trouble::Passing(why) => Trouble::Passing(format!("etcd at {}: {why}", self.place())),
            Trouble::Lasting(why) => Trouble::Lasting(format!("etcd at {}: {why}", self.place())),
        })
    }
}

/// The value of the first key in an answer; None if there is no key.
fn value(answer: &Value) -> Result<Option<String>, String> {
    let Some(first) = answer.pointer("/kvs/0") else { return Ok(None) };
    // The gateway leaves out an empty value.
    let text = first.get("value").and_then(Value::as_str).unwrap_or_default();
    let bytes = from_base64(text).and_then(|bytes| String::from_utf8(bytes).ok());
    bytes.map(Some).ok_or_else(|| format!("etcd has a value that is not text: {text}"))
}

#[cfg(test)]
mod tests;
