//! The options of a launch.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use crate::error::LaunchError;
use crate::node_check::NodeCheck;
use crate::numa::NumaBinding;
use crate::plan::{Meeting, Plan};
use crate::secret::{Secret, Trust};
use crate::streams::StreamsByRank;

/// Of a [`Launch::node_check`], unless set.
const CHECK_TIMEOUT: Duration = Duration::from_secs(300);

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
    pub(crate) plan: Plan,
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

    /// Makes the run elastic: it begins when this many hosts have joined, and goes on without lost hosts while this
    /// many are left. All ranks are started again, with their new `RANK` and `WORLD_SIZE`, when a host is lost, leaves
    /// by a signal to its launcher, or joins; such restarts do not count as [`max_restarts`](Self::max_restarts). The
    /// loss of node 0, or a signal to its launcher, ends the run, except with [`rdzv_etcd`](Self::rdzv_etcd). Must be
    /// the same on all nodes; [`nnodes`](Self::nnodes) unless set.
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

    /// How long an elastic run waits for more hosts once [`min_nodes`](Self::min_nodes) have joined; 30 s unless set.
    /// It does not wait when all are there. While the ranks run, a host that joins is taken in a second after the last
    /// one that has joined, and after this time at the latest.
    ///
    /// # Source
    /// torchrun's `last_call_timeout`.
    #[doc(alias = "last_call_timeout")]
    #[must_use]
    pub fn last_call(mut self, timeout: Duration) -> Self {
        self.plan.last_call = limited(timeout);
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

    /// An etcd of version 3.4 or later where the launchers elect node 0, in place of
    /// [`rdzv_endpoint`](Self::rdzv_endpoint). When node 0 is lost, another node takes its place, and the ranks are
    /// started again: in an elastic run without it, else when it has come back, which counts as a
    /// [restart](Self::max_restarts). The run needs a [`run_id`](Self::run_id) of its own; nodes are numbered as they
    /// join. [`master_addr`](Self::master_addr) is this host's address for the others; unless set, the one from which
    /// it reaches etcd, which must not be a loopback address. By TLS with [`etcd_tls`](Self::etcd_tls).
    ///
    /// # Source
    /// torchrun's `--rdzv-backend etcd`, which speaks version 2 of etcd's protocol.
    #[must_use]
    pub fn rdzv_etcd(mut self, host: impl Into<String>, port: u16) -> Self {
        self.plan.endpoint = Some((host.into(), port));
        self.plan.meeting = Meeting::AtEtcd;
        self
    }

    /// How long after the last sign of life of a node 0 that was [elected](Self::rdzv_etcd) another one may be elected;
    /// 10 s unless set, at least 2 s. If node 0 cannot renew its lease in etcd for half of it, all ranks are told to
    /// end.
    #[must_use]
    pub fn lease_timeout(mut self, timeout: Duration) -> Self {
        self.plan.lease = limited(timeout);
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

    /// Whether this host is node 0. Takes precedence over [`node_rank`](Self::node_rank). With
    /// [`rdzv_etcd`](Self::rdzv_etcd) both are refused.
    #[must_use]
    pub fn is_host(mut self, is_host: bool) -> Self {
        self.plan.is_host = Some(is_host);
        self
    }

    /// The address at which rank 0 serves the ranks' store; unless set, the endpoint's, or 127.0.0.1 on a single host.
    /// With [`rdzv_etcd`](Self::rdzv_etcd), this host's address for the others: each host gives its own.
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
        self.plan.grace = limited(grace);
        self
    }

    /// How long the other ranks may run on after the first has failed, before they are told to end; 1 s unless set.
    /// Those that fail by themselves within it are reported too, because the first to fail is not always the cause.
    /// Must be the same on all nodes.
    #[must_use]
    pub fn failure_window(mut self, window: Duration) -> Self {
        self.plan.failure_window = limited(window);
        self
    }

    /// How long nodes wait for one another; 600 s unless set.
    #[must_use]
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.plan.join_timeout = limited(timeout);
        self
    }

    /// The interval of heartbeats between nodes, and after how many silent intervals a node counts as lost; 5 s and 3
    /// unless set. Must be the same on all nodes.
    #[doc(alias = "keep_alive_interval")]
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration, max_attempts: u32) -> Self {
        self.plan.keep_alive = limited(interval);
        self.plan.silence = limited(interval.saturating_mul(max_attempts));
        self
    }

    /// Checks this host before it takes part in the run: `program` runs as one rank for each of this host's, with the same
    /// variables as in a run of this host alone. A host whose check fails, or has not ended within the
    /// [`node_check_timeout`](Self::node_check_timeout), is named by its own launcher and by node 0's, and takes no part: an
    /// [elastic](Self::min_nodes) run goes on without it, another one ends with [`LaunchError::NodeUnfit`].
    ///
    /// `overdrive-node-check` of `overdrive-ddp` is such a program.
    #[must_use]
    pub fn node_check(mut self, program: impl AsRef<OsStr>, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        let args = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
        let timeout = self.plan.node_check.take().map_or(CHECK_TIMEOUT, |check| check.timeout);
        let program = program.as_ref().to_owned();
        self.plan.node_check = Some(NodeCheck { program, file: Default::default(), args, timeout });
        self
    }

    /// How long a [`node_check`](Self::node_check) may take; 300 s unless set. Call it after that.
    #[must_use]
    pub fn node_check_timeout(mut self, timeout: Duration) -> Self {
        if let Some(check) = &mut self.plan.node_check {
            check.timeout = limited(timeout);
        }
        self
    }

    /// Answers health checks by HTTP at this port, on all of this host's addresses, while [`run`](Self::run) runs: 200, or
    /// 503 and what stands still. The launcher's own loops count, and the ranks that have called
    /// [`heartbeat`](crate::heartbeat).
    ///
    /// # Source
    /// torchrun's `TORCHELASTIC_HEALTH_CHECK_PORT`, where PyTorch itself serves nothing.
    #[doc(alias = "create_healthcheck_server")]
    #[must_use]
    pub fn health_port(mut self, port: u16) -> Self {
        self.plan.health_port = Some(port);
        self
    }

    /// How long the launcher or a rank may be silent before [health checks](Self::health_port) fail; 60 s unless set, as in
    /// torchrun. A launcher that ends ranks which cannot be killed may be silent for 30 s.
    #[must_use]
    pub fn health_timeout(mut self, timeout: Duration) -> Self {
        self.plan.health_timeout = limited(timeout);
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

    /// Binds each rank to CPUs near its GPU; ranks may use all CPUs unless set. CPUs that cannot be found are a
    /// [`LaunchError::System`], before any rank is started.
    #[doc(alias = "numa_options")]
    #[must_use]
    pub fn numa_binding(mut self, binding: NumaBinding) -> Self {
        self.plan.numa_binding = Some(binding);
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

    /// Copies lines of standard output that contain one of these texts, of all ranks that the console shows, with their
    /// prefixes, to `<log_dir>/<run_id>_<unique>/attempt_<n>/filtered_stdout.log`. Empty texts are ignored.
    ///
    /// # Source
    /// torchrun's `--duplicate-stdout-filters`, which takes the outputs of `--tee` alone.
    #[must_use]
    pub fn duplicate_stdout_filters(mut self, texts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.plan.filters[0] = texts.into_iter().map(Into::into).filter(|text| !text.is_empty()).collect();
        self
    }

    /// As [`duplicate_stdout_filters`](Self::duplicate_stdout_filters), for standard error; the file is
    /// `filtered_stderr.log`.
    #[must_use]
    pub fn duplicate_stderr_filters(mut self, texts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.plan.filters[1] = texts.into_iter().map(Into::into).filter(|text| !text.is_empty()).collect();
        self
    }

    /// The local ranks whose outputs the console shows; all unless set.
    #[must_use]
    pub fn local_ranks_filter(mut self, local_ranks: impl Into<Vec<usize>>) -> Self {
        self.plan.local_ranks_filter = Some(local_ranks.into());
        self
    }

    /// The prefix of each line on the console: `[rank${rank}]: ` unless set. `${rank}`, `${local_rank}` and
    /// `${role_name}` are filled in. On a terminal each rank's prefix has a colour, unless `NO_COLOR` is set.
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
}

/// At most 136 years, so that adding it to an `Instant` does not overflow.
fn limited(time: Duration) -> Duration {
    time.min(Duration::from_secs(u32::MAX.into()))
}
