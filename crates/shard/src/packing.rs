//! What is sent as one tensor.

use overdrive_core::TorchError;
use overdrive_ffi::free_memory;
use tch::{Device, Tensor};

/// A tensor of so many bytes is exchanged by itself, in its own memory: one more exchange costs less than the copy, and
/// nothing waits until a bucket is full. Measured with 2 and 4 ranks of one host; with many hosts, latency counts for more.
pub(crate) const LARGE: usize = 1 << 20;

pub(crate) fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel().saturating_mul(tensor.kind().elt_size_in_bytes())
}

/// Frees what was sent and waited for, and nobody else has. A thread of Gloo keeps a handle of it for a moment longer.
pub(crate) fn free_sent(sent: &Tensor) -> Result<(), TorchError> {
    match sent.device() == Device::Cpu && sent.numel() > 0 {
        true => Ok(free_memory(sent)?),
        false => Ok(()),
    }
}

/// Lists of things with the same key, and of at most `bytes`; large ones are alone. `things`: the key, the bytes, and the
/// thing; each joins the newest list of its key, or begins another.
pub(crate) fn packed<K: PartialEq, T>(things: impl Iterator<Item = (K, usize, T)>, bytes: usize) -> Vec<(K, Vec<T>)> {
    struct List<K, T> {
        key: K,
        used: usize,
        is_large: bool,
        things: Vec<T>,
    }
    let mut lists: Vec<List<K, T>> = Vec::new();
    for (key, size, thing) in things {
        let is_large = size >= LARGE;
        let newest = lists.iter_mut().rev().find(|list| list.key == key && !list.is_large);
        match newest.filter(|list| !is_large && list.used.saturating_add(size) <= bytes) {
            Some(list) => {
                list.used += size;
                list.things.push(thing);
            }
            None => lists.push(List { key, used: size, is_large, things: vec![thing] }),
        }
    }
    lists.into_iter().map(|list| (list.key, list.things)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_one_key_and_at_most_so_many_bytes() {
        let things = [('a', 2, 0), ('b', 9, 1), ('a', 2, 2), ('a', 1, 3), ('b', 0, 4), ('a', 3, 5)];
        let found = packed(things.into_iter(), 4);
        assert_eq!(found, [('a', vec![0, 2]), ('b', vec![1]), ('a', vec![3, 5]), ('b', vec![4])]);
        let things =
            [('a', 2, 0), ('a', LARGE, 1), ('a', LARGE - 1, 2), ('a', LARGE + 1, 3), ('b', LARGE, 4), ('a', 1, 5)];
        let found = packed(things.into_iter(), usize::MAX);
        assert_eq!(found, [('a', vec![0, 2, 5]), ('a', vec![1]), ('a', vec![3]), ('b', vec![4])]);
    }
}
