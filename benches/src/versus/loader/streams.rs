//! Photographs in tar shards of a server whose answers come late, beside the same shards on the disk.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{
    DataError, DataLoader, Dataset, EncodedImage, ImageFolder, IterableDataset, RemoteOptions, WebDataset,
    WebDatasetWriter, WebSample, configure_remote,
};
use overdrive_bench_report::{Ratio, Target};

use super::images::{self, Batch};
use super::{Bench, WORKERS, late_server, path_text};
use crate::versus::turns::{Case, Turns};

const STEPPED: &str = photographs!(
    "photographs in 8 interleaved tar shards of a server on this machine, each answer 40 ms late, nothing cached, 2 \
     workers, in a loop that waits 40 ms for each batch of 64"
);
const BUSY: &str =
    photographs!("the same in a loop that does nothing, so that the server takes time of the workers' cores");
/// What a step takes that needs nothing of the host.
const STEP: Duration = Duration::from_millis(40);
const LATE: Duration = Duration::from_millis(40);
const STREAMS: usize = 8;
/// How often each photograph is in the shards, which then have 45 MB or so.
const COPIES: usize = 8;
const BATCH_SIZE: usize = 64;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(STEPPED) else { return Ok(()) };
    let folder = bench.work.join("streams");
    if !folder.is_dir() {
        write(&photos, &folder)?;
    }
    let address = late_server::start(&bench.work, LATE)?;
    let shards = format!("{:06}..{:06}", 0, STREAMS - 1);
    let [disk, server] =
        [path_text(&folder), format!("http://{address}/streams")].map(|place| format!("{place}/{{{shards}}}.tar"));

    let from_server = |step| {
        let cache = tempfile::tempdir_in(&bench.work)?;
        configure_remote(RemoteOptions::default().cache(cache.path()))?;
        epoch(&server, step)
    };
    let mut turns = Turns::default();
    for (name, step) in [("with steps", STEP), ("without", Duration::ZERO)] {
        turns.ours(&format!("the server, {name}"), move || from_server(step));
        let disk = disk.clone();
        turns.ours(&format!("the disk, {name}"), move || epoch(&disk, step));
    }
    turns.take("streams", bench.pairs)?;
    let case = |text| Case { text, unit: "images/s", ratio: Ratio::ShareOfRate };
    let (findings, target) = (&mut bench.findings, Some(Target::AtLeast(0.9)));
    turns.compare(findings, case(STEPPED), ("the server, with steps", "the disk, with steps"), target)?;
    turns.compare(findings, case(BUSY), ("the server, without", "the disk, without"), None)
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
fn epoch(shards: &str, step: Duration) -> Result<f64> {
    let started = Instant::now();
    let samples = WebDataset::open(shards)?.map(|sample: WebSample| {
        let jpg = sample.get("jpg").ok_or_else(|| DataError::other("no jpg"))?;
        Ok((EncodedImage::new(jpg, sample.key()), 0_i64))
    });
    let builder = DataLoader::stream(samples).batch_size(BATCH_SIZE).interleave(STREAMS).num_workers(WORKERS);
    let loader: DataLoader<Batch> = builder.collate(images::pipeline()).build()?;
    let mut seen = 0;
    for batch in &loader {
        seen += batch?.1.size()[0];
        thread::sleep(step);
    }
    ensure!(seen > 0, "there are no images");
    Ok(seen as f64 / started.elapsed().as_secs_f64())
}
