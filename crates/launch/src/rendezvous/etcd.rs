//! A client of etcd, for what an election needs: keys with leases, by the JSON gateway of etcd's version 3.
//!
//! # Source
//! <https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/>

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Deserializer, Value, json};

use super::node::{connect, resolve};

/// In bytes; answers are short.
const LONGEST_ANSWER: usize = 1 << 20;

#[derive(Clone, Debug)]
pub struct Etcd {
    host: String,
    port: u16,
    /// For each call: to connect, to ask and to read the answer.
    timeout: Duration,
}

/// What an attempt to set a key has found.
#[derive(Debug, PartialEq)]
pub enum Found {
    /// The key was free and is set.
    Free,
    /// The key has this value already.
    Taken(String),
}

impl Etcd {
    pub fn new(host: &str, port: u16, timeout: Duration) -> Self {
        Self { host: host.to_owned(), port, timeout }
    }

    pub fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The value of a key, and the own address from which etcd was reached.
    pub fn get(&self, key: &str) -> Result<(Option<String>, IpAddr), String> {
        let (answer, own) = self.call("/v3/kv/range", &json!({"key": to_base64(key.as_bytes())}))?;
        Ok((value(&answer)?, own))
    }

    /// A lease that ends by itself after `time`, rounded up to whole seconds, unless it is renewed.
    pub fn grant(&self, time: Duration) -> Result<String, String> {
        let seconds = (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1).to_string();
        let (answer, _) = self.call("/v3/lease/grant", &json!({"TTL": seconds, "ID": "0"}))?;
        let id = answer.get("ID").and_then(Value::as_str).map(str::to_owned);
        id.ok_or_else(|| format!("etcd at {} has granted no lease: {answer}", self.place()))
    }

    /// Whether the lease still held and was renewed.
    pub fn renew(&self, lease: &str) -> Result<bool, String> {
        let (answer, _) = self.call("/v3/lease/keepalive", &json!({"ID": lease}))?;
        let left = answer.get("result").and_then(|result| result.get("TTL")).and_then(Value::as_str);
        Ok(left.and_then(|text| text.parse::<i64>().ok()).is_some_and(|seconds| seconds > 0))
    }

    /// Ends a lease, and with it the keys that were set with it.
    pub fn revoke(&self, lease: &str) -> Result<(), String> {
        self.call("/v3/lease/revoke", &json!({"ID": lease})).map(|_| ())
    }

    /// Sets a key with a lease if nobody else has set it.
    pub fn set_if_free(&self, key: &str, text: &str, lease: &str) -> Result<Found, String> {
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
        value(range)?.map(Found::Taken).ok_or_else(|| format!("etcd at {} has answered {answer}", self.place()))
    }

    /// In a thread of its own, because the system's look-up of a name has no limit.
    fn resolve(&self, limit: Duration) -> io::Result<Vec<SocketAddr>> {
        let (found, addresses) = channel();
        let (host, port) = (self.host.clone(), self.port);
        let look_up = move || drop(found.send(resolve(&host, port)));
        thread::Builder::new().name("look-up".to_owned()).spawn(look_up)?;
        addresses.recv_timeout(limit).unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
    }

    fn call(&self, path: &str, request: &Value) -> Result<(Value, IpAddr), String> {
        let failed = |why: String| format!("etcd at {}: {why}", self.place());
        let text = request.to_string();
        // By HTTP/1.0 the answer is not chunked, and ends with the connection.
        let head = format!(
            "POST {path} HTTP/1.0\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.place(),
            text.len()
        );
        let until = Instant::now() + self.timeout;
        // Zero would mean no limit.
        let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let exchange = || {
            let addresses = self.resolve(left())?;
            let mut stream = connect(&addresses, |addresses| left().div_f64(addresses as f64))?;
            stream.set_write_timeout(Some(left()))?;
            stream.write_all((head + &text).as_bytes())?;
            let (mut answer, mut chunk) = (Vec::new(), [0; 4096]);
            while answer.len() < LONGEST_ANSWER {
                if Instant::now() >= until {
                    return Err(ErrorKind::TimedOut.into());
                }
                stream.set_read_timeout(Some(left()))?;
                match stream.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(read) => answer.extend_from_slice(&chunk[..read]),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok((answer, stream.local_addr()?.ip()))
        };
        let (answer, own) = exchange().map_err(|error: io::Error| match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                failed(format!("it has not answered within {} s", self.timeout.as_secs_f64()))
            }
            _ => failed(error.to_string()),
        })?;
        Ok((parse(&answer).map_err(failed)?, own))
    }
}

/// The JSON of an answer; the first value of a stream.
fn parse(answer: &[u8]) -> Result<Value, String> {
    let stranger = || "what listens there does not speak HTTP".to_owned();
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").ok_or_else(stranger)?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let mut words = head.lines().next().unwrap_or_default().split(' ');
    if !words.next().is_some_and(|version| version.starts_with("HTTP/1.")) {
        return Err(stranger());
    }
    let body = &answer[end + 4..];
    match words.next() {
        Some("200") => {}
        Some("404") => return Err("it has no version 3 of etcd's API; etcd 3.4 or later is needed".to_owned()),
        status => {
            let said = String::from_utf8_lossy(&body[..body.len().min(300)]);
            return Err(format!("it has answered {}: {}", status.unwrap_or("nothing"), said.trim()));
        }
    }
    let first = Deserializer::from_slice(body).into_iter::<Value>().next();
    match first {
        Some(Ok(value)) if value.get("error").is_none() => Ok(value),
        Some(Ok(value)) => Err(format!("it has answered {value}")),
        Some(Err(error)) => Err(format!("its answer is not JSON: {error}")),
        None => Err("its answer is empty".to_owned()),
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

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let all = chunk.iter().fold(0_u32, |all, byte| all << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = DIGITS[(all >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes();
    let (mut bytes, mut all, mut bits) = (Vec::new(), 0_u32, 0);
    for digit in digits {
        let number = DIGITS.iter().position(|it| *it == digit)?;
        all = (all << 6 | u32::try_from(number).ok()?) & 0xfff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(all >> bits & 0xff).ok()?);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_call_ends_in_time_however_slowly_the_answer_comes() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            (0..3000).try_for_each(|_| {
                thread::sleep(Duration::from_millis(10));
                stream.write_all(b" ")
            })
        });
        let why = Etcd::new("127.0.0.1", port, Duration::from_millis(100)).get("key").unwrap_err();
        assert_eq!(why, format!("etcd at 127.0.0.1:{port}: it has not answered within 0.1 s"));
    }

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (text, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(to_base64(text.as_bytes()), encoded);
            assert_eq!(from_base64(encoded).unwrap(), text.as_bytes());
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(from_base64(&to_base64(&all)), Some(all));
        assert_eq!(from_base64("Zm9v!"), None);
    }

    #[test]
    fn answers_of_the_gateway_are_read() {
        let ok = |body: &str| parse(format!("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{body}").as_bytes());
        let range = ok(r#"{"header":{"revision":"7"},"kvs":[{"key":"Zm9v","value":"YmFy"}],"count":"1"}"#).unwrap();
        assert_eq!(value(&range), Ok(Some("bar".to_owned())));
        assert_eq!(value(&ok(r#"{"header":{"revision":"7"}}"#).unwrap()), Ok(None));
        // Of a stream.
        let stream = ok("{\"result\":{\"TTL\":\"15\"}}\n{\"result\":{}}\n").unwrap();
        assert_eq!(stream.pointer("/result/TTL").unwrap(), "15");
        let why = |answer: &str| parse(answer.as_bytes()).unwrap_err();
        assert!(why("HTTP/1.1 404 Not Found\r\n\r\n").contains("etcd 3.4 or later"));
        assert_eq!(why("HTTP/1.1 503 Busy\r\n\r\nno leader\n"), "it has answered 503: no leader");
        assert!(why("SSH-2.0-OpenSSH\r\n\r\n").contains("does not speak HTTP"));
        assert!(why("").contains("does not speak HTTP"));
        assert!(why("HTTP/1.0 200 OK\r\n\r\n").contains("empty"));
        assert!(why("HTTP/1.0 200 OK\r\n\r\n<html>").contains("not JSON"));
        assert!(why("HTTP/1.0 200 OK\r\n\r\n{\"error\":\"etcdserver: no\"}").contains("no"));
    }
}
