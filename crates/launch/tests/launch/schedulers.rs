//! Under the variables that schedulers set: Slurm's as srun 22.05 sets them on two nodes and its manual describes them,
//! Kubernetes' as the operators for PyTorchJob and TrainJob set them.

use crate::elastic::{lose, wait_for_file};
use crate::launcher::{Ended, Launcher, Running};
use crate::nodes::{PATIENT, SECRET};
use crate::port::free_port;

crate::tests![
    a_slurm_step_numbers_the_nodes,
    a_slurm_step_on_some_nodes_of_a_job_counts_its_own,
    a_slurm_batch_script_without_srun_can_run_on_its_host,
    several_launchers_on_a_slurm_node_are_refused,
    an_elastic_slurm_step_loses_a_node,
    a_pytorchjob_gives_node_ranks_and_a_master,
    a_trainjob_gives_node_ranks_and_a_master,
    an_elastic_pytorchjob_loses_a_pod_and_gets_it_again,
];

type Variables<'a> = &'a [(&'a str, &'a str)];

fn with(launcher: Launcher, variables: Variables<'_>) -> Launcher {
    variables.iter().fold(launcher, |launcher, (name, value)| launcher.env(name, value)).env("OVERDRIVE_SECRET", SECRET)
}

/// What is the same in all tasks of `srun --nodes=2 --ntasks-per-node=1`.
const STEP: [(&str, &str); 24] = [
    ("SLURM_CLUSTER_NAME", "test"),
    ("SLURM_CPUS_ON_NODE", "1"),
    ("SLURM_JOBID", "4711"),
    ("SLURM_JOB_CPUS_PER_NODE", "1(x2)"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_JOB_NAME", "train"),
    ("SLURM_JOB_NODELIST", "node[0-1]"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_JOB_PARTITION", "main"),
    ("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODELIST", "node[0-1]"),
    ("SLURM_NPROCS", "2"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_NTASKS_PER_NODE", "1"),
    ("SLURM_PRIO_PROCESS", "0"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "node[0-1]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
    ("SLURM_TASKS_PER_NODE", "1(x2)"),
    ("SLURM_UMASK", "0022"),
];

/// What differs.
const TASKS: [[(&str, &str); 4]; 2] = [
    [("SLURMD_NODENAME", "node0"), ("SLURM_NODEID", "0"), ("SLURM_PROCID", "0"), ("SLURM_GTIDS", "0")],
    [("SLURMD_NODENAME", "node1"), ("SLURM_NODEID", "1"), ("SLURM_PROCID", "1"), ("SLURM_GTIDS", "1")],
];

fn in_step(task: usize, port: u16, options: &[&str], script: &str) -> Launcher {
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{port}");
    let own = ["--rdzv-id=4711", &endpoint, PATIENT];
    with(with(Launcher::script(&[&own, options].concat(), script), &STEP), &TASKS[task])
}

const SAY: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE";

fn out(ended: &Ended) -> Vec<&str> {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.sorted()
}

fn a_slurm_step_numbers_the_nodes() {
    let port = free_port();
    let options = ["--nnodes=2", "--nproc-per-node=2"];
    // In the order in which they would be numbered without Slurm, the second would be the first.
    let second = in_step(1, port, &options, SAY).start();
    let first = in_step(0, port, &options, SAY).end();
    assert_eq!(out(&first), ["[rank0]: 0/4 0/2 0/2", "[rank1]: 1/4 1/2 0/2"]);
    assert_eq!(out(&second.end()), ["[rank2]: 2/4 0/2 1/2", "[rank3]: 3/4 1/2 1/2"]);
}

/// `srun --nodes=1 --nodelist=node1` and another step within a job of two nodes.
fn a_slurm_step_on_some_nodes_of_a_job_counts_its_own() {
    let of_one = [("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_NODELIST", "node1"), ("SLURM_NODEID", "0")];
    let ended = with(in_step(1, free_port(), &["--nnodes=1"], SAY), &of_one).end();
    assert_eq!(out(&ended), ["[rank0]: 0/1 0/1 0/1"]);
    // Two nodes, but the step has one: Slurm's number is not taken for the rank, and the host of the endpoint is node 0.
    let port = free_port();
    let both = [(); 2].map(|()| with(in_step(1, port, &["--nnodes=2"], SAY), &of_one).start());
    let mut said = both.map(|node| out(&node.end()).concat());
    said.sort();
    assert_eq!(said, ["[rank0]: 0/2 0/1 0/2", "[rank1]: 1/2 0/1 1/2"]);
}

fn a_slurm_batch_script_without_srun_can_run_on_its_host() {
    // A batch script is started on the first node, with the job's variables.
    let batch: Vec<_> = STEP.into_iter().filter(|(name, _)| !name.starts_with("SLURM_STEP")).collect();
    let launcher = Launcher::script(&["--standalone", "--nproc-per-node=2"], SAY);
    let ended = with(with(launcher, &batch), &TASKS[0]).end();
    assert_eq!(out(&ended), ["[rank0]: 0/2 0/2 0/1", "[rank1]: 1/2 1/2 0/1"]);
}

fn several_launchers_on_a_slurm_node_are_refused() {
    let second = [("SLURM_LOCALID", "1"), ("SLURM_NTASKS_PER_NODE", "2"), ("SLURM_PROCID", "1")];
    let launcher = with(in_step(0, free_port(), &["--nnodes=2"], "echo started"), &second);
    let ended = launcher.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""));
    ended.says("SLURM_LOCALID is 1: srun has started several launchers on node 0; start one on each, by --ntasks-per");
    // A run of its own in each task needs no meeting.
    let ended = with(in_step(0, free_port(), &["--nnodes=1"], SAY), &second).end();
    assert_eq!(out(&ended), ["[rank0]: 0/1 0/1 0/1"]);
}

fn an_elastic_slurm_step_loses_a_node() {
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("file");
    let script = format!("{SAY}; [ $WORLD_SIZE = 1 ] && exit 0; touch $FILE; sleep 1000");
    let port = free_port();
    let all = "--rdzv-conf=join_timeout=600,last_call_timeout=600,keep_alive_max_attempt=120";
    let start = |task: usize| in_step(task, port, &["--nnodes=1:2", all], &script).env("FILE", &file).start();
    let [first, second] = [start(0), start(1)];
    wait_for_file(&file, &[&first, &second]);
    lose(second);
    let first = first.end();
    assert_eq!(first.code, Some(0), "{first:?}");
    assert_eq!(first.out.lines().last(), Some("[rank0]: 0/1 0/1 0/1"));
}

/// The pods' ranks and sizes, which have to be replaced by those of the ranks.
fn pod(rank: &'static str, port: &str) -> Vec<(&'static str, String)> {
    [
        ("PYTHONUNBUFFERED", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", port),
        ("WORLD_SIZE", "2"),
        ("RANK", rank),
        ("PET_MASTER_ADDR", "localhost"),
        ("PET_MASTER_PORT", port),
        ("PET_NNODES", "2"),
        ("PET_NODE_RANK", rank),
        ("PET_NPROC_PER_NODE", "2"),
    ]
    .map(|(name, value)| (name, value.to_owned()))
    .into()
}

fn in_pod(variables: &[(&'static str, String)], script: &str) -> Running {
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    with(Launcher::script(&[PATIENT], script), &variables).start()
}

fn a_pytorchjob_gives_node_ranks_and_a_master() {
    let port = free_port().to_string();
    let script = format!("{SAY}; [ $MASTER_PORT != {port} ] || echo the launchers\\' port");
    let [worker, master] = ["1", "0"].map(|rank| in_pod(&pod(rank, &port), &script));
    assert_eq!(out(&master.end()), ["[rank0]: 0/4 0/2 0/2", "[rank1]: 1/4 1/2 0/2"]);
    assert_eq!(out(&worker.end()), ["[rank2]: 2/4 0/2 1/2", "[rank3]: 3/4 1/2 1/2"]);
}

fn a_trainjob_gives_node_ranks_and_a_master() {
    let port = free_port().to_string();
    let of_torch = |rank| pod(rank, &port).into_iter().filter(|(name, _)| name.starts_with("PET_")).collect::<Vec<_>>();
    let [second, first] = ["1", "0"].map(|rank| in_pod(&of_torch(rank), SAY));
    assert_eq!(out(&first.end()), ["[rank0]: 0/4 0/2 0/2", "[rank1]: 1/4 1/2 0/2"]);
    assert_eq!(out(&second.end()), ["[rank2]: 2/4 0/2 1/2", "[rank3]: 3/4 1/2 1/2"]);
}

/// `elasticPolicy`: all pods have the same variables, and the first worker is the endpoint.
fn an_elastic_pytorchjob_loses_a_pod_and_gets_it_again() {
    let folder = tempfile::TempDir::new().unwrap();
    let file = |ending: &str| folder.path().join(format!("file{ending}"));
    let variables = [
        ("PYTHONUNBUFFERED", "1".to_owned()),
        ("PET_RDZV_ENDPOINT", format!("127.0.0.1:{}", free_port())),
        ("PET_RDZV_BACKEND", "c10d".to_owned()),
        ("PET_NNODES", "1:2".to_owned()),
        ("PET_MAX_RESTARTS", "100".to_owned()),
        ("PET_NPROC_PER_NODE", "1".to_owned()),
        ("PET_RDZV_ID", "elastic-example".to_owned()),
        ("PET_RDZV_CONF", "join_timeout=600,last_call_timeout=600,keep_alive_max_attempt=120".to_owned()),
        ("PET_STANDALONE", String::new()),
    ];
    let script = format!(
        "touch $FILE.$RANK.$WORLD_SIZE; [ -e $FILE.alone ] && [ $WORLD_SIZE = 2 ] && {{ {SAY} $TORCHELASTIC_RUN_ID; \
         exit 0; }}; [ $WORLD_SIZE = 1 ] && touch $FILE.alone; sleep 1000"
    );
    let start = || {
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        with(Launcher::script(&[], &script), &variables).env("FILE", file("")).start()
    };
    let first = start();
    // The endpoint is there, so the next one joins it.
    crate::launcher::wait_for("worker 0", || {
        let port = variables[1].1.rsplit_once(':').unwrap().1.parse().unwrap();
        std::net::TcpStream::connect(("127.0.0.1", port)).ok()
    });
    let second = start();
    for ending in [".0.2", ".1.2"] {
        wait_for_file(&file(ending), &[&first, &second]);
    }
    lose(second);
    wait_for_file(&file(".alone"), &[&first]);
    let again = start().end();
    assert_eq!(out(&again), ["[rank1]: 1/2 0/1 1/2 elastic-example"]);
    let first = first.end();
    assert_eq!(out(&first), ["[rank0]: 0/2 0/1 0/2 elastic-example"]);
}
