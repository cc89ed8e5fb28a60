//! A free port that stays free until somebody listens on it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::{Errno, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

use crate::error::LaunchError;

/// How often another port is tried when rank 0 says that its port is taken.
pub const MOST_RETRIES: u32 = 3;

/// A port that is bound, but not listened on.
///
/// Both this socket and the store's say `SO_REUSEADDR`, so Linux lets rank 0 bind and listen on the port while it is
/// held here, and gives it to nobody who asks for any port, nor to an outgoing connection.
pub struct ReservedPort {
    _socket: OwnedFd,
    pub number: u16,
}

impl ReservedPort {
    pub fn new() -> std::result::Result<Self, LaunchError> {
        // On both families where there are two, as the store listens.
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

/// Whether the end of an output says that a port was taken.
pub fn says_taken(output: &[String]) -> bool {
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
    fn a_reserved_port_can_be_listened_on_and_is_given_to_nobody_else() {
        let reserved = ReservedPort::new().unwrap();
        let others: Vec<TcpListener> = (0..64).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(others.iter().all(|it| it.local_addr().unwrap().port() != reserved.number));
        // The standard library says SO_REUSEADDR as libtorch does.
        TcpListener::bind(("127.0.0.1", reserved.number)).unwrap();
    }

    #[test]
    fn a_taken_port_is_known_by_what_libtorch_and_python_say() {
        let says = |line: &str| says_taken(&[line.to_owned()]);
        assert!(says(
            "DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE"
        ));
        assert!(says("OSError: [Errno 98] Address already in use"));
        assert!(!says("connection refused"));
    }
}
