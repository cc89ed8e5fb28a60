//! All keys in two allocations, however many there are.

/// Sorted keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keys {
    bytes: Vec<u8>,
    /// The end of each key in `bytes`.
    ends: Vec<usize>,
}

impl Keys {
    pub(super) fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }

    /// From the concatenated keys and the length of each; `None` when the lengths do not add up.
    pub(super) fn from_parts(bytes: Vec<u8>, lengths: impl ExactSizeIterator<Item = u16>) -> Option<Self> {
        let mut ends = Vec::with_capacity(lengths.len());
        let mut end = 0usize;
        for length in lengths {
            end += usize::from(length);
            ends.push(end);
        }
        (end == bytes.len()).then_some(Self { bytes, ends })
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..end])
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }

    /// Removes a key.
    pub(super) fn remove(&mut self, index: usize) {
        let Some(length) = self.get(index).map(<[u8]>::len) else { return };
        let end = self.ends.remove(index);
        self.bytes.drain(end - length..end);
        self.ends[index..].iter_mut().for_each(|end| *end -= length);
    }

    /// The concatenated keys.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The position of a key.
    pub(super) fn find(&self, key: &[u8]) -> Option<usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle)?.cmp(key) {
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_kept_and_found() {
        let mut keys = Keys::default();
        let all = [&b"a"[..], b"ab", b"b", b"c\0"];
        all.iter().for_each(|key| keys.push(key));
        assert!(keys.iter().eq(all));
        assert_eq!((keys.len(), keys.get(1), keys.get(4)), (4, Some(&b"ab"[..]), None));
        for (position, key) in all.iter().enumerate() {
            assert_eq!(keys.find(key), Some(position));
        }
        for key in [&b""[..], b"aa", b"c", b"d"] {
            assert_eq!(keys.find(key), None);
        }
        let lengths = [1u16, 2, 1, 2];
        assert_eq!(Keys::from_parts(keys.bytes().to_vec(), lengths.into_iter()), Some(keys.clone()));
        assert_eq!(Keys::from_parts(keys.bytes().to_vec(), [1u16, 2, 1].into_iter()), None);
        assert_eq!(Keys::default().find(b"a"), None);
        keys.remove(1);
        assert!(keys.iter().eq([&b"a"[..], b"b", b"c\0"]));
        keys.remove(2);
        assert!(keys.iter().eq([&b"a"[..], b"b"]));
    }
}
