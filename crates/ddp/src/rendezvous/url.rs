//! Parses PyTorch's rendezvous addresses.

use std::path::PathBuf;

use super::{InitMethod, is_port};
use crate::error::DdpError;

pub(super) const EXPECTED: &str = "env://, tcp://host:port?rank=0&world_size=2 or file:///path?rank=0&world_size=2";

pub(super) fn parse(address: &str) -> Result<InitMethod, DdpError> {
    let wrong = |reason: &str| DdpError::InvalidAddress {
        address: address.to_owned(),
        reason: reason.to_owned(),
        expected: EXPECTED,
    };
    let (scheme, rest) = address.split_once("://").ok_or_else(|| wrong("has no scheme"))?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    if scheme == "env" {
        return if place.is_empty() && query.is_empty() {
            Ok(InitMethod::Env)
        } else {
            Err(wrong("takes nothing after env://"))
        };
    }
    let number = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let text = found.ok_or_else(|| wrong(&format!("has no {name}")))?;
        text.parse::<usize>().map_err(|_| wrong(&format!("has a {name} that is not a whole number")))
    };
    let ranks = || match number("world_size")? {
        0 => Err(wrong("has a world_size of 0")),
        ranks => Ok(ranks),
    };
    match scheme {
        "tcp" => {
            let (host, port) = place.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
            let no_port = || wrong("has a port that is not a number from 1 to 65535");
            let port = port.parse().map_err(|_| no_port())?;
            // IPv6 addresses are in brackets.
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            if host.is_empty() {
                return Err(wrong("has no host"));
            }
            let (rank, world_size) = (number("rank")?, ranks()?);
            if !is_port(port, world_size) {
                return Err(no_port());
            }
            Ok(InitMethod::Tcp { host: host.to_owned(), port, rank, world_size })
        }
        "file" => {
            if place.is_empty() {
                return Err(wrong("has no path"));
            }
            let (rank, world_size) = (number("rank")?, ranks()?);
            Ok(InitMethod::File { path: PathBuf::from(place), rank, world_size })
        }
        _ => Err(wrong("has an unknown scheme")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pytorchs_addresses() {
        assert_eq!(parse("env://").unwrap(), InitMethod::Env);
        let tcp = InitMethod::Tcp { host: "node1".into(), port: 29500, rank: 1, world_size: 4 };
        assert_eq!(parse("tcp://node1:29500?rank=1&world_size=4").unwrap(), tcp);
        let v6 = InitMethod::Tcp { host: "::1".into(), port: 80, rank: 0, world_size: 1 };
        assert_eq!(parse("tcp://[::1]:80?world_size=1&rank=0").unwrap(), v6);
        let alone = InitMethod::Tcp { host: "a".into(), port: 0, rank: 0, world_size: 1 };
        assert_eq!(parse("tcp://a:0?rank=0&world_size=1").unwrap(), alone);
        let file = InitMethod::File { path: "/shared/meet".into(), rank: 0, world_size: 2 };
        assert_eq!(parse("file:///shared/meet?rank=0&world_size=2").unwrap(), file);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (address, named) in [
            ("node1:29500", "no scheme"),
            ("tcp://node1?rank=0&world_size=2", "no port"),
            ("tcp://:1?rank=0&world_size=2", "no host"),
            ("tcp://a:99999?rank=0&world_size=2", "port that is not a number from 1 to 65535"),
            ("tcp://a:0?rank=0&world_size=2", "port that is not a number from 1 to 65535"),
            ("tcp://a:-1?rank=0&world_size=2", "port that is not a number from 1 to 65535"),
            ("tcp://a:1?rank=0&world_size=0", "world_size of 0"),
            ("file:///a?rank=0&world_size=0", "world_size of 0"),
            ("tcp://a:1?world_size=2", "no rank"),
            ("tcp://a:1?rank=x&world_size=2", "rank that is not a whole number"),
            ("tcp://a:1?rank=0", "no world_size"),
            ("file://?rank=0&world_size=2", "no path"),
            ("mpi://", "unknown scheme"),
            ("env://?rank=0", "nothing after"),
        ] {
            let error = parse(address).unwrap_err().to_string();
            assert!(error.contains(named), "{address}: {error}");
        }
    }
}
