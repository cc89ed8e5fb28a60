//! The addresses at which ranks listen: rank 0's store, and every rank's Gloo.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_ddp::{ReduceOp, Store, TcpStoreOptions};
use tch::Tensor;

use crate::harness::{Ended, Meeting, PATIENCE, all_through, free_port, start};

/// Printed before each address at which a rank listens.
const AT: &str = "listens at ";

/// Prints every address at which this process listens, once its group works.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut sum = Tensor::from(1);
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.int64_value(&[]) == 2, "{sum}");
    for address in listening()? {
        println!("{AT}{address}");
    }
    group.barrier()?;
    Ok(())
}

/// The addresses of this process's listening sockets.
fn listening() -> Result<Vec<SocketAddr>> {
    let own: HashSet<String> = fs::read_dir("/proc/self/fd")?
        .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .filter_map(|link| Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut found = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        // A host without IPv6 has no such table.
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [_, local, _, "0A", _, _, _, _, _, inode, ..] = fields[..]
                && own.contains(inode)
            {
                found.push(address(local).with_context(|| line.to_owned())?);
            }
        }
    }
    Ok(found)
}

/// Parses `0100007F:7530`: the address as 32-bit words in this machine's byte order, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words: Vec<u32> =
        (0..ip.len() / 8).map_while(|it| u32::from_str_radix(&ip[8 * it..8 * it + 8], 16).ok()).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let ip = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    Some((ip, u16::from_str_radix(port, 16).ok()?).into())
}

fn addresses(rank: &Ended) -> Result<Vec<SocketAddr>> {
    rank.output.lines().filter_map(|line| line.strip_prefix(AT)).map(|it| Ok(it.parse()?)).collect()
}

/// Checks that every rank listens, and only at addresses that are right.
pub fn only_at(ranks: &[Ended], is_right: impl Fn(usize, IpAddr) -> bool) -> Result<()> {
    for (rank, ended) in ranks.iter().enumerate() {
        let found = addresses(ended)?;
        ensure!(!found.is_empty(), "rank {rank} listens nowhere");
        ensure!(found.iter().all(|at| is_right(rank, at.ip())), "rank {rank} listens at {found:?}");
    }
    Ok(())
}

/// Ranks of one host listen only at the loopback, with every spelling of the address and with `LOCAL_WORLD_SIZE`.
pub fn of_one_host() -> Result<()> {
    let one_host = ("LOCAL_WORLD_SIZE", "2");
    let cases: [&[(&str, &str)]; 4] = [
        &[("MASTER_ADDR", "127.0.0.1")],
        &[("MASTER_ADDR", "localhost")],
        // Two launchers that meet at the loopback are on the same host.
        &[("MASTER_ADDR", "127.0.0.1"), ("LOCAL_WORLD_SIZE", "1")],
        &[("MASTER_ADDR", "127.0.0.1"), one_host],
    ];
    for vars in cases {
        let (port, started) = (free_port(), Instant::now());
        let ranks = (0..2).map(|rank| start("listeners", rank, 2, port, vars)).collect::<Result<Vec<_>>>()?;
        let ended = all_through(ranks, started)?;
        only_at(&ended, |_, ip| ip.is_loopback()).with_context(|| format!("{vars:?}"))?;
        let store = addresses(&ended[0])?.iter().any(|at| at.port() == port);
        ensure!(store, "{vars:?}: the store is elsewhere");
    }
    Ok(())
}

/// Groups of one process may use the same port, as in PyTorch: the server lives as long as one of its stores.
pub fn shared() -> Result<()> {
    let options = TcpStoreOptions {
        host: "127.0.0.1",
        port: free_port(),
        is_server: true,
        one_host: true,
        world_size: 1,
        wait_for_workers: true,
        connect_timeout: PATIENCE,
        timeout: PATIENCE,
    };
    let (first, port) = Store::tcp(&options)?;
    first.set("key", b"value")?;
    let (second, same) = Store::tcp(&options)?;
    ensure!((port, same) == (options.port, options.port));
    drop(first);
    ensure!(second.get("key", PATIENCE)? == b"value");
    let (client, _) = Store::tcp(&TcpStoreOptions { is_server: false, ..options.clone() })?;
    ensure!(client.get("key", PATIENCE)? == b"value");
    drop((second, client));
    // A new server, without the old keys.
    ensure!(!Store::tcp(&options)?.0.check(&["key"])?, "the server outlived its stores");
    Ok(())
}
