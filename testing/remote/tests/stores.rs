//! Google's and Azure's stores, as other programs give them on the loopback; without these the tests are skipped.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{
    DataError, Dataset, ImageFolder, ParquetDataset, RemoteOptions, ShardListDataset, TfRecordDataset, TfRecordWriter,
    WebDataset, configure_remote, expand_shards, read_idx,
};

use crate::alone::{self, format};
use crate::formats::{FORMATS, PASSING, STAYING, fails, write};
use crate::{bucket, files, services};

/// A store of another program.
pub struct Store {
    pub name: &'static str,
    scheme: &'static str,
    /// The variable with the server's address, without a proxy.
    pub address: &'static str,
    put: fn(SocketAddr, &str, &[u8]) -> Result<()>,
    /// The variable and the name of its program.
    pub program: (&'static str, &'static str),
}

pub const STORES: &[Store] = &[GOOGLE, AZURE];

pub const GOOGLE: Store = Store {
    name: "google",
    scheme: "gs",
    address: "OVERDRIVE_TEST_GOOGLE",
    put: services::put_google,
    program: services::GOOGLE,
};

pub const AZURE: Store = Store {
    name: "azure",
    scheme: "az",
    address: "OVERDRIVE_TEST_AZURE",
    put: services::put_azure,
    program: services::AZURE,
};

type Test = (&'static str, fn(&Store) -> Result<()>);

/// Each with each store.
pub const TESTS: &[Test] = &[
    ("reads_every_format", reads_every_format),
    ("faults_pass_or_are_errors", faults_pass_or_are_errors),
    ("lists_ranges_and_resumes", lists_ranges_and_resumes),
    ("what_is_missing_or_changed_is_an_error", what_is_missing_or_changed_is_an_error),
];

pub const ALONE: &[alone::Test] = &[
    ("s3_refuses_wrong_credentials", &[("AWS_SECRET_ACCESS_KEY", "wrong")], |cache| refuses("s3", cache)),
    (
        "s3_without_credentials_says_what_is_read",
        &[("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", ""), ("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")],
        |cache| refuses("s3", cache),
    ),
    ("azure_refuses_wrong_credentials", &[("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")], |cache| refuses("az", cache)),
    ("azure_needs_an_account", &[("AZURE_STORAGE_USE_EMULATOR", "false")], |cache| refuses("az", cache)),
    ("google_needs_the_file_of_its_key", &[("GOOGLE_SERVICE_ACCOUNT", "/none.json")], |cache| refuses("gs", cache)),
];

impl Store {
    pub fn is_here(&self) -> bool {
        std::env::var_os(self.address).is_some()
    }

    fn url(&self, name: &str) -> String {
        format!("{}://data/{name}", self.scheme)
    }

    /// Puts a folder of the disk into the store, by the same name.
    fn publish(&self, name: &str) -> Result<()> {
        let server = std::env::var(self.address)?.parse()?;
        let mut left = vec![bucket().join(name)];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?);
                continue;
            }
            let key = path.strip_prefix(bucket())?.to_str().context("UTF-8")?;
            (self.put)(server, key, &fs::read(&path)?)?;
        }
        Ok(())
    }
}

fn reads_every_format(store: &Store) -> Result<()> {
    for format in FORMATS {
        let name = format!("{}/whole", store.scheme);
        let (folder, _) = write(format, &name)?;
        let name = format!("{name}/{}", format.name);
        store.publish(&name)?;
        let expected = (format.samples)(&folder.display().to_string())?;
        let found = (format.samples)(&store.url(&name)).context(format.name)?;
        ensure!(
            found == expected,
            "{}: {:?}",
            format.name,
            found.iter().zip(&expected).find(|(one, other)| one != other)
        );
    }
    Ok(())
}

fn faults_pass_or_are_errors(store: &Store) -> Result<()> {
    for name in ["tar", "tokens", "images"] {
        let format = format(name)?;
        for fault in PASSING {
            let fault = format!("{}/{fault}", store.scheme);
            let (folder, _) = write(format, &fault)?;
            store.publish(&format!("{fault}/{name}"))?;
            let found = (format.samples)(&store.url(&format!("{fault}/{name}"))).context(fault.clone())?;
            ensure!(found == (format.samples)(&folder.display().to_string())?, "{fault}");
        }
        for (fault, what) in STAYING {
            let fault = format!("{}/{fault}", store.scheme);
            write(format, &fault)?;
            store.publish(&format!("{fault}/{name}"))?;
            fails(format, &store.url(&format!("{fault}/{name}")), what).context(fault)?;
        }
    }
    Ok(())
}

fn lists_ranges_and_resumes(store: &Store) -> Result<()> {
    let name = format!("{}/shards", store.scheme);
    let expected = files::write(&name, 3)?;
    store.publish(&name)?;
    for pattern in ["*.tar", "{00..02}.tar", "0[012].tar"] {
        let files = expand_shards(&store.url(&format!("{name}/{pattern}")))?;
        ensure!(files.len() == 3, "{files:?}");
        ensure!(files::are_equal(&files::all(&WebDataset::from_files(files)?)?, &expected), "{pattern}");
    }
    files::resumes(&store.url(&format!("{name}/*.tar")), &expected)?;
    let listed = expand_shards(&store.url(&format!("{}/sh*/*.tar", store.scheme)))?;
    ensure!(listed.len() == 3, "{listed:?}");

    // By an index, in any order, from a file of several chunks.
    let name = format!("{}/ranges", store.scheme);
    fs::create_dir_all(bucket().join(&name))?;
    let mut writer = TfRecordWriter::with_index(bucket().join(&name).join("0.tfrecord"))?;
    (0..20_u8).try_for_each(|number| writer.write(&vec![number; 500_000]))?;
    writer.finish()?;
    store.publish(&name)?;
    let records = ShardListDataset::new(TfRecordDataset::open(&store.url(&format!("{name}/0.tfrecord")))?)?;
    for number in [19, 0, 10] {
        ensure!(records.get(number)?.bytes() == vec![number as u8; 500_000]);
    }
    Ok(())
}

fn what_is_missing_or_changed_is_an_error(store: &Store) -> Result<()> {
    let name = format!("{}/missing", store.scheme);
    let folder = bucket().join(&name);
    files::write(&name, 1)?;
    store.publish(&name)?;
    let url = |file: &str| store.url(&format!("{name}/{file}"));
    for missing in [url("none.tar"), store.url("none.tar").replace("/data/", "/nowhere/")] {
        let said = files::told(WebDataset::open(&missing))?;
        ensure!(said.contains(&missing) && said.contains("there is no such file"), "{said}");
    }
    let said = files::told(read_idx(url("none.idx")))?;
    ensure!(said.contains("none.idx") && said.contains("there is no such file"), "{said}");
    let unmatched = files::told(WebDataset::open(&url("*.none")))?;
    ensure!(unmatched.contains("files that match"), "{unmatched}");
    let none = files::told(ImageFolder::open(url("none")))?;
    ensure!(none.contains("expected a folder for every class, found no folder"), "{none}");

    let dataset = WebDataset::open(&url("00.tar"))?;
    let mut bytes = fs::read(folder.join("00.tar"))?;
    let last = bytes.len() - 2000;
    bytes[last] ^= 1;
    fs::write(folder.join("00.tar"), &bytes)?;
    store.publish(&name)?;
    let error = files::all(&dataset).err().context("it should be an error")?.to_string();
    ensure!(error.contains("changed since it was opened") && error.contains(&url("00.tar")), "{error}");
    // Whoever opens it anew sees it as it is.
    let expected = files::all(&WebDataset::open(&folder.join("00.tar").display().to_string())?)?;
    ensure!(files::are_equal(&files::all(&WebDataset::open(&url("00.tar"))?)?, &expected));
    Ok(())
}

/// An error that names the file and where credentials are read from, whether a file is read or files are listed.
fn refuses(scheme: &str, cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).max_retries(1))?;
    for name in ["numbers.parquet", "*.parquet"] {
        let url = format!("{scheme}://data/{name}");
        let error = ParquetDataset::open(&url).err().context("it should be an error")?;
        ensure!(matches!(error, DataError::Remote { .. }), "{error:?}");
        let said = error.to_string();
        ensure!(said.contains(&url) && said.contains("check the credentials"), "{said}");
    }
    Ok(())
}
