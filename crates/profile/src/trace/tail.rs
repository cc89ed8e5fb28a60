//! Completes the end of a trace that kineto has written: adds scopes, names of threads, and the file's final name.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use overdrive_ffi::profiler::Scope;

use super::ThreadNames;

/// The last event that kineto writes; the array of events ends after it.
const LAST_EVENT: &[u8] = b"\"Record Window End\"";
const TRACE_NAME: &[u8] = b"\"traceName\": \"";
const BASE_TIME: &[u8] = b"\"baseTimeNanoseconds\": ";
const BLOCK: u64 = 1 << 16;

/// Adds scopes, names of threads and the file's name to a trace; false if kineto has not written all of it.
pub(super) fn complete(file: &mut File, target: &Path, scopes: &[Scope], threads: &ThreadNames) -> io::Result<bool> {
    let Some((events_end, rest)) = end(file)? else { return Ok(false) };
    let Some(name) = find_last(&rest, TRACE_NAME) else { return Ok(false) };
    let mut new = Vec::new();
    if !(scopes.is_empty() && threads.names.is_empty()) {
        let Some(base_ns) = base_time(file)? else { return Ok(false) };
        write_scopes(&mut new, scopes, base_ns)?;
        write_names(&mut new, scopes, threads, base_ns)?;
        new.extend_from_slice(b"\n  ");
    }
    new.extend_from_slice(&rest[..name + TRACE_NAME.len() - 1]);
    new.extend_from_slice(string(&target.to_string_lossy()).as_bytes());
    new.extend_from_slice(b"\n}\n");
    file.seek(SeekFrom::Start(events_end))?;
    file.write_all(&new)?;
    file.set_len(events_end + new.len() as u64)?;
    Ok(true)
}

/// The position where the array of events ends, and the file's bytes from there on.
fn end(file: &mut File) -> io::Result<Option<(u64, Vec<u8>)>> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut wanted = BLOCK;
    loop {
        let from = length.saturating_sub(wanted);
        let bytes = read(file, from, length)?;
        let found = find_last(&bytes, LAST_EVENT)
            .and_then(|last| Some(last + bytes[last..].iter().position(|&byte| byte == b']')?));
        if let Some(place) = found {
            return Ok(Some((from + place as u64, bytes[place..].to_vec())));
        }
        if from == 0 {
            return Ok(None);
        }
        wanted *= 4;
    }
}

/// The time at which the trace's timestamps are 0, in nanoseconds since the Unix epoch.
fn base_time(file: &mut File) -> io::Result<Option<i64>> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut wanted = BLOCK;
    loop {
        let bytes = read(file, 0, length.min(wanted))?;
        let found = find(&bytes, BASE_TIME).map(|place| &bytes[place + BASE_TIME.len()..]);
        let digits = found.map(|rest| rest.iter().copied().take_while(u8::is_ascii_digit).collect());
        if let Some(number) = digits.and_then(|digits| String::from_utf8(digits).ok()?.parse().ok()) {
            return Ok(Some(number));
        }
        if wanted >= length {
            return Ok(None);
        }
        wanted *= 4;
    }
}

fn read(file: &mut File, from: u64, to: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(to - from).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

fn find_last(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).rposition(|window| window == text)
}

/// Writes scopes by thread and time, in kineto's format.
fn write_scopes(out: &mut Vec<u8>, scopes: &[Scope], base_ns: i64) -> io::Result<()> {
    let process = std::process::id();
    let mut sorted: Vec<&Scope> = scopes.iter().collect();
    sorted.sort_by_key(|scope| (scope.thread.system_id, scope.start_ns, std::cmp::Reverse(scope.end_ns)));
    for scope in sorted {
        write!(
            out,
            ",\n  {{\n    \"ph\": \"X\", \"cat\": \"user_annotation\", \"name\": {}, \"pid\": {process}, \"tid\": {},\n    \
             \"ts\": {}, \"dur\": {},\n    \"args\": {{}}\n  }}",
            string(&scope.name),
            scope.thread.system_id,
            microseconds(scope.start_ns - base_ns),
            microseconds(scope.end_ns - scope.start_ns),
        )?;
    }
    Ok(())
}

/// Writes the threads' names. kineto may have written others, but viewers show the latest one.
fn write_names(out: &mut Vec<u8>, scopes: &[Scope], threads: &ThreadNames, base_ns: i64) -> io::Result<()> {
    let process = std::process::id();
    let mut names = threads.names.clone();
    for scope in scopes {
        // The system keeps 15 bytes of a name.
        let name = names.entry(scope.thread.system_id).or_insert_with(|| "unnamed".to_owned());
        if let Some(whole) = &scope.thread.name {
            name.clone_from(whole);
        }
    }
    let at = microseconds(threads.at_ns - base_ns);
    for (thread, name) in names {
        let name = string(&format!("thread {thread} ({name})"));
        for (metadata, key, value) in
            [("thread_name", "name", name), ("thread_sort_index", "sort_index", thread.to_string())]
        {
            write!(
                out,
                ",\n  {{\n    \"name\": \"{metadata}\", \"ph\": \"M\", \"ts\": {at}, \"pid\": {process}, \
                 \"tid\": {thread},\n    \"args\": {{\n      \"{key}\": {value}\n    }}\n  }}",
            )?;
        }
    }
    Ok(())
}

/// Negative times become 0, as in kineto.
fn microseconds(ns: i64) -> String {
    let ns = ns.max(0);
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// A string of JSON.
fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use overdrive_ffi::profiler::Thread;

    use super::*;

    /// A trace as kineto writes it, with `padding` before, among and after its events.
    fn trace(padding: &str) -> String {
        format!(
            "{{\n \"padding\": \"{padding}\",\n \"baseTimeNanoseconds\": 1000,\n \"traceEvents\": [\n \
             {{\"ph\": \"i\", \"name\": \"first {padding}\"}},\n {{\n \"name\": \"Record Window End\", \"ph\": \"i\"\n }}\n  \
             ],\n \"ERROR\": [\"{padding}\"],\n \"traceName\": \"/traces/.trace-1.tmp\"\n}}"
        )
    }

    fn completed(text: &str, scopes: &[Scope], threads: &ThreadNames) -> (bool, String) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let is_complete = complete(&mut file, Path::new("a \"name\".json"), scopes, threads).unwrap();
        let mut now = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut now).unwrap();
        (is_complete, now)
    }

    #[test]
    fn a_trace_of_any_length_gets_its_scopes_and_its_name() {
        let thread = Arc::new(Thread { number: 3, system_id: 77, name: Some("worker \"1\"".to_owned()) });
        let scope =
            |name: &str, start_ns, end_ns| Scope { name: name.into(), start_ns, end_ns, thread: thread.clone() };
        let scopes = [scope("inner", 3000, 4001), scope("outer", 2500, 9000)];
        let none = ThreadNames { at_ns: 9000, ..ThreadNames::default() };
        let mut threads = ThreadNames { at_ns: 9000, ..ThreadNames::default() };
        threads.names.extend([(77, "worker".to_owned()), (78, "pt_gloo_runloop".to_owned())]);
        for length in [0, 10, 70_000, 1_000_000] {
            for (scopes, threads, events) in
                [(&scopes[..], &none, 6), (&[], &none, 2), (&[], &threads, 6), (&scopes, &threads, 8)]
            {
                let (is_complete, now) = completed(&trace(&"x".repeat(length)), scopes, threads);
                assert!(is_complete);
                let now: serde_json::Value = serde_json::from_str(&now).unwrap();
                assert_eq!(now["traceName"], "a \"name\".json");
                let all = now["traceEvents"].as_array().unwrap();
                assert_eq!(all.len(), events);
                if !scopes.is_empty() {
                    assert_eq!([&all[2]["name"], &all[3]["name"]], ["outer", "inner"]);
                    assert_eq!((all[3]["ts"].as_f64(), all[3]["dur"].as_f64()), (Some(2.0), Some(1.001)));
                    assert_eq!(all[4]["args"]["name"], "thread 77 (worker \"1\")");
                }
                if !threads.names.is_empty() {
                    let last = &all[events - 2];
                    assert_eq!(
                        (&last["args"]["name"], &last["tid"]),
                        (&"thread 78 (pt_gloo_runloop)".into(), &78.into())
                    );
                    assert_eq!(last["ts"].as_f64(), Some(8.0));
                }
            }
        }
    }

    #[test]
    fn a_trace_that_was_cut_short_is_detected_and_left_unchanged() {
        let whole = trace("some text");
        for length in [0, 1, whole.len() / 2, whole.len() - 40] {
            assert_eq!(completed(&whole[..length], &[], &ThreadNames::default()), (false, whole[..length].to_owned()));
        }
    }
}
