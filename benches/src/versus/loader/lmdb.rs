//! Reading values of an LMDB database that is in the page cache.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use lmdb::{Database, Environment, EnvironmentFlags, Transaction, WriteFlags};
use overdrive::dataload::{Dataset, LmdbDataset, RandomSampler, Sampler};
use overdrive_bench_report::{Ratio, Target};

use super::Bench;
use crate::versus::turns::{Case, Turns};

const GET: &str = "40 kB values of a cached LMDB database in random order, each copied, one thread";
const RAW: &str = "the same beside copies out of the memory map, with nothing looked up";
const VALUES: usize = 4000;
const BYTES: usize = 40_000;
const PEER: &str = "lmdb-rkv, get and copy in one transaction";

pub fn measure(bench: &mut Bench) -> Result<()> {
    let path = make(&bench.work, "values", VALUES, BYTES)?;
    let dataset = LmdbDataset::open(&path)?;
    let order = RandomSampler::new(VALUES, 0).order(0);
    let (environment, database) = open(&path)?;
    let keys: Vec<String> = order.iter().map(|&number| key(number)).collect();
    let transaction = environment.begin_ro_txn()?;
    let values: Vec<&[u8]> = keys.iter().map(|key| transaction.get(database, key)).collect::<Result<_, _>>()?;

    let mut turns = Turns::default();
    turns.ours("ours", || {
        rate(|| {
            order.iter().try_for_each(|&index| {
                black_box(dataset.get(index)?.into_value());
                Ok(())
            })
        })
    });
    turns.ours(PEER, || {
        rate(|| {
            let transaction = environment.begin_ro_txn()?;
            keys.iter().try_for_each(|key| {
                black_box(transaction.get(database, key)?.to_vec());
                Ok(())
            })
        })
    });
    turns.ours("the memory map", || {
        rate(|| {
            values.iter().for_each(|value| drop(black_box(value.to_vec())));
            Ok(())
        })
    });
    turns.take("lmdb", bench.pairs)?;
    bench.versions.insert("lmdb-rkv".to_owned(), "0.14.0".to_owned());
    let case = |text| Case { text, unit: "values/s", ratio: Ratio::ShareOfRate };
    turns.compare(&mut bench.findings, case(GET), ("ours", PEER), Some(Target::AtLeast(0.95)))?;
    turns.compare(&mut bench.findings, case(RAW), ("ours", "the memory map"), None)
}

/// Values per second. Each value is read ten times.
fn rate(mut epoch: impl FnMut() -> Result<()>) -> Result<f64> {
    const EPOCHS: usize = 10;
    let started = Instant::now();
    for _ in 0..EPOCHS {
        epoch()?;
    }
    Ok((EPOCHS * VALUES) as f64 / started.elapsed().as_secs_f64())
}

/// The key of an entry. Keys have the order of their numbers.
fn key(number: usize) -> String {
    format!("{number:08}")
}

/// Opens a database as our dataset does: read-only, without locks.
pub fn open(path: &Path) -> Result<(Environment, Database)> {
    let flags = EnvironmentFlags::READ_ONLY | EnvironmentFlags::NO_SUB_DIR | EnvironmentFlags::NO_LOCK;
    let environment = Environment::new().set_flags(flags | EnvironmentFlags::NO_TLS).open(path)?;
    let database = environment.open_db(None)?;
    Ok((environment, database))
}

/// Writes a database into `work` with lmdb-rkv, unless it exists.
pub fn make(work: &Path, name: &str, entries: usize, bytes: usize) -> Result<PathBuf> {
    let path = work.join(format!("{name}.mdb"));
    if path.exists() {
        return Ok(path);
    }
    eprintln!("writing {entries} entries to {}", path.display());
    let aside = path.with_extension("part");
    _ = std::fs::remove_file(&aside);
    let flags = EnvironmentFlags::NO_SUB_DIR | EnvironmentFlags::NO_LOCK | EnvironmentFlags::NO_SYNC;
    let size = entries * (bytes + 200) * 2;
    let environment = Environment::new().set_flags(flags).set_map_size(size.next_multiple_of(1 << 20)).open(&aside)?;
    let database = environment.open_db(None)?;
    for start in (0..entries).step_by(10_000) {
        let mut transaction = environment.begin_rw_txn()?;
        for number in start..entries.min(start + 10_000) {
            let value: Vec<u8> = (0..bytes).map(|position| (position * 31 + number) as u8).collect();
            transaction.put(database, &key(number), &value, WriteFlags::APPEND).context("cannot write an entry")?;
        }
        transaction.commit()?;
    }
    drop(environment);
    std::fs::rename(&aside, &path)?;
    Ok(path)
}
