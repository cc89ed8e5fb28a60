//! The order in which a device is given the collectives of several communicators. If two ranks are given them in
//! opposite orders, they may wait forever: each GPU runs the collective that it has begun until the other one comes to
//! it.
//!
//! # Source
//! NCCL's guide, "Using multiple NCCL communicators concurrently"

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::code::Failure;
use super::lanes::{Lane, Lanes, Record};

/// For each device, how many collectives each communicator was given.
static GIVEN: Mutex<BTreeMap<(usize, PathBuf), u64>> = Mutex::new(BTreeMap::new());
const LENGTH: usize = size_of::<u64>();

fn given() -> MutexGuard<'static, BTreeMap<(usize, PathBuf), u64>> {
    GIVEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a communicator to a device.
pub fn begin(device: usize, path: &Path) {
    given().insert((device, path.to_owned()), 0);
}

pub fn end(device: usize, path: &Path) {
    given().remove(&(device, path.to_owned()));
}

/// Counts a collective of the communicator. Returns what the device's other communicators were given before it, a line
/// each.
pub fn give(device: usize, path: &Path) -> String {
    let mut given = given();
    let others = given.iter().filter(|((its, other), _)| *its == device && other != path);
    let before = others.map(|((_, other), count)| format!("{count} {}\n", other.display())).collect();
    if let Some(count) = given.get_mut(&(device, path.to_owned())) {
        *count += 1;
    }
    before
}

/// If two ranks differ: how many collectives of another communicator that both have came before at each of them.
pub fn difference(one: &str, other: &str) -> Option<(u64, u64)> {
    let counts = |text: &str| -> BTreeMap<String, u64> {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.filter_map(|(count, path)| Some((path.to_owned(), count.parse().ok()?))).collect()
    };
    let other = counts(other);
    let both = counts(one).into_iter().filter_map(|(path, count)| Some((count, *other.get(&path)?)));
    both.into_iter().find(|(one, other)| one != other)
}

/// Appends it to the bytes that a rank sends.
pub fn append(bytes: &mut Vec<u8>, before: &str) {
    bytes.extend(before.as_bytes());
    bytes.extend((before.len() as u64).to_ne_bytes());
}

/// Reads it from behind the bytes of a rank.
pub fn read(lanes: &Lanes, lane: Lane, record: Record) -> Result<String, Failure> {
    let mut length = [0; LENGTH];
    let end = record.bytes - LENGTH as u64;
    lanes.take(lane, end, &mut length)?;
    let length = u64::from_ne_bytes(length);
    let mut text = vec![0; length as usize];
    lanes.take(lane, end - length, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opposite_orders_differ_and_equal_ones_do_not() {
        // A number that no other test uses.
        let (one, other) = (901, 902);
        let (first, second) = (Path::new("first"), Path::new("second"));
        for (device, path) in [(one, first), (one, second), (other, first), (other, second)] {
            begin(device, path);
        }
        let equal = [first, second, first].map(|path| difference(&give(one, path), &give(other, path)));
        assert_eq!(equal, [None; 3]);
        let (ones_first, ones_second) = (give(one, first), give(one, second));
        let (others_second, others_first) = (give(other, second), give(other, first));
        assert_eq!(difference(&ones_first, &others_first), Some((1, 2)));
        assert_eq!(difference(&ones_second, &others_second), Some((3, 2)));
        // One that has ended at a rank is not compared.
        end(other, second);
        assert_eq!(difference(&give(one, first), &give(other, first)), None);
        end(other, first);
        [first, second].iter().for_each(|path| end(one, path));
    }
}
