//! Host names and addresses.

use std::net::{IpAddr, Ipv6Addr};

/// Whether a text is a valid host name or address, without a port: `node0`, `10.0.0.1`, `::1`, `[::1]`, `fe80::1%eth0`.
/// Nothing is resolved.
pub fn is_host(text: &str) -> bool {
    let is_part = |it: char| it.is_alphanumeric() || matches!(it, '-' | '.' | '_');
    let bare = without_brackets(text);
    let (address, scope) = bare.split_once('%').unwrap_or((bare, ""));
    if address.parse::<Ipv6Addr>().is_ok() {
        return scope.chars().all(is_part);
    }
    !text.is_empty() && !text.starts_with('-') && text.chars().all(is_part)
}

/// `::1` of `[::1]`: resolvers do not accept brackets.
pub(crate) fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host)
}

/// Whether a host name means, on every host, that host itself: `localhost` or a loopback address.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = without_brackets(host);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_and_addresses_are_hosts() {
        for text in ["node0", "node-0.example.org", "a_b", "10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "[fe80::1%eth0]"]
        {
            assert!(is_host(text), "{text}");
        }
        for text in
            ["", " ", "a b", "node0:29500", "tcp://node0", "[node0]", "[]", "[::1", "::1%a b", "-1", "a,b", "a\n"]
        {
            assert!(!is_host(text), "{text:?}");
        }
    }

    #[test]
    fn loopback_names_are_recognised() {
        assert!(
            ["localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "[::1]", "::ffff:127.0.0.1"]
                .map(is_loopback)
                .iter()
                .all(|it| *it)
        );
        assert!(!["node0", "10.0.0.1", "0.0.0.0", "::", "localhost.example.org"].map(is_loopback).iter().any(|it| *it));
    }
}
