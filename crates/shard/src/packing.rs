//! What is sent as one tensor.

use tch::Tensor;

pub(crate) fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel().saturating_mul(tensor.kind().elt_size_in_bytes())
}

/// Lists of things with the same key, and of at most `bytes` unless one alone has more. `things`: the key, the bytes, and
/// the thing; each joins the newest list of its key, or begins another.
pub(crate) fn packed<K: PartialEq, T>(things: impl Iterator<Item = (K, usize, T)>, bytes: usize) -> Vec<(K, Vec<T>)> {
    let mut lists: Vec<(K, usize, Vec<T>)> = Vec::new();
    for (key, size, thing) in things {
        let newest = lists.iter_mut().rev().find(|(known, ..)| *known == key);
        match newest.filter(|(_, used, _)| used.saturating_add(size) <= bytes) {
            Some((_, used, list)) => {
                *used += size;
                list.push(thing);
            }
            None => lists.push((key, size, vec![thing])),
        }
    }
    lists.into_iter().map(|(key, _, list)| (key, list)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_one_key_and_at_most_so_many_bytes() {
        let things = [('a', 2, 0), ('b', 9, 1), ('a', 2, 2), ('a', 1, 3), ('b', 0, 4), ('a', 3, 5)];
        let found = packed(things.into_iter(), 4);
        assert_eq!(found, [('a', vec![0, 2]), ('b', vec![1]), ('a', vec![3, 5]), ('b', vec![4])]);
    }
}
