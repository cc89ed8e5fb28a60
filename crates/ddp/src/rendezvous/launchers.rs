//! Reads the environment variables that launchers set.

use std::num::NonZero;
use std::str::FromStr;

use super::{MOST_RANKS, Place, Rendezvous};
use crate::error::DdpError;

type Vars<'a> = &'a dyn Fn(&str) -> Option<String>;

const TORCHRUN: &str = "set by torchrun, overdrive-run and PyTorchJob";
const SLURM: &str = "set by Slurm's srun";
const OPEN_MPI: &str = "set by Open MPI's mpirun";
const BY_HAND: &str = "to be set for mpirun: -x MASTER_ADDR=.. -x MASTER_PORT=..";
const ADDRESS: &str = "the name or address of rank 0's host";
const PORT: &str = "a free port of rank 0's host, 1 to 65535";
const RANK: &str = "this process's rank, a whole number";
const WORLD_SIZE: &str = "the number of ranks, a whole number of at least 1";

pub(super) fn auto(var: Vars<'_>) -> Result<Rendezvous, DdpError> {
    if var("RANK").is_some() {
        env(var)
    } else if var("SLURM_PROCID").is_some() {
        slurm(var)
    } else if var("OMPI_COMM_WORLD_RANK").is_some() {
        open_mpi(var)
    } else {
        Err(DdpError::NoLauncher)
    }
}

pub(super) fn env(var: Vars<'_>) -> Result<Rendezvous, DdpError> {
    let rank = needed(var, "RANK", RANK, TORCHRUN)?;
    let world_size = ranks(var, "WORLD_SIZE", TORCHRUN)?;
    check("RANK", rank, world_size)?;
    let host = text(var, "MASTER_ADDR", ADDRESS, TORCHRUN)?;
    // torchrun's agent serves the store itself, and a new one at each restart.
    let served = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let text = text(var, "MASTER_PORT", PORT, TORCHRUN)?;
    let port = port(&text, !served && world_size == 1)?;
    Ok(rendezvous(var, rank, world_size, Place::Tcp { host, port, served }))
}

pub(super) fn slurm(var: Vars<'_>) -> Result<Rendezvous, DdpError> {
    let rank = needed(var, "SLURM_PROCID", RANK, SLURM)?;
    let world_size = ranks(var, "SLURM_NTASKS", SLURM)?;
    check("SLURM_PROCID", rank, world_size)?;
    let host = match var("MASTER_ADDR") {
        Some(host) => host,
        None => {
            let (name, list) = match var("SLURM_STEP_NODELIST") {
                Some(list) => ("SLURM_STEP_NODELIST", list),
                None => ("SLURM_NODELIST", text(var, "SLURM_NODELIST", "the job's hosts", SLURM)?),
            };
            first_host(&list).ok_or(DdpError::InvalidVariable {
                variable: name,
                found: list,
                expected: "a list of hosts like node[03-05,07]".to_owned(),
            })?
        }
    };
    let port = match var("MASTER_PORT") {
        Some(found) => port(&found, world_size == 1)?,
        // One port per job, the same on all its ranks, below the ports that systems assign by themselves.
        None => {
            let job: u64 = needed(var, "SLURM_JOB_ID", "the job's number", SLURM)?;
            15000 + u16::try_from(job % 10000).unwrap_or(0)
        }
    };
    Ok(rendezvous(var, rank, world_size, Place::Tcp { host, port, served: false }))
}

pub(super) fn open_mpi(var: Vars<'_>) -> Result<Rendezvous, DdpError> {
    let rank = needed(var, "OMPI_COMM_WORLD_RANK", RANK, OPEN_MPI)?;
    let world_size = ranks(var, "OMPI_COMM_WORLD_SIZE", OPEN_MPI)?;
    check("OMPI_COMM_WORLD_RANK", rank, world_size)?;
    let one_host = var("OMPI_COMM_WORLD_LOCAL_SIZE").is_some_and(|size| size == world_size.to_string());
    let host = match var("MASTER_ADDR") {
        None if one_host => "127.0.0.1".to_owned(),
        _ => text(var, "MASTER_ADDR", ADDRESS, BY_HAND)?,
    };
    let port = port(&text(var, "MASTER_PORT", PORT, BY_HAND)?, world_size == 1)?;
    Ok(rendezvous(var, rank, world_size, Place::Tcp { host, port, served: false }))
}

fn rendezvous(var: Vars<'_>, rank: usize, world_size: usize, place: Place) -> Rendezvous {
    Rendezvous { rank, world_size, local_rank: local_rank(var), local_world_size: local_world_size(var), place }
}

/// How many of the ranks are on this host, from the launcher that sets it. Slurm sets only how many hosts a step has.
fn local_world_size(var: Vars<'_>) -> Option<usize> {
    let number = |name: &str| var(name)?.parse().ok();
    let of_one_node =
        || number("SLURM_STEP_NUM_NODES").filter(|nodes| *nodes == 1).and_then(|_| number("SLURM_NTASKS"));
    number("LOCAL_WORLD_SIZE").or_else(|| number("OMPI_COMM_WORLD_LOCAL_SIZE")).or_else(of_one_node)
}

/// This process's index on its host, from the launcher that sets it.
pub(super) fn local_rank(var: Vars<'_>) -> Option<usize> {
    ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"].iter().find_map(|name| var(name)?.parse().ok())
}

fn text(
    var: Vars<'_>,
    variable: &'static str,
    expected: &'static str,
    launcher: &'static str,
) -> Result<String, DdpError> {
    var(variable).filter(|value| !value.is_empty()).ok_or(DdpError::MissingVariable { variable, expected, launcher })
}

fn needed<T: FromStr>(
    var: Vars<'_>,
    variable: &'static str,
    expected: &'static str,
    launcher: &'static str,
) -> Result<T, DdpError> {
    number(variable, &text(var, variable, expected, launcher)?, expected)
}

/// How many ranks there are.
fn ranks(var: Vars<'_>, variable: &'static str, launcher: &'static str) -> Result<usize, DdpError> {
    let found: NonZero<usize> = needed(var, variable, WORLD_SIZE, launcher)?;
    if found.get() <= MOST_RANKS {
        return Ok(found.get());
    }
    let expected = "the number of ranks, at most 2147483647".to_owned();
    Err(DdpError::InvalidVariable { variable, found: found.to_string(), expected })
}

fn number<T: FromStr>(variable: &'static str, found: &str, expected: &str) -> Result<T, DdpError> {
    let wrong = || DdpError::InvalidVariable { variable, found: found.to_owned(), expected: expected.to_owned() };
    found.trim().parse().map_err(|_| wrong())
}

/// `alone`: no other rank has to know the port, so it may be 0, and the system chooses one.
fn port(found: &str, alone: bool) -> Result<u16, DdpError> {
    if alone { number("MASTER_PORT", found, PORT) } else { number("MASTER_PORT", found, PORT).map(NonZero::<u16>::get) }
}

fn check(variable: &'static str, rank: usize, world_size: usize) -> Result<(), DdpError> {
    if rank < world_size {
        return Ok(());
    }
    let expected = format!("below the number of ranks, {world_size}");
    Err(DdpError::InvalidVariable { variable, found: rank.to_string(), expected })
}

/// `node03` of `node[03-05,07],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let Some(ranges) = rest.strip_prefix('[') else {
        return (!prefix.is_empty()).then(|| prefix.to_owned());
    };
    let (ranges, suffix) = ranges.split_once(']')?;
    let first = ranges.split([',', '-']).next().filter(|first| !first.is_empty())?;
    // `rack[1-2]node` continues after its ranges.
    let suffix = suffix.split(',').next().unwrap_or_default();
    (!suffix.contains('[')).then(|| format!("{prefix}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    fn tcp(host: &str, port: u16, served: bool) -> Place {
        Place::Tcp { host: host.to_owned(), port, served }
    }

    #[test]
    fn torchrun_with_and_without_its_agents_store() {
        let plain = given(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "29500")]);
        let found = auto(&plain).unwrap();
        assert_eq!((found.rank, found.world_size, found.local_rank), (1, 2, None));
        assert_eq!(found.place, tcp("a", 29500, false));
        let agent = |name: &str| match name {
            "TORCHELASTIC_USE_AGENT_STORE" => Some("True".to_owned()),
            "LOCAL_RANK" => Some("1".to_owned()),
            _ => plain(name),
        };
        let found = auto(&agent).unwrap();
        assert_eq!((found.place, found.local_rank), (tcp("a", 29500, true), Some(1)));
    }

    #[test]
    fn slurm_finds_the_first_host_and_a_port() {
        let found = auto(&given(&[
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_NODELIST", "gpu[03-05,07],login1"),
            ("SLURM_JOB_ID", "1234567"),
        ]))
        .unwrap();
        assert_eq!((found.rank, found.world_size, found.local_rank), (3, 8, Some(3)));
        assert_eq!(found.place, tcp("gpu03", 15000 + 4567, false));
    }

    #[test]
    fn ranks_of_one_host_are_known() {
        let meets = |pairs: &[(&str, &str)]| {
            let var = |name: &str| Some(pairs.iter().find(|(key, _)| *key == name)?.1.to_owned());
            auto(&var).unwrap().one_host()
        };
        let env = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")];
        let with = |more: &[(&'static str, &'static str)]| meets(&[&env[..], more].concat());
        for address in ["localhost", "127.0.0.1", "::1"] {
            assert!(with(&[("MASTER_ADDR", address)]), "{address}");
        }
        assert!(!with(&[("MASTER_ADDR", "node0")]));
        assert!(with(&[("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "2")]));
        assert!(!with(&[("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "1")]));
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_NODELIST", "a"), ("SLURM_JOB_ID", "1")];
        assert!(meets(&[&slurm[..], &[("SLURM_STEP_NUM_NODES", "1")]].concat()));
        assert!(!meets(&[&slurm[..], &[("SLURM_STEP_NUM_NODES", "2")]].concat()));
        assert!(!meets(&slurm));
        let mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("MASTER_PORT", "1")];
        assert!(meets(&[&mpi[..], &[("MASTER_ADDR", "a"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]].concat()));
        assert!(!meets(&[&mpi[..], &[("MASTER_ADDR", "a"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]].concat()));
    }

    #[test]
    fn lists_of_hosts() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b", Some("a")),
            ("n[1-3]", Some("n1")),
            ("n[007,9],b", Some("n007")),
            ("r[1-2]n,b", Some("r1n")),
            ("r[1-2]n[3-4]", None),
            ("n[]", None),
            ("n[1", None),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn open_mpi_on_one_host_needs_only_a_port() {
        let found = auto(&given(&[
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("MASTER_PORT", "4000"),
        ]));
        assert_eq!(found.unwrap().place, tcp("127.0.0.1", 4000, false));
    }

    #[test]
    fn a_single_rank_that_listens_may_give_port_0() {
        let alone = given(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "0")]);
        assert_eq!(auto(&alone).unwrap().place, tcp("a", 0, false));
        let served =
            |name: &str| if name == "TORCHELASTIC_USE_AGENT_STORE" { Some("True".into()) } else { alone(name) };
        assert!(auto(&served).unwrap_err().to_string().contains("MASTER_PORT is \"0\""));
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_NODELIST", "a"), ("MASTER_PORT", "0")];
        let slurm = |name: &str| slurm.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned());
        assert_eq!(auto(&slurm).unwrap().place, tcp("a", 0, false));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let cases: [(&'static [(&'static str, &'static str)], &str); 15] = [
            (&[], "no launcher"),
            (&[("RANK", "0")], "WORLD_SIZE is not set"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is \"x\""),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is \"2\", but should be below"),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], "variable WORLD_SIZE is \"0\", but should be the number of ranks"),
            (&[("RANK", "0"), ("WORLD_SIZE", "-2")], "variable WORLD_SIZE is \"-2\""),
            (&[("RANK", "0"), ("WORLD_SIZE", "2147483648")], "should be the number of ranks, at most 2147483647"),
            (&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "0")], "SLURM_NTASKS is \"0\""),
            (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "0")], "OMPI_COMM_WORLD_SIZE is \"0\""),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "0")],
                "MASTER_PORT is \"0\", but should be a free port of rank 0's host, 1 to 65535",
            ),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_NODELIST", "a"), ("MASTER_PORT", "0")],
                "MASTER_PORT is \"0\"",
            ),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "MASTER_PORT is not set"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")],
                "MASTER_PORT is \"70000\"",
            ),
            (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
        ];
        for (pairs, named) in cases {
            let error = auto(&given(pairs)).unwrap_err().to_string();
            assert!(error.contains(named), "{named}: {error}");
        }
    }
}
