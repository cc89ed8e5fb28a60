//! Turns the parsed options into a [`Launch`].

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use overdrive_launch::{Launch, LaunchError, StreamsByRank, signal_by_name};

use crate::cli::Cli;
use crate::values::{self, Rendezvous};

/// The endpoint's port if only an address is given; torchrun's default.
const DEFAULT_PORT: u16 = 29500;

/// etcd's own default.
const ETCD_PORT: u16 = 2379;

/// Whether the launchers meet by an etcd. torchrun has two names for that; here both mean version 3 of etcd's protocol.
fn is_etcd(backend: &str) -> bool {
    matches!(backend, "etcd" | "etcd-v2")
}

pub fn refuse<T>(why: impl Into<String>) -> Result<T, LaunchError> {
    Err(LaunchError::Options(why.into()))
}

/// The [`Launch`] that the options ask for.
pub fn launch(cli: &Cli) -> Result<Launch, LaunchError> {
    refuse_unsupported(cli)?;
    let (program, args) = command_line(cli)?;
    let rendezvous = values::rendezvous(&cli.rdzv_conf)?;
    let Some(grace) = values::seconds(cli.grace_period) else {
        return refuse(format!("--grace-period {}: give a number of seconds, 0 or more", cli.grace_period));
    };
    let Some(window) = values::seconds(cli.failure_window) else {
        return refuse(format!("--failure-window {}: give a number of seconds, 0 or more", cli.failure_window));
    };
    let mut launch = Launch::new(program)
        .args(args)
        .nproc(values::nproc(&cli.nproc_per_node)?)
        .max_restarts(cli.max_restarts)
        .grace_period(grace)
        .failure_window(window)
        .run_id(&cli.rdzv_id)
        .role(&cli.role)
        .redirects(streams("--redirects", &cli.redirects)?)
        .tee(streams("--tee", &cli.tee)?)
        .duplicate_stdout_filters(values::texts(cli.duplicate_stdout_filters.as_deref()))
        .duplicate_stderr_filters(values::texts(cli.duplicate_stderr_filters.as_deref()))
        .forward_signals();
    if let Some(command) = &cli.node_check {
        let mut words = command.split_ascii_whitespace();
        let Some(program) = words.next() else {
            return refuse("--node-check: give a command, like overdrive-node-check");
        };
        let Some(timeout) = values::seconds(cli.node_check_timeout).filter(|it| !it.is_zero()) else {
            return refuse(format!(
                "--node-check-timeout {}: give a number of seconds above 0",
                cli.node_check_timeout
            ));
        };
        launch = launch.node_check(program, words).node_check_timeout(timeout);
    }
    if let Some(port) = cli.health_port {
        let Some(timeout) = values::seconds(cli.health_timeout).filter(|it| !it.is_zero()) else {
            return refuse(format!("--health-timeout {}: give a number of seconds above 0", cli.health_timeout));
        };
        launch = launch.health_port(port).health_timeout(timeout);
    }
    if let Some(folder) = &cli.log_dir {
        launch = launch.log_dir(folder);
    }
    // torchrun's default is an empty list, which means all.
    if let Some(shown) = cli.local_ranks_filter.as_deref().filter(|it| !it.is_empty()) {
        launch = launch.local_ranks_filter(values::local_ranks(shown)?);
    }
    if let Some(mode) = &cli.numa_binding {
        launch = launch.numa_binding(mode.parse()?);
    }
    if let Some(names) = &cli.signals_to_handle {
        launch = launch.signals(signals(names)?);
    }
    if let Ok(template) = env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") {
        launch = launch.prefix(template);
    }
    set_hosts(launch, cli, &rendezvous)
}

/// Refuses torchrun's options that this launcher does not support, instead of ignoring them.
fn refuse_unsupported(cli: &Cli) -> Result<(), LaunchError> {
    match cli.rdzv_backend.as_str() {
        // Both mean this launcher's own protocol, which node 0 serves at the endpoint.
        "static" | "c10d" => {}
        name if is_etcd(name) => {}
        other => {
            return refuse(format!(
                "--rdzv-backend {other}: give static or c10d, which need no separate server, or etcd"
            ));
        }
    }
    // torchrun's default, `null`, means no handler, so it is accepted.
    let is_null = |handler: &&String| handler.as_str() != "null";
    let unsupported = [
        ("--event-log-handler", cli.event_log_handler.as_ref().filter(is_null).is_some()),
        ("--logs-specs", cli.logs_specs.is_some()),
        ("--virtual-local-rank", cli.virtual_local_rank),
    ];
    match unsupported.iter().find(|option| option.1) {
        Some((name, _)) => refuse(format!("{name}: overdrive-run does not support this option; leave it out")),
        None => Ok(()),
    }
}

/// What to execute: the program itself, or Python with the program as its argument.
fn command_line(cli: &Cli) -> Result<(OsString, Vec<OsString>), LaunchError> {
    // --run-path overrides --module and --no-python.
    if cli.module && cli.no_python && !cli.run_path {
        return refuse("--module and --no-python contradict each other: only Python runs modules");
    }
    let Some((program, arguments)) = cli.command.split_first() else { return refuse("give a program to run") };
    let is_python_file = Path::new(program).extension() == Some(OsStr::new("py"));
    let with_python = cli.run_path || cli.module || (is_python_file && !cli.no_python);
    if !with_python {
        return Ok((program.clone(), arguments.to_vec()));
    }
    let python = env::var_os("PYTHON_EXEC").filter(|it| !it.is_empty()).unwrap_or_else(|| "python3".into());
    // Unbuffered, as with torchrun, so that output appears at once.
    let mut args = vec![OsString::from("-u")];
    if cli.module && !cli.run_path {
        args.push("-m".into());
    }
    args.extend(cli.command.iter().cloned());
    Ok((python, args))
}

fn streams(option: &str, choice: &str) -> Result<StreamsByRank, LaunchError> {
    choice.parse().or_else(|error| refuse(format!("{option}: {error}")))
}

fn signals(names: &str) -> Result<Vec<i32>, LaunchError> {
    let number = |name: &str| match signal_by_name(name) {
        Some(number) => Ok(number),
        None => refuse(format!(
            "--signals-to-handle: `{name}` is not the name of a signal that can be forwarded; SIGKILL, SIGSTOP, \
             SIGCHLD, SIGSEGV, SIGBUS, SIGILL and SIGFPE cannot be"
        )),
    };
    names.split(',').filter(|name| !name.trim().is_empty()).map(number).collect()
}

/// Sets the number of hosts, this host's rank, and the rendezvous endpoint.
fn set_hosts(launch: Launch, cli: &Cli, rendezvous: &Rendezvous) -> Result<Launch, LaunchError> {
    let (min_nodes, nnodes) = if cli.standalone { (1, 1) } else { values::nnodes(&cli.nnodes)? };
    let mut launch = launch
        .nnodes(nnodes)
        .min_nodes(min_nodes)
        .keep_alive(rendezvous.keep_alive_interval, rendezvous.keep_alive_max_attempt);
    if let Some(timeout) = rendezvous.join_timeout {
        launch = launch.join_timeout(timeout);
    }
    if let Some(lease) = rendezvous.lease {
        launch = launch.lease_timeout(lease);
    }
    if let Some(last_call) = rendezvous.last_call {
        launch = launch.last_call(last_call);
    }
    if nnodes == 1 {
        // A single host needs no endpoint, because no other launcher joins.
        // --rdzv-endpoint and --standalone override --master-addr and --master-port.
        let uses_master = cli.rdzv_endpoint.is_none() && !cli.standalone;
        if let Some(address) = cli.master_addr.as_ref().filter(|_| uses_master) {
            launch = launch.master_addr(address);
        }
        if let Some(port) = cli.master_port.filter(|_| uses_master) {
            launch = launch.master_port(port);
        }
        return Ok(match cli.node_rank {
            Some(rank) if !cli.standalone => launch.node_rank(rank),
            _ => launch,
        });
    }
    launch = set_secret(launch, cli)?;
    let uses_etcd = is_etcd(&cli.rdzv_backend);
    if !uses_etcd {
        rendezvous.etcd.refuse_all()?;
    }
    // With etcd the launchers elect node 0 and number the others as they join, so Slurm's number is not used.
    let slurm = if cli.node_rank.is_none() { values::slurm_node(nnodes)?.filter(|_| !uses_etcd) } else { None };
    if let Some(rank) = cli.node_rank.or(slurm) {
        launch = launch.node_rank(rank);
    }
    if let Some(is_host) = rendezvous.is_host {
        launch = launch.is_host(is_host);
    }
    if let Some(address) = &cli.local_addr {
        launch = launch.master_addr(address);
    }
    match (&cli.rdzv_endpoint, &cli.master_addr) {
        (Some(endpoint), _) if uses_etcd => {
            let (host, port) = values::endpoint(endpoint, ETCD_PORT)?;
            if let Some(port) = cli.master_port {
                launch = launch.master_port(port);
            }
            rendezvous.etcd.set(launch.rdzv_etcd(host, port))
        }
        (None, _) if uses_etcd => {
            refuse("--rdzv-backend etcd: give etcd's host and port, like --rdzv-endpoint etcd0:2379")
        }
        (Some(endpoint), _) if !endpoint.is_empty() => {
            let (host, port) = values::endpoint(endpoint, DEFAULT_PORT)?;
            if let Some(port) = cli.master_port {
                launch = launch.master_port(port);
            }
            Ok(launch.rdzv_endpoint(host, port))
        }
        (_, Some(address)) => Ok(launch.rdzv_endpoint(address, cli.master_port.unwrap_or(DEFAULT_PORT))),
        _ => Ok(launch), // `Launch::run` reports that the endpoint is missing.
    }
}

/// Sets the secret by which the launchers authenticate: none with --insecure, else from --secret-file, else from
/// OVERDRIVE_SECRET.
fn set_secret(launch: Launch, cli: &Cli) -> Result<Launch, LaunchError> {
    let variable = env::var_os("OVERDRIVE_SECRET").filter(|it| !it.is_empty());
    match (&cli.secret_file, variable) {
        _ if cli.insecure => Ok(launch.insecure()),
        (Some(file), _) => launch.secret_file(file),
        (None, Some(secret)) => launch.secret(secret.as_encoded_bytes()),
        (None, None) => Ok(launch), // `Launch::run` reports that the secret is missing.
    }
}
