//! Remote files that are needed as a whole, because they are mapped.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::object::{Chunk, Object};
use super::{CHUNK, url};
use crate::DataError;
use crate::local::LocalFile;

/// How often a line says how far a file is.
const PACE: Duration = Duration::from_secs(5);

/// A copy of a remote file: fetches what is not in the cache yet, many chunks at a time, and waits for it. The copy stays
/// as it is while the file is open, also where the cache removes its entry.
pub(crate) fn fetch_whole(path: &Path) -> Result<LocalFile, DataError> {
    let text = url(path)?;
    let object = Object::open(text)?;
    fetch(&object, text).map_err(DataError::io(path))?;
    let (file, name) = object.entry.file().map_err(DataError::io(path))?;
    let state = u64::from_str_radix(&object.name[..16], 16).unwrap_or_default();
    Ok(LocalFile { file, bytes: object.version.size, name, state })
}

fn fetch(object: &Arc<Object>, text: &str) -> io::Result<()> {
    // The ranks of a machine open a file at the same time: one fetches it, and the others find it in the cache.
    let alone =
        object.entry.alone(|| tracing::info!(url = text, "waiting for another process, which fetches the file"))?;
    let chunks = object.version.size.div_ceil(CHUNK);
    (0..chunks).for_each(|chunk| object.ask(chunk, true));
    let (begun, mut told) = (Instant::now(), None::<Instant>);
    let mut tell = |chunks: &[Chunk]| {
        if told.unwrap_or(begun).elapsed() >= PACE {
            told = Some(Instant::now());
            tracing::info!(url = text, "{}", progress(chunks, object.version.size, begun.elapsed()));
        }
    };
    (0..chunks).try_for_each(|chunk| object.wait_and_tell(chunk, &mut tell)).inspect_err(|_| object.give_up())?;
    drop(alone);
    if told.is_some() {
        tracing::info!(url = text, "the whole file is here, after {:.0} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
}

/// How far a file is.
fn progress(chunks: &[Chunk], bytes: u64, since: Duration) -> String {
    let here = chunks.iter().filter(|chunk| matches!(chunk, Chunk::Here)).count() as u64;
    // The last chunk may be shorter.
    let here = (here * CHUNK).min(bytes);
    let [here, all] = [here, bytes].map(|bytes| bytes / 1_000_000);
    format!("{here} of {all} MB of the file are here, after {:.0} s", since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_the_chunks_that_are_here() {
        let chunks = [Chunk::Here, Chunk::UnderWay, Chunk::Here];
        let line = |bytes| progress(&chunks, bytes, Duration::from_secs(7));
        assert_eq!(line(2 * CHUNK + 1_000_000), "8 of 9 MB of the file are here, after 7 s");
        assert_eq!(progress(&[Chunk::Here], 5, Duration::ZERO), "0 of 0 MB of the file are here, after 0 s");
    }
}
