//! Reserves a free port until rank 0 listens on it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::{Errno, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

use crate::error::LaunchError;

/// How often another port is tried when rank 0 reports that its port is taken.
pub const MOST_RETRIES: u32 = 3;

/// A port that is bound, but not listened on.
///
/// Both this socket and the store's set `SO_REUSEADDR`. So Linux lets rank 0 bind and listen on the port while this
/// socket holds it, but gives it neither to a `bind` to port 0 nor to an outgoing connection.
pub struct ReservedPort {
    _socket: OwnedFd,
    pub number: u16,
}

impl ReservedPort {
    pub fn new() -> std::result::Result<Self, LaunchError> {
        // For IPv6 and IPv4 if the host has both, because the store listens on both.
        let reserved = reserve(AddressFamily::INET6, (Ipv6Addr::UNSPECIFIED, 0).into())
            .or_else(|_| reserve(AddressFamily::INET, (Ipv4Addr::UNSPECIFIED, 0).into()));
        reserved.map_err(|error| LaunchError::system("reserve a port")(error.into()))
    }
}

fn reserve(family: AddressFamily, any: SocketAddr) -> Result<ReservedPort> {
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &any)?;
    let address = SocketAddr::try_from(getsockname(&socket)?).map_err(|_| Errno::INVAL)?;
    Ok(ReservedPort { _socket: socket, number: address.port() })
}

/// Whether the end of an output reports that a port was taken.
pub fn reports_taken(output: &[String]) -> bool {
    output.iter().any(|line| {
        let line = line.to_ascii_lowercase();
        line.contains("eaddrinuse") || line.contains("address already in use")
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_can_be_listened_on_and_is_not_handed_out() {
        let reserved = ReservedPort::new().unwrap();
        let others: Vec<TcpListener> = (0..64).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(others.iter().all(|it| it.local_addr().unwrap().port() != reserved.number));
        // The standard library sets SO_REUSEADDR, as libtorch does.
        TcpListener::bind(("127.0.0.1", reserved.number)).unwrap();
    }

    #[test]
    fn a_taken_port_is_recognised_in_errors_of_libtorch_and_python() {
        let taken = |line: &str| reports_taken(&[line.to_owned()]);
        assert!(taken(
            "DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE"
        ));
        assert!(taken("OSError: [Errno 98] Address already in use"));
        assert!(!taken("connection refused"));
    }
}
