//! Splits a byte stream into lines in bounded memory, and keeps the last few of them.

use std::collections::VecDeque;

/// In bytes. Longer lines are passed on in parts.
pub const LONGEST_LINE: usize = 64 << 10;

const KEPT_LINES: usize = 20;
const KEPT_BYTES_PER_LINE: usize = 1000;

/// Splits a stream into lines. A line ends with `\n`, `\r\n` or a lone `\r` (progress bars).
#[derive(Default)]
pub struct Splitter {
    pending: Vec<u8>,
}

impl Splitter {
    /// Emits the lines that `bytes` complete, with their line ends. An overlong line is emitted in parts.
    pub fn push(&mut self, bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        let mut rest = bytes;
        // The last piece ended with `\r`; only now is it known whether `\n` follows.
        if self.pending.last() == Some(&b'\r') && !rest.is_empty() {
            if rest[0] == b'\n' {
                self.pending.push(b'\n');
                rest = &rest[1..];
            }
            emit(&self.pending);
            self.pending.clear();
        }
        while let Some(length) = line_length(rest) {
            let (line, after) = rest.split_at(length);
            self.take(line, &mut emit);
            emit(&self.pending);
            self.pending.clear();
            rest = after;
        }
        self.take(rest, &mut emit);
    }

    /// Emits the rest at the end of the stream.
    pub fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            emit(&self.pending);
            self.pending.clear();
        }
    }

    /// Buffers a part of a line, and emits the buffer whenever it reaches [`LONGEST_LINE`].
    fn take(&mut self, mut part: &[u8], emit: &mut impl FnMut(&[u8])) {
        while self.pending.len() + part.len() > LONGEST_LINE {
            let (now, later) = part.split_at(LONGEST_LINE - self.pending.len());
            self.pending.extend_from_slice(now);
            emit(&self.pending);
            self.pending.clear();
            part = later;
        }
        self.pending.extend_from_slice(part);
    }
}

/// The length of the first line with its line end; None if more bytes are needed to find that end.
fn line_length(bytes: &[u8]) -> Option<usize> {
    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
    match (bytes[end], bytes.get(end + 1)) {
        (b'\r', None) => None,
        (b'\r', Some(b'\n')) => Some(end + 2),
        _ => Some(end + 1),
    }
}

/// The last lines of an output.
#[derive(Default)]
pub struct Tail {
    lines: VecDeque<Vec<u8>>,
    /// The last line ended with a lone `\r`, so the next one replaces it, as on a terminal.
    overwrites: bool,
}

impl Tail {
    pub fn push(&mut self, line: &[u8]) {
        if self.overwrites {
            self.lines.pop_back();
        } else if self.lines.len() == KEPT_LINES {
            self.lines.pop_front();
        }
        self.overwrites = line.ends_with(b"\r");
        let text = line.trim_ascii_end();
        self.lines.push_back(text[..text.len().min(KEPT_BYTES_PER_LINE)].to_vec());
    }

    /// As text, without empty lines at either end.
    pub fn lines(&self) -> Vec<String> {
        let lines: Vec<String> = self.lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect();
        let first = lines.iter().position(|line| !line.is_empty()).unwrap_or(lines.len());
        let last = lines.iter().rposition(|line| !line.is_empty()).map_or(first, |it| it + 1);
        lines[first..last].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut emit = |line: &[u8]| lines.push(String::from_utf8_lossy(line).into_owned());
        let mut splitter = Splitter::default();
        for piece in pieces {
            splitter.push(piece, &mut emit);
        }
        splitter.finish(&mut emit);
        lines
    }

    #[test]
    fn lines_are_the_same_however_the_stream_is_cut() {
        let text = b"one\ntwo\r\n\n10%\r20%\r\r\nlast";
        let whole = split(&[text]);
        assert_eq!(whole, ["one\n", "two\r\n", "\n", "10%\r", "20%\r", "\r\n", "last"]);
        for cut in 0..=text.len() {
            assert_eq!(split(&[&text[..cut], &text[cut..]]), whole, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(split(&bytes), whole);
    }

    #[test]
    fn a_line_without_end_is_passed_on_in_parts() {
        let mut splitter = Splitter::default();
        let mut sizes = Vec::new();
        for _ in 0..10 {
            splitter.push(&[b'x'; 100_000], |part| sizes.push(part.len()));
            assert!(splitter.pending.len() <= LONGEST_LINE && splitter.pending.capacity() <= 4 * LONGEST_LINE);
        }
        splitter.finish(|part| sizes.push(part.len()));
        assert_eq!(sizes.iter().sum::<usize>(), 1_000_000);
        assert!(sizes.iter().all(|size| *size <= LONGEST_LINE));
    }

    #[test]
    fn the_tail_keeps_the_last_twenty_lines() {
        let mut tail = Tail::default();
        for number in 0..50 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        tail.push(&[0xff, b'x']);
        tail.push(b"\n");
        let lines = tail.lines();
        assert_eq!(lines.first().unwrap(), "line 32");
        assert_eq!(lines.last().unwrap(), "\u{fffd}x");
        assert!(Tail::default().lines().is_empty());

        let mut progress = Tail::default();
        for line in ["start\n", "10%\r", "20%\r", "done\n"] {
            progress.push(line.as_bytes());
        }
        assert_eq!(progress.lines(), ["start", "done"]);
    }
}
