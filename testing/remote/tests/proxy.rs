//! Passes requests on to a server, and plants faults by what they ask for.
//!
//! A name within a folder `cut-2` has its first two answers cut in the middle, and so on: see [`Fault`].

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::Result;

/// What goes wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// `cut-N`: the first N answers to each request for bytes end in the middle, with the connection.
    Cut,
    /// `short-N`: the first N answers to each request for bytes have half of them, and say so as if it were right.
    Short,
    /// `broken-N`: the first N answers are status 500.
    Broken,
    /// `busy-N`: the first N answers are status 503.
    Busy,
    /// `down-N`: every answer is status N; `failing-N`: every answer to a request for bytes.
    Down(u64),
    /// `wordy-0`: every answer to a request for bytes is status 403, with an explanation of 256 MB that is not UTF-8.
    Wordy,
    /// `refused-0`: every answer is status 403; `forbidden-0`: every answer to a request for bytes.
    Refused,
    /// `late-N`: every answer comes N milliseconds late.
    Late(u64),
    /// `slow-N`: of the answer to a request for bytes, the content comes in N pieces, one a second.
    Slow(usize),
    /// `once-0`: bytes that were given once are status 500 from then on.
    Once,
    /// `held-0`: every answer to a request for bytes is status 403: at once for the first bytes of a file, and for
    /// others once a name that begins with `release` was asked for.
    Held,
    /// `endless-0`: every page of a list is the first one, and says that there is another.
    Endless,
    /// `hollow-0`: every page of a list says that there is another.
    Hollow,
    /// `flood-0`: the answer to a request for a list goes on as long as it is read.
    Flood,
    /// `changed-0`: every answer to a request for bytes is of a file with another ETag and date.
    Changed,
}

#[derive(Clone, Default)]
struct Seen {
    times: Arc<Mutex<HashMap<String, u64>>>,
    released: Arc<AtomicBool>,
    /// The first pages of lists that have no end, by what is asked for.
    pages: Arc<Mutex<HashMap<String, Vec<u8>>>>,
}

impl Seen {
    /// The fault of a request, given its head.
    fn fault(&self, head: &str) -> Fault {
        let Some(line) = head.lines().next() else { return Fault::None };
        // A list names its folder in a query.
        let is_list = line.contains("list-type") || line.contains("comp=list");
        if line.contains("/release") {
            self.released.store(true, SeqCst);
        }
        // Google's client escapes more than others.
        let path = line.replace("%2F", "/").replace("%2D", "-").replace("prefix=", "/");
        let folder = path.split('/').find_map(|part| {
            let (kind, number) = part.split_once('-')?;
            Some((kind, number.parse::<u64>().ok()?))
        });
        let Some((kind, number)) = folder else { return Fault::None };
        // A request for bytes is one for a range, or a list.
        let range = head.lines().find(|line| line.to_ascii_lowercase().starts_with("range:")).unwrap_or_default();
        let is_for_bytes = !range.is_empty() || is_list;
        let mut seen = self.times.lock().unwrap();
        let times = seen.entry(format!("{line} {range}")).or_default();
        *times += 1;
        match kind {
            "cut" if *times <= number && is_for_bytes => Fault::Cut,
            "short" if *times <= number && is_for_bytes => Fault::Short,
            "broken" if *times <= number => Fault::Broken,
            "busy" if *times <= number => Fault::Busy,
            "down" => Fault::Down(number),
            "failing" if is_for_bytes => Fault::Down(number),
            "wordy" if is_for_bytes => Fault::Wordy,
            "refused" => Fault::Refused,
            "forbidden" if is_for_bytes => Fault::Refused,
            "late" => Fault::Late(number),
            "slow" if !range.is_empty() => Fault::Slow(number as usize),
            "once" if *times > 1 && is_for_bytes => Fault::Once,
            "held" if range.contains("bytes=0-") => Fault::Refused,
            "held" if is_for_bytes => Fault::Held,
            "endless" if is_list => Fault::Endless,
            "hollow" if is_list => Fault::Hollow,
            "flood" if is_list => Fault::Flood,
            "changed" if !range.is_empty() => Fault::Changed,
            _ => Fault::None,
        }
    }

    /// The first page of the list that a request asks for a page of.
    fn first_page(&self, head: &[u8], answer: Vec<u8>) -> Vec<u8> {
        let head = String::from_utf8_lossy(head);
        let asked = head.split(['&', ' ']).find(|part| part.starts_with("prefix=")).unwrap_or_default();
        self.pages.lock().unwrap().entry(asked.to_owned()).or_insert(answer).clone()
    }
}

/// Listens on an address of its own, until the process ends.
pub fn start(server: SocketAddr) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let seen = Seen::default();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let seen = seen.clone();
            thread::spawn(move || drop(pass_on(client, server, &seen)));
        }
    });
    Ok(address)
}

/// One connection. Requests have no body, so each is a head.
fn pass_on(mut client: TcpStream, server: SocketAddr, seen: &Seen) -> Result<()> {
    client.set_nodelay(true)?;
    let mut waiting = Vec::new();
    loop {
        let Some(head) = head(&mut client, &mut waiting)? else { return Ok(()) };
        let fault = seen.fault(&String::from_utf8_lossy(&head));
        while fault == Fault::Held && !seen.released.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        let status = match fault {
            Fault::Broken | Fault::Once => Some(500),
            Fault::Busy => Some(503),
            Fault::Refused | Fault::Held => Some(403),
            Fault::Down(status) => Some(status),
            _ => None,
        };
        if let Some(status) = status {
            write!(client, "HTTP/1.1 {status} so\r\ncontent-length: 0\r\n\r\n")?;
            continue;
        }
        if fault == Fault::Wordy {
            write!(client, "HTTP/1.1 403 so\r\ncontent-length: {}\r\n\r\n", 256 << 20)?;
            (0..256).try_for_each(|_| client.write_all(&vec![b'\xe9'; 1 << 20]))?;
            continue;
        }
        if let Fault::Late(millis) = fault {
            thread::sleep(Duration::from_millis(millis));
        }
        // A connection for each request, so that an answer ends with it.
        let mut upstream = TcpStream::connect(server)?;
        upstream.write_all(&without_keep_alive(&head))?;
        let is_head = head.starts_with(b"HEAD");
        let mut answer = Vec::new();
        upstream.read_to_end(&mut answer)?;
        answer = with_length(answer);
        if fault == Fault::Cut {
            client.write_all(&answer[..answer.len() / 2])?;
            client.shutdown(Shutdown::Both)?;
            return Ok(());
        }
        if fault == Fault::Short {
            answer = shortened(&answer);
        }
        if fault == Fault::Changed {
            answer = of_another_version(&answer);
        }
        if fault == Fault::Flood {
            return flood(&mut client);
        }
        if fault == Fault::Endless {
            answer = seen.first_page(&head, answer);
        }
        if matches!(fault, Fault::Endless | Fault::Hollow) {
            answer = with_another_page(&answer);
        }
        let pieces = if let Fault::Slow(pieces) = fault { pieces } else { 1 };
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(0, |at| at + 4);
        client.write_all(&answer[..end])?;
        for (number, piece) in answer[end..].chunks((answer.len() - end).div_ceil(pieces).max(1)).enumerate() {
            thread::sleep(Duration::from_secs(u64::from(number > 0)));
            client.write_all(piece)?;
        }
        // Without a length, only the end of the connection ends the answer.
        let said = String::from_utf8_lossy(&answer[..answer.len().min(4096)]).to_ascii_lowercase();
        if !is_head && !said.contains("content-length") {
            client.shutdown(Shutdown::Both)?;
            return Ok(());
        }
    }
}

/// The next request, up to its empty line.
fn head(client: &mut TcpStream, waiting: &mut Vec<u8>) -> Result<Option<Vec<u8>>> {
    loop {
        if let Some(end) = waiting.windows(4).position(|four| four == b"\r\n\r\n") {
            return Ok(Some(waiting.drain(..end + 4).collect()));
        }
        let mut buffer = [0; 4096];
        match client.read(&mut buffer)? {
            0 => return Ok(None),
            count => waiting.extend_from_slice(&buffer[..count]),
        }
    }
}

/// The signature does not cover this header.
fn without_keep_alive(head: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(head);
    let lines = text.trim_end().lines().filter(|line| !line.to_ascii_lowercase().starts_with("connection:"));
    let mut out: String = lines.map(|line| format!("{line}\r\n")).collect();
    out += "connection: close\r\n\r\n";
    out.into_bytes()
}

/// The lines of an answer's head without those of these names, and its content.
fn parts<'a>(answer: &'a [u8], but: &[&str]) -> Option<(String, &'a [u8])> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let lines = head.lines().filter(|line| {
        let line = line.to_ascii_lowercase();
        !but.iter().any(|name| line.starts_with(name))
    });
    Some((lines.map(|line| format!("{line}\r\n")).collect(), &answer[end + 4..]))
}

fn joined(head: &str, line: &str, content: &[u8]) -> Vec<u8> {
    [format!("{head}{line}\r\n\r\n").as_bytes(), content].concat()
}

/// An answer in chunks as one with a length, so that it can be cut and shortened as others are.
fn with_length(answer: Vec<u8>) -> Vec<u8> {
    let Some((head, mut content)) = parts(&answer, &["transfer-encoding:"]) else { return answer };
    if content.is_empty() || parts(&answer, &[]).is_some_and(|(all, _)| all == head) {
        return answer;
    }
    let mut whole = Vec::new();
    while let Some(end) = content.windows(2).position(|two| two == b"\r\n") {
        let length = usize::from_str_radix(&String::from_utf8_lossy(&content[..end]), 16).unwrap_or_default();
        let chunk = content[end + 2..].get(..length).unwrap_or_default();
        if chunk.is_empty() {
            break;
        }
        whole.extend_from_slice(chunk);
        content = content.get(end + 2 + length + 2..).unwrap_or_default();
    }
    joined(&head, &format!("content-length: {}", whole.len()), &whole)
}

/// The answer with half of its content, and the length of that.
fn shortened(answer: &[u8]) -> Vec<u8> {
    let Some((head, content)) = parts(answer, &["content-length:"]) else { return answer.to_vec() };
    let content = &content[..content.len() / 2];
    joined(&head, &format!("content-length: {}", content.len()), content)
}

/// A page of a list as one that is followed by another, whose token comes after all names.
fn with_another_page(answer: &[u8]) -> Vec<u8> {
    static PAGES: AtomicU64 = AtomicU64::new(0);
    let Some((head, content)) = parts(answer, &["content-length:"]) else { return answer.to_vec() };
    let token = format!("zzz-{}", PAGES.fetch_add(1, SeqCst));
    let another = format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>");
    let content = String::from_utf8_lossy(content).replace("<IsTruncated>false</IsTruncated>", &another);
    joined(&head, &format!("content-length: {}", content.len()), content.as_bytes())
}

/// An answer that goes on until the client has enough.
fn flood(client: &mut TcpStream) -> Result<()> {
    client.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
    let chunk = [&b"10000\r\n"[..], &[b' '; 0x10000], b"\r\n"].concat();
    loop {
        client.write_all(&chunk)?;
    }
}

/// The answer with another ETag and date.
fn of_another_version(answer: &[u8]) -> Vec<u8> {
    let Some((head, content)) = parts(answer, &["etag:", "last-modified:"]) else { return answer.to_vec() };
    joined(&head, "etag: \"another\"\r\nlast-modified: Thu, 01 Jan 2015 00:00:00 GMT", content)
}
