//! The data of each workload, and how it is trained.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_bench_report::{BenchOptions, Contender, DeviceKind, Machine, Size, Workload};
use overdrive_ffi::cuda::device_capability;

use super::job::Job;
use super::{digits_files, photo_files};

/// Digits of a step.
const DIGITS_BATCH: usize = 128;
/// The compute capability from which a GPU multiplies bfloat16 in hardware.
const BF16_CAPABILITY: (i32, i32) = (8, 0);
/// Photographs of a step.
const PHOTOS_BATCH: usize = 16;
/// A workload's data, and the sentences about it in the report.
pub struct Data {
    pub job: Job,
    pub facts: Vec<String>,
}

/// The job of a workload without a contender, and its data, which is made if it does not exist.
pub fn of_workload(workload: Workload, options: &BenchOptions, device: DeviceKind, threads: u32) -> Result<Data> {
    let work = work_folder();
    let (cuda, quick) = (device == DeviceKind::Cuda, options.size() == Size::Quick);
    let by_size = |quick, default, full| match options.size() {
        Size::Quick => quick,
        Size::Default => default,
        Size::Full => full,
    };
    let job = Job {
        workload,
        contender: Contender::Tch,
        parts: Vec::new(),
        device,
        seed: options.seed,
        threads,
        tries: !quick,
        compiles: options.size() == Size::Full,
        has_bf16: if cuda {
            device_capability(0).is_ok_and(|it| it >= BF16_CAPABILITY)
        } else {
            Machine::detect(None).has_bf16_hardware()
        },
        options: serde_json::Value::Null,
        batch_size: 32,
        settle_seconds: by_size(0.2, 0.2, 0.5),
        turn_seconds: by_size(0.4, 1.0, 1.5),
        length: 0,
        train: PathBuf::new(),
        test: None,
        test_images: 0,
    };
    Ok(match workload {
        Workload::Digits => {
            let idx = data_folder(options.data.as_deref())?;
            let (train, test) = if quick { (4_000, 1_000) } else { (usize::MAX, usize::MAX) };
            let data = digits_files::prepare(&idx, &work, train, test)?;
            ensure!(
                data.train >= DIGITS_BATCH,
                "{} holds {} training images, fewer than a batch of {DIGITS_BATCH}: give more",
                data.idx.display(),
                data.train
            );
            let facts = vec![
                format!("{} training and {} test images of MNIST, one PNG file each.", data.train, data.test),
                format!("A CNN of 2 convolutions and 2 linear layers, 105,866 parameters; batches of {DIGITS_BATCH}."),
            ];
            let test = (Some(data.idx), data.test);
            let job =
                Job { batch_size: DIGITS_BATCH, length: 5, train: data.png, test: test.0, test_images: test.1, ..job };
            Data { job, facts }
        }
        Workload::Photos => {
            let photos = match &options.photos {
                Some(folder) => photo_files::of_user(folder, PHOTOS_BATCH)?,
                None => {
                    let (train, times) = if quick { (32, 16) } else { (128, 8) };
                    photo_files::prepare(&work, (train, if quick { 8 } else { 64 }), times, &photo_files::installed())?
                }
            };
            let model = if cuda { "ResNet-50 at 224 pixels" } else { "ResNet-18 at 96 pixels" };
            let facts = vec![
                photos.fact,
                format!("{model}, RandomResizedCrop and RandomHorizontalFlip; batches of {PHOTOS_BATCH}."),
            ];
            let job = Job {
                batch_size: PHOTOS_BATCH,
                settle_seconds: by_size(0.7, 0.7, 1.0),
                turn_seconds: by_size(1.0, 1.5, 3.0),
                length: 2,
                train: photos.train,
                test: photos.test,
                ..job
            };
            Data { job: Job { test_images: photos.test_images, ..job }, facts }
        }
        Workload::Text => {
            let batch_size = if cuda { 8 } else { 32 };
            let facts = vec![
                format!("Hamlet, 163 kB, in pieces of random places; batches of {batch_size}."),
                match cuda {
                    true => "GPT-2's smallest shape, 124 million parameters, 1024 characters of context.".to_owned(),
                    false => {
                        "A GPT of 4 blocks and width 192, 1.8 million parameters, 128 characters of context.".to_owned()
                    }
                },
            ];
            let train = data_file("text/hamlet.txt")?;
            Data { job: Job { length: 200, train, batch_size, ..job }, facts }
        }
    })
}

/// With what can be done about a full disk, which no other message says.
pub fn with_remedy(error: anyhow::Error) -> anyhow::Error {
    let kinds = error.chain().filter_map(|it| it.downcast_ref::<std::io::Error>().map(std::io::Error::kind));
    let is_full = kinds.into_iter().any(|it| matches!(it, ErrorKind::StorageFull | ErrorKind::QuotaExceeded));
    match is_full {
        true => error.context(format!(
            "no space left for generated data in {}: free some, or run this in another folder",
            work_folder().display()
        )),
        false => error,
    }
}

/// Where generated data is kept for the next run: in `target/`, if that exists.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/bench/data"),
        false => std::env::temp_dir().join("overdrive-bench-data"),
    }
}

/// The folder given by `--data`, or the images in the workspace or the bundle.
fn data_folder(asked: Option<&Path>) -> Result<PathBuf> {
    asked.map_or_else(|| data_file("mnist"), |folder| Ok(folder.to_owned()))
}

/// A file or folder in `data/`, of the workspace or next to the program.
fn data_file(name: &str) -> Result<PathBuf> {
    let beside_program = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("data")));
    let in_workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let mut folders = [Some(PathBuf::from("data")), beside_program, Some(in_workspace)].into_iter().flatten();
    let found = folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.exists()));
    found.with_context(|| {
        format!("data/{name} is neither in this folder nor next to the program: run it in the workspace or the bundle")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_answered_with_what_to_do() {
        let said = |kind: ErrorKind| {
            let error = anyhow::Error::from(std::io::Error::from(kind)).context("cannot write photographs");
            format!("{:#}", with_remedy(error))
        };
        let full = said(ErrorKind::StorageFull);
        assert!(full.starts_with("no space left for generated data in ") && full.contains("another folder"), "{full}");
        assert!(said(ErrorKind::NotFound).starts_with("cannot write photographs: "));
    }
}
