//! Authenticates the launchers' messages with HMAC-SHA256, without sending the secret. Nothing is encrypted.
//!
//! Each side of a connection draws a random nonce. The secret and both nonces give a key for each direction, and every
//! message carries an HMAC over its sequence number and its bytes. So a message that is replayed from another
//! connection, repeated, or reflected to its sender is rejected.

use std::io;

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use super::PROTOCOL;

type HmacSha256 = Hmac<Sha256>;

/// Hex digits of a nonce or an HMAC.
const DIGITS: usize = 64;

/// A random number that is used once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nonce([u8; DIGITS / 2]);

impl Nonce {
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; DIGITS / 2];
        // `getrandom` returns this few bytes in one call.
        match getrandom(&mut bytes, GetRandomFlags::empty())? {
            drawn if drawn == bytes.len() => Ok(Self(bytes)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    pub fn to_hex(self) -> String {
        to_hex(&self.0)
    }

    pub fn from_hex(text: &[u8]) -> Option<Self> {
        from_hex(text).map(Self)
    }
}

/// Signs or verifies the messages of one direction of a connection.
pub struct Seal {
    key: HmacSha256,
    messages: u64,
}

impl Seal {
    /// For the node's messages, and for node 0's.
    pub fn pair(key: &[u8], of_node_zero: Nonce, of_node: Nonce) -> (Self, Self) {
        let derived = |speaker: &str| {
            let mut derived = with_key(key);
            derived.update(format!("overdrive-run {PROTOCOL} {speaker}\n").as_bytes());
            derived.update(&of_node_zero.0);
            derived.update(&of_node.0);
            Self { key: with_key(&derived.finalize().into_bytes()), messages: 0 }
        };
        (derived("node"), derived("node 0"))
    }

    fn next(&mut self, message: &[u8]) -> HmacSha256 {
        let mut hmac = self.key.clone();
        hmac.update(&self.messages.to_be_bytes());
        hmac.update(message);
        self.messages += 1;
        hmac
    }

    /// The line that carries the next message.
    pub fn sign(&mut self, message: &[u8]) -> Vec<u8> {
        let hmac = self.next(message).finalize().into_bytes();
        let mut line = to_hex(&hmac).into_bytes();
        line.push(b' ');
        line.extend_from_slice(message);
        line.push(b'\n');
        line
    }

    /// The message in a line (without newline); None if the HMAC does not match.
    pub fn verify<'a>(&mut self, line: &'a [u8]) -> Option<&'a [u8]> {
        let (digits, rest) = line.split_at_checked(DIGITS)?;
        let message = rest.strip_prefix(b" ")?;
        let hmac: [u8; DIGITS / 2] = from_hex(digits)?;
        // Takes constant time, so that timing does not reveal the right HMAC.
        self.next(message).verify_slice(&hmac).ok()?;
        Some(message)
    }
}

fn with_key(key: &[u8]) -> HmacSha256 {
    // HMAC takes keys of any length: this never fails.
    HmacSha256::new_from_slice(key).unwrap_or_else(|_| unreachable!("a key of {} bytes", key.len()))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|it| u8::try_from(it).ok());
    let (pairs, []) = text.as_chunks::<2>() else { return None };
    let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of both directions of a connection.
    fn connection(key: &[u8]) -> [(Seal, Seal); 2] {
        let (zero, node) = (Nonce::random().unwrap(), Nonce::random().unwrap());
        let (here, there) = (Seal::pair(key, zero, node), Seal::pair(key, zero, node));
        [(here.0, there.0), (here.1, there.1)]
    }

    fn line(seal: &mut Seal, message: &[u8]) -> Vec<u8> {
        let mut line = seal.sign(message);
        assert_eq!(line.pop(), Some(b'\n'));
        line
    }

    #[test]
    fn repeated_replayed_and_reflected_messages_are_rejected() {
        let [(mut from_node, mut at_zero), (mut from_zero, _)] = connection(b"secret");
        let first = line(&mut from_node, b"first");
        assert_eq!(at_zero.verify(&first), Some(&b"first"[..]));
        assert_eq!(at_zero.verify(&first), None, "a repeated message");
        let [(mut from_node, mut at_zero), (_, mut at_node)] = connection(b"secret");
        assert_eq!(at_zero.verify(&first), None, "a message of another connection");
        let [(_, mut again), _] = connection(b"secret");
        let second = line(&mut from_node, b"second");
        assert_eq!(again.verify(&second), None);
        assert_eq!(at_node.verify(&second), None, "a node's own message, reflected to it");
        assert_eq!(at_node.verify(&line(&mut from_zero, b"other")), None);
    }

    #[test]
    fn a_changed_byte_or_another_secret_is_rejected() {
        let (zero, node) = (Nonce::random().unwrap(), Nonce::random().unwrap());
        let verified = |key: &[u8], text: &[u8]| Seal::pair(key, zero, node).0.verify(text).is_some();
        let good = line(&mut Seal::pair(b"secret", zero, node).0, b"{}");
        assert!(verified(b"secret", &good) && !verified(b"Secret", &good) && !verified(b"", &good));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(!verified(b"secret", &bad), "byte {at}");
            assert!(!verified(b"secret", &good[..at]), "{at} bytes");
        }
    }

    #[test]
    fn hmacs_are_those_of_rfc_4231() {
        let mut hmac = with_key(b"Jefe");
        hmac.update(b"what do ya want for nothing?");
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(to_hex(&hmac.finalize().into_bytes()), expected);
    }

    #[test]
    fn nonces_are_converted_to_hex_and_back() {
        let nonce = Nonce::random().unwrap();
        assert_eq!(Nonce::from_hex(nonce.to_hex().as_bytes()), Some(nonce));
        assert_ne!(Nonce::random().unwrap(), nonce);
        for text in ["", "00", &"g0".repeat(32), &"00".repeat(33), &"0".repeat(63)] {
            assert_eq!(Nonce::from_hex(text.as_bytes()), None, "{text}");
        }
    }
}
