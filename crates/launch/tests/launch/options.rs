//! Options and variables, in torchrun's spellings.

use std::process::Command;

use crate::launcher::{Launcher, PROGRAM};

crate::tests![
    the_environment_is_torchruns,
    omp_threads_are_set_unless_the_user_has_set_them,
    both_spellings_and_variables_are_taken,
    options_may_be_abbreviated_while_unambiguous,
    empty_variables_count_as_unset,
    invalid_options_are_refused_before_anything_starts,
    invalid_numbers_are_refused_with_the_options_name,
    invalid_hosts_are_refused_with_the_options_name,
    ranks_get_an_address_without_brackets,
    unsupported_options_of_torchrun_are_refused,
    python_files_and_modules_are_started_with_python,
    arguments_reach_the_program_as_they_are,
    help_and_version,
];

fn the_environment_is_torchruns() {
    let names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE \
                 ROLE_NAME MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID \
                 OVERDRIVE_LAUNCH_ROLE TORCHELASTIC_USE_AGENT_STORE";
    let script = format!("for n in {names}; do eval \"echo $n=\\${{$n-unset}}\"; done");
    let options =
        ["--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=job7", "--role=trainer", "--local-ranks-filter=1"];
    let ended = Launcher::script(&options, &script).env("TORCHELASTIC_USE_AGENT_STORE", "True").end();
    let said: Vec<&str> = ended.out.lines().map(|line| line.strip_prefix("[rank1]: ").unwrap()).collect();
    let expected = [
        "RANK=1",
        "WORLD_SIZE=2",
        "LOCAL_RANK=1",
        "LOCAL_WORLD_SIZE=2",
        "GROUP_RANK=0",
        "GROUP_WORLD_SIZE=1",
        "ROLE_RANK=1",
        "ROLE_WORLD_SIZE=2",
        "ROLE_NAME=trainer",
        "MASTER_ADDR=127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_MAX_RESTARTS=3",
        "TORCHELASTIC_RUN_ID=job7",
        "OVERDRIVE_LAUNCH_ROLE=unset",
        "TORCHELASTIC_USE_AGENT_STORE=unset",
    ];
    assert_eq!(said, expected);
}

fn omp_threads_are_set_unless_the_user_has_set_them() {
    let said = |options: &[&str], threads: Option<&str>| {
        let launcher = Launcher::script(options, "echo ${OMP_NUM_THREADS-unset}");
        let ended = threads
            .map_or_else(
                || Launcher::script(options, "echo ${OMP_NUM_THREADS-unset}"),
                |threads| launcher.env("OMP_NUM_THREADS", threads),
            )
            .end();
        (ended.out.lines().next().unwrap().to_owned(), ended.err.matches("OMP_NUM_THREADS").count())
    };
    assert_eq!(said(&[], None), ("[rank0]: unset".into(), 0));
    let cores = std::thread::available_parallelism().unwrap().get();
    let filter = "--local-ranks-filter=0";
    assert_eq!(said(&["--nproc-per-node=2", filter], None), (format!("[rank0]: {}", (cores / 2).max(1)), 1));
    assert_eq!(said(&["--nproc-per-node=2", filter], Some("5")), ("[rank0]: 5".into(), 0));
}

fn both_spellings_and_variables_are_taken() {
    for options in [["--nproc-per-node", "2"], ["--nproc_per_node", "2"]] {
        assert_eq!(Launcher::script(&options, "echo $RANK").end().out.lines().count(), 2);
    }
    let by_variable = || Launcher::script(&[], "echo $RANK").env("PET_NPROC_PER_NODE", "3");
    assert_eq!(by_variable().end().out.lines().count(), 3);
    // The command line wins.
    let both = Launcher::script(&["--nproc-per-node=1"], "echo $RANK").env("PET_NPROC_PER_NODE", "3").end();
    assert_eq!(both.out.lines().count(), 1);
    // A flag's variable counts unless it is 0.
    let several = || Launcher::script(&["--nnodes=2"], "echo $RANK");
    assert_eq!(several().env("PET_STANDALONE", "1").end().code, Some(0));
    assert_eq!(several().env("PET_STANDALONE", "0").end().code, Some(2));
}

fn options_may_be_abbreviated_while_unambiguous() {
    let ended = Launcher::script(&["--nproc", "2", "--nnode", "1", "--standalo"], "echo $RANK").end();
    assert_eq!(ended.sorted(), ["[rank0]: 0", "[rank1]: 1"]);
    assert_eq!(Launcher::script(&["--nproc_per=2"], "echo $RANK").end().out.lines().count(), 2);
    // Ambiguous: several options start with it.
    for unclear in ["--master=1", "--r=3"] {
        let ended = Launcher::script(&[unclear], "echo started").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{unclear}");
        ended.says(unclear.split('=').next().unwrap());
    }
    // The program's own arguments are left alone.
    assert_eq!(Launcher::new(&["echo", "--nproc", "2"]).end().out, "[rank0]: --nproc 2\n");
}

fn empty_variables_count_as_unset() {
    let variables = [
        "NPROC_PER_NODE",
        "NNODES",
        "NODE_RANK",
        "RDZV_ENDPOINT",
        "RDZV_BACKEND",
        "RDZV_ID",
        "RDZV_CONF",
        "STANDALONE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_ADDR",
        "MAX_RESTARTS",
        "REDIRECTS",
        "TEE",
        "LOG_DIR",
        "LOCAL_RANKS_FILTER",
        "ROLE",
        "SIGNALS_TO_HANDLE",
        "MODULE",
        "NO_PYTHON",
        "RUN_PATH",
        "MONITOR_INTERVAL",
        "START_METHOD",
        "EVENT_LOG_HANDLER",
        "VIRTUAL_LOCAL_RANK",
        "DUPLICATE_STDOUT_FILTERS",
        "DUPLICATE_STDERR_FILTERS",
    ];
    let script = "echo $WORLD_SIZE $MASTER_ADDR $ROLE_NAME $TORCHELASTIC_RUN_ID";
    let launcher =
        variables.iter().fold(Launcher::script(&[], script), |launcher, name| launcher.env(&format!("PET_{name}"), ""));
    assert_eq!(launcher.end().out, "[rank0]: 1 127.0.0.1 default none\n");
    // On the command line, an empty value is an error.
    let ended = Launcher::script(&["--nproc-per-node="], "echo started").env("PET_NPROC_PER_NODE", "").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""));
}

fn invalid_options_are_refused_before_anything_starts() {
    let refused = |options: &[&str], why: &str| {
        let ended = Launcher::script(options, "echo started").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{options:?}");
        ended.says(why);
    };
    refused(&["--nproc-per-node=0"], "--nproc-per-node 0: give 1 to 1024 ranks on this host");
    refused(&["--nproc-per-node=many"], "give a number from 1 on, gpu, cpu or auto");
    refused(&["--nnodes=4:1"], "--nnodes 4:1: the fewest hosts come first; give MIN:MAX, like 1:4");
    refused(&["--nnodes=0:2"], "--nnodes 0:2: the fewest hosts have to be at least 1");
    refused(&["--nnodes=1:many"], "give a number of hosts from 1 on, or MIN:MAX, like 2:4");
    refused(&["--nnodes=1:2"], "2 nodes need an endpoint");
    refused(&["--nnodes=2"], "--rdzv-endpoint node0:29500");
    let etcd = ["--nnodes=2", "--rdzv-backend=etcd", "--insecure"];
    let with = |options: &[&'static str]| [&etcd[..], options].concat();
    refused(&with(&[]), "give etcd's host and port, like --rdzv-endpoint etcd0:2379");
    refused(&with(&["--rdzv-endpoint=etcd0"]), "runs that meet by etcd need a name of their own");
    let named = ["--rdzv-endpoint=etcd0", "--rdzv-id=job7"];
    refused(&with(&[&named[..], &["--node-rank=0"]].concat()), "with etcd the launchers elect node 0");
    refused(
        &with(&[&named[..], &["--rdzv-conf=lease_timeout=1"]].concat()),
        "--rdzv-conf lease_timeout=1: give 2 s or more",
    );
    refused(&["--nnodes=2", "--node-rank=2", "--master-addr=here"], "--node-rank 2: ranks of 2 nodes are 0 to 1");
    refused(&["--rdzv-endpoint=here:there", "--nnodes=2"], "give a host and a port");
    refused(&["--numa-binding=near"], "--numa-binding near: give node, socket, exclusive or core-complex");
    refused(&["--redirects=7"], "--redirects: `7` is not a choice of outputs");
    refused(&["--grace-period=-1"], "give a number of seconds");
    refused(&["--rdzv-conf=colour=red"], "join_timeout");
    refused(&["--signals-to-handle=SIGKILL"], "`SIGKILL` is not the name of a signal that can be forwarded");
}

/// Invalid numbers, negative ones included, as `--option=value` and as `--option value`.
fn invalid_numbers_are_refused_with_the_options_name() {
    let options: [(&str, &[&str], &str); 10] = [
        ("--nproc-per-node", &["-1", "1.5", "x"], "give a number from 1 on"),
        ("--nnodes", &["-1", "-1:-1", "x"], "give a number of hosts from 1 on"),
        ("--node-rank", &["-1", "65536"], "is not in 0..=65535"),
        ("--max-restarts", &["-1", "4294967296"], "is not in 0..=4294967295"),
        ("--master-port", &["-1", "0", "65536"], "is not in 1..=65535"),
        ("--grace-period", &["-1"], "give a number of seconds, 0 or more"),
        ("--failure-window", &["-1"], "give a number of seconds, 0 or more"),
        ("--local-ranks-filter", &["-1"], "give local ranks"),
        ("--redirects", &["-1"], "is not a choice of outputs"),
        ("--tee", &["-1"], "is not a choice of outputs"),
    ];
    for (option, values, why) in options {
        for value in values {
            let both = format!("{option}={value}");
            let mut ways = vec![vec![both.as_str()]];
            // clap takes a separate `-1:-1` for an option.
            if !value.contains(':') {
                ways.push(vec![option, value]);
            }
            for way in &ways {
                let ended = Launcher::script(way, "echo started").end();
                assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{way:?}");
                ended.says(option);
                ended.says(value);
                ended.says(why);
            }
        }
    }
}

/// Brackets separate an IPv6 address from its port; resolvers do not accept them.
fn ranks_get_an_address_without_brackets() {
    let ended = Launcher::script(&["--master-addr", "[::1]"], "echo $MASTER_ADDR").end();
    assert_eq!(ended.out, "[rank0]: ::1\n");
}

fn invalid_hosts_are_refused_with_the_options_name() {
    for option in ["--master-addr", "--local-addr"] {
        for value in ["a b", "", "node0:29500", "tcp://node0"] {
            let ended = Launcher::script(&[option, value], "echo started").end();
            assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{option} {value:?}");
            ended.says(option);
        }
    }
    Launcher::script(&["--master-addr", "a b"], "echo started").end().says("give a host's name or address");
    let ended = Launcher::script(&["--nnodes=2", "--rdzv-endpoint", "a b:29500"], "echo started").end();
    assert_eq!(ended.code, Some(2));
    ended.says("--rdzv-endpoint a b:29500: give a host and a port");
    // Also from an environment variable.
    let ended = Launcher::script(&[], "echo started").env("PET_MASTER_ADDR", "a b").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""));
}

fn unsupported_options_of_torchrun_are_refused() {
    for options in [["--rdzv-backend", "zeus"], ["--event-log-handler", "console"], ["--logs-specs", "mine"]] {
        let ended = Launcher::script(&options, "echo started").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{options:?}");
        ended.says(options[0]);
    }
    let accepted = ["--monitor-interval=0.5", "--start-method=spawn", "--event-log-handler=null", "--standalone"];
    assert_eq!(Launcher::script(&accepted, "echo started").end().code, Some(0));
}

fn python_files_and_modules_are_started_with_python() {
    // `echo` in place of Python, which shows the arguments.
    let said = |args: &[&str]| Launcher::new(args).env("PYTHON_EXEC", "echo").end().out;
    assert_eq!(said(&["train.py", "--lr", "1"]), "[rank0]: -u train.py --lr 1\n");
    assert_eq!(said(&["-m", "pkg.train", "x"]), "[rank0]: -u -m pkg.train x\n");
    assert_eq!(said(&["--run-path", "/abs/script"]), "[rank0]: -u /abs/script\n");
    assert_eq!(said(&["--no-python", "echo", "x"]), "[rank0]: x\n");
    assert_eq!(Launcher::new(&["-m", "--no-python", "pkg"]).end().code, Some(2));
}

fn arguments_reach_the_program_as_they_are() {
    let ended = Launcher::new(&["--nproc-per-node=2", "printf", "%s|"])
        .args(&["--nproc-per-node", "a b", "", "--", "-r", "$HOME", "${local_rank}"])
        .end();
    let expected = |rank: usize| format!("[rank{rank}]: --nproc-per-node|a b||--|-r|$HOME|{rank}|");
    assert_eq!(ended.sorted(), [expected(0), expected(1)]);
    // Also directly after the program.
    let ended = Launcher::new(&["echo", "--role", "of", "-r", "3"]).end();
    assert_eq!(ended.sorted(), ["[rank0]: --role of -r 3"]);
}

fn help_and_version() {
    let output = |option: &str| Command::new(PROGRAM).arg(option).output().unwrap();
    let help = String::from_utf8(output("--help").stdout).unwrap();
    for option in ["--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--max-restarts", "--redirects"]
        .into_iter()
        .chain(["MIN:MAX", "last_call_timeout", "lease_timeout", "--numa-binding", "--duplicate-stdout-filters"])
    {
        assert!(help.contains(option), "{option}");
    }
    // ARGS are optional.
    assert!(help.contains("Usage: overdrive-run [OPTIONS] <PROGRAM> [ARGS]...\n"), "{help}");
    assert!(output("--version").status.success());
    let nothing = Command::new(PROGRAM).output().unwrap();
    let said = String::from_utf8(nothing.stderr).unwrap();
    assert!(nothing.status.code() == Some(2) && said.contains("<PROGRAM>") && !said.contains("<ARGS>"), "{said}");
}
