//! Servers of other programs, on the loopback: Google's store as fake-gcs-server gives it, Azure's as Azurite does.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use object_store::azure::{AzureAuthorizer, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody, ReqwestConnector};
use object_store::path::Path as Key;
use object_store::{ClientOptions, ObjectStoreExt};
use tokio::runtime::Runtime;

/// The account of Azurite.
const ACCOUNT: &str = "devstoreaccount1";

/// A program that serves the bucket `data`, until this is dropped.
pub struct Service {
    child: Child,
    /// What it says goes on being read from here.
    _said: Option<BufReader<ChildStdout>>,
    pub address: SocketAddr,
}

impl Drop for Service {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The program that a variable names, or the one of this name; `None` where there is none.
fn spawn(variable: &str, name: &str, arguments: &[&str]) -> Result<Option<Child>> {
    let program = env::var_os(variable).unwrap_or_else(|| OsString::from(name));
    let child = Command::new(&program).args(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    match child {
        Err(error) if error.kind() == ErrorKind::NotFound && env::var_os(variable).is_none() => Ok(None),
        child => Ok(Some(child.with_context(|| format!("cannot start {}", program.display()))?)),
    }
}

pub const GOOGLE: (&str, &str) = ("OVERDRIVE_FAKE_GCS_SERVER", "fake-gcs-server");
pub const AZURE: (&str, &str) = ("OVERDRIVE_AZURITE", "azurite-blob");

pub fn google() -> Result<Option<Service>> {
    // It cannot say which port it has chosen.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let port = address.port().to_string();
    let place = ["-scheme", "http", "-host", "127.0.0.1", "-public-host", "127.0.0.1", "-port", &port];
    let (variable, name) = GOOGLE;
    let Some(child) = spawn(variable, name, &[&place[..], &["-backend", "memory", "-log-level", "error"]].concat())?
    else {
        return Ok(None);
    };
    let mut service = Service { child, _said: None, address };
    while TcpStream::connect(address).is_err() {
        ensure!(service.child.try_wait()?.is_none(), "{name} has ended");
        sleep(Duration::from_millis(10));
    }
    post(address, "/storage/v1/b?project=test", br#"{"name": "data"}"#)?;
    Ok(Some(service))
}

pub fn azure() -> Result<Option<Service>> {
    let place = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--silent"];
    let more = ["--disableTelemetry", "--skipApiVersionCheck"];
    let (variable, name) = AZURE;
    let Some(mut child) = spawn(variable, name, &[&place[..], &more].concat())? else { return Ok(None) };
    let mut said = BufReader::new(child.stdout.take().context("its output")?);
    let address = loop {
        let mut line = String::new();
        ensure!(said.read_line(&mut line)? > 0, "{name} has ended");
        if let Some((_, address)) = line.split_once("successfully listens on http://") {
            break address.trim().parse()?;
        }
    };
    let service = Service { child, _said: Some(said), address };
    create_container(address)?;
    Ok(Some(service))
}

/// Puts a file into the bucket of Google's store.
pub fn put_google(server: SocketAddr, key: &str, content: &[u8]) -> Result<()> {
    let name: String = key.bytes().map(|byte| format!("%{byte:02X}")).collect();
    post(server, &format!("/upload/storage/v1/b/data/o?uploadType=media&name={name}"), content)
}

fn post(server: SocketAddr, path: &str, content: &[u8]) -> Result<()> {
    let mut stream = TcpStream::connect(server)?;
    let head = ["host: 127.0.0.1", "connection: close", "content-type: application/json"].join("\r\n");
    write!(stream, "POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n", content.len())?;
    stream.write_all(content)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "POST {path}: {answer}");
    Ok(())
}

/// Azurite's container `data`, without a proxy before it.
fn container(server: SocketAddr) -> Result<MicrosoftAzure> {
    // The key of this account is known to everybody.
    let known = MicrosoftAzureBuilder::new().with_container_name("data").with_use_emulator(true).build()?;
    let direct = MicrosoftAzureBuilder::new().with_container_name("data").with_account(ACCOUNT);
    let direct = direct.with_credentials(known.credentials().clone()).with_allow_http(true);
    Ok(direct.with_endpoint(format!("http://{server}/{ACCOUNT}")).build()?)
}

fn create_container(server: SocketAddr) -> Result<()> {
    let runtime = Runtime::new()?;
    let credential = runtime.block_on(container(server)?.credentials().get_credential())?;
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    *request.method_mut() = "PUT".parse()?;
    *request.uri_mut() = format!("http://{server}/{ACCOUNT}/data?restype=container").parse()?;
    AzureAuthorizer::new(&credential, ACCOUNT).try_authorize(&mut request)?;
    let client = ReqwestConnector::default().connect(&ClientOptions::new().with_allow_http(true))?;
    let answer = runtime.block_on(client.execute(request))?;
    match answer.status().as_u16() {
        201 => Ok(()),
        status => bail!("a container: status {status}"),
    }
}

/// Puts a file into Azurite's container.
pub fn put_azure(server: SocketAddr, key: &str, content: &[u8]) -> Result<()> {
    let store = container(server)?;
    Runtime::new()?.block_on(store.put(&Key::parse(key)?, content.to_vec().into()))?;
    Ok(())
}
