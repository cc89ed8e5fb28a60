//! `tf.train.Example`: named lists of bytes, floats or integers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use super::wire::{Malformed, Message, Value};
use crate::DataError;

/// The values of one feature.
#[derive(Clone, Debug, PartialEq)]
pub enum Feature<'a> {
    /// Strings, images, or any other bytes.
    Bytes(Vec<Cow<'a, [u8]>>),
    /// Floats.
    Float(Vec<f32>),
    /// Integers.
    Int64(Vec<i64>),
    /// No list, as TensorFlow writes for a missing value.
    Empty,
}

/// Features by name.
///
/// Bytes of a parsed example are borrowed from the record.
///
/// # Source
/// `tf.train.Example` of `tensorflow/core/example/example.proto` (proto3).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Example<'a> {
    features: BTreeMap<Cow<'a, str>, Feature<'a>>,
}

impl<'a> Example<'a> {
    /// An example without features.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a feature, or replaces the one with that name.
    pub fn with(mut self, name: impl Into<Cow<'a, str>>, feature: Feature<'a>) -> Self {
        self.features.insert(name.into(), feature);
        self
    }

    /// The feature of that name.
    pub fn get(&self, name: &str) -> Option<&Feature<'a>> {
        self.features.get(name)
    }

    /// The only value of a bytes feature; `None` when the feature is missing or does not have exactly one value.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.get(name) {
            Some(Feature::Bytes(values)) if values.len() == 1 => values.first().map(|value| &**value),
            _ => None,
        }
    }

    /// The only value of an integer feature; `None` when the feature is missing or does not have exactly one value.
    pub fn int64(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(Feature::Int64(values)) if values.len() == 1 => values.first().copied(),
            _ => None,
        }
    }

    /// The values of a float feature.
    pub fn floats(&self, name: &str) -> Option<&[f32]> {
        match self.get(name) {
            Some(Feature::Float(values)) => Some(values),
            _ => None,
        }
    }

    /// Every feature with its name, sorted by name.
    pub fn features(&self) -> impl ExactSizeIterator<Item = (&str, &Feature<'a>)> {
        self.features.iter().map(|(name, feature)| (&**name, feature))
    }

    /// The encoded message.
    pub fn encode(&self) -> Vec<u8> {
        let mut features = Vec::new();
        for (name, feature) in &self.features {
            let mut entry = Vec::new();
            put_block(&mut entry, 1, name.as_bytes());
            put_block(&mut entry, 2, &encode_feature(feature));
            put_block(&mut features, 1, &entry);
        }
        let mut example = Vec::with_capacity(features.len() + 8);
        put_block(&mut example, 1, &features);
        example
    }

    /// Parses a message; `path` only names it in errors.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] with the path and the offset within the message.
    pub fn decode(message: &'a [u8], path: &Path) -> Result<Self, DataError> {
        let corrupt = |it: Malformed| DataError::corrupt(path, it.offset as u64, it.expected, it.found);
        Self::parse(message).map_err(corrupt)
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut example = Self::default();
        let mut message = Message { bytes, offset: 0 };
        while !message.is_empty() {
            match message.field()? {
                (1, Value::Block(mut features)) => {
                    while !features.is_empty() {
                        match features.field()? {
                            (1, Value::Block(entry)) => example.parse_entry(entry)?,
                            (1, _) => return Err(features.malformed("a feature by name", "a number")),
                            _ => {}
                        }
                    }
                }
                (1, _) => return Err(message.malformed("the features of an example", "a number")),
                // Unknown fields are skipped, as in every protocol-buffer parser.
                _ => {}
            }
        }
        Ok(example)
    }

    fn parse_entry(&mut self, mut entry: Message<'a>) -> Result<(), Malformed> {
        let (mut name, mut feature) = ("", Feature::Empty);
        while !entry.is_empty() {
            match entry.field()? {
                (1, Value::Block(text)) => {
                    name = std::str::from_utf8(text.bytes).map_err(|_| {
                        text.malformed("a feature's name in UTF-8", text.bytes.escape_ascii().to_string())
                    })?;
                }
                (2, Value::Block(message)) => parse_feature(message, &mut feature)?,
                (1 | 2, _) => return Err(entry.malformed("a feature by name", "a number")),
                _ => {}
            }
        }
        self.features.insert(Cow::Borrowed(name), feature);
        Ok(())
    }
}

/// If a feature has several lists, the last kind wins, and lists of that kind are joined, as protocol buffers merge
/// messages.
fn parse_feature<'a>(mut message: Message<'a>, feature: &mut Feature<'a>) -> Result<(), Malformed> {
    while !message.is_empty() {
        let (number, value) = message.field()?;
        if !(1..=3).contains(&number) {
            continue;
        }
        let Value::Block(list) = value else { return Err(message.malformed("a list of values", "a number")) };
        let taken = std::mem::replace(feature, Feature::Empty);
        *feature = match (number, taken) {
            (1, Feature::Bytes(values)) => Feature::Bytes(parse_bytes(list, values)?),
            (1, _) => Feature::Bytes(parse_bytes(list, Vec::new())?),
            (2, Feature::Float(values)) => Feature::Float(parse_floats(list, values)?),
            (2, _) => Feature::Float(parse_floats(list, Vec::new())?),
            (_, Feature::Int64(values)) => Feature::Int64(parse_integers(list, values)?),
            (_, _) => Feature::Int64(parse_integers(list, Vec::new())?),
        };
    }
    Ok(())
}

fn parse_bytes<'a>(mut list: Message<'a>, mut values: Vec<Cow<'a, [u8]>>) -> Result<Vec<Cow<'a, [u8]>>, Malformed> {
    while !list.is_empty() {
        match list.field()? {
            (1, Value::Block(value)) => values.push(Cow::Borrowed(value.bytes)),
            (1, _) => return Err(list.malformed("bytes", "a number")),
            _ => {}
        }
    }
    Ok(values)
}

/// Reads both forms: packed, and one field per value as written by older writers.
fn parse_floats(mut list: Message<'_>, mut values: Vec<f32>) -> Result<Vec<f32>, Malformed> {
    while !list.is_empty() {
        match list.field()? {
            (1, Value::Block(packed)) => {
                let (floats, rest) = packed.bytes.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(packed.malformed("floats of four bytes", format!("{} bytes", packed.bytes.len())));
                }
                values.extend(floats.iter().map(|&bytes| f32::from_le_bytes(bytes)));
            }
            (1, Value::Fixed32(bytes)) => values.push(f32::from_le_bytes(bytes)),
            (1, _) => return Err(list.malformed("a float", "another kind of number")),
            _ => {}
        }
    }
    Ok(values)
}

fn parse_integers(mut list: Message<'_>, mut values: Vec<i64>) -> Result<Vec<i64>, Malformed> {
    while !list.is_empty() {
        match list.field()? {
            (1, Value::Block(mut packed)) => {
                while !packed.is_empty() {
                    values.push(packed.varint()? as i64);
                }
            }
            (1, Value::Varint(value)) => values.push(value as i64),
            (1, _) => return Err(list.malformed("an integer", "another kind of number")),
            _ => {}
        }
    }
    Ok(values)
}

fn encode_feature(feature: &Feature<'_>) -> Vec<u8> {
    let mut list = Vec::new();
    let number = match feature {
        Feature::Bytes(values) => {
            values.iter().for_each(|value| put_block(&mut list, 1, value));
            1
        }
        Feature::Float(values) => {
            let packed: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            put_packed(&mut list, &packed);
            2
        }
        Feature::Int64(values) => {
            let mut packed = Vec::new();
            values.iter().for_each(|&value| put_varint(&mut packed, value as u64));
            put_packed(&mut list, &packed);
            3
        }
        Feature::Empty => return Vec::new(),
    };
    let mut feature = Vec::with_capacity(list.len() + 8);
    put_block(&mut feature, number, &list);
    feature
}

fn put_packed(out: &mut Vec<u8>, packed: &[u8]) {
    if !packed.is_empty() {
        put_block(out, 1, packed);
    }
}

fn put_block(out: &mut Vec<u8>, number: u64, block: &[u8]) {
    put_varint(out, number << 3 | 2);
    put_varint(out, block.len() as u64);
    out.extend_from_slice(block);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_examples_parse_back() {
        let example = Example::new()
            .with("bytes", Feature::Bytes(vec![Cow::Borrowed(b"one"), Cow::Borrowed(b"")]))
            .with("floats", Feature::Float(vec![0.5, -1.25, f32::INFINITY]))
            .with("integers", Feature::Int64(vec![0, -1, i64::MIN, i64::MAX, 300]))
            .with("none", Feature::Int64(vec![]))
            .with("empty", Feature::Empty);
        let encoded = example.encode();
        assert_eq!(Example::parse(&encoded).unwrap(), example);
        assert!(Example::parse(&[]).unwrap().features.is_empty());
    }

    #[test]
    fn unpacked_lists_and_unknown_fields_are_read() {
        // integers {7, 300} as one field each, then the unknown field 9 (a fixed64), then an unpacked float.
        let mut integers = vec![0x08, 7, 0x08, 0xac, 0x02, 0x49];
        integers.extend([0; 8]);
        let list = |bytes: &[u8]| Message { bytes: bytes.to_vec().leak(), offset: 0 };
        assert_eq!(parse_integers(list(&integers), Vec::new()).unwrap(), [7, 300]);
        assert_eq!(parse_floats(list(&[0x0d, 0, 0, 0x80, 0x3f]), Vec::new()).unwrap(), [1.0]);
    }

    #[test]
    fn damage_is_an_error_with_its_offset() {
        let good = Example::new().with("name", Feature::Int64(vec![1])).encode();
        for cut in 1..good.len() {
            assert!(Example::parse(&good[..cut]).is_err(), "cut at {cut}");
        }
        for (bytes, offset) in [
            (&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f][..], 6),
            (&[0x0b][..], 0),
            (&[0x02, 0x00][..], 0),
            (&[0xff; 12][..], 0),
            (&[0x08, 0x01][..], 2),
        ] {
            assert_eq!(Example::parse(bytes).unwrap_err().offset, offset, "{bytes:x?}");
        }
        assert!(Example::parse(b"\x0a\x05\x0a\x03\x0a\x01\xff").unwrap_err().expected.contains("UTF-8"));
    }
}
