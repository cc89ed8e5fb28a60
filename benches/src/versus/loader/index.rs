//! 1.2 million entries, about as many as ImageNet: the time to scan them, and to get the first batch after that.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lmdb::{Cursor, Transaction};
use overdrive::dataload::{DataError, DataLoader, Dataset, EncodedImage, ImageFolder, LmdbDataset, LmdbSample};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::{Bench, WORKERS, lmdb as values, path_text, startup::first_batch};
use crate::versus::turns::{Case, Turns};

const LMDB_SCAN: &str = "scan of an LMDB database of 1.2 million entries, cached, its tree checked";
const LMDB_FIRST: &str = "first shuffled batch of 64 values of an LMDB database of 1.2 million entries, opened with \
                          its index, 2 workers";
const SCAN: &str = "scan of a folder of 1.2 million files in 1,000 classes, cached";
const FIRST: &str = "first shuffled batch of 64 undecoded files, 1.2 million files scanned before, 2 workers";
const CLASSES: usize = 1000;
const FILES_A_CLASS: usize = 1200;
const BATCH_SIZE: usize = 64;
/// The limit of the time to the first batch, in milliseconds.
const ALLOWED: f64 = 50.0;

pub fn measure(bench: &mut Bench) -> Result<()> {
    database(bench)?;
    folder(bench)
}

fn database(bench: &mut Bench) -> Result<()> {
    let path = values::make(&bench.work, "index", CLASSES * FILES_A_CLASS, 100)?;
    let index = path.with_extension("mdb.index");
    LmdbDataset::builder(&path).index_file(&index).open()?;
    let mut turns = Turns::default();
    turns.ours("our scan", || {
        let started = Instant::now();
        LmdbDataset::open(&path)?;
        Ok(started.elapsed().as_secs_f64())
    });
    turns.ours("lmdb-rkv, a cursor and copies of the keys", || {
        let started = Instant::now();
        let (environment, database) = values::open(&path)?;
        let transaction = environment.begin_ro_txn()?;
        let mut cursor = transaction.open_ro_cursor(database)?;
        let keys: Vec<Vec<u8>> =
            cursor.iter().map(|entry| entry.map(|(key, _)| key.to_vec())).collect::<Result<_, _>>()?;
        ensure!(keys.len() == CLASSES * FILES_A_CLASS, "{} keys", keys.len());
        Ok(started.elapsed().as_secs_f64())
    });
    turns.take("index, scan of a database", bench.pairs.min(3))?;
    let case = Case { text: LMDB_SCAN, unit: "s", ratio: Ratio::TimesFasterByTime };
    turns.compare(&mut bench.findings, case, ("our scan", "lmdb-rkv, a cursor and copies of the keys"), None)?;

    let sizes = |values: Vec<LmdbSample>| Ok(values.iter().map(|sample| sample.value().len()).collect::<Vec<_>>());
    let loader = || {
        let dataset = LmdbDataset::builder(&path).index_file(&index).open()?;
        let builder = DataLoader::builder(dataset).batch_size(BATCH_SIZE).shuffle(true).num_workers(WORKERS);
        builder.collate(sizes).build()
    };
    let mut turns = Turns::default();
    turns.ours("first", || first_batch(loader));
    turns.ours("the 50 ms allowed", || Ok(ALLOWED));
    turns.take("index, first batch of a database", bench.pairs)?;
    let case = Case { text: LMDB_FIRST, unit: "ms", ratio: Ratio::ShareOfCost };
    turns.compare(&mut bench.findings, case, ("first", "the 50 ms allowed"), Some(Target::AtMost(1.0)))
}

fn folder(bench: &mut Bench) -> Result<()> {
    let folder = make(&bench.work).context("cannot make 1.2 million files")?;
    let options = json!({ "folder": path_text(&folder), "batch_size": BATCH_SIZE, "workers": WORKERS });
    let program = bench.torch(include_str!("../../../peers/loader_index.py"), &options);
    let pairs = bench.pairs.min(3);

    let files = RefCell::new(None);
    let mut turns = Turns::default();
    turns.ours("our scan", || {
        let started = Instant::now();
        *files.borrow_mut() = Some(Arc::new(ImageFolder::open(&folder)?));
        Ok(started.elapsed().as_secs_f64())
    });
    turns.peer("torchvision's ImageFolder", &program, |peer| peer.measure("scan", 1));
    turns.take("index, scan", pairs)?;
    let case = Case { text: SCAN, unit: "s", ratio: Ratio::TimesFasterByTime };
    turns.compare(&mut bench.findings, case, ("our scan", "torchvision's ImageFolder"), None)?;
    drop(turns);

    let files = files.into_inner().context("nothing was scanned")?;
    let mut turns = Turns::default();
    turns.ours("first", || first_batch(|| loader(&files)));
    turns.peer("DataLoader", &program, |peer| Ok(1e3 * peer.measure("first", 1)?));
    turns.ours("the 50 ms allowed", || Ok(ALLOWED));
    turns.take("index, first batch", bench.pairs)?;
    let case = Case { text: FIRST, unit: "ms", ratio: Ratio::ShareOfCost };
    turns.compare(&mut bench.findings, case, ("first", "the 50 ms allowed"), Some(Target::AtMost(1.0)))?;
    let case = Case { ratio: Ratio::TimesFasterByTime, ..case };
    turns.compare(&mut bench.findings, case, ("first", "DataLoader"), None)
}

fn loader(files: &Arc<ImageFolder>) -> Result<DataLoader<Vec<usize>>, DataError> {
    debug_assert_eq!(files.len(), CLASSES * FILES_A_CLASS);
    let sizes = |files: Vec<(EncodedImage, i64)>| Ok(files.iter().map(|(image, _)| image.bytes.len()).collect());
    let builder = DataLoader::builder(files.clone()).batch_size(BATCH_SIZE).shuffle(true).num_workers(WORKERS);
    builder.collate(sizes).build()
}

/// Makes the folder in `work`, unless it exists. The files of a class are hard links to one file: this saves disk
/// space, and a scan of the folder sees no difference.
fn make(work: &Path) -> Result<PathBuf> {
    let folder = work.join("index");
    if folder.is_dir() {
        return Ok(folder);
    }
    eprintln!("making {} file names in {}", CLASSES * FILES_A_CLASS, folder.display());
    let aside = work.join("index.part");
    if aside.exists() {
        fs::remove_dir_all(&aside)?;
    }
    for class in 0..CLASSES {
        let class = aside.join(format!("n{class:08}"));
        fs::create_dir_all(&class)?;
        let file = |number: usize| class.join(format!("{number:08}.jpg"));
        fs::write(file(0), [0; 1000])?;
        for number in 1..FILES_A_CLASS {
            fs::hard_link(file(0), file(number))?;
        }
    }
    fs::rename(&aside, &folder)?;
    Ok(folder)
}
