//! The settings of a monitor.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{GpuSource, Monitor, Nvml, http};
use crate::ProfileError;

const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_INTERVAL: Duration = Duration::from_secs(3600);
const LONGEST_WINDOW: usize = 1 << 17;

/// Sets up a [`Monitor`]. Made by [`Monitor::builder`].
#[must_use = "a builder does nothing until it starts a monitor"]
pub struct MonitorBuilder {
    pub(super) interval: Duration,
    pub(super) window: usize,
    pub(super) json_lines: Option<PathBuf>,
    pub(super) http: Option<SocketAddr>,
    pub(super) http_timeout: Duration,
    pub(super) live: bool,
    pub(super) threads: bool,
    pub(super) gpus: Option<Box<dyn GpuSource>>,
}

impl MonitorBuilder {
    pub(super) fn new() -> Self {
        Self {
            interval: Duration::from_secs(1),
            window: 3600,
            json_lines: None,
            http: None,
            http_timeout: http::TIMEOUT,
            live: false,
            threads: false,
            gpus: Some(Box::new(Nvml::new())),
        }
    }

    /// The time between two samples, from 10 ms to an hour; the default is a second.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// How many of the last samples are kept in memory; the default is 3600.
    pub fn window(mut self, samples: usize) -> Self {
        self.window = samples;
        self
    }

    /// Appends each sample to a file, as one line of JSON. Off by default.
    pub fn json_lines(mut self, path: impl AsRef<Path>) -> Self {
        self.json_lines = Some(path.as_ref().to_owned());
        self
    }

    /// Serves the last sample to Prometheus, at `http://127.0.0.1:PORT/metrics`: to this machine alone. 0 takes a free
    /// port. Off by default.
    pub fn http(self, port: u16) -> Self {
        self.http_at((Ipv4Addr::LOCALHOST, port))
    }

    /// The same at another address. At `0.0.0.0`, everyone who can reach the machine can read them.
    pub fn http_at(mut self, address: impl Into<SocketAddr>) -> Self {
        self.http = Some(address.into());
        self
    }

    /// How long a client may take to ask and to read the answer, from 10 ms to an hour; a quarter of that to begin to
    /// ask. The default is 2 s.
    pub fn http_timeout(mut self, timeout: Duration) -> Self {
        self.http_timeout = timeout;
        self
    }

    /// Shows the last sample in one line on standard error, if that is a terminal. Off by default.
    pub fn live(mut self, live: bool) -> Self {
        self.live = live;
        self
    }

    /// Also samples each thread of this process: how long it was on a CPU, and how long it waited for one. Off by
    /// default.
    pub fn threads(mut self, watch: bool) -> Self {
        self.threads = watch;
        self
    }

    /// A source of GPU samples in place of NVML.
    pub fn gpus(mut self, source: impl GpuSource + 'static) -> Self {
        self.gpus = Some(Box::new(source));
        self
    }

    /// Leaves GPUs out.
    pub fn without_gpus(mut self) -> Self {
        self.gpus = None;
        self
    }

    /// Starts monitoring on a background thread. The first sample is taken at once.
    ///
    /// # Errors
    /// `Setting` for an interval, a window or a timeout out of bounds; `Io` for a file that cannot be written; `Listen`
    /// for an address that is not available, for example because another program uses the port; `Thread`. Nothing runs
    /// then.
    pub fn start(self) -> Result<Monitor, ProfileError> {
        for (name, time) in [("interval", self.interval), ("http_timeout", self.http_timeout)] {
            if !(SHORTEST_INTERVAL..=LONGEST_INTERVAL).contains(&time) {
                let problem = format!("should be from {SHORTEST_INTERVAL:?} to {LONGEST_INTERVAL:?}");
                return Err(ProfileError::Setting { name, value: format!("{time:?}"), problem });
            }
        }
        if !(1..=LONGEST_WINDOW).contains(&self.window) {
            let problem = format!("should be from 1 to {LONGEST_WINDOW} samples");
            return Err(ProfileError::Setting { name: "window", value: self.window.to_string(), problem });
        }
        Monitor::start(self)
    }
}

impl std::fmt::Debug for MonitorBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MonitorBuilder")
            .field("interval", &self.interval)
            .field("window", &self.window)
            .field("json_lines", &self.json_lines)
            .field("http", &self.http)
            .field("http_timeout", &self.http_timeout)
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}
