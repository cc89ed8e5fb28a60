//! The files in which ranks record the error that ends them, in PyTorch's format.
//!
//! ```json
//! {"message": {"message": "ValueError: no data",
//!              "extraInfo": {"py_callstack": "Traceback ..", "timestamp": "1764163200"}}}
//! ```
//!
//! # Source
//! `torch.distributed.elastic.multiprocessing.errors`: `ErrorHandler` writes them, `ProcessFailure` reads them.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The variable with the path of a rank's file.
pub const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// In bytes. A larger file is not read: reports of many ranks go over the network.
const LARGEST: u64 = 1 << 20;

/// How much is kept of what is read: lines at the start and at the end of a traceback, lines of a message, and bytes of
/// each line.
const FIRST_LINES: usize = 30;
const LAST_LINES: usize = 50;
const MESSAGE_LINES: usize = 8;
const LINE_BYTES: usize = 1000;

/// The error that a rank has recorded in the file named by `TORCHELASTIC_ERROR_FILE`, by [`record`](crate::record) or
/// Python's `@record`.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RecordedError {
    /// What went wrong; of a Rust error with its causes, of a Python exception with its type. At most 8 lines.
    pub message: String,
    /// Where: Python's traceback; or the Rust error, its causes, and its backtrace. The first 30 and the last 50 lines.
    pub traceback: Vec<String>,
    /// When, by the clock of its host: the time since 1970-01-01 UTC. Whole seconds if Python has written it.
    pub time: Option<Duration>,
}

/// The text of a file. `traceback` includes the message. Both are shortened if the file would be too large to be read.
pub fn to_json(message: &str, traceback: &str, time: Duration) -> String {
    let whole = in_full(message, traceback, time);
    if whole.len() as u64 <= LARGEST {
        return whole;
    }
    in_full(&self::message(message), &lines(traceback).join("\n"), time)
}

fn in_full(message: &str, traceback: &str, time: Duration) -> String {
    // PyTorch has whole seconds, as text, and ignores other keys.
    json!({"message": {"message": message, "extraInfo": {
        "py_callstack": traceback,
        "timestamp": time.as_secs().to_string(),
        "timestamp_us": time.as_micros().to_string(),
    }}})
    .to_string()
}

/// Writes a file so that it is complete or absent, even if the process ends meanwhile.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}.tmp", std::process::id()));
    let written = fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, path));
    written.inspect_err(|_| drop(fs::remove_file(&unfinished)))
}

/// Reads the file of a failed rank. None if there is none; an error file that cannot be read is an error that says so.
pub fn read(path: &Path) -> Option<RecordedError> {
    let damaged = |why: String| RecordedError {
        message: format!("its error file {} cannot be read: {why}", path.display()),
        ..RecordedError::default()
    };
    // Opening a pipe would wait for its writer.
    match fs::metadata(path) {
        Ok(data) if data.is_file() => {}
        Ok(_) => return Some(damaged("it is not a file".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(damaged(error.to_string())),
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return Some(damaged(error.to_string())),
    };
    let mut bytes = Vec::new();
    Some(match file.take(LARGEST + 1).read_to_end(&mut bytes) {
        Err(error) => damaged(error.to_string()),
        // A rank that was killed while it wrote.
        Ok(0) => return None,
        Ok(read) if read as u64 > LARGEST => damaged(format!("it has more than {LARGEST} bytes")),
        Ok(_) => {
            replace_lone_surrogates(&mut bytes);
            match serde_json::from_slice(&bytes) {
                Ok(value) => parse(&value).unwrap_or_else(|| damaged("it has no `message`".to_owned())),
                Err(error) => damaged(error.to_string()),
            }
        }
    })
}

/// Python writes a byte of a name that is not UTF-8 as half of a UTF-16 pair, like `\udc80`, which is no valid text.
fn replace_lone_surrogates(json: &mut [u8]) {
    let unit = |json: &[u8], at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut at = 0;
    while at < json.len() {
        if json[at] != b'\\' {
            at += 1;
            continue;
        }
        match (unit(json, at), unit(json, at + 6)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => at += 12,
            (Some(0xD800..=0xDFFF), _) => {
                json[at + 2..at + 6].copy_from_slice(b"fffd");
                at += 6;
            }
            _ => at += 2,
        }
    }
}

fn parse(file: &Value) -> Option<RecordedError> {
    let said = file.get("message")?;
    // PyTorch accepts a text in place of the object.
    if let Some(text) = said.as_str() {
        return Some(RecordedError { message: message(text), time: time(file), ..RecordedError::default() });
    }
    let text = said.get("message").and_then(Value::as_str)?;
    let extra = said.get("extraInfo");
    let traceback = extra.and_then(|extra| extra.get("py_callstack")).and_then(Value::as_str).unwrap_or_default();
    Some(RecordedError { message: message(text), traceback: lines(traceback), time: extra.and_then(time) })
}

/// The time of an error, as a number or, as PyTorch writes it, as text.
fn time(holder: &Value) -> Option<Duration> {
    let number = |key| {
        let value = holder.get(key)?;
        value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
    };
    number("timestamp_us").map(Duration::from_micros).or_else(|| number("timestamp").map(Duration::from_secs))
}

fn message(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().take(MESSAGE_LINES).map(shortened).collect();
    lines.join("\n")
}

fn lines(text: &str) -> Vec<String> {
    let all: Vec<&str> = text.trim_end().lines().collect();
    let kept = |lines: &[&str]| lines.iter().map(|line| shortened(line).to_owned()).collect::<Vec<String>>();
    if all.len() <= FIRST_LINES + LAST_LINES + 1 {
        return kept(&all);
    }
    let left_out = format!("[{} lines left out]", all.len() - FIRST_LINES - LAST_LINES);
    [kept(&all[..FIRST_LINES]), vec![left_out], kept(&all[all.len() - LAST_LINES..])].concat()
}

fn shortened(line: &str) -> &str {
    let ends = line.char_indices().map(|(start, letter)| start + letter.len_utf8());
    &line[..ends.take_while(|end| *end <= LINE_BYTES).last().unwrap_or(0)]
}

/// A folder for the error files of a launch that has no folder for logs; removed when the launch ends.
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Only this user can access it, and it must not exist before.
    pub fn create(mark: &str) -> io::Result<Self> {
        let path = std::path::absolute(Self::path(mark))?;
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    fn path(mark: &str) -> PathBuf {
        std::env::temp_dir().join(format!("overdrive-errors-{mark}"))
    }

    /// The file of a rank.
    pub fn file(&self, attempt: u32, local_rank: usize) -> PathBuf {
        self.path.join(format!("attempt_{attempt}_{local_rank}.json"))
    }

    /// Removes the folder of a launch whose guard was killed.
    pub fn remove_left(mark: &str) {
        // Ignored: nothing may be left.
        let _ = fs::remove_dir_all(Self::path(mark));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &[u8]) -> Option<RecordedError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn what_is_written_is_read() {
        let time = Duration::from_micros(1_764_163_200_123_456);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        assert_eq!(read(&path), None);
        write(&path, &to_json("no \"data\"", "Error: no data\n\nStack backtrace:\n   0: main", time)).unwrap();
        let expected = RecordedError {
            message: "no \"data\"".into(),
            traceback: ["Error: no data", "", "Stack backtrace:", "   0: main"].map(str::to_owned).into(),
            time: Some(time),
        };
        assert_eq!(read(&path), Some(expected));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "the unfinished file is left");
        // Nor when it cannot become the file, here because that is a folder.
        write(folder.path(), "{}").unwrap_err();
        let beside = fs::read_dir(folder.path().parent().unwrap()).unwrap().map(|it| it.unwrap().file_name());
        let name = folder.path().file_name().unwrap().to_str().unwrap();
        assert_eq!(beside.filter(|other| other.to_string_lossy().starts_with(name)).count(), 1);
    }

    #[test]
    fn the_forms_that_pytorch_writes_and_accepts_are_read() {
        let python = br#"{"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack":
            "Traceback (most recent call last):\n  File \"train.py\", line 3\nValueError: no data\n",
            "timestamp": "1764163200"}, "errorCode": 1}}"#;
        let read = read_text(python).unwrap();
        assert_eq!((read.message.as_str(), read.traceback.len()), ("ValueError: no data", 3));
        assert_eq!(read.time, Some(Duration::from_secs(1_764_163_200)));
        let old = read_text(br#"{"message": "out of memory", "timestamp": 7}"#).unwrap();
        assert_eq!((old.message.as_str(), old.time), ("out of memory", Some(Duration::from_secs(7))));
        assert_eq!(read_text(br#"{"message": {"message": "short"}}"#).unwrap().message, "short");
    }

    #[test]
    fn names_that_are_not_utf_8_are_read() {
        // As Python's `json.dump` writes the name of a file with the byte 0x80, a letter outside of 16 bits, and a
        // backslash before a `u`.
        let text = br#"{"message": {"message": "no \udc80\ud83d\ud83d\ude00 \\udc80 \ud83d"}}"#;
        assert_eq!(read_text(text).unwrap().message, "no \u{fffd}\u{fffd}\u{1f600} \\udc80 \u{fffd}");
    }

    #[test]
    fn files_that_cannot_be_read_are_reported() {
        let why = |text: &[u8]| read_text(text).unwrap().message;
        for text in ["{", "[]", "{}", "7", r#"{"message": 7}"#, r#"{"message": {"extraInfo": {}}}"#, "\u{0}"] {
            assert!(why(text.as_bytes()).contains("error.json cannot be read: "), "{text}");
        }
        assert!(why(&[b' '; (LARGEST + 1) as usize]).contains("more than 1048576 bytes"));
        assert_eq!(read_text(b""), None);
    }

    #[test]
    fn an_error_of_any_length_is_written_so_that_it_is_read() {
        // Each of these bytes becomes six in JSON.
        let long = "\u{1}".repeat(LARGEST as usize);
        let text = to_json(&long, &format!("Error: no data\n{long}\n").repeat(3), Duration::from_secs(7));
        let read = read_text(text.as_bytes()).unwrap();
        assert_eq!((read.message.len(), read.traceback.len()), (LINE_BYTES, 6), "{}", &read.message[..80]);
        assert_eq!((read.traceback[0].as_str(), read.time), ("Error: no data", Some(Duration::from_secs(7))));
    }

    #[test]
    fn long_errors_are_shortened_at_their_middle() {
        let text = (0..1000).map(|line| format!("line {line}\n")).collect::<String>() + &"é".repeat(1000);
        let read = read_text(to_json(&text, &text, Duration::ZERO).as_bytes()).unwrap();
        assert_eq!(read.message.lines().count(), MESSAGE_LINES);
        assert_eq!(read.traceback.len(), FIRST_LINES + 1 + LAST_LINES);
        assert_eq!(read.traceback[FIRST_LINES], "[921 lines left out]");
        assert_eq!(read.traceback.last().unwrap().len(), LINE_BYTES);
    }
}
