//! Parses the options' values.

use std::env;
use std::fs;
use std::num::NonZero;
use std::thread::available_parallelism;
use std::time::Duration;

use overdrive_launch::{LaunchError, is_host};

use crate::etcd::EtcdConf;
use crate::options::refuse;

/// The number of ranks on this host: a number, or how many GPUs or cores there are.
pub fn nproc(text: &str) -> Result<usize, LaunchError> {
    let cores = || available_parallelism().map_or(1, NonZero::get);
    match text {
        "cpu" => Ok(cores()),
        "gpu" | "cuda" => match gpus() {
            0 => refuse(format!("--nproc-per-node {text}: no NVIDIA GPU is visible here")),
            count => Ok(count),
        },
        "auto" => Ok(Some(gpus()).filter(|count| *count > 0).unwrap_or_else(cores)),
        _ => text.trim().parse().or_else(|_| {
            refuse(format!(
                "--nproc-per-node {text}: give a number from 1 on, gpu, cpu or auto; other devices are not counted"
            ))
        }),
    }
}

/// The number of GPUs that CUDA would see: those listed in `CUDA_VISIBLE_DEVICES`, else those with a device file.
fn gpus() -> usize {
    let files = fs::read_dir("/dev").into_iter().flatten().flatten();
    let present = files.filter(|file| file.file_name().to_str().is_some_and(is_gpu)).count();
    match env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => visible(&list).min(present),
        Err(_) => present,
    }
}

/// Whether a file in `/dev` is a GPU: `nvidia0`, not `nvidiactl`.
fn is_gpu(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|number| !number.is_empty() && number.bytes().all(|it| it.is_ascii_digit()))
}

/// The number of GPUs in `CUDA_VISIBLE_DEVICES`. As CUDA does, it counts entries up to the first one that is empty or
/// negative. Slurm sets `NoDevFiles` in a job without GPUs.
fn visible(list: &str) -> usize {
    if list == "NoDevFiles" {
        return 0;
    }
    list.split(',').take_while(|entry| !entry.trim().is_empty() && !entry.trim().starts_with('-')).count()
}

/// Reads the least and the largest number of hosts: `2`, or `1:4` for an elastic run.
pub fn nnodes(text: &str) -> Result<(usize, usize), LaunchError> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        (Some(_), Some(_)) => refuse(format!(
            "--nnodes {text}: the fewest hosts come first; give MIN:MAX, like {}:{}",
            most.trim(),
            least.trim()
        )),
        _ => refuse(format!("--nnodes {text}: give a number of hosts from 1 on, or MIN:MAX, like 2:4")),
    }
}

/// Checks a host; clap adds the option's name to the error.
pub fn host(text: &str) -> Result<String, &'static str> {
    if is_host(text) { Ok(text.to_owned()) } else { Err("give a host's name or address, without a port, like node0") }
}

/// Reads an endpoint: `host:port`, `host`, or `[::1]:port`.
pub fn endpoint(text: &str, default_port: u16) -> Result<(String, u16), LaunchError> {
    let wrong = || refuse(format!("--rdzv-endpoint {text}: give a host and a port, like node0:29500 or [::1]:29500"));
    let (host, port) = match text.rsplit_once(':') {
        // An address in brackets without a port: the colons belong to the address.
        _ if text.ends_with(']') => (text, Some(default_port)),
        Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)),
        None => (text, Some(default_port)),
    };
    // Without brackets, an IPv6 address and a port cannot be told apart.
    let is_clear = is_host(host) && (host.starts_with('[') || !host.contains(':'));
    match port {
        Some(port) if is_clear => Ok((host.to_owned(), port)),
        _ => wrong(),
    }
}

/// Reads a list of local ranks: `0,2`.
pub fn local_ranks(text: &str) -> Result<Vec<usize>, LaunchError> {
    let ranks: Result<Vec<usize>, _> = text.split(',').map(|rank| rank.trim().parse()).collect();
    ranks.or_else(|_| refuse(format!("--local-ranks-filter {text}: give local ranks, like 0,1")))
}

/// Reads texts that are separated by commas. A comma within a text is written twice, as for torchrun.
pub fn texts(list: Option<&str>) -> Vec<String> {
    let parts = list.unwrap_or_default().replace(",,", "\0");
    parts.split(',').filter(|text| !text.is_empty()).map(|text| text.replace('\0', ",")).collect()
}

/// A number of seconds as a duration; None if it is negative, NaN, or too large.
pub fn seconds(value: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(value).ok().filter(|it| *it < Duration::from_secs(u32::MAX.into()))
}

/// The options in `--rdzv-conf`.
#[derive(Debug, PartialEq)]
pub struct Rendezvous {
    pub join_timeout: Option<Duration>,
    pub last_call: Option<Duration>,
    pub lease: Option<Duration>,
    pub keep_alive_interval: Duration,
    pub keep_alive_max_attempt: u32,
    pub is_host: Option<bool>,
    pub etcd: EtcdConf,
}

impl Default for Rendezvous {
    fn default() -> Self {
        Self {
            join_timeout: None,
            last_call: None,
            lease: None,
            keep_alive_interval: Duration::from_secs(5),
            keep_alive_max_attempt: 3,
            is_host: None,
            etcd: EtcdConf::default(),
        }
    }
}

/// Reads `key=value` pairs that are separated by commas.
pub fn rendezvous(text: &str) -> Result<Rendezvous, LaunchError> {
    // Options of torchrun's store and of its rendezvous rounds. This launcher has neither.
    const IGNORED: [&str; 7] =
        ["read_timeout", "close_timeout", "heartbeat_timeout", "store_type", "use_libuv", "rank", "local_addr"];
    let mut conf = Rendezvous::default();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').map_or((pair, ""), |(key, value)| (key.trim(), value.trim()));
        match key {
            "join_timeout" | "timeout" => conf.join_timeout = Some(time(pair, value)?),
            "last_call_timeout" => conf.last_call = Some(time(pair, value)?),
            "lease_timeout" => conf.lease = Some(time(pair, value)?),
            "keep_alive_interval" => conf.keep_alive_interval = time(pair, value)?,
            "keep_alive_max_attempt" => match value.parse() {
                Ok(attempts) => conf.keep_alive_max_attempt = attempts,
                Err(_) => return refuse(format!("--rdzv-conf {pair}: give a number")),
            },
            "is_host" => match value.to_ascii_lowercase().as_str() {
                "1" | "true" | "t" | "yes" | "y" => conf.is_host = Some(true),
                "0" | "false" | "f" | "no" | "n" => conf.is_host = Some(false),
                _ => return refuse(format!("--rdzv-conf {pair}: give true or false")),
            },
            _ if conf.etcd.takes(key, value)? || IGNORED.contains(&key) => {}
            _ => {
                return refuse(format!(
                    "--rdzv-conf {pair}: unknown key; give join_timeout, timeout, last_call_timeout, lease_timeout, \
                     is_host, keep_alive_interval, keep_alive_max_attempt, or with etcd protocol, cacert, cert, key, \
                     user or password_file"
                ));
            }
        }
    }
    Ok(conf)
}

fn time(pair: &str, value: &str) -> Result<Duration, LaunchError> {
    match value.parse().ok().and_then(seconds) {
        Some(time) => Ok(time),
        None => refuse(format!("--rdzv-conf {pair}: give a number of seconds")),
    }
}

/// This host's number among the nodes of a Slurm step, or of a job without steps, if that has `nnodes` nodes. None
/// elsewhere.
pub fn slurm_node(nnodes: usize) -> Result<Option<usize>, LaunchError> {
    let number = |name| env::var(name).ok()?.parse::<usize>().ok();
    let nodes = number("SLURM_STEP_NUM_NODES").or_else(|| number("SLURM_NNODES"));
    if nodes != Some(nnodes) {
        return Ok(None);
    }
    match (number("SLURM_NODEID"), number("SLURM_LOCALID")) {
        (Some(node), Some(task)) if task > 0 => refuse(format!(
            "SLURM_LOCALID is {task}: srun has started several launchers on node {node}; start one on each, by \
             --ntasks-per-node=1, and give the ranks by --nproc-per-node"
        )),
        (node, _) => Ok(node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_hosts_and_ports() {
        let good = |text: &str| endpoint(text, 29500).unwrap();
        assert_eq!(good("node0:1234"), ("node0".into(), 1234));
        assert_eq!(good("node0"), ("node0".into(), 29500));
        assert_eq!(good("[::1]:1234"), ("[::1]".into(), 1234));
        assert_eq!(good("[::1]"), ("[::1]".into(), 29500));
        for text in ["node0:", ":1", "node0:99999", "node0:0", "::1:1234", "tcp://node0:1", "[]:1", "a b:1", "a b"] {
            assert!(endpoint(text, 29500).is_err(), "{text}");
        }
    }

    #[test]
    fn hosts_are_a_number_or_a_range() {
        assert_eq!([nnodes("3"), nnodes("2:2"), nnodes(" 1 : 4 ")].map(Result::unwrap), [(3, 3), (2, 2), (1, 4)]);
        let why = |text: &str| nnodes(text).unwrap_err().to_string();
        assert_eq!(why("4:2"), "--nnodes 4:2: the fewest hosts come first; give MIN:MAX, like 2:4");
        for text in ["x", "", "-1", "1:", ":4", "1:x", "1:2:3", "1-4", "1.5", "-1:2"] {
            assert!(why(text).starts_with(&format!("--nnodes {text}: give a number of hosts from 1 on, or MIN:MAX")));
        }
    }

    #[test]
    fn texts_are_separated_by_commas() {
        assert_eq!(texts(Some("loss,a,,b, c")), ["loss", "a,b", " c"]);
        assert!(texts(None).is_empty() && texts(Some("")).is_empty());
    }

    #[test]
    fn ranks_are_counted_or_given() {
        assert_eq!(nproc("3").unwrap(), 3);
        assert_eq!(nproc("cpu").unwrap(), available_parallelism().unwrap().get());
        assert!(nproc("xpu").unwrap_err().to_string().contains("gpu, cpu or auto"));
        assert_eq!(visible("NoDevFiles"), 0);
        assert_eq!([visible("0,1,2"), visible(""), visible("1,-1,2"), visible("GPU-a,MIG-b")], [3, 0, 1, 2]);
        assert!(is_gpu("nvidia0") && is_gpu("nvidia12") && !is_gpu("nvidiactl") && !is_gpu("nvidia"));
    }

    #[test]
    fn the_configuration_of_the_rendezvous_is_read() {
        let conf =
            rendezvous("join_timeout=5, is_host=True,read_timeout=60,last_call_timeout=2,keep_alive_max_attempt=7");
        let expected = Rendezvous {
            join_timeout: Some(Duration::from_secs(5)),
            last_call: Some(Duration::from_secs(2)),
            is_host: Some(true),
            keep_alive_max_attempt: 7,
            ..Rendezvous::default()
        };
        assert_eq!(conf.unwrap(), expected);
        for text in [
            "join_timeout=x",
            "join_timeout=-1",
            "timeout=nan",
            "is_host=maybe",
            "last_call_timeout=soon",
            "colour=red",
        ] {
            assert!(rendezvous(text).is_err(), "{text}");
        }
    }
}
