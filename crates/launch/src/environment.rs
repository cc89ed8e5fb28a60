//! What ranks find in their environment: torchrun's variables.

use std::path::Path;

use crate::host_name::without_brackets;

/// The place of a rank in the run, and where the ranks meet.
pub struct Place<'a> {
    pub rank: usize,
    pub local_rank: usize,
    pub world_size: usize,
    pub local_world_size: usize,
    pub node_rank: usize,
    pub nnodes: usize,
    pub master_addr: &'a str,
    pub master_port: u16,
    pub attempt: u32,
    pub max_restarts: u32,
    pub run_id: &'a str,
    pub role: &'a str,
    /// Where Python's `@record` leaves the exception that ended a rank.
    pub error_file: Option<&'a Path>,
}

/// # Source
/// `LocalElasticAgent._start_workers`. There is no `TORCHELASTIC_USE_AGENT_STORE`, because the launcher has no store:
/// rank 0 makes it.
pub fn of(place: &Place<'_>) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("RANK", place.rank.to_string()),
        ("WORLD_SIZE", place.world_size.to_string()),
        ("LOCAL_RANK", place.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
        ("GROUP_RANK", place.node_rank.to_string()),
        ("GROUP_WORLD_SIZE", place.nnodes.to_string()),
        // One role for all, so the places within it are those among all.
        ("ROLE_RANK", place.rank.to_string()),
        ("ROLE_WORLD_SIZE", place.world_size.to_string()),
        ("ROLE_NAME", place.role.to_owned()),
        ("MASTER_ADDR", without_brackets(place.master_addr).to_owned()),
        ("MASTER_PORT", place.master_port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", place.attempt.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", place.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", place.run_id.to_owned()),
    ];
    if let Some(path) = place.error_file {
        variables.push(("TORCHELASTIC_ERROR_FILE", path.display().to_string()));
    }
    // Both are torchrun's defaults: what the user has set stays.
    let unset = |name| std::env::var_os(name).is_none();
    if unset("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        variables.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".to_owned()));
    }
    variables
}

/// The variable that holds what launchers of several nodes know one another by.
pub const SECRET: &str = "OVERDRIVE_SECRET";

/// The variables of an outer launch, and of the launcher alone, which must not reach the ranks.
pub const FOREIGN: [&str; 3] = ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", SECRET];

/// The threads for each of several ranks where the user said nothing: the cores, divided. torchrun says 1.
pub fn threads_per_rank(local_world_size: usize) -> Option<usize> {
    if local_world_size < 2 || std::env::var_os("OMP_NUM_THREADS").is_some() {
        return None;
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Some((cores / local_world_size).max(1))
}
