//! Tests that count requests, or that touch the cache: each runs in a process and with a cache of its own.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{
    ArrowDataset, DataError, Dataset, ImageFolder, IterableDataset, LmdbDataset, RemoteOptions, RemoteStats,
    ShardListDataset, TokenFile, WebDataset, WebDatasetWriter, configure_remote, read_idx, remote_stats,
};

use crate::formats::{FORMATS, Format, images, lmdb, tokens, write};
use crate::{bucket, retries, secure, stores};

/// The name of the test that a process runs alone.
pub const ALONE: &str = "OVERDRIVE_TEST_ALONE";
const CHUNK: u64 = 4 << 20;

/// What each of several processes does for a test.
const READER: &str = "reads_tokens";

/// Its name, what its environment has besides (or lacks: an empty value), and itself, which is given the cache's folder.
pub type Test = (&'static str, &'static [(&'static str, &'static str)], fn(&Path) -> Result<()>);

const TESTS: &[Test] = &[
    ("a_whole_file_is_fetched_once_and_checked", &[], a_whole_file_is_fetched_once_and_checked),
    ("what_is_open_outlives_its_entry", &[], what_is_open_outlives_its_entry),
    ("processes_fetch_a_whole_file_once", &[], processes_fetch_a_whole_file_once),
    ("a_whole_file_must_fit_into_the_cache", &[], a_whole_file_must_fit_into_the_cache),
    ("a_file_that_failed_is_not_fetched_on", &[], a_file_that_failed_is_not_fetched_on),
    ("a_database_is_only_read", &[], a_database_is_only_read),
    ("images_take_one_list_and_one_request_each", &[], images_take_one_list_and_one_request_each),
    ("samples_of_shards_take_no_question_each", &[], samples_of_shards_take_no_question_each),
    ("requests_that_failed_are_counted", &[], requests_that_failed_are_counted),
    ("a_slow_answer_is_waited_for", &[], a_slow_answer_is_waited_for),
    ("a_list_that_fails_is_asked_for_again", &[], a_list_that_fails_is_asked_for_again),
];

/// All tests of this kind.
pub fn tests() -> impl Iterator<Item = &'static Test> {
    TESTS.iter().chain(retries::TESTS).chain(stores::ALONE).chain(secure::ALONE)
}

/// Starts this program with one of the tests.
pub fn start((name, environment, _): &Test) -> Result<()> {
    let cache = tempfile::tempdir()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(ALONE, name).env(CACHE, cache.path());
    for (variable, value) in *environment {
        match value.is_empty() {
            true => command.env_remove(variable),
            false => command.env(variable, value),
        };
    }
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Runs one of the tests in this process.
pub fn run(name: &str) -> Result<()> {
    let cache = PathBuf::from(std::env::var_os(CACHE).context("started by itself")?);
    configure_remote(RemoteOptions::default().cache(&cache))?;
    if name == READER {
        return reads_tokens();
    }
    let (_, _, test) = tests().find(|(test, ..)| *test == name).context("no such test")?;
    test(&cache)
}

/// The folder of the cache.
const CACHE: &str = "OVERDRIVE_TEST_CACHE";

pub fn format(name: &str) -> Result<&'static Format> {
    FORMATS.iter().find(|format| format.name == name).context("no such format")
}

/// What is done by `work`: bytes of files, those found in the cache, requests, and those that failed.
pub fn counted<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, RemoteStats)> {
    let before = remote_stats();
    let result = work()?;
    let mut stats = remote_stats();
    stats.fetched_bytes -= before.fetched_bytes;
    stats.cached_bytes -= before.cached_bytes;
    stats.requests -= before.requests;
    stats.failed_requests -= before.failed_requests;
    Ok((result, stats))
}

/// The cache's files that end so.
fn entries(cache: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let files = fs::read_dir(cache)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(files.into_iter().filter(|file| file.to_string_lossy().ends_with(ending)).collect())
}

/// So many other files are opened that this process keeps nothing open of those before.
fn open_others() -> Result<()> {
    let name = format!("others/{}", std::process::id());
    let is_new = !bucket().join(&name).exists();
    fs::create_dir_all(bucket().join(&name))?;
    for number in 0..40 {
        if is_new {
            fs::write(bucket().join(format!("{name}/{number}.bin")), [number; 2])?;
        }
        TokenFile::open(format!("s3://data/{name}/{number}.bin"))?;
    }
    Ok(())
}

fn a_whole_file_is_fetched_once_and_checked(cache: &Path) -> Result<()> {
    let (folder, url) = write(format("tokens")?, "checked")?;
    let expected = tokens(&folder.display().to_string())?;
    let bytes = fs::metadata(folder.join("train.bin"))?.len();
    let (found, stats) = counted(|| tokens(&url))?;
    // A question, and two chunks.
    ensure!(
        found == expected && (stats.requests, stats.fetched_bytes, stats.cached_bytes) == (3, bytes, 0),
        "{stats:?}"
    );
    ensure!(stats.pending_bytes == 0, "{stats:?}");
    open_others()?;
    let (found, stats) = counted(|| tokens(&url))?;
    ensure!(
        found == expected && (stats.requests, stats.fetched_bytes, stats.cached_bytes) == (1, 0, bytes),
        "{stats:?}"
    );
    // The second chunk is damaged, or was not written before a crash: only that one is fetched again.
    let [data, sums] = [".data", ".sums"].map(|ending| {
        let files = entries(cache, ending)?;
        files.into_iter().find(|file| fs::metadata(file).is_ok_and(|it| it.len() > 8)).context("an entry")
    });
    let (data, sums) = (File::options().write(true).open(data?)?, File::options().write(true).open(sums?)?);
    let damage: [&dyn Fn() -> Result<()>; 2] =
        [&|| Ok(data.write_all_at(b"damage", CHUNK + 5)?), &|| Ok(sums.set_len(8)?)];
    for damage in damage {
        open_others()?;
        damage()?;
        let (found, stats) = counted(|| tokens(&url))?;
        let counts = (stats.requests, stats.fetched_bytes, stats.cached_bytes);
        ensure!(found == expected && counts == (2, bytes - CHUNK, CHUNK), "{stats:?}");
    }
    Ok(())
}

fn what_is_open_outlives_its_entry(cache: &Path) -> Result<()> {
    let [(folder, url), (_, mdb), (_, table)] =
        [write(format("tokens")?, "gone")?, write(format("lmdb_file")?, "gone")?, write(format("arrow")?, "gone")?];
    let tokens = TokenFile::open(format!("{url}/train.bin"))?;
    let values = LmdbDataset::open(format!("{mdb}/train.lmdb"))?;
    let rows = ArrowDataset::open(&format!("{table}/*.arrow"))?;
    for file in entries(cache, "")? {
        fs::remove_file(file)?;
    }
    open_others()?;
    let expected = TokenFile::open(folder.join("train.bin"))?;
    ensure!(tokens.tokens(0..tokens.len())? == expected.tokens(0..tokens.len())?);
    for index in 0..values.len() {
        ensure!(values.get(index)?.value() == vec![index as u8; 100_000]);
    }
    (0..rows.len()).try_for_each(|row| rows.get(row).map(drop))?;
    Ok(())
}

/// Bytes that were given once are refused: a second process that fetched them would fail.
fn processes_fetch_a_whole_file_once(cache: &Path) -> Result<()> {
    write(format("tokens")?, "once-0")?;
    let program = std::env::current_exe()?;
    let start = || Command::new(&program).env(ALONE, READER).env(CACHE, cache).spawn();
    let children = [start()?, start()?, start()?];
    for child in children {
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
    }
    Ok(())
}

fn reads_tokens() -> Result<()> {
    let name = "once-0/tokens";
    let expected = tokens(&bucket().join(name).display().to_string())?;
    ensure!(tokens(&format!("s3://data/{name}"))? == expected);
    Ok(())
}

fn a_whole_file_must_fit_into_the_cache(cache: &Path) -> Result<()> {
    configure_remote(RemoteOptions::default().cache(cache).cache_bytes(64 << 20))?;
    fs::create_dir_all(bucket().join("large"))?;
    File::create(bucket().join("large/train.bin"))?.set_len((64 << 20) + 2)?;
    let error = TokenFile::open("s3://data/large/train.bin").err().context("it should be an error")?;
    let said = error.to_string();
    ensure!(said.contains("cache_bytes") && said.contains("s3://data/large/train.bin"), "{said}");
    Ok(())
}

/// Of 64 chunks, only those that were under way when the first one failed.
fn a_file_that_failed_is_not_fetched_on(_: &Path) -> Result<()> {
    fs::create_dir_all(bucket().join("held-0"))?;
    File::create(bucket().join("held-0/train.bin"))?.set_len(64 * CHUNK)?;
    let (_, stats) = counted(|| {
        let error = TokenFile::open("s3://data/held-0/train.bin").err().context("it should be an error")?;
        ensure!(error.to_string().contains("check the credentials"), "{error}");
        ensure!(TokenFile::open("s3://data/release").is_err());
        while remote_stats().pending_bytes > 0 {
            sleep(Duration::from_millis(5));
        }
        Ok(())
    })?;
    // Two questions, and 16 requests at a time; and as many again on a machine that is too slow for their timeouts.
    ensure!(stats.requests <= 2 + 16 + 1 + 16, "{stats:?}");
    Ok(())
}

fn a_database_is_only_read(cache: &Path) -> Result<()> {
    let (folder, url) = write(format("lmdb_folder")?, "read")?;
    let index = cache.with_extension("index");
    let open = || {
        let builder = LmdbDataset::builder(format!("{url}/train.lmdb")).index_file(&index);
        anyhow::Ok(builder.open()?.keys().map(<[u8]>::to_vec).collect::<Vec<_>>())
    };
    let keys = open()?;
    let written = fs::metadata(&index)?.ino();
    open_others()?;
    ensure!(open()? == keys && fs::metadata(&index)?.ino() == written, "the keys were listed again");
    fs::remove_file(&index)?;
    ensure!(lmdb(&url)? == lmdb(&folder.display().to_string())?);
    // The copy is as it came, and nothing lies beside it.
    let original = fs::read(folder.join("train.lmdb/data.mdb"))?;
    let copies = entries(cache, ".data")?.into_iter().filter(|file| fs::read(file).is_ok_and(|it| it == original));
    ensure!(copies.count() == 1);
    let files = entries(cache, "")?.len();
    ensure!(files == 1 + 2 * entries(cache, ".data")?.len(), "{files}");
    let error = LmdbDataset::builder(&url).index_file("s3://data/read/index").open().err().context("an error")?;
    ensure!(matches!(error, DataError::InvalidOption { option: "index_file", .. }), "{error}");
    let missing = LmdbDataset::open("s3://data/read/none").err().context("an error")?.to_string();
    ensure!(missing.contains("s3://data/read/none") && missing.contains("there is no such file"), "{missing}");
    Ok(())
}

fn images_take_one_list_and_one_request_each(_: &Path) -> Result<()> {
    let (folder, url) = write(format("images")?, "listed")?;
    let expected = images(&folder.display().to_string())?;
    let (found, stats) = counted(|| images(&url))?;
    ensure!(found == expected && expected.len() == 6, "{found:?}");
    ensure!((stats.requests, stats.cached_bytes) == (1 + 5, 0), "{stats:?}");
    let listed = ImageFolder::open(&url)?;
    open_others()?;
    let (_, stats) = counted(|| Ok((0..5).try_for_each(|image| listed.get(image).map(drop))?))?;
    let bytes: u64 = listed.files().iter().map(|(path, _)| bytes_of(path)).sum();
    ensure!((stats.requests, stats.cached_bytes) == (0, bytes), "{stats:?}");
    // An image that was replaced since is not taken for the one that was listed.
    fs::write(folder.join("dog/b.png"), "another")?;
    fs::remove_file(folder.join("dog/a.PNG"))?;
    fs::write(folder.join("cat/0.png"), "new")?;
    ensure!(ImageFolder::open(&url)?.files().len() == 5);
    let again = ImageFolder::open(&url)?;
    fs::write(folder.join("cat/0.png"), "replaced")?;
    let error = again.get(0).err().context("it should be an error")?.to_string();
    ensure!(error.contains("cat/0.png") && error.contains("changed since it was opened"), "{error}");
    // Only stores list their files, and a folder has to be one.
    let web = ImageFolder::open("http://localhost/data/train").err().context("an error")?.to_string();
    ensure!(web.contains("web servers do not list files"), "{web}");
    let none = ImageFolder::open("s3://data/listed/none").err().context("an error")?.to_string();
    ensure!(none.contains("expected a folder for every class, found no folder"), "{none}");
    Ok(())
}

fn bytes_of(path: &Path) -> u64 {
    let key = path.to_string_lossy().replace("s3://data/", "");
    fs::metadata(bucket().join(key)).map_or(0, |it| it.len())
}

fn samples_of_shards_take_no_question_each(_: &Path) -> Result<()> {
    let folder = bucket().join("any-order");
    fs::create_dir_all(&folder)?;
    let mut writer = WebDatasetWriter::builder(folder.join("%d.tar").display().to_string()).index(true).build()?;
    (0..50).try_for_each(|number| writer.write(&format!("{number}"), &[("txt", "x".repeat(number))]))?;
    writer.finish()?;
    let (samples, stats) = counted(|| Ok(ShardListDataset::new(WebDataset::open("s3://data/any-order/0.tar")?)?))?;
    // The shard and its two possible indexes, and the bytes of both.
    ensure!(stats.requests <= 5, "{stats:?}");
    open_others()?;
    let (_, stats) = counted(|| Ok((0..50).try_for_each(|sample| samples.get(sample).map(drop))?))?;
    ensure!(stats.requests == 0, "{stats:?}");
    // Whoever opens the shard anew sees what is there today.
    let mut writer = WebDatasetWriter::builder(folder.join("%d.tar").display().to_string()).index(true).build()?;
    writer.write("new", &[("txt", "new")])?;
    writer.finish()?;
    let new = WebDataset::open("s3://data/any-order/0.tar")?;
    ensure!(new.open_shard(0, 0)?.count() == 1);
    Ok(())
}

fn requests_that_failed_are_counted(_: &Path) -> Result<()> {
    for (fault, failed) in [("broken-2", 2 * 3), ("busy-1", 3), ("short-2", 2 * 2), ("plain", 0)] {
        let (_, url) = write(format("tokens")?, &format!("{fault}/counted"))?;
        let (_, stats) = counted(|| tokens(&url))?;
        ensure!((stats.requests, stats.failed_requests) == (3 + failed, failed), "{fault}: {stats:?}");
    }
    let (_, url) = write(format("tokens")?, "cut-1/counted")?;
    let (_, stats) = counted(|| tokens(&url))?;
    ensure!(stats.failed_requests >= 2 && stats.requests == 3 + stats.failed_requests, "{stats:?}");
    Ok(())
}

/// It takes longer than the 30 s that `object_store` gives a request unless it is told otherwise.
fn a_slow_answer_is_waited_for(_: &Path) -> Result<()> {
    let folder = bucket().join("slow-34");
    fs::create_dir_all(&folder)?;
    // Its content comes in pieces of two bytes.
    fs::write(folder.join("sixty.idx"), [&[0, 0, 8, 1, 0, 0, 0, 60][..], &[7; 60]].concat())?;
    let (read, stats) = counted(|| Ok(read_idx("s3://data/slow-34/sixty.idx")?))?;
    ensure!(read.data == [7; 60]);
    ensure!((stats.requests, stats.failed_requests) == (2, 0), "{stats:?}");
    Ok(())
}

fn a_list_that_fails_is_asked_for_again(_: &Path) -> Result<()> {
    for fault in ["broken-2", "busy-2", "cut-2", "short-2"] {
        let (folder, url) = write(format("images")?, &format!("{fault}/listed"))?;
        ensure!(images(&url)? == images(&folder.display().to_string())?, "{fault}");
    }
    Ok(())
}
