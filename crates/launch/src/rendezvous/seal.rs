//! How launchers know one another, and each other's words, without telling what they share.
//!
//! Each side of a connection draws a number that was never used before. The secret and both numbers give a key for each
//! direction, and every message carries a code over its place in line and itself. So a message that was heard elsewhere, or
//! before, or from the other side, is no message here.

use std::io;

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use super::PROTOCOL;

type Code = Hmac<Sha256>;

/// The characters of a number or a code, as it is written.
const WRITTEN: usize = 64;

/// A number that is used once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nonce([u8; WRITTEN / 2]);

impl Nonce {
    pub fn draw() -> io::Result<Self> {
        let mut bytes = [0; WRITTEN / 2];
        // The system gives so few bytes whole.
        match getrandom(&mut bytes, GetRandomFlags::empty())? {
            drawn if drawn == bytes.len() => Ok(Self(bytes)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    pub fn write(&self) -> String {
        write(&self.0)
    }

    pub fn read(text: &[u8]) -> Option<Self> {
        read(text).map(Self)
    }
}

/// One direction of a connection.
pub struct Seal {
    key: Code,
    messages: u64,
}

impl Seal {
    /// Of what the node says, and of what node 0 does.
    pub fn pair(key: &[u8], of_node_zero: Nonce, of_node: Nonce) -> (Self, Self) {
        let derived = |speaker: &str| {
            let mut derived = code(key);
            derived.update(format!("overdrive-run {PROTOCOL} {speaker}\n").as_bytes());
            derived.update(&of_node_zero.0);
            derived.update(&of_node.0);
            Self { key: code(&derived.finalize().into_bytes()), messages: 0 }
        };
        (derived("node"), derived("node 0"))
    }

    fn next(&mut self, message: &[u8]) -> Code {
        let mut code = self.key.clone();
        code.update(&self.messages.to_be_bytes());
        code.update(message);
        self.messages += 1;
        code
    }

    /// The line that carries the next message.
    pub fn close(&mut self, message: &[u8]) -> Vec<u8> {
        let code = self.next(message).finalize().into_bytes();
        let mut line = write(&code).into_bytes();
        line.push(b' ');
        line.extend_from_slice(message);
        line.push(b'\n');
        line
    }

    /// The message that a line carries, without its end; none if the other side has not written it.
    pub fn open<'a>(&mut self, line: &'a [u8]) -> Option<&'a [u8]> {
        let (written, rest) = line.split_at_checked(WRITTEN)?;
        let message = rest.strip_prefix(b" ")?;
        let told: [u8; WRITTEN / 2] = read(written)?;
        // In a time that does not tell how much of it is right.
        self.next(message).verify_slice(&told).ok()?;
        Some(message)
    }
}

fn code(key: &[u8]) -> Code {
    // HMAC takes keys of any length: this never fails.
    Code::new_from_slice(key).unwrap_or_else(|_| unreachable!("a key of {} bytes", key.len()))
}

fn write(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
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
        let (zero, node) = (Nonce::draw().unwrap(), Nonce::draw().unwrap());
        let (here, there) = (Seal::pair(key, zero, node), Seal::pair(key, zero, node));
        [(here.0, there.0), (here.1, there.1)]
    }

    fn line(seal: &mut Seal, message: &[u8]) -> Vec<u8> {
        let mut line = seal.close(message);
        assert_eq!(line.pop(), Some(b'\n'));
        line
    }

    #[test]
    fn only_what_was_written_for_this_place_is_opened() {
        let [(mut from_node, mut heard), (mut from_zero, _)] = connection(b"secret");
        let first = line(&mut from_node, b"first");
        assert_eq!(heard.open(&first), Some(&b"first"[..]));
        assert_eq!(heard.open(&first), None, "a message said twice");
        let [(mut from_node, mut heard), (_, mut at_node)] = connection(b"secret");
        assert_eq!(heard.open(&first), None, "a message of another connection");
        let [(_, mut again), _] = connection(b"secret");
        let second = line(&mut from_node, b"second");
        assert_eq!(again.open(&second), None);
        assert_eq!(at_node.open(&second), None, "a node's own message, sent back to it");
        assert_eq!(at_node.open(&line(&mut from_zero, b"other")), None);
    }

    #[test]
    fn a_changed_byte_or_another_secret_is_noticed() {
        let (zero, node) = (Nonce::draw().unwrap(), Nonce::draw().unwrap());
        let opened = |key: &[u8], text: &[u8]| Seal::pair(key, zero, node).0.open(text).is_some();
        let good = line(&mut Seal::pair(b"secret", zero, node).0, b"{}");
        assert!(opened(b"secret", &good) && !opened(b"Secret", &good) && !opened(b"", &good));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(!opened(b"secret", &bad), "byte {at}");
            assert!(!opened(b"secret", &good[..at]), "{at} bytes");
        }
    }

    #[test]
    fn codes_are_hmacs_of_rfc_4231() {
        let mut told = code(b"Jefe");
        told.update(b"what do ya want for nothing?");
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(write(&told.finalize().into_bytes()), expected);
    }

    #[test]
    fn numbers_are_written_and_read() {
        let nonce = Nonce::draw().unwrap();
        assert_eq!(Nonce::read(nonce.write().as_bytes()), Some(nonce));
        assert_ne!(Nonce::draw().unwrap(), nonce);
        for text in ["", "00", &"g0".repeat(32), &"00".repeat(33), &"0".repeat(63)] {
            assert_eq!(Nonce::read(text.as_bytes()), None, "{text}");
        }
    }
}
