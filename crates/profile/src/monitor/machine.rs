//! The running monitor.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};

use super::file::JsonLines;
use super::http::Server;
use super::{GapSource, MonitorBuilder, MonitorGap, Sample, Sampler, prometheus_text};
use crate::ProfileError;

/// How long to wait for the thread if it hangs in a driver or a file.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Samples the machine, this process and its GPUs while a program trains.
///
/// A background thread takes the samples and sleeps in between. The last samples are kept in memory; they can also go
/// to a file, to Prometheus and to the terminal. Without NVML the monitor reports that once, by `tracing` and in
/// [`gaps`](Self::gaps), and continues without GPUs. If NVML fails for a while, that is a gap.
///
/// Dropping it, even in a panic, ends its threads.
///
/// ```
/// use overdrive_profile::Monitor;
///
/// # fn main() -> Result<(), overdrive_profile::ProfileError> {
/// # let folder = tempfile::tempdir().expect("a folder");
/// # let path = folder.path().join("machine.jsonl");
/// let mut monitor = Monitor::builder().json_lines(path).http(0).start()?;
/// println!("metrics at http://{}/metrics", monitor.http_address().expect("it was asked for"));
/// // .. training
/// monitor.stop();
/// for sample in monitor.samples() {
///     println!("{:.1} s: {sample}", sample.elapsed_seconds);
/// }
/// # assert!(!monitor.samples().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Monitor {
    seen: Arc<Mutex<Seen>>,
    server: Option<Server>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread has recorded so far.
#[derive(Debug, Default)]
struct Seen {
    samples: VecDeque<Arc<Sample>>,
    gaps: Vec<MonitorGap>,
}

impl Monitor {
    /// Settings of a monitor.
    pub fn builder() -> MonitorBuilder {
        MonitorBuilder::new()
    }

    pub(super) fn start(settings: MonitorBuilder) -> Result<Self, ProfileError> {
        let file = settings.json_lines.as_deref().map(JsonLines::open).transpose()?;
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let to_serve = seen.clone();
        let page = move || {
            let last = lock(&to_serve).samples.back().cloned();
            last.map(|sample| prometheus_text(&sample)).unwrap_or_default()
        };
        let server = settings.http.map(|address| Server::start(address, settings.http_timeout, page)).transpose()?;
        let (stop, stopped) = mpsc::channel();
        let work = Work {
            interval: settings.interval,
            window: settings.window,
            sampler: Sampler::with_gpus(settings.gpus).threads(settings.threads),
            file,
            line: settings.live.then(spinner),
            seen: seen.clone(),
        };
        let thread = Builder::new().name("monitor".to_owned()).spawn(move || work.run(&stopped));
        let thread = thread.map_err(ProfileError::Thread)?;
        Ok(Self { seen, server, stop: Some(stop), thread: Some(thread) })
    }

    /// The samples in memory, the oldest first.
    pub fn samples(&self) -> Vec<Arc<Sample>> {
        lock(&self.seen).samples.iter().cloned().collect()
    }

    /// The last sample. None before the first, which is taken at the start.
    pub fn latest(&self) -> Option<Arc<Sample>> {
        lock(&self.seen).samples.back().cloned()
    }

    /// The last 256 gaps: what could not be sampled, and when.
    pub fn gaps(&self) -> Vec<MonitorGap> {
        lock(&self.seen).gaps.clone()
    }

    /// The address at which metrics are served, if they are.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::address)
    }

    /// Takes a last sample and ends the threads. Samples and gaps stay available. A second call does nothing.
    ///
    /// # Syncs
    /// Waits for the threads. If a driver or a file hangs, it waits for up to 30 s and then abandons the thread.
    pub fn stop(&mut self) {
        drop(self.server.take());
        drop(self.stop.take());
        let Some(thread) = self.thread.take() else { return };
        let until = Instant::now() + LONGEST_WAIT;
        while !thread.is_finished() {
            if Instant::now() >= until {
                tracing::error!("the monitor's thread hangs and is abandoned");
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            tracing::error!("the monitor's thread panicked");
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The state of the monitor's thread.
struct Work {
    interval: Duration,
    window: usize,
    sampler: Sampler,
    file: Option<JsonLines>,
    line: Option<ProgressBar>,
    seen: Arc<Mutex<Seen>>,
}

impl Work {
    fn run(mut self, stopped: &Receiver<()>) {
        let begun = Instant::now();
        let mut due = begun;
        loop {
            self.take_sample(begun);
            // Samples that are overdue are skipped.
            due = (due + self.interval).max(Instant::now());
            if stopped.recv_timeout(due.saturating_duration_since(Instant::now())) != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
        self.take_sample(begun);
        if let Some(line) = self.line {
            line.finish();
        }
    }

    fn take_sample(&mut self, begun: Instant) {
        let (elapsed, wall) = both_clocks(begun);
        let sample = self.sampler.sample_at(elapsed, wall);
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.write(&sample)) {
            // The file may end with an incomplete line, so nothing appended to it could be parsed.
            self.file = None;
            tracing::warn!(%error, "samples are no longer written to the file");
            self.sampler.gaps_mut().open(GapSource::File, elapsed, error);
        }
        if let Some(line) = &self.line {
            line.set_message(sample.to_string());
            line.tick();
        }
        let gaps = self.sampler.gaps();
        let mut seen = lock(&self.seen);
        if seen.samples.len() == self.window {
            seen.samples.pop_front();
        }
        seen.samples.push_back(Arc::new(sample));
        seen.gaps = gaps;
    }
}

/// The time since `begun` and the system's clock at the same moment. They are read again if the thread has lost its CPU
/// in between, because that would look as if the clock had been set.
fn both_clocks(begun: Instant) -> (Duration, SystemTime) {
    const CLOSE: Duration = Duration::from_millis(10);
    const MOST_TRIES: usize = 100;
    let mut tries = 0;
    loop {
        let (elapsed, wall) = (begun.elapsed(), SystemTime::now());
        tries += 1;
        if begun.elapsed().saturating_sub(elapsed) < CLOSE || tries == MOST_TRIES {
            return (elapsed, wall);
        }
    }
}

fn spinner() -> ProgressBar {
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
        line.set_style(style);
    }
    line
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
