//! Photographs: read, decoded, cropped at random, scaled to 224x224 and flipped.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{
    DataError, DataLoader, Dataset, ImageFolder, ImagePipeline, RandomHorizontalFlip, RandomResizedCrop, RandomSampler,
    Sampler,
};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;
use tch::Tensor;

use super::{Bench, WORKERS, path_text, process};
use crate::versus::turns::{Case, Program, Turns};

pub const BATCH_SIZE: usize = 64;
pub const SIDE: usize = 224;

const SPEED: &str =
    photographs!("500x375 JPEG photographs, RandomResizedCrop 224 and flip, batch 64, 2 persistent workers");
const SHARE: &str =
    photographs!("the same photographs, 2 workers: the loader beside a bare loop on 2 threads that does the same work");
const SCALING: &str = photographs!("the same photographs: 2 workers beside 1");
const ALLOWED: &str =
    photographs!("the same photographs: bare loops on 2 threads beside 1, which is what the machine allows");
const MEMORY: &str = photographs!("the same photographs: memory of the process and its 2 workers");
pub const DALI: &str = "nvidia-dali-cuda130";
const SPDL_REMEDY: &str = "pip install spdl, and FFmpeg's shared libraries (Debian: libavdevice59 libavfilter8)";

/// The same transforms that DataLoader applies with torchvision.
pub fn pipeline() -> ImagePipeline {
    ImagePipeline::new(0).then(RandomResizedCrop::new(SIDE)).then(RandomHorizontalFlip::default())
}

pub type Folder = Arc<ImageFolder>;
pub type Batch = (Tensor, Tensor);

pub fn loader(folder: &Folder, batch_size: usize, workers: usize) -> Result<DataLoader<Batch>, DataError> {
    loader_of(folder, batch_size, workers, pipeline())
}

pub fn loader_of(
    folder: &Folder,
    batch_size: usize,
    workers: usize,
    pipeline: ImagePipeline,
) -> Result<DataLoader<Batch>, DataError> {
    let builder = DataLoader::builder(folder.clone()).batch_size(batch_size).shuffle(true).num_workers(workers);
    builder.collate(pipeline).build()
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(SPEED) else { return Ok(()) };
    let folder: Folder = Arc::new(ImageFolder::open(&photos)?);
    let images = folder.len() as f64;
    let [pillow, io] = ["pillow", "io"].map(|name| torch(bench, &photos, name, BATCH_SIZE, true));
    let spdl = spdl(bench, &photos, true);
    let options = json!({ "photos": path_text(&photos), "batch_size": BATCH_SIZE, "workers": WORKERS });
    let dali = bench.packaged(
        DALI,
        include_str!("../../../peers/loader_dali.py"),
        &options,
        "pip install nvidia-dali-cuda130",
    );

    let (one, two) = (loader(&folder, BATCH_SIZE, 1)?, loader(&folder, BATCH_SIZE, WORKERS)?);
    let bare = Bare { folder: folder.clone(), pipeline: pipeline(), epoch: AtomicU64::new(0) };
    let mut turns = Turns::default();
    turns.ours("2 workers", || Ok(images / epoch(&two)?));
    turns.ours("a bare loop on 2 threads", || Ok(images / bare.epoch(2)?));
    turns.ours("1 worker", || Ok(images / epoch(&one)?));
    turns.ours("a bare loop on 1 thread", || Ok(images / bare.epoch(1)?));
    let targets = [3.0, 2.0, 2.6];
    let peers = [
        ("DataLoader with pillow", &pillow, "pillow", targets[0]),
        ("DataLoader with torchvision.io", &io, "io", targets[1]),
        ("spdl with its own decoder", &spdl, "own", targets[2]),
        ("spdl with torchvision.io", &spdl, "torchvision", targets[2]),
        ("DALI's CPU pipeline", &dali, "cpu", 1.0),
    ];
    for (name, program, asked, _) in peers {
        turns.peer(name, program, move |peer| Ok(images / peer.measure(asked, 1)?));
    }
    turns.take("images", bench.pairs)?;

    let case = |text, ratio| Case { text, unit: "images/s", ratio };
    let findings = &mut bench.findings;
    for (name, _, _, target) in peers {
        let faster = case(SPEED, Ratio::TimesFasterByRate);
        turns.compare(findings, faster, ("2 workers", name), Some(Target::AtLeast(target)))?;
    }
    let share = case(SHARE, Ratio::ShareOfRate);
    turns.compare(findings, share, ("2 workers", "a bare loop on 2 threads"), Some(Target::AtLeast(0.9)))?;
    let scaling = case(SCALING, Ratio::TimesFasterByRate);
    turns.compare(findings, scaling, ("2 workers", "1 worker"), Some(Target::AtLeast(1.85)))?;
    let allowed = case(ALLOWED, Ratio::TimesFasterByRate);
    turns.compare(findings, allowed, ("a bare loop on 2 threads", "a bare loop on 1 thread"), None)?;
    memory(bench, &two, [("DataLoader with pillow", &pillow), ("DataLoader with torchvision.io", &io)])
}

/// Starts PyTorch's DataLoader in a process of its own, so that its memory can be measured. `name` is its decoder, or
/// `startup`.
pub fn torch(bench: &mut Bench, photos: &Path, name: &str, batch_size: usize, crops: bool) -> Program {
    let options = json!({
        "photos": path_text(photos), "batch_size": batch_size, "workers": WORKERS, "names": [name], "crop": crops,
    });
    bench.torch(include_str!("../../../peers/loader_images.py"), &options)
}

pub fn spdl(bench: &mut Bench, photos: &Path, crops: bool) -> Program {
    let options = json!({ "photos": path_text(photos), "batch_size": BATCH_SIZE, "workers": WORKERS, "crop": crops });
    bench.packaged("spdl", include_str!("../../../peers/loader_spdl.py"), &options, SPDL_REMEDY)
}

/// Seconds per epoch.
pub fn epoch(loader: &DataLoader<Batch>) -> Result<f64> {
    let started = Instant::now();
    for batch in loader {
        let (images, _) = batch?;
        ensure!(images.size()[1..] == [3, SIDE as i64, SIDE as i64], "the images are not 3x224x224");
    }
    Ok(started.elapsed().as_secs_f64())
}

/// The same work without a loader: threads that each decode into one buffer, over and over.
struct Bare {
    folder: Folder,
    pipeline: ImagePipeline,
    epoch: AtomicU64,
}

impl Bare {
    fn epoch(&self, threads: usize) -> Result<f64> {
        let epoch = self.epoch.fetch_add(1, Relaxed);
        let started = Instant::now();
        let order = RandomSampler::new(self.folder.len(), 0).order(epoch);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut slot = vec![0; 3 * SIDE * SIDE];
            while let Some(&index) = order.get(next.fetch_add(1, Relaxed)) {
                let (image, _) = self.folder.get(index)?;
                self.pipeline.decode_into(&image, index as u64, epoch, &mut slot)?;
            }
            Ok::<_, DataError>(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let panicked = |_| Err(DataError::other("a thread panicked"));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        })?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Compares memory: ours with four batches taken and others prefetched, DataLoader's as its last epoch left it.
fn memory(bench: &mut Bench, ours: &DataLoader<Batch>, peers: [(&str, &Program); 2]) -> Result<()> {
    let mut turns = Turns::default();
    turns.ours("2 workers", || {
        let mut batches = ours.iter();
        let _taken = batches.by_ref().take(4).collect::<Result<Vec<_>, _>>()?;
        process::own_mebibytes()
    });
    for (name, program) in peers {
        turns.peer(name, program, |peer| process::tree_mebibytes(peer.process()));
    }
    turns.take("memory of images", bench.pairs.min(3))?;
    let case = Case { text: MEMORY, unit: "MiB", ratio: Ratio::ShareOfCost };
    for (name, _) in peers {
        turns.compare(&mut bench.findings, case, ("2 workers", name), None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::versus::peer::Peer;

    /// A DALI that has read two batches ahead whenever it is asked, and a clock that counts the other batches.
    const FAKE_DALI: &str = r#"
import sys, time, types
ahead, clock = 2, 0

def lines(given):
    global ahead
    for line in given:
        ahead = 2
        yield line

sys.stdin = lines(sys.stdin)
time.perf_counter = lambda: clock

class Batch:
    dtype = "uint8"
    shape = lambda self: [(3, 224, 224)]
    __len__ = lambda self: 64

class Pipeline:
    build = lambda self: None
    epoch_size = lambda self, reader: 5 * 64
    def run(self):
        global ahead, clock
        ahead, clock = (ahead - 1, clock) if ahead else (0, clock + 1)
        return Batch(), None

dali = types.ModuleType("nvidia.dali")
dali.__version__, dali.fn, dali.types = "2.0", None, types.SimpleNamespace(UINT8="uint8")
dali.pipeline_def = lambda graph: lambda *args, **options: Pipeline()
nvidia = types.ModuleType("nvidia")
nvidia.dali = dali
sys.modules.update({"nvidia": nvidia, "nvidia.dali": dali})
"#;

    #[test]
    fn every_case_names_the_decoder_of_ours() {
        for case in [SPEED, SHARE, SCALING, ALLOWED, MEMORY] {
            assert_eq!(case.ends_with(", ours with libjpeg-turbo"), cfg!(feature = "libjpeg-turbo"), "{case}");
        }
    }

    #[test]
    fn what_dali_reads_ahead_between_its_samples_is_not_taken_for_speed() {
        if Command::new("python3").arg("--version").output().is_err() {
            println!("skipped: no python3");
            return;
        }
        let source = format!("{FAKE_DALI}{}", include_str!("../../../peers/loader_dali.py"));
        let options = json!({ "photos": "", "batch_size": 64, "workers": 2 });
        let mut peer = Peer::start(Path::new("python3"), &source, &[options.to_string()]).unwrap();
        // The batches of whole epochs, each computed while the time was taken.
        assert_eq!([1, 2].map(|epochs| peer.measure("cpu", epochs).unwrap()), [5.0, 10.0]);
    }
}
