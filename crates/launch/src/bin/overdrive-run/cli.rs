//! The command line: torchrun's option names, with dashes or underscores and abbreviated, and its `PET_` variables.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{FalseyValueParser, RangedI64ValueParser, Resettable};
use clap::{Arg, CommandFactory, FromArgMatches, Parser};

use crate::values;

/// Starts the ranks of a distributed run, as torchrun does
///
/// Each rank runs PROGRAM with the arguments that follow it, a .py file with Python. In its environment it finds RANK,
/// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and torchrun's other variables.
///
///   overdrive-run --nproc-per-node 4 ./train --epochs 3
///   overdrive-run --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 --secret-file key --nproc-per-node 8 ./train
///
/// When a rank fails, the others are ended. The failure is reported with its rank, exit code or signal, and the end of
/// its output. The exit code is that rank's, or 128 plus its signal's number. No process that the ranks have started
/// outlives the launcher. Options can also be set by environment variables (PET_NPROC_PER_NODE=4), and abbreviated
/// while they are unambiguous (--nproc 4).
#[derive(Debug, Parser)]
#[command(
    name = "overdrive-run",
    version,
    max_term_width = 100,
    verbatim_doc_comment,
    args_override_self = true,
    infer_long_args = true,
    // The usage that clap generates would require ARGS.
    override_usage = "overdrive-run [OPTIONS] <PROGRAM> [ARGS]..."
)]
pub struct Cli {
    /// Ranks on this host: a number, gpu, cpu (its cores), or auto (GPUs if there are any, else cores)
    #[arg(long, value_name = "N", alias = "nproc_per_node", env = "PET_NPROC_PER_NODE", default_value = "1")]
    pub nproc_per_node: String,

    /// Number of hosts; start this launcher on each. MIN:MAX makes the run elastic: it begins with MIN hosts, goes on
    /// without lost ones while MIN are left, and takes in those that join later, by starting all ranks again
    #[arg(long, value_name = "M", env = "PET_NNODES", default_value = "1")]
    pub nnodes: String,

    /// This host's rank among the hosts [default: SLURM_NODEID in a Slurm step of as many nodes; else 0 for the host
    /// with the endpoint's address, and the others as they join]
    #[arg(long, value_name = "R", alias = "node_rank", env = "PET_NODE_RANK",
          value_parser = RangedI64ValueParser::<usize>::new().range(0..=65_535))]
    pub node_rank: Option<usize>,

    /// Where the launchers meet: the address of the host with rank 0, as the other hosts reach it, and a free port on
    /// it; with --rdzv-backend etcd, the address and port of etcd
    #[arg(long, value_name = "HOST:PORT", alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT")]
    pub rdzv_endpoint: Option<String>,

    /// File with the secret by which the launchers of several hosts authenticate, the same on all of them; only its
    /// owner may have access (chmod 600) [default: the secret in OVERDRIVE_SECRET]
    #[arg(long, value_name = "FILE", alias = "secret_file")]
    pub secret_file: Option<PathBuf>,

    /// Run several hosts without a secret: anyone who can reach the endpoint can join the run, and end it
    #[arg(long, conflicts_with = "secret_file")]
    pub insecure: bool,

    /// static or c10d: the launchers meet at node 0; both mean the launcher's own protocol. etcd: the launchers elect
    /// node 0 by an etcd at the endpoint, and another one when it is lost
    #[arg(long, value_name = "NAME", alias = "rdzv_backend", env = "PET_RDZV_BACKEND", default_value = "static")]
    pub rdzv_backend: String,

    /// The run's name, the same on all hosts
    #[arg(long, value_name = "ID", alias = "rdzv_id", env = "PET_RDZV_ID", default_value = "none")]
    pub rdzv_id: String,

    /// Times in seconds, and other settings: join_timeout (or timeout; how long hosts wait for each other),
    /// last_call_timeout (how long an elastic run that has MIN hosts waits for more), keep_alive_interval (how often
    /// hosts report that they are alive), keep_alive_max_attempt (how many such reports a lost host has missed), is_host
    /// (whether this host is the one with rank 0), lease_timeout (with etcd: how long after the loss of the host with
    /// rank 0 another one takes its place). For an etcd with TLS: protocol=https, cacert (file with the authority that has
    /// signed its certificate), cert and key (files of this host's), user and password_file (or the password in
    /// OVERDRIVE_ETCD_PASSWORD). Keys of torchrun's store are ignored, all others refused
    #[arg(long, value_name = "KEY=VALUE,..", alias = "rdzv_conf", env = "PET_RDZV_CONF", default_value = "")]
    pub rdzv_conf: String,

    /// Run on this host only; --nnodes, --node-rank, --rdzv-backend, --rdzv-endpoint, --master-addr and --master-port
    /// are ignored
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    pub standalone: bool,

    /// Address where ranks and launchers meet; ignored with --rdzv-endpoint [default: 127.0.0.1]
    #[arg(long, value_name = "HOST", alias = "master_addr", env = "PET_MASTER_ADDR", value_parser = values::host)]
    pub master_addr: Option<String>,

    /// Port of the ranks' store [default: a free port]; with several hosts and no --rdzv-endpoint, port where the
    /// launchers meet [default: 29500]
    #[arg(long, value_name = "PORT", alias = "master_port", env = "PET_MASTER_PORT",
          value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,

    /// Address at which the ranks reach the host with rank 0, if it is not the endpoint's; with etcd, this host's
    /// address for the others [default: the one from which it reaches etcd]
    #[arg(long, value_name = "HOST", alias = "local_addr", env = "PET_LOCAL_ADDR", value_parser = values::host)]
    pub local_addr: Option<String>,

    /// How many times all ranks may be started again after one has failed
    #[arg(long, value_name = "K", alias = "max_restarts", env = "PET_MAX_RESTARTS", default_value = "0")]
    pub max_restarts: u32,

    /// How long ranks may take to end after they were told to, before they get SIGKILL
    #[arg(long, value_name = "SECONDS", alias = "grace_period", default_value = "30")]
    pub grace_period: f64,

    /// How long the other ranks may run on after the first has failed, before they are told to end; the same on all
    /// hosts
    #[arg(long, value_name = "SECONDS", alias = "failure_window", default_value = "1")]
    pub failure_window: f64,

    /// Check this host before its ranks start: COMMAND, with arguments after spaces, runs as one rank for each of this host's.
    /// A host that fails takes no part; overdrive-node-check is such a command
    #[arg(long, value_name = "COMMAND", alias = "node_check")]
    pub node_check: Option<String>,

    /// How long --node-check may take
    #[arg(long, value_name = "SECONDS", alias = "node_check_timeout", default_value = "300")]
    pub node_check_timeout: f64,

    /// Port at which this launcher answers health checks by HTTP: 200, or 503 if the launcher or a rank that has called
    /// overdrive_launch::heartbeat() stands still. Else at that of TORCHELASTIC_HEALTH_CHECK_PORT, if it is free
    #[arg(long, value_name = "PORT", alias = "health_port",
          value_parser = clap::value_parser!(u16).range(1..))]
    pub health_port: Option<u16>,

    /// How long the launcher or a rank may give no sign of life in health checks; 3 at least
    #[arg(long, value_name = "SECONDS", alias = "health_timeout", default_value = "60")]
    pub health_timeout: f64,

    /// Bind each rank to CPUs near its GPU: those of its NUMA node (node) or processor (socket), a share of the node's
    /// cores (exclusive), or cores of the node with a common cache (core-complex). Without GPUs the ranks are divided
    /// among the NUMA nodes [default: all CPUs]
    #[arg(long, value_name = "MODE", alias = "numa_binding")]
    pub numa_binding: Option<String>,

    /// Outputs that go to files only: 0 none, 1 standard output, 2 standard error, 3 both; or one of these per local
    /// rank, as in 0:3,1:2
    #[arg(short, long, value_name = "CHOICE", env = "PET_REDIRECTS", default_value = "0")]
    pub redirects: String,

    /// Outputs that go to files and to the console, with the same values
    #[arg(short, long, value_name = "CHOICE", env = "PET_TEE", default_value = "0")]
    pub tee: String,

    /// Where those files go: DIR/ID_UNIQUE/attempt_0/0/stdout.log [default: the system's temporary folder]
    #[arg(long, value_name = "DIR", alias = "log_dir", env = "PET_LOG_DIR")]
    pub log_dir: Option<PathBuf>,

    /// The local ranks that the console shows, like 0,1 [default: all]
    #[arg(long, value_name = "RANKS", alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER")]
    pub local_ranks_filter: Option<String>,

    /// Copy lines of standard output that contain one of these texts, of all ranks that the console shows, to
    /// DIR/ID_UNIQUE/attempt_0/filtered_stdout.log; a comma within a text is written twice
    #[arg(long, value_name = "TEXT,..", alias = "duplicate_stdout_filters", env = "PET_DUPLICATE_STDOUT_FILTERS")]
    pub duplicate_stdout_filters: Option<String>,

    /// The same for standard error, to filtered_stderr.log
    #[arg(long, value_name = "TEXT,..", alias = "duplicate_stderr_filters", env = "PET_DUPLICATE_STDERR_FILTERS")]
    pub duplicate_stderr_filters: Option<String>,

    /// The ranks' ROLE_NAME
    #[arg(long, value_name = "NAME", env = "PET_ROLE", default_value = "default")]
    pub role: String,

    /// Signals that are forwarded to the ranks [default: SIGINT,SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2]
    #[arg(long, value_name = "NAMES", alias = "signals_to_handle", env = "PET_SIGNALS_TO_HANDLE")]
    pub signals_to_handle: Option<String>,

    /// PROGRAM is a Python module: python -m PROGRAM
    #[arg(short, long, env = "PET_MODULE", value_parser = FalseyValueParser::new())]
    pub module: bool,

    /// Start PROGRAM directly, even if it is a .py file
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    pub no_python: bool,

    /// Start PROGRAM with Python, even if it is not a .py file
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", value_parser = FalseyValueParser::new())]
    pub run_path: bool,

    /// Accepted and ignored: the launcher does not poll
    #[arg(long, value_name = "SECONDS", alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide = true)]
    pub monitor_interval: Option<f64>,

    /// Accepted and ignored: ranks are always separate programs
    #[arg(long, value_name = "HOW", alias = "start_method", env = "PET_START_METHOD", hide = true)]
    pub start_method: Option<String>,

    /// Known, so that it can be refused with a reason
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide = true)]
    pub event_log_handler: Option<String>,

    /// Known, so that it can be refused with a reason
    #[arg(long, alias = "logs_specs", hide = true)]
    pub logs_specs: Option<String>,

    /// Known, so that it can be refused with a reason
    #[arg(long, alias = "virtual_local_rank", env = "PET_VIRTUAL_LOCAL_RANK", hide = true,
          value_parser = FalseyValueParser::new())]
    pub virtual_local_rank: bool,

    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, num_args = 1.., trailing_var_arg = true, hide = true)]
    pub command: Vec<OsString>,
}

impl Cli {
    /// Parses this process's command line; prints the error and exits if it is invalid.
    pub fn read() -> Self {
        let mut command = Self::command().mut_args(without_empty_variable).mut_args(with_negative_numbers);
        let read = Self::from_arg_matches(&command.get_matches_mut());
        read.unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// An empty variable counts as unset: job templates often set variables for which they have no value.
fn without_empty_variable(option: Arg) -> Arg {
    let is_empty = option.get_env().and_then(env::var_os).is_some_and(|value| value.is_empty());
    if is_empty { option.env(Resettable::Reset) } else { option }
}

/// A negative number is an invalid value of an option, not an unknown option.
fn with_negative_numbers(option: Arg) -> Arg {
    let takes_value = option.get_long().is_some() && option.get_action().takes_values();
    option.allow_negative_numbers(takes_value)
}
