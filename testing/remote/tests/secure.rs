//! Servers behind TLS. The tests' certificate is the only one that is trusted: its file is named by `SSL_CERT_FILE`.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{DataError, RemoteOptions, WebDataset, configure_remote, read_idx};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::alone::{self, counted};
use crate::{bucket, files};

/// The addresses of the web server behind TLS: with the certificate that is trusted, and with another.
pub const SECURE: &str = "OVERDRIVE_TEST_SECURE";
pub const UNTRUSTED: &str = "OVERDRIVE_TEST_UNTRUSTED";

pub const TESTS: &[files::Test] = &[
    ("https_servers_are_read", https_servers_are_read),
    ("faults_over_https_are_those_over_http", faults_over_https_are_those_over_http),
];

pub const ALONE: &[alone::Test] =
    &[("a_certificate_that_is_not_trusted_is_named", &[], a_certificate_that_is_not_trusted_is_named)];

/// Listens with a certificate of its own, and passes all bytes on to the server; with the certificate's PEM.
pub fn start(server: SocketAddr) -> Result<(SocketAddr, String)> {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()])?;
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![cert.der().clone()], key)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        runtime.block_on(async move {
            while let Ok((client, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut client = acceptor.accept(client).await?;
                    let mut server = TcpStream::connect(server).await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
    });
    Ok((address, cert.pem()))
}

fn url(variable: &str, name: &str) -> Result<String> {
    let address: SocketAddr = std::env::var(variable)?.parse()?;
    Ok(format!("https://localhost:{}/data/{name}", address.port()))
}

fn https_servers_are_read() -> Result<()> {
    let expected = files::write("secure", 2)?;
    let shards = url(SECURE, "secure/{00..01}.tar")?;
    ensure!(files::are_equal(&files::all(&WebDataset::open(&shards)?)?, &expected));
    files::resumes(&shards, &expected)?;
    let missing = files::told(WebDataset::open(&url(SECURE, "secure/none.tar")?))?;
    ensure!(missing.contains("secure/none.tar") && missing.contains("there is no such file"), "{missing}");
    let listed = files::told(WebDataset::open(&url(SECURE, "secure/*.tar")?))?;
    ensure!(listed.contains("web servers do not list files"), "{listed}");
    Ok(())
}

fn faults_over_https_are_those_over_http() -> Result<()> {
    for fault in ["cut-1", "short-1", "broken-1"] {
        let name = format!("{fault}/secure");
        let expected = files::write(&name, 1)?;
        let found = files::all(&WebDataset::open(&url(SECURE, &format!("{name}/00.tar"))?)?).context(fault)?;
        ensure!(files::are_equal(&found, &expected), "{fault}");
    }
    let refused = files::told(read_idx(url(SECURE, "refused-0/x.idx")?))?;
    ensure!(refused.contains("refused-0/x.idx") && refused.contains("check the credentials"), "{refused}");
    Ok(())
}

fn a_certificate_that_is_not_trusted_is_named(cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).max_retries(1))?;
    fs::create_dir_all(bucket().join("untrusted"))?;
    fs::write(bucket().join("untrusted/three.idx"), [0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])?;
    ensure!(read_idx(url(SECURE, "untrusted/three.idx")?)?.data == [7, 8, 9]);
    let (error, stats) = counted(|| read_idx(url(UNTRUSTED, "untrusted/three.idx")?).err().context("an error"))?;
    ensure!(matches!(error, DataError::Remote { .. }) && stats.requests <= 2, "{error:?} {stats:?}");
    let said = error.to_string();
    ensure!(said.contains("untrusted/three.idx") && said.contains("certificate"), "{said}");
    Ok(())
}
