//! Remote files, read from an S3 server through a proxy with faults.
//!
//! The program starts the server, and then itself with the address in its environment, as a user would give it.

mod alone;
mod convert;
mod files;
mod formats;
mod lists;
mod proxy;
mod retries;
mod secure;
mod server;
mod services;
mod stores;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_dataload::{RemoteOptions, configure_remote};
use tokio_rustls::rustls::crypto::ring;

use crate::stores::{STORES, Store};

/// The folder of buckets.
const ROOT: &str = "OVERDRIVE_TEST_ROOT";
/// The address of a server that asks for no credentials.
const WEB: &str = "OVERDRIVE_TEST_WEB";

/// The folder whose names are keys of the bucket `data`.
fn bucket() -> PathBuf {
    PathBuf::from(std::env::var_os(ROOT).expect("started by itself")).join("data")
}

fn web() -> String {
    std::env::var(WEB).expect("started by itself")
}

fn main() -> Result<ExitCode> {
    if let Ok(name) = std::env::var(alone::ALONE) {
        alone::run(&name)?;
        return Ok(ExitCode::SUCCESS);
    }
    if std::env::var_os(ROOT).is_some() {
        return tests();
    }
    let root = tempfile::tempdir()?;
    std::fs::create_dir(root.path().join("data"))?;
    let [s3, web] = [true, false].map(|it| proxy::start(server::start(root.path(), it)?));
    // Whoever uses TLS chooses its encryption.
    _ = ring::default_provider().install_default();
    let web = web?;
    let [(secure, certificate), (untrusted, _)] = [secure::start(web)?, secure::start(web)?];
    std::fs::write(root.path().join("certificate.pem"), certificate)?;
    let (google, azure) = (services::google()?, services::azure()?);
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(std::env::args_os().skip(1))
        .env(ROOT, root.path())
        .env(WEB, format!("http://{web}"))
        .env(secure::SECURE, secure.to_string())
        .env(secure::UNTRUSTED, untrusted.to_string())
        .env("SSL_CERT_FILE", root.path().join("certificate.pem"))
        .env("AWS_ENDPOINT_URL", format!("http://{}", s3?))
        .env("AWS_ALLOW_HTTP", "true")
        // Of other programs.
        .env("TOKEN", "a secret")
        .env("ENDPOINT", "http://127.0.0.1:9")
        .env("NOT_UTF8", <std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(vec![0xff]))
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", server::KEY.0)
        .env("AWS_SECRET_ACCESS_KEY", server::KEY.1);
    if let Some(google) = &google {
        command
            .env(stores::GOOGLE.address, google.address.to_string())
            .env("GOOGLE_BASE_URL", format!("http://{}", proxy::start(google.address)?))
            .env("GOOGLE_SKIP_SIGNATURE", "true");
    }
    if let Some(azure) = &azure {
        command
            .env(stores::AZURE.address, azure.address.to_string())
            .env("AZURITE_BLOB_STORAGE_URL", format!("http://{}", proxy::start(azure.address)?))
            .env("AZURE_STORAGE_USE_EMULATOR", "true");
    }
    Ok(ExitCode::from(command.status()?.code().and_then(|code| code.try_into().ok()).unwrap_or(1)))
}

fn tests() -> Result<ExitCode> {
    let cache = tempfile::tempdir()?;
    configure_remote(RemoteOptions::default().cache(cache.path()))?;
    let trial = |name: &str, test: Box<dyn FnOnce() -> Result<()> + Send>| {
        Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:?}"))))
    };
    _ = ring::default_provider().install_default();
    let files = [files::TESTS, secure::TESTS, convert::TESTS, lists::TESTS].into_iter().flatten();
    let files = files.map(|&(name, test)| trial(name, Box::new(test)));
    let formats = formats::FORMATS
        .iter()
        .map(|format| trial(&format!("{}_by_url", format.name), Box::new(move || formats::test(format))));
    let alone = alone::tests().map(|test| {
        let store = STORES.iter().find(|store| test.0.starts_with(store.name));
        let trial = trial(test.0, Box::new(move || alone::start(test)));
        trial.with_ignored_flag(!store.is_none_or(Store::is_here))
    });
    let of_stores = STORES.iter().flat_map(|store| {
        stores::TESTS.iter().map(move |&(name, test)| {
            let trial = trial(&format!("{}_{name}", store.name), Box::new(move || test(store)));
            trial.with_ignored_flag(!store.is_here())
        })
    });
    for Store { program: (variable, name), .. } in STORES.iter().filter(|store| !store.is_here()) {
        println!("skipped: no {name}; {variable} names it");
    }
    let trials = files.chain(formats).chain(alone).chain(of_stores).collect();
    let mut arguments = Arguments::from_args();
    // Most of the time they wait before a request is made again.
    arguments.test_threads.get_or_insert(16);
    let conclusion = libtest_mimic::run(&arguments, trials);
    Ok(if conclusion.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
