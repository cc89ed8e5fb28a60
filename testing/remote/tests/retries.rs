//! A server that does not get well again is an error after as many requests as the options say.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{
    DataError, DataLoader, ImageFolder, OnError, RemoteOptions, WebDataset, WebSample, configure_remote, read_idx,
};

use crate::alone::{self, counted, format};
use crate::formats::{images, write};
use crate::{bucket, files};

pub const TESTS: &[alone::Test] = &[
    ("endless_errors_of_a_server_end_within_the_limit", &[], endless_errors_of_a_server_end_within_the_limit),
    ("a_server_that_cannot_be_reached_is_an_error", &[], a_server_that_cannot_be_reached_is_an_error),
    ("a_server_that_never_answers_is_an_error", &[], a_server_that_never_answers_is_an_error),
    ("a_long_explanation_is_not_read", &[], a_long_explanation_is_not_read),
    ("a_loader_ends_where_its_server_stays_down", &[], a_loader_ends_where_its_server_stays_down),
];

/// That it fails, after so many requests, which have all failed but so many; what is said of it.
fn fails<T>(what: &str, requests: u64, good: u64, work: impl FnOnce() -> Result<T, DataError>) -> Result<String> {
    let (error, stats) = counted(|| work().err().with_context(|| format!("{what}: it should be an error")))?;
    ensure!(matches!(error.innermost(), DataError::Remote { .. }), "{what}: {error:?}");
    ensure!((stats.requests, stats.failed_requests) == (requests, requests - good), "{what}: {stats:?}");
    Ok(error.to_string())
}

fn endless_errors_of_a_server_end_within_the_limit(cache: &Path) -> Result<()> {
    let options = || RemoteOptions::default().cache(cache);
    let limits = [
        (0, options().max_retries(0)),
        (3, options().max_retries(3)),
        (0, options().max_retries(usize::MAX).retry_timeout(Duration::ZERO)),
    ];
    for (retries, options) in limits {
        configure_remote(options)?;
        for status in [500, 503] {
            for (fault, good) in [(format!("down-{status}"), 0), (format!("failing-{status}"), 1)] {
                let folder = bucket().join(&fault);
                fs::create_dir_all(&folder)?;
                fs::write(folder.join("three.idx"), [0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])?;
                let url = format!("s3://data/{fault}/three.idx");
                let said = fails(&fault, good + 1 + retries, good, || read_idx(&url))?;
                ensure!(said.contains(&url) && said.contains(&status.to_string()), "{said}");
                let (_, listed) = write(format("images")?, &fault)?;
                let said = fails(&fault, 1 + retries, 0, || ImageFolder::open(&listed))?;
                ensure!(said.contains(&listed) && said.contains(&status.to_string()), "{said}");
            }
        }
        // It is well again.
        let (folder, url) = write(format("images")?, "up")?;
        ensure!(images(&url)? == images(&folder.display().to_string())?);
    }
    Ok(())
}

fn a_server_that_cannot_be_reached_is_an_error(cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).max_retries(2))?;
    // Nobody listens at this end of a connection, nor can anybody while it is there.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let connection = TcpStream::connect(listener.local_addr()?)?;
    let url = format!("http://{}/three.idx", connection.local_addr()?);
    let said = fails("gone", 3, 0, || read_idx(&url))?;
    ensure!(said.contains(&url) && said.to_lowercase().contains("connection refused"), "{said}");
    Ok(())
}

/// After the half minute that a request may take without an answer.
fn a_server_that_never_answers_is_an_error(cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).max_retries(0))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/three.idx", listener.local_addr()?);
    let said = fails("mute", 1, 0, || read_idx(&url))?;
    ensure!(said.contains(&url) && said.contains("timed out"), "{said}");
    Ok(())
}

fn a_long_explanation_is_not_read(_: &Path) -> Result<()> {
    fs::create_dir_all(bucket().join("wordy-0"))?;
    fs::write(bucket().join("wordy-0/three.idx"), [0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])?;
    let url = "s3://data/wordy-0/three.idx";
    let (error, stats) = counted(|| read_idx(url).err().context("it should be an error"))?;
    let said = error.to_string();
    ensure!(said.contains(url) && said.contains("check the credentials") && said.len() < 1 << 16, "{:.999}", said);
    ensure!(stats.fetched_bytes < 1 << 20 && stats.requests == 2, "{stats:?}");
    Ok(())
}

fn a_loader_ends_where_its_server_stays_down(cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).max_retries(1))?;
    files::write("failing-503/shards", 3)?;
    for workers in [0, 2] {
        let stream = WebDataset::open("s3://data/failing-503/shards/{00..02}.tar")?;
        let loader = DataLoader::stream(stream).batch_size(5).on_error(OnError::Skip).num_workers(workers);
        let loader = loader.collate(|samples: Vec<WebSample>| Ok(samples)).build()?;
        let mut epoch = loader.iter();
        let error = epoch.next().context("a batch")?.err().context("it should be an error")?;
        ensure!(matches!(error.innermost(), DataError::Remote { .. }), "{error:?}");
        ensure!(epoch.next().is_none() && loader.faults().is_empty());
    }
    Ok(())
}
