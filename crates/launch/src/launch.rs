//! The launcher process: it starts the guard, forwards signals to it, and waits for the result.

use std::env;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::getpid;

use crate::error::LaunchError;
use crate::error_file;
use crate::forwarding::Forwarding;
use crate::plan::Plan;
use crate::roles::{self, ROLE, Role};
use crate::secret::{Secret, Trust};
use crate::streams::StreamsByRank;
use crate::{environment, guard, process, signals};

/// Which ranks to start, and how. The defaults are torchrun's.
///
/// ```no_run
/// use overdrive_launch::Launch;
///
/// fn main() -> Result<(), overdrive_launch::LaunchError> {
///     overdrive_launch::helper(); // must come first
///     Launch::new("./train").args(["--epochs", "3"]).nproc(4).max_restarts(2).run()
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Launch {
    plan: Plan,
}

impl Launch {
    /// A launch of one rank of `program` on this host, unless changed. The program is found as a shell finds it.
    #[doc(alias = "LaunchConfig")]
    #[doc(alias = "torchrun")]
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self { plan: Plan::new(program.as_ref().to_owned()) }
    }

    /// A launch of the running program with its own arguments. In the ranks, `main` finds `RANK` set.
    pub fn current_program() -> Self {
        let mut launch = Self::new("").args(env::args_os().skip(1));
        launch.plan.is_own_program = true;
        launch
    }

    /// Adds arguments of the program. `${local_rank}` in them is replaced by the local rank, as torchrun does.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.plan.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable for the ranks. It overrides inherited variables and those that the launcher sets.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.plan.envs.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Ranks on this host; 1 unless set.
    #[doc(alias = "nproc_per_node")]
    #[must_use]
    pub fn nproc(mut self, nproc: usize) -> Self {
        self.plan.nproc = nproc;
        self
    }

    /// Hosts, each of which runs a launcher; 1 unless set. With [`min_nodes`](Self::min_nodes), the most of them.
    /// Several hosts need [`rdzv_endpoint`](Self::rdzv_endpoint) and [`secret`](Self::secret).
    #[doc(alias = "max_nodes")]
    #[must_use]
    pub fn nnodes(mut self, nnodes: usize) -> Self {
        self.plan.nnodes = nnodes;
        self
    }

    /// Makes the run elastic: it begins when this many hosts have joined, and goes on without lost hosts while this many
    /// are left. All ranks are started again, with their new `RANK` and `WORLD_SIZE`, when a host is lost, leaves by a
    /// signal to its launcher, or joins; such restarts do not count as [`max_restarts`](Self::max_restarts). The loss of
    /// node 0 ends the run. Must be the same on all nodes; [`nnodes`](Self::nnodes) unless set.
    ///
    /// With fewer hosts the run waits for the [`join_timeout`](Self::join_timeout), and ends with
    /// [`LaunchError::NodesMissing`].
    ///
    /// # Source
    /// `LaunchConfig.min_nodes`; `--nnodes MIN:MAX` of torchrun.
    #[must_use]
    pub fn min_nodes(mut self, min_nodes: usize) -> Self {
        self.plan.min_nodes = Some(min_nodes);
        self
    }

    /// How long an elastic run waits for more hosts once [`min_nodes`](Self::min_nodes) have joined; 30 s unless set. It
    /// does not wait when all are there. A host that joins later waits for this long at most, and for a second after the
    /// last one that has joined.
    ///
    /// # Source
    /// torchrun's `last_call_timeout`.
    #[doc(alias = "last_call_timeout")]
    #[must_use]
    pub fn last_call(mut self, timeout: Duration) -> Self {
        self.plan.last_call = timeout.min(Duration::from_secs(u32::MAX.into()));
        self
    }

    /// This host's rank among the hosts. Unless set, node 0 is the host with the endpoint's address, and the others are
    /// numbered as they join.
    #[must_use]
    pub fn node_rank(mut self, node_rank: usize) -> Self {
        self.plan.node_rank = Some(node_rank);
        self
    }

    /// Where the launchers meet: node 0's address, as the other hosts reach it, and a free port on it. Ranks meet at
    /// the same address, at the [`master_port`](Self::master_port).
    #[must_use]
    pub fn rdzv_endpoint(mut self, host: impl Into<String>, port: u16) -> Self {
        self.plan.endpoint = Some((host.into(), port));
        self
    }

    /// The secret by which the launchers of several nodes authenticate: 16 to 4096 bytes that cannot be guessed, the
    /// same on all nodes. A launcher that does not know it cannot join. Several nodes need this or
    /// [`insecure`](Self::insecure).
    ///
    /// # Errors
    /// [`LaunchError::Options`] for a secret of another length.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Result<Self, LaunchError> {
        self.plan.trust = Trust::Secret(Secret::new(secret.as_ref())?);
        Ok(self)
    }

    /// Reads the [`secret`](Self::secret) from a file that only its owner can access.
    ///
    /// # Errors
    /// [`LaunchError::Options`] for a file that cannot be read, that other users can access, or whose secret has
    /// another length.
    pub fn secret_file(mut self, path: impl AsRef<Path>) -> Result<Self, LaunchError> {
        self.plan.trust = Trust::Secret(Secret::read(path.as_ref())?);
        Ok(self)
    }

    /// Runs several nodes without a secret: anyone who can reach the endpoint can join the run, and end it.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.plan.trust = Trust::Anyone;
        self
    }

    /// Whether this host is node 0. Takes precedence over [`node_rank`](Self::node_rank).
    #[must_use]
    pub fn is_host(mut self, is_host: bool) -> Self {
        self.plan.is_host = Some(is_host);
        self
    }

    /// The address at which rank 0 serves the ranks' store; unless set, the endpoint's, or 127.0.0.1 on a single host.
    #[must_use]
    pub fn master_addr(mut self, address: impl Into<String>) -> Self {
        self.plan.master_addr = Some(address.into());
        self
    }

    /// The port at which rank 0 serves the ranks' store. Unless set, node 0 chooses a free one for each attempt and
    /// reserves it.
    #[must_use]
    pub fn master_port(mut self, port: u16) -> Self {
        self.plan.master_port = Some(port);
        self
    }

    /// How many times all ranks may be started again after one has failed; 0 unless set.
    #[must_use]
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.plan.max_restarts = restarts;
        self
    }

    /// How long ranks may take to end after they were told to, before they get SIGKILL; 30 s unless set.
    #[must_use]
    pub fn grace_period(mut self, grace: Duration) -> Self {
        self.plan.grace = grace;
        self
    }

    /// How long the other ranks may run on after the first has failed, before they are told to end; 1 s unless set.
    /// Those that fail by themselves within it are reported too, because the first to fail is not always the cause. At
    /// most 136 years. Must be the same on all nodes.
    #[must_use]
    pub fn failure_window(mut self, window: Duration) -> Self {
        self.plan.failure_window = window.min(Duration::from_secs(u32::MAX.into()));
        self
    }

    /// How long nodes wait for one another; 600 s unless set.
    #[must_use]
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.plan.join_timeout = timeout;
        self
    }

    /// The interval of heartbeats between nodes, and after how many silent intervals a node counts as lost; 5 s and 3
    /// unless set. Must be the same on all nodes.
    #[doc(alias = "keep_alive_interval")]
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration, max_attempts: u32) -> Self {
        self.plan.keep_alive = interval;
        self.plan.silence = interval.saturating_mul(max_attempts);
        self
    }

    /// The name of this run, `none` unless set. Must be the same on all nodes.
    #[doc(alias = "rdzv_id")]
    #[must_use]
    pub fn run_id(mut self, run_id: impl Into<String>) -> Self {
        self.plan.run_id = run_id.into();
        self
    }

    /// The ranks' `ROLE_NAME`; `default` unless set.
    #[must_use]
    pub fn role(mut self, role: impl Into<String>) -> Self {
        self.plan.role = role.into();
        self
    }

    /// Outputs that go to files and not to the console; none unless set.
    #[must_use]
    pub fn redirects(mut self, streams: impl Into<StreamsByRank>) -> Self {
        self.plan.redirects = streams.into();
        self
    }

    /// Outputs that go to files and to the console; none unless set.
    #[must_use]
    pub fn tee(mut self, streams: impl Into<StreamsByRank>) -> Self {
        self.plan.tee = streams.into();
        self
    }

    /// Where output files go: `<log_dir>/<run_id>_<unique>/attempt_<n>/<local rank>/stdout.log`; the system's temporary
    /// folder unless set.
    #[must_use]
    pub fn log_dir(mut self, folder: impl AsRef<OsStr>) -> Self {
        self.plan.log_dir = Some(folder.as_ref().to_owned());
        self
    }

    /// The local ranks whose outputs the console shows; all unless set.
    #[must_use]
    pub fn local_ranks_filter(mut self, local_ranks: impl Into<Vec<usize>>) -> Self {
        self.plan.local_ranks_filter = Some(local_ranks.into());
        self
    }

    /// The prefix of each line on the console: `[rank${rank}]: ` unless set. `${rank}`, `${local_rank}` and
    /// `${role_name}` are filled in.
    #[doc(alias = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")]
    #[must_use]
    pub fn prefix(mut self, template: impl Into<String>) -> Self {
        self.plan.prefix = template.into();
        self
    }

    /// Forwards signals from this process to the ranks during [`run`](Self::run); off unless called.
    ///
    /// SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the ranks and their children, and end the run; a second SIGINT kills
    /// the ranks at once. SIGUSR1 and SIGUSR2 go to the ranks only. Signals that this process inherited as ignored stay
    /// ignored. The handlers stay when `run` returns: from then on these signals do nothing, unless the program handles
    /// them.
    #[must_use]
    pub fn forward_signals(mut self) -> Self {
        self.plan.forward_signals = true;
        self
    }

    /// Forwards these signals, by number, in place of the six of [`forward_signals`](Self::forward_signals).
    #[must_use]
    pub fn signals(mut self, signals: impl Into<Vec<i32>>) -> Self {
        self.plan.signals = signals.into();
        self.forward_signals()
    }

    /// Starts the ranks, restarts them after failures if allowed, and waits until all have succeeded.
    ///
    /// When it returns, all processes that the ranks have started have ended. If the calling process dies, even by
    /// SIGKILL, the ranks and all that they have started get SIGKILL.
    ///
    /// # Errors
    /// See [`LaunchError`]. The program and options are checked before anything is started.
    ///
    /// # Syncs
    /// Blocks until the run has ended.
    pub fn run(&self) -> Result<(), LaunchError> {
        let mut plan = self.plan.clone();
        plan.check()?;
        plan.mark = unique_mark();
        if !roles::has_helper() {
            return Err(LaunchError::Guard(
                "this program cannot be started as the guard: call overdrive_launch::helper() first in its main".into(),
            ));
        }
        let (mut guard, mut socket) = start_guard(&plan)?;
        // Without a thread or descriptor for this, signals keep their default action; the ranks still end with the
        // launcher.
        let forwarding = plan.forward_signals.then(|| Forwarding::start(&plan.signals, &guard).ok()).flatten();
        let result = converse(&plan, &mut socket);
        // Ends the guard if it did not end by itself.
        drop(socket);
        let status = guard.wait();
        let interrupted = forwarding.and_then(Forwarding::stop);
        match result {
            Some(result) => result,
            None => {
                process::end_marked(&plan.mark);
                error_file::Folder::remove_left(&plan.mark);
                Err(guard_lost(status, interrupted))
            }
        }
    }
}

/// Different for every launch on this host.
fn unique_mark() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", getpid().as_raw_pid(), now.as_nanos())
}

fn start_guard(plan: &Plan) -> Result<(Child, UnixStream), LaunchError> {
    let failed = |error: std::io::Error| LaunchError::Guard(format!("cannot start the guard process: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    // This program, even if its file has been replaced since.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(guard::NAME).env(ROLE, Role::Guard.to_variable());
    // The guard carries the mark as well, so that it is found with the launch's other processes.
    command.env(process::MARK, &plan.mark).env_remove(environment::SECRET).stdin(Stdio::from(OwnedFd::from(theirs)));
    let guard = command.spawn().map_err(failed)?;
    // `command` still holds the guard's end of the socket; without it, the socket closes when the guard dies.
    drop(command);
    Ok((guard, ours))
}

/// Sends the plan and waits for the result; None if the guard dies before it sends one.
fn converse(plan: &Plan, socket: &mut UnixStream) -> Option<Result<(), LaunchError>> {
    let mut text = serde_json::to_vec(plan).ok()?;
    text.push(b'\n');
    socket.write_all(&text).ok()?;
    let mut result = Vec::new();
    socket.read_to_end(&mut result).ok()?;
    serde_json::from_slice(&result).ok()
}

fn guard_lost(status: std::io::Result<ExitStatus>, interrupted: Option<i32>) -> LaunchError {
    if let Some(signal) = interrupted {
        return LaunchError::Interrupted { signal, host: None };
    }
    let how = match status {
        Ok(status) => match status.signal() {
            Some(signal) => format!("was ended by {}", signals::describe(signal)),
            None => format!("exited early ({status})"),
        },
        Err(error) => format!("was lost: {error}"),
    };
    LaunchError::Guard(format!("the guard process {how}; the ranks were ended"))
}
