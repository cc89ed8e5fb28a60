//! Starts a rank: its program, its environment, and where its outputs go.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, getpid};

use super::{Attempt, Running};
use crate::environment::{self, Place};
use crate::error::LaunchError;
use crate::error_file;
use crate::heartbeat;
use crate::numa::Binding;
use crate::output::{self, Kind, Output, Progress, Route};
use crate::process;
use crate::roles::{ROLE, Role};

impl Attempt<'_> {
    pub fn start(&self, local_rank: usize, progress: &Arc<Progress>) -> Result<Running, LaunchError> {
        let (host, team, plan) = (self.host, self.team, &self.host.plan);
        let rank = team.first_rank + local_rank;
        let folder = host.logs.as_ref().map(|logs| logs.join(self.folder()).join(local_rank.to_string()));
        if let Some(folder) = &folder {
            std::fs::create_dir_all(folder).map_err(LaunchError::system(format!("create {}", folder.display())))?;
        }
        let in_logs = folder.as_ref().map(|folder| folder.join("error.json"));
        let error_file = in_logs.or_else(|| host.errors.as_ref().map(|errors| errors.file(team.attempt, local_rank)));
        if let Some(file) = &error_file {
            // If the ranks' port was taken, they start again as the same attempt, with the files of the first start.
            // Usually there is none.
            let _ = std::fs::remove_file(file);
        }
        let place = Place {
            rank,
            local_rank,
            world_size: team.world_size,
            local_world_size: plan.nproc,
            node_rank: team.node_rank,
            nnodes: team.nnodes,
            master_addr: &team.master_addr,
            master_port: team.master_port,
            restarts: team.restarts,
            max_restarts: plan.max_restarts,
            run_id: &plan.run_id,
            role: &plan.role,
        };
        // The rank inherits the CPUs of the thread that starts it.
        let bound = host.bindings.get(local_rank).map(Binding::enter).transpose()?;
        let heartbeats = error_file.as_ref().filter(|_| plan.health_port.is_some());
        let heartbeats = heartbeats.map(|file| file.with_extension("heartbeat"));
        let mut command = self.command(&place, error_file.as_deref());
        if let Some(file) = &heartbeats {
            // As with the error file.
            let _ = std::fs::remove_file(file);
            command.env(heartbeat::VARIABLE, file);
            host.health.started(rank, file);
        }
        let mut child = command.spawn().map_err(|error| LaunchError::Program {
            program: plan.program.display().to_string(),
            reason: error.to_string(),
            missing: false,
        })?;
        drop(bound);
        let pid = Pid::from_child(&child);

        let files = plan.redirects.of(local_rank);
        let copies = plan.tee.of(local_rank);
        let route = |kind: Kind| -> Result<(Route, Option<PathBuf>), LaunchError> {
            let meant = |streams: crate::Streams| if kind == Kind::Out { streams.out() } else { streams.err() };
            let log = folder.as_ref().filter(|_| meant(files) || meant(copies)).map(|it| it.join(kind.file_name()));
            let shown = plan.is_shown(local_rank) && (meant(copies) || !meant(files));
            let prefix = plan.prefix(rank, local_rank);
            let prefix = if self.check.is_some() { format!("check {prefix}") } else { prefix };
            let route = Route {
                kind,
                prefix: host.console.prefix(kind, &prefix, rank),
                plain_prefix: prefix.into_bytes(),
                console: shown.then(|| Arc::clone(&host.console)),
                filtered: self.filtered[usize::from(kind == Kind::Err)].clone().filter(|_| shown),
                file: log.as_deref().map(output::create).transpose()?,
                progress: Arc::clone(progress),
            };
            Ok((route, log))
        };
        let (out, err) = (route(Kind::Out)?, route(Kind::Err)?);
        let piped = || LaunchError::Guard("a rank was started without pipes for its output".to_owned());
        let outputs = [
            Output::start(child.stdout.take().ok_or_else(piped)?, out.0)?,
            Output::start(child.stderr.take().ok_or_else(piped)?, err.0)?,
        ];
        Ok(Running { rank, pid, end: None, outputs, logs: [out.1, err.1], error_file })
    }

    /// Of the outputs.
    fn folder(&self) -> String {
        if self.check.is_some() { "check".to_owned() } else { format!("attempt_{}", self.team.attempt) }
    }

    /// `error_file`: where `record`, here or in Python, writes the error that ends the rank.
    fn command(&self, place: &Place<'_>, error_file: Option<&Path>) -> Command {
        let plan = &self.host.plan;
        let guard = getpid().as_raw_pid();
        let mut command = Command::new("/proc/self/exe");
        let (program, file, args) = match self.check {
            Some((check, _)) => (&check.program, &check.file, &check.args),
            None => (&plan.program, &plan.file, &plan.args),
        };
        if plan.is_own_program && self.check.is_none() {
            command = Command::new(file);
            command.env(ROLE, Role::Rank(guard).to_variable());
        } else {
            command.arg0(program).arg(file).env(ROLE, Role::Exec(guard).to_variable());
        }
        for argument in args {
            match argument.to_str() {
                // torchrun's only macro.
                Some(text) => command.arg(text.replace("${local_rank}", &place.local_rank.to_string())),
                None => command.arg(argument),
            };
        }
        for name in environment::NOT_FOR_RANKS {
            command.env_remove(name);
        }
        command.envs(error_file.map(|path| (error_file::VARIABLE, path)));
        command.envs(environment::of(place)).env(process::MARK, &plan.mark);
        let threads = self.host.threads.get(place.local_rank);
        command.envs(threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string())));
        command.envs(plan.envs.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        command
    }
}
