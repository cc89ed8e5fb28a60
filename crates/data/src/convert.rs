//! Converts a dataset to another format: reads the source's samples, scales their images if asked to, and writes them
//! to the target in the same order.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::cli::ConvertOptions;
use crate::format::Format;
use crate::reencode::Reencode;
use crate::sample::Sample;
use crate::source;
use crate::target::{self, Refused, Target};

/// Limits the memory of a batch: the sample that reaches this size is the batch's last one.
const BATCH_BYTES: usize = 1 << 26;
/// How often Ctrl-C is looked for while the source is waited for.
const WAIT: Duration = Duration::from_millis(50);
/// Samples per thread and batch. Images differ in size; over this many, every thread has about the same work.
const SAMPLES_PER_WORKER: usize = 16;

/// Stopped by Ctrl-C or a signal to terminate.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; the incomplete target was removed")]
pub struct Interrupted;

/// The result of a conversion.
#[derive(Debug)]
pub struct Summary {
    converted: u64,
    skipped: u64,
    target: PathBuf,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} samples", self.target.display(), self.converted)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped as bad", self.skipped)?;
        }
        Ok(())
    }
}

/// Converts as the options say.
///
/// # Errors
/// [`Interrupted`]; an error of reading the source or writing the target; the first bad sample, unless bad ones are
/// skipped.
pub fn run(options: &ConvertOptions) -> Result<Summary> {
    // Before a source elsewhere is listed and fetched.
    target::check(&options.dst)?;
    let from = options.from.map_or_else(|| Format::of_source(&options.src), Ok)?;
    let to = options.to.map_or_else(|| Format::of_target(&options.dst), Ok)?;
    let sharded = matches!(to, Format::WebDataset | Format::TfRecord);
    ensure!(
        sharded || options.samples_per_shard.is_none(),
        "--samples-per-shard is for webdataset and tfrecord: leave it out"
    );
    ensure!(
        sharded || to == Format::Mds || options.shard_size.is_none(),
        "--shard-size is for webdataset and tfrecord, and mds: leave it out"
    );
    ensure!(sharded || !options.index, "--index is for webdataset and tfrecord: leave it out");
    let tokens = matches!(to, Format::Megatron | Format::Tokens);
    ensure!(tokens || options.token_dtype.is_none(), "--token-dtype is for megatron and tokens: leave it out");
    let cut = options.src_token_dtype.is_some() || options.end_of_text.is_some() || options.block_size.is_some();
    ensure!(
        from == Format::Tokens || !cut,
        "--src-token-dtype, --end-of-text and --block-size are for tokens as the source: leave them out"
    );
    ensure!(!options.checksums || to == Format::Lmdb, "--checksums is for lmdb: leave it out");

    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)).context("cannot watch for Ctrl-C")?;
    let workers = options.workers.map_or(0, usize::from);
    let workers = rayon::ThreadPoolBuilder::new().num_threads(workers).build().context("cannot start the workers")?;
    let source = Reader::start(options, from, SAMPLES_PER_WORKER * workers.current_num_threads(), &stop)?;
    let job = Job {
        skip_errors: options.skip_errors,
        reencode: options.shorter_side.map(|side| Reencode::new(side, options.quality)),
        workers,
        progress: progress(source.total),
        stop,
    };
    let summary = job.run(&source, target::create(options, to)?, options)?;
    job.progress.finish_and_clear();
    Ok(summary)
}

/// Reads the source on a thread of its own, since Ctrl-C is to be seen while a server is waited for. The thread is left
/// where it is then: nothing that it does has to be undone.
struct Reader {
    total: Option<u64>,
    /// In order; an empty one at the end.
    batches: Receiver<Vec<Result<Sample>>>,
}

impl Reader {
    fn start(options: &ConvertOptions, from: Format, most: usize, stop: &AtomicBool) -> Result<Self> {
        let options = options.clone();
        let (opened, is_open) = mpsc::channel();
        // The next batch is read while one is written, and no further one.
        let (full, batches) = mpsc::sync_channel(0);
        let read = move || match source::open(&options, from) {
            Ok(mut source) => {
                let mut go_on = opened.send(Ok(source.total)).is_ok();
                while go_on {
                    let batch = batch(&mut source.samples, most);
                    go_on = !batch.is_empty() && full.send(batch).is_ok();
                }
                // Whether it is the end, or nobody listens.
                _ = full.send(Vec::new());
            }
            Err(error) => _ = opened.send(Err(error)),
        };
        thread::Builder::new().name("source".to_owned()).spawn(read).context("cannot start the thread that reads")?;
        let total = wait(&is_open, stop)??;
        Ok(Self { total, batches })
    }
}

/// The next samples, in order; none at the end of the source.
fn batch(samples: &mut impl Iterator<Item = Result<Sample>>, most: usize) -> Vec<Result<Sample>> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while batch.len() < most && bytes < BATCH_BYTES {
        let Some(sample) = samples.next() else { break };
        bytes += sample.as_ref().map_or(0, Sample::bytes);
        batch.push(sample);
    }
    batch
}

/// What another thread sends, unless Ctrl-C comes first.
fn wait<T>(sent: &Receiver<T>, stop: &AtomicBool) -> Result<T> {
    loop {
        check(stop)?;
        match sent.recv_timeout(WAIT) {
            Ok(sent) => return Ok(sent),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that reads the source has panicked"),
        }
    }
}

fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Interrupted.into()) } else { Ok(()) }
}

struct Job {
    skip_errors: bool,
    reencode: Option<Reencode>,
    workers: ThreadPool,
    progress: ProgressBar,
    stop: Arc<AtomicBool>,
}

impl Job {
    fn run(&self, source: &Reader, mut target: Box<dyn Target>, options: &ConvertOptions) -> Result<Summary> {
        let mut summary = Summary { converted: 0, skipped: 0, target: options.dst.clone() };
        loop {
            let batch = wait(&source.batches, &self.stop)?;
            if batch.is_empty() {
                break;
            }
            for sample in self.scale(batch) {
                check(&self.stop)?;
                let checked = sample.and_then(|sample| sample.check_names().map(|()| sample));
                let written = checked.map_err(Refused::Sample).and_then(|sample| target.write(sample));
                match written {
                    Ok(()) => summary.converted += 1,
                    Err(Refused::Sample(error)) if self.skip_errors => {
                        summary.skipped += 1;
                        self.progress.suspend(|| eprintln!("skipped: {error:#}"));
                    }
                    Err(Refused::Sample(error)) => {
                        return Err(error.context("a bad sample (--skip-errors skips bad samples)"));
                    }
                    Err(Refused::All(error)) => return Err(error),
                }
                self.progress.inc(1);
            }
        }
        if summary.converted == 0 {
            bail!("{}: no sample to convert ({} skipped)", options.src.display(), summary.skipped);
        }
        check(&self.stop)?;
        target.finish()?;
        Ok(summary)
    }

    fn scale(&self, batch: Vec<Result<Sample>>) -> Vec<Result<Sample>> {
        let Some(reencode) = &self.reencode else { return batch };
        let scale = |sample: Result<Sample>| {
            let mut sample = sample?;
            if !self.stop.load(Ordering::Relaxed) {
                reencode.apply(&mut sample)?;
            }
            Ok(sample)
        };
        self.workers.install(|| batch.into_par_iter().map(scale).collect())
    }
}

/// A progress bar where the number of samples is known, otherwise a count; hidden unless on a terminal.
fn progress(total: Option<u64>) -> ProgressBar {
    let style =
        |template: &str| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    match total {
        Some(total) => ProgressBar::new(total).with_style(style("{wide_bar} {pos}/{len} {per_sec}, {eta} left")),
        None => ProgressBar::new_spinner().with_style(style("{spinner} {pos} samples, {per_sec}")),
    }
}
