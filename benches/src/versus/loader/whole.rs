//! Photographs without a crop: read, decoded, scaled to 224x224 as they are, and flipped.

use std::sync::Arc;

use anyhow::Result;
use overdrive::dataload::{Dataset, ImageFolder, ImagePipeline, RandomHorizontalFlip, Resize};
use overdrive_bench_report::{Ratio, Target};

use super::images::{self, BATCH_SIZE, SIDE};
use super::{Bench, WORKERS};
use crate::versus::turns::{Case, Turns};

const CASE: &str =
    photographs!("500x375 JPEG photographs, whole, Resize 224x224 and flip, batch 64, 2 persistent workers");

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(CASE) else { return Ok(()) };
    let folder = Arc::new(ImageFolder::open(&photos)?);
    let count = folder.len() as f64;
    let [pillow, io] = ["pillow", "io"].map(|name| images::torch(bench, &photos, name, BATCH_SIZE, false));
    let spdl = images::spdl(bench, &photos, false);
    let pipeline = ImagePipeline::new(0).then(Resize::new(SIDE)).then(RandomHorizontalFlip::default());
    let loader = images::loader_of(&folder, BATCH_SIZE, WORKERS, pipeline)?;

    let peers = [
        ("DataLoader with pillow", &pillow, "pillow", 2.0),
        ("DataLoader with torchvision.io", &io, "io", 1.3),
        ("spdl with its own decoder", &spdl, "own", 1.5),
        ("spdl with torchvision.io", &spdl, "torchvision", 1.5),
    ];
    let mut turns = Turns::default();
    turns.ours("2 workers", || Ok(count / images::epoch(&loader)?));
    for (name, program, asked, _) in peers {
        turns.peer(name, program, move |peer| Ok(count / peer.measure(asked, 1)?));
    }
    turns.take("whole images", bench.pairs)?;
    let case = Case { text: CASE, unit: "images/s", ratio: Ratio::TimesFasterByRate };
    for (name, _, _, target) in peers {
        turns.compare(&mut bench.findings, case, ("2 workers", name), Some(Target::AtLeast(target)))?;
    }
    Ok(())
}
