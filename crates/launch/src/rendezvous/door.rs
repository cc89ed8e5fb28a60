//! Where nodes come in. Whoever connects is a guest until its greeting shows that it knows the secret; guests are few, have
//! little time and little room, and nobody hears what they say.

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

/// Nobody who is alive takes that long for a greeting.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// One who comes while there are so many takes the place of another: whoever knows the secret greets at once, and comes
/// again if that was too late.
const MOST_GUESTS: usize = 128;

/// Guests in a row that are let in before those who are there are heard.
const AT_ONCE: usize = 16;

/// So many guests with another secret are told of.
const MOST_TOLD: usize = 8;

/// What the coordinator hears.
pub enum Heard {
    Joined(usize, Speaker, Hello),
    Said(usize, ToNodeZero),
    Lost(usize, String),
}

pub struct Door {
    pub listener: TcpListener,
    pub trust: Trust,
    pub heard: Sender<Heard>,
    /// Connections of nodes at a time.
    pub most: usize,
    /// A node that says nothing for so long is lost.
    pub silence: Duration,
    /// A guest that has not greeted within this time leaves.
    pub patience: Duration,
    pub console: Arc<Console>,
}

/// Somebody who has not greeted yet.
struct Guest {
    stream: TcpStream,
    from: IpAddr,
    nonce: Nonce,
    said: Vec<u8>,
    until: Instant,
}

/// What a guest turned out to be.
enum Turn {
    Waits,
    Leaves,
    /// It has sent a greeting without the secret.
    Stranger,
    Joins(Box<(Speaker, Reader, Hello)>),
}

impl Door {
    /// Lets guests in for as long as the process lives.
    pub fn run(self) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        let open = Arc::new(AtomicUsize::new(0));
        let mut guests: Vec<Guest> = Vec::new();
        let (mut joined, mut strangers) = (0, 0);
        loop {
            let ready = wait(&self.listener, &guests);
            let mut ready = ready.into_iter();
            let somebody_comes = ready.next() == Some(true);
            let now = Instant::now();
            for mut guest in std::mem::take(&mut guests) {
                let turn = if ready.next() == Some(true) { guest.hear(&self.trust) } else { Turn::Waits };
                match turn {
                    Turn::Waits if now < guest.until => guests.push(guest),
                    Turn::Waits | Turn::Leaves => {}
                    Turn::Stranger => {
                        strangers += 1;
                        self.tell_of(&guest, strangers);
                    }
                    Turn::Joins(node) => {
                        self.follow(joined, *node, &open);
                        joined += 1;
                    }
                }
            }
            for _ in 0..if somebody_comes { AT_ONCE } else { 0 } {
                match self.listener.accept() {
                    Ok((stream, from)) => {
                        if guests.len() >= MOST_GUESTS {
                            guests.remove(one_too_many(&guests));
                        }
                        guests.extend(Guest::welcome(stream, from.ip(), self.patience).ok());
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => {
                        // Out of file descriptors, for one: it may pass.
                        thread::sleep(Duration::from_millis(50));
                        break;
                    }
                }
            }
        }
    }

    /// A node whose secret is wrong has to learn of it; a flood is not to fill the console.
    fn tell_of(&self, guest: &Guest, count: usize) {
        if count <= MOST_TOLD {
            let who = guest.from.to_canonical();
            let more = if count == MOST_TOLD { "; others will not be told of" } else { "" };
            self.console.say(&format!("refused {who}, which does not know this run's secret{more}"));
        }
    }

    /// Passes on what a node says, from a thread that ends when the connection does.
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

/// Waits until somebody comes, says something or has had its time; whether each is ready, the listener first.
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

/// The first of those from the address with the most of them, so that a flood from one host keeps no other host out.
fn one_too_many(guests: &[Guest]) -> usize {
    let neighbours = |guest: &Guest| guests.iter().filter(|other| other.from == guest.from).count();
    (0..guests.len()).max_by_key(|place| (neighbours(&guests[*place]), Reverse(*place))).unwrap_or_default()
}

impl Guest {
    fn welcome(mut stream: TcpStream, from: IpAddr, patience: Duration) -> io::Result<Self> {
        let nonce = Nonce::draw()?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        // A new connection has room for so little.
        stream.write_all(format!("{GREETING} {PROTOCOL} {}\n", nonce.write()).as_bytes())?;
        Ok(Self { stream, from, nonce, said: Vec::new(), until: Instant::now() + patience })
    }

    fn hear(&mut self, trust: &Trust) -> Turn {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Turn::Leaves,
                Ok(read) => self.said.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Turn::Waits,
                Err(_) => return Turn::Leaves,
            }
            if let Some(end) = self.said.iter().position(|byte| *byte == b'\n') {
                let rest = self.said.split_off(end + 1);
                return self.greeted(trust, rest);
            }
            if self.said.len() > LONGEST_GREETING {
                return Turn::Leaves;
            }
        }
    }

    /// Its number, and a greeting that is sealed with the secret and both numbers.
    fn greeted(&self, trust: &Trust, rest: Vec<u8>) -> Turn {
        let line = self.said.trim_ascii_end();
        let Some(space) = line.iter().position(|byte| *byte == b' ') else { return Turn::Leaves };
        let Some(of_node) = Nonce::read(&line[..space]) else { return Turn::Leaves };
        let (mut from_node, from_node_zero) = Seal::pair(trust.key(), self.nonce, of_node);
        let Some(message) = from_node.open(&line[space + 1..]) else { return Turn::Stranger };
        let Ok(ToNodeZero::Hello(hello)) = serde_json::from_slice(message) else { return Turn::Leaves };
        let streams = || {
            self.stream.set_nonblocking(false)?;
            io::Result::Ok((self.stream.try_clone()?, self.stream.try_clone()?))
        };
        let Ok((speaking, hearing)) = streams() else { return Turn::Leaves };
        let mut speaker = Speaker { stream: speaking, seal: from_node_zero };
        // So the node knows that it has come to the right one.
        match speaker.say(&FromNodeZero::Alive) {
            Ok(()) => {
                let reader = Reader { lines: Lines::new(hearing, rest), seal: from_node };
                Turn::Joins(Box::new((speaker, reader, hello)))
            }
            Err(_) => Turn::Leaves,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::mpsc::channel;

    use super::*;

    fn open(patience: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let console = Arc::new(Console::new().unwrap());
        let (heard, silence) = (channel().0, Duration::from_secs(60));
        let door = Door { listener, trust: Trust::Anyone, heard, most: 1, silence, patience, console };
        thread::spawn(move || door.run());
        address
    }

    #[test]
    fn a_guest_that_does_not_greet_in_time_leaves() {
        let address = open(Duration::from_millis(50));
        let mut silent = TcpStream::connect(address).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut said = String::new();
        silent.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("overdrive-run ") && said.ends_with('\n'), "{said}");
        // One that always says something, and never ends.
        let (mut drips, mut bytes) = (TcpStream::connect(address).unwrap(), 0);
        while drips.write_all(b"0").is_ok() {
            bytes += 1;
            thread::sleep(Duration::from_millis(10));
        }
        assert!(bytes < LONGEST_GREETING, "{bytes} bytes were taken");
    }

    #[test]
    fn a_greeting_without_end_is_not_kept() {
        let mut endless = TcpStream::connect(open(Duration::from_secs(600))).unwrap();
        // More than the system keeps for a reader.
        let said = (0..4096).try_for_each(|_| endless.write_all(&[b'0'; LONGEST_GREETING]));
        assert!(said.is_err());
    }

    #[test]
    fn a_flood_from_one_address_takes_no_other_s_place() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let guests = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3], [10, 0, 0, 2]].map(|from| {
            let _guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            Guest::welcome(listener.accept().unwrap().0, from.into(), PATIENCE).unwrap()
        });
        assert_eq!(one_too_many(&guests), 1);
    }
}
