//! Where nodes come in: each connection has a thread that turns what it says into messages to the coordinator.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::wire::{PATIENCE, Reader};
use super::{Hello, ToNodeZero};

/// What the coordinator hears.
pub enum Heard {
    Joined(usize, TcpStream, Hello),
    Said(usize, ToNodeZero),
    Lost(usize, String),
}

/// Takes connections for as long as the process lives, `most` at a time.
pub fn accept(listener: &TcpListener, heard: &Sender<Heard>, most: usize, silence: Duration) {
    let open = Arc::new(AtomicUsize::new(0));
    for (id, stream) in listener.incoming().enumerate() {
        let Ok(stream) = stream else {
            // Out of file descriptors, for one: it may pass.
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        if open.fetch_add(1, Ordering::Relaxed) >= most {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (heard, count) = (heard.clone(), Arc::clone(&open));
        let listening = thread::Builder::new().name("from-node".to_owned()).spawn(move || {
            listen_to(id, stream, &heard, silence);
            count.fetch_sub(1, Ordering::Relaxed);
        });
        if listening.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Ends when the connection does, or when nobody listens any more.
fn listen_to(id: usize, stream: TcpStream, heard: &Sender<Heard>, silence: Duration) {
    let _ = stream.set_nodelay(true);
    let Ok(mut reader) = Reader::new(&stream, PATIENCE) else { return };
    // Who does not begin with a greeting is no launcher.
    let Ok(ToNodeZero::Hello(hello)) = reader.next() else { return };
    if reader.set_silence(silence).is_err() || heard.send(Heard::Joined(id, stream, hello)).is_err() {
        return;
    }
    loop {
        let (message, last) = match reader.next() {
            Ok(ToNodeZero::Alive) => continue,
            Ok(message) => (Heard::Said(id, message), false),
            Err(why) => (Heard::Lost(id, why), true),
        };
        if heard.send(message).is_err() || last {
            return;
        }
    }
}
