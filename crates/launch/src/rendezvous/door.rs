//! Accepts connections for the coordinator. A new connection is a guest until its greeting proves that it knows the
//! secret. Guests are limited in number, time and bytes, and nothing that they send reaches the coordinator.

use std::cmp::Reverse;
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::seal::{Nonce, Seal};
use super::wire::{Lines, Reader, Speaker};
use super::{FromNodeZero, GREETING, Hello, LONGEST_GREETING, PROTOCOL, ToNodeZero};
use crate::output::Console;
use crate::secret::Trust;

/// How long a guest may take for its greeting. Nodes send it at once.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// One guest more replaces an older one. Nodes greet at once, so they are rarely replaced, and then connect again.
const MOST_GUESTS: usize = 128;

/// Most connections to accept before the guests are read again.
const ACCEPTED_AT_ONCE: usize = 16;

/// How many guests with a wrong secret are reported.
const MOST_REPORTED: usize = 8;

/// An event for the coordinator.
pub enum Heard {
    Joined(usize, Speaker, Hello),
    Said(usize, ToNodeZero),
    Lost(usize, String),
    /// This node is no longer node 0: another one may have been elected.
    Deposed(String),
}

pub struct Door {
    pub listener: TcpListener,
    pub trust: Trust,
    pub heard: Sender<Heard>,
    /// Most connections of nodes at a time.
    pub most: usize,
    /// A node that is silent for this long counts as lost.
    pub silence: Duration,
    /// A guest that has not greeted within this time is disconnected.
    pub greeting_timeout: Duration,
    pub console: Arc<Console>,
}

/// A connection that has not greeted yet.
struct Guest {
    stream: TcpStream,
    from: IpAddr,
    nonce: Nonce,
    received: Vec<u8>,
    until: Instant,
}

/// What a guest has sent.
enum Greeting {
    Incomplete,
    /// Malformed, or the connection is closed.
    Invalid,
    WrongSecret,
    Valid(Box<(Speaker, Reader, Hello)>),
}

impl Door {
    /// Accepts connections until the listener is shut down.
    pub fn run(self) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        let open = Arc::new(AtomicUsize::new(0));
        let mut guests: Vec<Guest> = Vec::new();
        let (mut joined, mut wrong_secrets) = (0, 0);
        loop {
            let ready = wait(&self.listener, &guests);
            let mut ready = ready.into_iter();
            let has_connections = ready.next() == Some(true);
            let now = Instant::now();
            for mut guest in std::mem::take(&mut guests) {
                let greeting = if ready.next() == Some(true) { guest.read(&self.trust) } else { Greeting::Incomplete };
                match greeting {
                    Greeting::Incomplete if now < guest.until => guests.push(guest),
                    Greeting::Incomplete | Greeting::Invalid => {}
                    Greeting::WrongSecret => {
                        wrong_secrets += 1;
                        self.report_wrong_secret(&guest, wrong_secrets);
                    }
                    Greeting::Valid(node) => {
                        self.follow(joined, *node, &open);
                        joined += 1;
                    }
                }
            }
            for _ in 0..if has_connections { ACCEPTED_AT_ONCE } else { 0 } {
                match self.listener.accept() {
                    Ok((stream, from)) => {
                        if guests.len() >= MOST_GUESTS {
                            guests.remove(guest_to_replace(&guests));
                        }
                        guests.extend(Guest::welcome(stream, from.ip(), self.greeting_timeout).ok());
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(()),
                    Err(_) => {
                        // For example out of file descriptors, which may be temporary.
                        thread::sleep(Duration::from_millis(50));
                        break;
                    }
                }
            }
        }
    }

    /// Only so many times, so that a flood does not fill the console.
    fn report_wrong_secret(&self, guest: &Guest, count: usize) {
        if count <= MOST_REPORTED {
            let who = guest.from.to_canonical();
            let more = if count == MOST_REPORTED { "; more will not be reported" } else { "" };
            self.console.say(&format!("refused {who}, which does not know this run's secret{more}"));
        }
    }

    /// Starts a thread that passes a node's messages on until its connection ends.
    fn follow(&self, id: usize, (speaker, mut reader, hello): (Speaker, Reader, Hello), open: &Arc<AtomicUsize>) {
        if open.fetch_add(1, Ordering::Relaxed) >= self.most {
            open.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let (heard, silence, count) = (self.heard.clone(), self.silence, Arc::clone(open));
        let follow = move || {
            let mut last = heard.send(Heard::Joined(id, speaker, hello)).is_err();
            while !last {
                let message = match reader.next(|| silence) {
                    Ok(ToNodeZero::Alive) => continue,
                    Ok(message) => Heard::Said(id, message),
                    Err(why) => {
                        last = true;
                        Heard::Lost(id, why)
                    }
                };
                last |= heard.send(message).is_err();
            }
            count.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new().name("from-node".to_owned()).spawn(follow).is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Waits for a new connection, for bytes from a guest, or until a guest's time is over. Returns which of them are
/// ready, the listener first.
fn wait(listener: &TcpListener, guests: &[Guest]) -> Vec<bool> {
    let streams = guests.iter().map(|guest| PollFd::new(&guest.stream, PollFlags::IN));
    let mut all: Vec<PollFd<'_>> = std::iter::once(PollFd::new(listener, PollFlags::IN)).chain(streams).collect();
    let first = guests.iter().map(|guest| guest.until).min();
    let left = first.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    // A signal ends the wait early, which does no harm.
    let _ = poll(&mut all, left.as_ref());
    all.iter().map(|it| !it.revents().is_empty()).collect()
}

/// The oldest guest from the address with the most guests, so that a flood from one host keeps no other host out.
fn guest_to_replace(guests: &[Guest]) -> usize {
    let from_same = |guest: &Guest| guests.iter().filter(|other| other.from == guest.from).count();
    (0..guests.len()).max_by_key(|place| (from_same(&guests[*place]), Reverse(*place))).unwrap_or_default()
}

impl Guest {
    fn welcome(mut stream: TcpStream, from: IpAddr, timeout: Duration) -> io::Result<Self> {
        let nonce = Nonce::random()?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        // Succeeds without blocking: the send buffer of a new connection is empty.
        stream.write_all(format!("{GREETING} {PROTOCOL} {}\n", nonce.to_hex()).as_bytes())?;
        Ok(Self { stream, from, nonce, received: Vec::new(), until: Instant::now() + timeout })
    }

    fn read(&mut self, trust: &Trust) -> Greeting {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Greeting::Invalid,
                Ok(read) => self.received.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Greeting::Incomplete,
                Err(_) => return Greeting::Invalid,
            }
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let rest = self.received.split_off(end + 1);
                return self.check(trust, rest);
            }
            if self.received.len() > LONGEST_GREETING {
                return Greeting::Invalid;
            }
        }
    }

    /// Checks the line that the guest has sent: its nonce, and its signed `Hello`. `rest` is what followed the line.
    fn check(&self, trust: &Trust, rest: Vec<u8>) -> Greeting {
        let line = self.received.trim_ascii_end();
        let Some(space) = line.iter().position(|byte| *byte == b' ') else { return Greeting::Invalid };
        let Some(of_node) = Nonce::from_hex(&line[..space]) else { return Greeting::Invalid };
        let (mut from_node, from_node_zero) = Seal::pair(trust.key(), self.nonce, of_node);
        let Some(message) = from_node.verify(&line[space + 1..]) else { return Greeting::WrongSecret };
        let Ok(ToNodeZero::Hello(hello)) = serde_json::from_slice(message) else { return Greeting::Invalid };
        let streams = || {
            self.stream.set_nonblocking(false)?;
            io::Result::Ok((self.stream.try_clone()?, self.stream.try_clone()?))
        };
        let Ok((speaking, hearing)) = streams() else { return Greeting::Invalid };
        let mut speaker = Speaker { stream: speaking, seal: from_node_zero };
        // Proves to the node that this is node 0.
        match speaker.say(&FromNodeZero::Alive) {
            Ok(()) => {
                let reader = Reader { lines: Lines::new(hearing, rest), seal: from_node };
                Greeting::Valid(Box::new((speaker, reader, hello)))
            }
            Err(_) => Greeting::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::mpsc::channel;

    use super::*;

    fn open(greeting_timeout: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let console = Arc::new(Console::new().unwrap());
        let (heard, silence) = (channel().0, Duration::from_secs(60));
        let door = Door { listener, trust: Trust::Anyone, heard, most: 1, silence, greeting_timeout, console };
        thread::spawn(move || door.run());
        address
    }

    #[test]
    fn the_door_closes_when_its_listener_is_shut_down() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (doors, console) = (listener.try_clone().unwrap(), Arc::new(Console::new().unwrap()));
        let (heard, silence, greeting_timeout) = (channel().0, GREETING_TIMEOUT, GREETING_TIMEOUT);
        let door = Door { listener: doors, trust: Trust::Anyone, heard, most: 1, silence, greeting_timeout, console };
        let door = thread::spawn(move || door.run());
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
        door.join().unwrap().unwrap();
    }

    #[test]
    fn a_guest_that_does_not_greet_in_time_is_disconnected() {
        let address = open(Duration::from_millis(50));
        let mut silent = TcpStream::connect(address).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        let mut said = String::new();
        silent.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("overdrive-run ") && said.ends_with('\n'), "{said}");
        // A guest that keeps sending bytes but never ends its line.
        let (mut endless, mut bytes) = (TcpStream::connect(address).unwrap(), 0);
        while endless.write_all(b"0").is_ok() {
            bytes += 1;
            thread::sleep(Duration::from_millis(10));
        }
        assert!(bytes < LONGEST_GREETING, "{bytes} bytes were taken");
    }

    #[test]
    fn an_endless_greeting_is_cut_off() {
        let mut endless = TcpStream::connect(open(Duration::from_secs(600))).unwrap();
        // More than the sockets' buffers hold.
        let said = (0..4096).try_for_each(|_| endless.write_all(&[b'0'; LONGEST_GREETING]));
        assert!(said.is_err());
    }

    #[test]
    fn a_flood_from_one_address_replaces_no_guest_from_another() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let guests = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3], [10, 0, 0, 2]].map(|from| {
            let _guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            Guest::welcome(listener.accept().unwrap().0, from.into(), GREETING_TIMEOUT).unwrap()
        });
        assert_eq!(guest_to_replace(&guests), 1);
    }
}
