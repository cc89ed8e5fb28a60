//! Entries of the cache of remote files that another process, or a crash, has damaged.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::thread;

use overdrive_dataload::{RemoteOptions, configure_remote, read_idx, remote_stats};
use tempfile::TempDir;

/// The file that the server has: an array of 40 numbers.
static REMOTE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let numbers: Vec<u8> = (0..40).map(|number| number * 5 + 3).collect();
    [&[0, 0, 8, 1, 0, 0, 0, 40], &numbers[..]].concat()
});

/// The URL of the file, the cache with its entry, and the files of the entry as they are undamaged.
struct Cached {
    url: String,
    folder: TempDir,
    entry: [(PathBuf, Vec<u8>); 3],
}

static CACHED: LazyLock<Cached> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
    let url = format!("http://{}/fuzz.idx", listener.local_addr().expect("its address"));
    thread::spawn(move || listener.incoming().flatten().for_each(|socket| drop(thread::spawn(|| serve(socket)))));
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    open(&folder);
    read_idx(&url).expect("the file that the server has");
    let files = fs::read_dir(folder.path()).expect("the cache").map(|file| file.expect("a file").path());
    let mut entry: Vec<_> = files.map(|path| (path.clone(), fs::read(path).expect("a file of the cache"))).collect();
    // The bytes of the file, their checksums, and the lock.
    entry.sort_unstable_by_key(|(path, _)| (path.extension().is_none(), path.clone()));
    let entry = entry.try_into().expect("three files");
    Cached { url, folder, entry }
});

/// Has files opened anew, with this folder as the cache.
fn open(cache: &TempDir) {
    configure_remote(RemoteOptions::default().cache(cache.path()).cache_bytes(64 << 20)).expect("good options");
}

/// Damages an entry of the cache, and reads its file, which must be the one that the server has. Returns 1 where the
/// entry was still good.
///
/// For each of the entry's files comes a byte that says how much longer or shorter it is, and 8 bytes by which those at
/// its beginning are changed; the rest changes what follows in the first file. Without bytes nothing is damaged.
pub(crate) fn remote_cache(bytes: &[u8]) -> usize {
    const CHANGED: usize = 8;
    let cached = &*CACHED;
    let mut rest = bytes;
    let mut damaged = cached.entry.clone();
    for (_, content) in &mut damaged {
        let Some((by, after)) = rest.split_first() else { break };
        let (changes, after) = after.split_at(after.len().min(CHANGED));
        change(content, changes);
        content.resize(content.len().saturating_add_signed(isize::from(by.cast_signed())), *by);
        rest = after;
    }
    change(damaged[0].1.get_mut(CHANGED..).unwrap_or_default(), rest);
    for (path, content) in damaged {
        // Writing over a file waits for the disk.
        _ = fs::remove_file(&path);
        fs::write(path, content).expect("room for a temporary file");
    }
    open(&cached.folder);
    let before = remote_stats().cached_bytes;
    let array = read_idx(&cached.url).expect("the file that the server has, whatever the cache has");
    assert_eq!(array.data, REMOTE[8..], "a damaged entry must not be read");
    usize::from(remote_stats().cached_bytes > before)
}

fn change(content: &mut [u8], by: &[u8]) {
    content.iter_mut().zip(by).for_each(|(byte, by)| *byte ^= by);
}

/// Answers requests for the file, or for a part of it, until the client leaves.
fn serve(socket: TcpStream) -> Option<()> {
    let mut lines = BufReader::new(socket.try_clone().ok()?).lines();
    let mut socket = socket;
    let last = REMOTE.len() - 1;
    loop {
        let asked = lines.next()?.ok()?;
        let head: Vec<String> = lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let range =
            head.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let range = range.and_then(|range| {
            let (first, end) = range.split_once('-')?;
            Some((first.parse::<usize>().ok()?, end.parse::<usize>().ok()?.min(last)))
        });
        let (status, (first, end)) =
            if range.is_some() { ("206 Partial Content", range?) } else { ("200 OK", (0, last)) };
        let content = REMOTE.get(first..=end)?;
        let mut answer = format!(
            "HTTP/1.1 {status}\r\nETag: \"1\"\r\nContent-Length: {}\r\nContent-Range: bytes {first}-{end}/{}\r\n\
             Last-Modified: Fri, 27 Nov 2026 12:00:00 GMT\r\n\r\n",
            content.len(),
            REMOTE.len(),
        )
        .into_bytes();
        if !asked.starts_with("HEAD") {
            answer.extend_from_slice(content);
        }
        socket.write_all(&answer).ok()?;
    }
}
