//! What to start: the launcher checks it and sends it to the guard.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::LaunchError;
use crate::etcd_access::Access;
use crate::failures::FAILURE_WINDOW;
use crate::host_name::is_host;
use crate::node_check::NodeCheck;
use crate::numa::NumaBinding;
use crate::secret::Trust;
use crate::signals;
use crate::streams::StreamsByRank;

/// More than any host has cores or GPUs: a larger number is a typing mistake.
const MOST_RANKS: usize = 1024;
const MOST_NODES: usize = 65_536;
/// In bytes: nodes send the run's name in their greeting.
const LONGEST_RUN_ID: usize = 1024;
/// etcd grants no shorter ones.
const SHORTEST_LEASE: Duration = Duration::from_secs(2);

/// What is at the endpoint.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Meeting {
    /// The launcher of node 0.
    AtNodeZero,
    /// An etcd, by which the launchers elect node 0.
    AtEtcd,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Plan {
    /// As the user gave it.
    pub program: OsString,
    /// The path at which `program` was found.
    pub file: OsString,
    pub args: Vec<OsString>,
    /// The ranks run the current program, whose `main` calls `helper`.
    pub is_own_program: bool,
    pub envs: Vec<(OsString, OsString)>,
    pub nproc: usize,
    /// In an elastic run the most.
    pub nnodes: usize,
    /// The fewest nodes of an elastic run.
    pub min_nodes: Option<usize>,
    pub last_call: Duration,
    pub node_rank: Option<usize>,
    pub endpoint: Option<(String, u16)>,
    pub meeting: Meeting,
    pub etcd: Access,
    /// How long a node 0 that was elected stays in etcd without a renewal.
    pub lease: Duration,
    pub is_host: Option<bool>,
    pub master_addr: Option<String>,
    pub master_port: Option<u16>,
    pub max_restarts: u32,
    pub grace: Duration,
    pub failure_window: Duration,
    pub join_timeout: Duration,
    pub keep_alive: Duration,
    pub silence: Duration,
    pub run_id: String,
    pub trust: Trust,
    pub role: String,
    pub redirects: StreamsByRank,
    pub tee: StreamsByRank,
    pub log_dir: Option<OsString>,
    /// Of standard output and standard error.
    pub filters: [Vec<String>; 2],
    pub numa_binding: Option<NumaBinding>,
    pub local_ranks_filter: Option<Vec<usize>>,
    pub prefix: String,
    pub node_check: Option<NodeCheck>,
    pub health_port: Option<u16>,
    /// How long a loop or a rank may be silent.
    pub health_timeout: Duration,
    pub signals: Vec<i32>,
    pub forward_signals: bool,
    /// The value of the variable that every process of this launch carries.
    pub mark: String,
}

impl Plan {
    pub fn new(program: OsString) -> Self {
        Self {
            program,
            file: OsString::new(),
            args: Vec::new(),
            is_own_program: false,
            envs: Vec::new(),
            nproc: 1,
            nnodes: 1,
            min_nodes: None,
            last_call: Duration::from_secs(30),
            node_rank: None,
            endpoint: None,
            meeting: Meeting::AtNodeZero,
            etcd: Access::default(),
            lease: Duration::from_secs(10),
            is_host: None,
            master_addr: None,
            master_port: None,
            max_restarts: 0,
            grace: Duration::from_secs(30),
            failure_window: FAILURE_WINDOW,
            join_timeout: Duration::from_secs(600),
            keep_alive: Duration::from_secs(5),
            silence: Duration::from_secs(15),
            run_id: "none".to_owned(),
            trust: Trust::Undecided,
            role: "default".to_owned(),
            redirects: StreamsByRank::default(),
            tee: StreamsByRank::default(),
            log_dir: None,
            filters: Default::default(),
            numa_binding: None,
            local_ranks_filter: None,
            prefix: "[rank${rank}]: ".to_owned(),
            node_check: None,
            health_port: None,
            health_timeout: Duration::from_secs(60),
            signals: signals::FORWARDED.to_vec(),
            forward_signals: false,
            mark: String::new(),
        }
    }

    /// Refuses invalid options, and finds the program's file.
    pub fn check(&mut self) -> Result<(), LaunchError> {
        self.check_counts()?;
        self.check_places()?;
        self.check_ranks_named()?;
        if let Some(number) = self.signals.iter().find(|number| signals::from_number(**number).is_none()) {
            return refuse(format!("{number} is not the number of a signal that can be forwarded"));
        }
        if self.keep_alive.is_zero() || self.silence.is_zero() {
            return refuse(
                "--rdzv-conf keep_alive_interval, keep_alive_max_attempt: one of them is 0; give more than 0 for both"
                    .into(),
            );
        }
        if self.is_own_program {
            let file = env::current_exe().map_err(LaunchError::system("find the running program"))?;
            self.program = file.clone().into_os_string();
            self.file = file.into_os_string();
        } else {
            self.file = find(&self.program)?.into_os_string();
        }
        if let Some(check) = &mut self.node_check {
            check.file = find(&check.program)?.into_os_string();
        }
        Ok(())
    }

    fn check_counts(&self) -> Result<(), LaunchError> {
        if !(1..=MOST_RANKS).contains(&self.nproc) {
            return refuse(format!("--nproc-per-node {}: give 1 to {MOST_RANKS} ranks on this host", self.nproc));
        }
        if !(1..=MOST_NODES).contains(&self.nnodes) {
            return refuse(format!("--nnodes {}: give 1 to {MOST_NODES} hosts", self.nnodes));
        }
        if self.fewest_nodes() == 0 || self.fewest_nodes() > self.nnodes {
            return refuse(format!(
                "--nnodes {}: the fewest hosts have to be at least 1, and not more than the most; give MIN:MAX, like \
                 2:4",
                self.nnodes_text()
            ));
        }
        if let Some(rank) = self.node_rank.filter(|rank| *rank >= self.nnodes) {
            return refuse(format!("--node-rank {rank}: ranks of {} nodes are 0 to {}", self.nnodes, self.nnodes - 1));
        }
        if self.nnodes > 1 && self.endpoint.is_none() {
            return refuse(format!(
                "{} nodes need an endpoint: give the address of node 0 and a free port on it, as in \
                 --rdzv-endpoint node0:29500",
                self.nnodes
            ));
        }
        if self.nnodes > 1 && self.trust == Trust::Undecided {
            return refuse(format!(
                "{} nodes need a secret, the same on all of them: give its file by --secret-file, or set \
                 OVERDRIVE_SECRET (openssl rand -hex 32 makes one). --insecure does without: anyone who can reach the \
                 endpoint can then join and end the run",
                self.nnodes
            ));
        }
        if self.meeting == Meeting::AtEtcd && self.nnodes > 1 {
            self.check_election()?;
        }
        if self.run_id.len() > LONGEST_RUN_ID {
            return refuse(format!("--rdzv-id has {} bytes; give at most {LONGEST_RUN_ID}", self.run_id.len()));
        }
        Ok(())
    }

    fn check_election(&self) -> Result<(), LaunchError> {
        if self.run_id == "none" {
            return refuse(
                "--rdzv-id: runs that meet by etcd need a name of their own, like --rdzv-id job7".to_owned(),
            );
        }
        if self.node_rank.is_some() || self.is_host.is_some() {
            return refuse(
                "--node-rank, --rdzv-conf is_host: with etcd the launchers elect node 0; leave both out".into(),
            );
        }
        if self.lease < SHORTEST_LEASE {
            let least = SHORTEST_LEASE.as_secs();
            return refuse(format!("--rdzv-conf lease_timeout={}: give {least} s or more", self.lease.as_secs_f64()));
        }
        self.etcd.check()
    }

    fn check_places(&self) -> Result<(), LaunchError> {
        let (host, port) = self.endpoint.as_ref().map(|(host, port)| (host, *port)).unzip();
        for (option, host) in [("--rdzv-endpoint", host), ("--master-addr", self.master_addr.as_ref())] {
            if let Some(host) = host.filter(|host| !is_host(host)) {
                return refuse(format!("{option} `{host}`: give a host's name or address, like node0 or 10.0.0.1"));
            }
        }
        for (option, port) in
            [("--rdzv-endpoint", port), ("--master-port", self.master_port), ("--health-port", self.health_port)]
        {
            if port == Some(0) {
                return refuse(format!("{option}: the port is 0; give 1 to 65535"));
            }
        }
        Ok(())
    }

    fn check_ranks_named(&self) -> Result<(), LaunchError> {
        let shown = self.local_ranks_filter.iter().flatten().copied().max();
        let named = [
            ("--redirects", self.redirects.highest_local_rank()),
            ("--tee", self.tee.highest_local_rank()),
            ("--local-ranks-filter", shown),
        ];
        match named.into_iter().find_map(|(what, rank)| Some((what, rank.filter(|rank| *rank >= self.nproc)?))) {
            None => Ok(()),
            Some((what, rank)) => {
                refuse(format!("{what} names local rank {rank}; this host has local ranks 0 to {}", self.nproc - 1))
            }
        }
    }

    pub fn fewest_nodes(&self) -> usize {
        self.min_nodes.unwrap_or(self.nnodes)
    }

    /// How long a loop may wait before it says that it goes on: only health checks ask.
    pub fn longest_wait(&self) -> Duration {
        Duration::from_secs(if self.health_port.is_some() { 1 } else { 86_400 })
    }

    /// Whether the number of nodes may change during the run.
    pub fn is_elastic(&self) -> bool {
        self.fewest_nodes() != self.nnodes
    }

    /// `2`, or `1:4` for an elastic run.
    pub fn nnodes_text(&self) -> String {
        if self.is_elastic() { format!("{}:{}", self.fewest_nodes(), self.nnodes) } else { self.nnodes.to_string() }
    }

    /// A variable that ranks inherit, or that was set for them; None if it is not text.
    pub fn variable_of_ranks(&self, name: &str) -> Option<String> {
        let set = self.envs.iter().rev().find(|(other, _)| other == name).map(|(_, value)| value.clone());
        set.or_else(|| env::var_os(name))?.into_string().ok()
    }

    pub fn is_shown(&self, local_rank: usize) -> bool {
        self.local_ranks_filter.as_ref().is_none_or(|shown| shown.contains(&local_rank))
    }

    pub fn prefix(&self, rank: usize, local_rank: usize) -> String {
        let filled = self.prefix.replace("${local_rank}", &local_rank.to_string());
        filled.replace("${rank}", &rank.to_string()).replace("${role_name}", &self.role)
    }

    pub fn wants_files(&self) -> bool {
        let filters = self.filters.iter().any(|texts| !texts.is_empty());
        self.log_dir.is_some() || self.redirects.any() || self.tee.any() || filters
    }
}

fn refuse<T>(why: String) -> Result<T, LaunchError> {
    Err(LaunchError::Options(why))
}

/// Finds a program as a shell does: by its path if it contains a `/`, else in the folders of `PATH`.
fn find(program: &OsStr) -> Result<PathBuf, LaunchError> {
    let fail = |reason: &str, missing| {
        Err(LaunchError::Program { program: program.display().to_string(), reason: reason.to_owned(), missing })
    };
    let has_folder = program.as_encoded_bytes().contains(&b'/');
    let candidates: Vec<PathBuf> = if has_folder {
        vec![program.into()]
    } else {
        let folders = env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        env::split_paths(&folders).map(|folder| folder.join(program)).collect()
    };
    let files: Vec<&PathBuf> = candidates.iter().filter(|path| path.is_file()).collect();
    match files.iter().find(|path| is_executable(path)) {
        Some(path) => Ok(path.to_path_buf()),
        None if !files.is_empty() => fail("the file is not executable (chmod +x)", false),
        None if has_folder && Path::new(program).exists() => fail("that is not a file", false),
        None if has_folder => fail("there is no such file", true),
        None if Path::new(program).exists() => {
            fail(&format!("it is not in PATH; to run the one in this folder, give ./{}", program.display()), true)
        }
        None => fail("it is not in PATH", true),
    }
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| it.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = Plan::new("true".into());
        change(&mut plan);
        plan.check().unwrap_err().to_string()
    }

    #[test]
    fn invalid_options_are_refused_with_what_would_be_right() {
        assert_eq!(refused(|plan| plan.nproc = 0), "--nproc-per-node 0: give 1 to 1024 ranks on this host");
        assert!(refused(|plan| plan.nproc = 5000).contains("--nproc-per-node 5000"));
        assert_eq!(refused(|plan| plan.nnodes = 0), "--nnodes 0: give 1 to 65536 hosts");
        assert!(refused(|plan| plan.nnodes = 2).contains("--rdzv-endpoint"));
        assert!(refused(|plan| (plan.min_nodes, plan.nnodes) = (Some(4), 2)).starts_with("--nnodes 4:2: the fewest"));
        assert!(refused(|plan| (plan.min_nodes, plan.nnodes) = (Some(0), 2)).starts_with("--nnodes 0:2: the fewest"));
        let meets = |plan: &mut Plan| (plan.nnodes, plan.endpoint) = (2, Some(("a".into(), 1)));
        assert!(refused(meets).starts_with("2 nodes need a secret, the same on all of them"));
        assert_eq!(refused(|plan| plan.run_id = "x".repeat(1025)), "--rdzv-id has 1025 bytes; give at most 1024");
        assert_eq!(refused(|plan| plan.node_rank = Some(1)), "--node-rank 1: ranks of 1 nodes are 0 to 0");
        assert!(
            refused(|plan| plan.master_addr = Some("a b".into())).starts_with("--master-addr `a b`: give a host's")
        );
        assert!(
            refused(|plan| plan.endpoint = Some((String::new(), 1))).starts_with("--rdzv-endpoint ``: give a host's")
        );
        assert_eq!(refused(|plan| plan.master_port = Some(0)), "--master-port: the port is 0; give 1 to 65535");
        assert!(refused(|plan| plan.endpoint = Some(("a".into(), 0))).starts_with("--rdzv-endpoint: the port is 0"));
        assert!(refused(|plan| plan.tee = "1:3".parse().unwrap()).contains("--tee names local rank 1"));
        assert!(refused(|plan| plan.local_ranks_filter = Some(vec![3])).contains("-filter names local rank 3"));
        assert!(refused(|plan| plan.signals = vec![99]).contains("99"));
    }

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        assert!(find("sh".as_ref()).unwrap().is_absolute());
        let why = |program: &str| find(program.as_ref()).unwrap_err();
        assert_eq!(why("./no-such-program").exit_code(), 127);
        assert_eq!(why("no-such-program").exit_code(), 127);
        assert_eq!(why("/etc/passwd").exit_code(), 126);
        assert_eq!(why("/etc").to_string(), "cannot start `/etc`: that is not a file");
        assert!(why("Cargo.toml").to_string().contains("give ./Cargo.toml"));
    }

    #[test]
    fn prefixes_are_torchruns_templates() {
        let mut plan = Plan::new("true".into());
        assert_eq!(plan.prefix(3, 1), "[rank3]: ");
        plan.prefix = "<${role_name}${rank}/${local_rank}>".into();
        assert_eq!(plan.prefix(3, 1), "<default3/1>");
    }
}
