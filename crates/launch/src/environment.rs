//! The ranks' environment variables, as torchrun sets them.

use crate::error_file;
use crate::heartbeat;
use crate::host_name::without_brackets;
use crate::numa::{self, Binding};

/// A rank's position in the run, and the address of the ranks' store.
pub struct Place<'a> {
    pub rank: usize,
    pub local_rank: usize,
    pub world_size: usize,
    pub local_world_size: usize,
    pub node_rank: usize,
    pub nnodes: usize,
    pub master_addr: &'a str,
    pub master_port: u16,
    /// After failures; torchrun does not count changes of the nodes either.
    pub restarts: u32,
    pub max_restarts: u32,
    pub run_id: &'a str,
    pub role: &'a str,
}

/// # Source
/// `LocalElasticAgent._start_workers`. `TORCHELASTIC_USE_AGENT_STORE` is not set, because rank 0 serves the store, not
/// the launcher.
pub fn of(place: &Place<'_>) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("RANK", place.rank.to_string()),
        ("WORLD_SIZE", place.world_size.to_string()),
        ("LOCAL_RANK", place.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
        ("GROUP_RANK", place.node_rank.to_string()),
        ("GROUP_WORLD_SIZE", place.nnodes.to_string()),
        // All ranks have the same role, so rank and size within the role are the global ones.
        ("ROLE_RANK", place.rank.to_string()),
        ("ROLE_WORLD_SIZE", place.world_size.to_string()),
        ("ROLE_NAME", place.role.to_owned()),
        ("MASTER_ADDR", without_brackets(place.master_addr).to_owned()),
        ("MASTER_PORT", place.master_port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", place.restarts.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", place.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", place.run_id.to_owned()),
    ];
    // torchrun's default, unless the user has set it.
    let unset = |name| std::env::var_os(name).is_none();
    if unset("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        variables.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".to_owned()));
    }
    variables
}

/// The variable with the secret that the launchers of several nodes share.
pub const SECRET: &str = "OVERDRIVE_SECRET";

/// The variable with the password of the user of etcd.
pub const ETCD_PASSWORD: &str = "OVERDRIVE_ETCD_PASSWORD";

/// Variables that must not reach the ranks: those of an outer torchrun, and the launcher's secrets.
pub const NOT_FOR_RANKS: [&str; 6] =
    ["TORCHELASTIC_USE_AGENT_STORE", error_file::VARIABLE, heartbeat::VARIABLE, HEALTH_PORT, SECRET, ETCD_PASSWORD];

/// torchrun's variable for the port of the health check, which is this launcher's own.
pub const HEALTH_PORT: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";

/// The default of `OMP_NUM_THREADS` for each of several ranks on a host: the cores divided by the ranks, where torchrun
/// sets 1; of ranks that are bound to CPUs, their own. None for a single rank, or if the user has set the variable.
pub fn threads_of_ranks(local_world_size: usize, bindings: &[Binding]) -> Vec<usize> {
    if local_world_size < 2 || std::env::var_os("OMP_NUM_THREADS").is_some() {
        return Vec::new();
    }
    if !bindings.is_empty() {
        return numa::threads_of(bindings);
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    vec![(cores / local_world_size).max(1); local_world_size]
}
