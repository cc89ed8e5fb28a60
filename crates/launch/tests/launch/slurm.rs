//! A job of Slurm itself: its controller and two nodes, all on this host. Skipped where Slurm is not installed (Debian:
//! slurmctld, slurmd, slurm-client).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::launcher::{Ended, LIMIT, Launcher, PROGRAM, wait_for};
use crate::nodes::SECRET;
use crate::port::free_port;

crate::tests![a_job_of_slurm_runs_fails_shrinks_and_is_cancelled];

/// Why these tests cannot run here.
pub fn missing() -> Option<String> {
    let absent: Vec<&str> = ["slurmctld", "slurmd", "srun", "scancel"].into_iter().filter(|it| !found(it)).collect();
    (!absent.is_empty()).then(|| format!("no {}", absent.join(", ")))
}

fn found(program: &str) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&folders).chain([PathBuf::from("/usr/sbin")]).any(|folder| folder.join(program).is_file())
}

fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin")).stdin(Stdio::null());
    command
}

struct Cluster {
    folder: TempDir,
    daemons: Vec<Child>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end_jobs();
        for daemon in self.daemons.iter_mut().rev() {
            let _ = kill_process(Pid::from_child(daemon), Signal::TERM);
            let start = Instant::now();
            while daemon.try_wait().is_ok_and(|status| status.is_none()) && start.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = daemon.kill();
        }
    }
}

impl Cluster {
    fn start() -> Self {
        let folder = TempDir::new().unwrap();
        let at = folder.path().display();
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = name.split('.').next().unwrap();
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
        let user = user.trim();
        let [controller, first, second] = [(); 3].map(|()| free_port());
        let nodes = [(0, first), (1, second)].map(|(node, port)| {
            format!("NodeName=node{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN\n")
        });
        let text = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmUser={user}\n\
             SlurmdUser={user}\nAuthType=auth/none\nCredType=cred/none\nMailProg=/bin/true\nMpiDefault=none\n\
             SlurmctldPidFile={at}/controller.pid\nSlurmdPidFile={at}/%n.pid\nStateSaveLocation={at}/state\n\
             SlurmdSpoolDir={at}/spool.%n\nSlurmctldLogFile={at}/controller.log\nSlurmdLogFile={at}/%n.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_Core\nSwitchType=switch/none\nReturnToService=2\n\
             SlurmdParameters=config_overrides\nKillWait=600\nMessageTimeout=100\nTCPTimeout=100\n{}PartitionName=main Nodes=ALL Default=YES State=UP\n",
            nodes.concat()
        );
        fs::create_dir(folder.path().join("state")).unwrap();
        let config = folder.path().join("slurm.conf");
        fs::write(&config, text).unwrap();
        let daemon = |program: &str, options: &[&str]| {
            let mut command = command(program);
            command.args(["-D", "-f"]).arg(&config).args(options).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap()
        };
        let mut cluster = Self { folder, daemons: vec![daemon("slurmctld", &["-c"])] };
        for node in ["node0", "node1"] {
            cluster.daemons.push(daemon("slurmd", &["-N", node]));
        }
        wait_for("Slurm's nodes", || {
            let output = cluster.tool("sinfo", &["-h", "-o", "%T %D"]);
            (output.trim() == "idle 2").then_some(())
        });
        cluster
    }

    /// Kills the jobs that a failed test has left, which would outlive the daemons.
    fn end_jobs(&self) {
        // This may run while a test panics, so nothing here panics.
        let tool = |program: &str, options: &[&str]| {
            let output = command(program).args(options).env("SLURM_CONF", self.config()).output().ok()?;
            output.status.success().then_some(output.stdout)
        };
        let is_left = || tool("squeue", &["-h"]).is_some_and(|jobs| !jobs.is_empty());
        let start = Instant::now();
        while is_left() && start.elapsed() < LIMIT {
            tool("scancel", &["--signal=KILL", "--partition=main"]);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }

    fn tool(&self, program: &str, options: &[&str]) -> String {
        let output = command(program).args(options).env("SLURM_CONF", self.config()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// `srun` of launchers on both nodes, as in `docs/launching.md`, whose ranks run a script.
    fn srun(&self, name: &str, nnodes: &str, options: &[&str], script: &str) -> Launcher {
        let endpoint = format!("127.0.0.1:{}", free_port());
        let patient = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=600";
        let job = format!("--job-name={name}");
        let of_srun = ["--nodes=2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", &job, PROGRAM];
        let of_run = ["--grace-period=600", "--nnodes", nnodes, "--rdzv-endpoint", &endpoint, patient];
        Launcher::of_program("srun", &[&of_srun[..], &of_run, options, &["sh", "-c", script]].concat())
            .env("SLURM_CONF", self.config())
            .env("OVERDRIVE_SECRET", SECRET)
            .env("FILE", self.folder.path().join(name))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn wait_for_file(path: &Path) {
    wait_for(&path.display().to_string(), || path.exists().then_some(()));
}

/// The launcher that Slurm has started on a node for this test.
fn launcher_on(node: &str, name: &str) -> Pid {
    wait_for(&format!("the launcher on node {node}"), || {
        let pids = fs::read_dir("/proc").unwrap().filter_map(|it| it.ok()?.file_name().to_str()?.parse::<i32>().ok());
        let is_meant = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let has = |variable: String| environment.split(|byte| *byte == 0).any(|it| it == variable.as_bytes());
            let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            let role = environment.windows(21).any(|it| it == b"OVERDRIVE_LAUNCH_ROLE");
            program == Path::new(PROGRAM)
                && !role
                && has(format!("SLURM_NODEID={node}"))
                && has(format!("SLURM_JOB_NAME={name}"))
        };
        pids.filter(is_meant).find_map(Pid::from_raw)
    })
}

fn a_job_of_slurm_runs_fails_shrinks_and_is_cancelled() {
    let cluster = Cluster::start();
    let say = "echo $RANK/$WORLD_SIZE on $SLURM_NODEID in $TORCHELASTIC_RESTART_COUNT";

    let ended = cluster.srun("runs", "2", &["--nproc-per-node=2"], say).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines =
        ["[rank0]: 0/4 on 0 in 0", "[rank1]: 1/4 on 0 in 0", "[rank2]: 2/4 on 1 in 0", "[rank3]: 3/4 on 1 in 0"];
    assert_eq!(ended.sorted(), lines);

    let script = format!("{say}; [ $RANK = 1 ] && exit 7; sleep 1000");
    let ended = cluster.srun("fails", "2", &["--max-restarts=1"], &script).end();
    // srun's own code is the largest of the launchers'.
    assert_eq!((ended.code, ended.out.matches("in 1").count()), (Some(7), 2), "{ended:?}");
    ended.says("rank 1 failed: exit code 7");

    // srun may lose the last lines of a step that has lost a task: ranks leave files.
    let script = "[ $WORLD_SIZE = 1 ] && { touch $FILE.alone; exit 0; }; touch $FILE.$RANK; sleep 1000";
    let running = cluster.srun("shrinks", "1:2", &[], script).start();
    wait_for_file(&cluster.file("shrinks.0"));
    wait_for_file(&cluster.file("shrinks.1"));
    kill_process(launcher_on("1", "shrinks"), Signal::KILL).unwrap();
    let ended: Ended = running.end();
    // The code of the launcher that was killed.
    assert_eq!(ended.code, Some(137), "{ended:?}");
    assert!(cluster.file("shrinks.alone").exists(), "{ended:?}");

    let script = "trap 'touch $FILE.told.$RANK; exit 0' TERM; touch $FILE.$RANK; while true; do sleep 0.01; done";
    let running = cluster.srun("cancelled", "2", &[], script).start();
    wait_for_file(&cluster.file("cancelled.0"));
    wait_for_file(&cluster.file("cancelled.1"));
    cluster.tool("scancel", &["--name=cancelled"]);
    let ended = running.end();
    assert_ne!(ended.code, Some(0), "{ended:?}");
    let told = ["cancelled.told.0", "cancelled.told.1"].map(|name| cluster.file(name).exists());
    assert_eq!(told, [true, true], "{ended:?}");
}
