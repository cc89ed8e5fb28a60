//! Chooses the address at which a store's server listens.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// The result of trying to listen.
#[derive(Debug)]
pub(super) enum Listening {
    At(TcpListener),
    /// The port is taken, possibly by a server of this process.
    Taken,
}

/// Whether `host` means the local host on every host: `localhost`, 127.0.0.1, ::1.
pub fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Listens only at an address of `host`, if that is an address of this host.
///
/// In two cases it has to listen at all addresses: if the name resolves to a loopback address here (as a host's own
/// name often does), it may resolve to another address on the other hosts; and if the address is not this host's,
/// address translation may lead to any of its addresses.
pub(super) fn at(host: &str, port: u16, one_host: bool) -> io::Result<Listening> {
    let mut addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    if !one_host && !is_loopback(host) {
        addresses.retain(|it| !it.ip().to_canonical().is_loopback());
    }
    // Clients try all addresses of a name. IPv4's loopback goes first, because clients may use 127.0.0.1.
    addresses.sort_by_key(|it| it.ip() == Ipv6Addr::LOCALHOST);
    for address in addresses {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            bound => return or_taken(bound),
        }
    }
    let all = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
    or_taken(TcpListener::bind(&all[..]))
}

fn or_taken(bound: io::Result<TcpListener>) -> io::Result<Listening> {
    match bound {
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(Listening::Taken),
        bound => bound.map(Listening::At),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listens(host: &str, one_host: bool) -> SocketAddr {
        match at(host, 0, one_host).unwrap() {
            Listening::At(listener) => listener.local_addr().unwrap(),
            Listening::Taken => panic!("the system has chosen a port that is taken"),
        }
    }

    #[test]
    fn a_store_listens_only_at_its_hosts_address() {
        for host in ["127.0.0.1", "127.0.0.2"] {
            assert_eq!(listens(host, false).ip().to_string(), host);
        }
        assert_eq!(listens("localhost", false).ip(), Ipv4Addr::LOCALHOST);
        // An address reserved for documentation, which no host has.
        assert!(listens("192.0.2.77", false).ip().is_unspecified());
        assert!(at("n".repeat(64).as_str(), 0, true).is_err());
    }

    #[test]
    fn a_taken_port_is_distinguished_from_other_errors() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(matches!(at("127.0.0.1", port, true), Ok(Listening::Taken)));
    }

    #[test]
    fn names_of_the_loopback_are_recognised() {
        assert!(["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]"].into_iter().all(is_loopback));
        assert!(!["node0", "10.0.0.1", "0.0.0.0", "::", ""].into_iter().any(is_loopback));
    }
}
