//! Photographs in tar shards of a server whose answers come late, beside the same shards on the disk.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{
    DataError, DataLoader, Dataset, EncodedImage, ImageFolder, IterableDataset, RemoteOptions, WebDataset,
    WebDatasetWriter, WebSample, configure_remote,
};
use overdrive_bench_report::{Ratio, Target};
use overdrive_remote_tests::server;

use super::images::{self, Batch};
use super::{Bench, WORKERS, path_text};
use crate::versus::turns::{Case, Turns};

const CASE: &str = photographs!(
    "photographs in 8 interleaved tar shards of a server on this machine, each answer 40 ms late, nothing cached, 2 workers"
);
const LATE: Duration = Duration::from_millis(40);
const STREAMS: usize = 8;
/// How often each photograph is in the shards, which then have 45 MB or so.
const COPIES: usize = 8;
const BATCH_SIZE: usize = 64;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(CASE) else { return Ok(()) };
    let folder = bench.work.join("streams");
    if !folder.is_dir() {
        write(&photos, &folder)?;
    }
    let address = server::start_late(&bench.work, false, LATE)?;
    let shards = format!("{:06}..{:06}", 0, STREAMS - 1);
    let [disk, server] =
        [path_text(&folder), format!("http://{address}/streams")].map(|place| format!("{place}/{{{shards}}}.tar"));

    let mut turns = Turns::default();
    turns.ours("the server", || {
        let cache = tempfile::tempdir_in(&bench.work)?;
        configure_remote(RemoteOptions::default().cache(cache.path()))?;
        epoch(&server)
    });
    turns.ours("the disk", || epoch(&disk));
    turns.take("streams", bench.pairs)?;
    let case = Case { text: CASE, unit: "images/s", ratio: Ratio::ShareOfRate };
    turns.compare(&mut bench.findings, case, ("the server", "the disk"), Some(Target::AtLeast(0.9)))
}

fn write(photos: &Path, folder: &Path) -> Result<()> {
    let photos = ImageFolder::open(photos)?;
    let samples = COPIES * Dataset::len(&photos);
    eprintln!("writing {samples} photographs to shards in {}", folder.display());
    let aside = tempfile::tempdir_in(folder.parent().context("a folder of its own")?)?;
    let pattern = path_text(&aside.path().join("%06d.tar"));
    let mut writer = WebDatasetWriter::builder(pattern).max_count(samples.div_ceil(STREAMS) as u64).build()?;
    for number in 0..samples {
        let (photo, _) = photos.get(number % Dataset::len(&photos))?;
        writer.write(&format!("{number:06}"), &[("jpg", &*photo.bytes), ("cls", b"0".as_slice())])?;
    }
    let written = writer.finish()?.len();
    ensure!(written == STREAMS, "{written} shards in place of {STREAMS}");
    Ok(fs::rename(aside.keep(), folder)?)
}

/// Images per second of an epoch, with opening the shards.
fn epoch(shards: &str) -> Result<f64> {
    let started = Instant::now();
    let samples = WebDataset::open(shards)?.map(|sample: WebSample| {
        let jpg = sample.get("jpg").ok_or_else(|| DataError::other("no jpg"))?;
        Ok((EncodedImage::new(jpg, sample.key()), 0_i64))
    });
    let builder = DataLoader::stream(samples).batch_size(BATCH_SIZE).interleave(STREAMS).num_workers(WORKERS);
    let loader: DataLoader<Batch> = builder.collate(images::pipeline()).build()?;
    let seen = loader.iter().try_fold(0, |seen, batch| Ok::<_, DataError>(seen + batch?.1.size()[0]))?;
    ensure!(seen > 0, "there are no images");
    Ok(seen as f64 / started.elapsed().as_secs_f64())
}
