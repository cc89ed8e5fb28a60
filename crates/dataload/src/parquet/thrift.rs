//! Reads Thrift's compact protocol, as far as Parquet's headers need it, and checks every length.

/// Parquet's own structures nest less than ten deep.
const MAX_DEPTH: usize = 32;

/// What is wrong, and at which offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    pub(super) offset: usize,
    pub(super) expected: &'static str,
    pub(super) found: String,
}

/// The type of a value, which precedes it in its field or list header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    Bool(bool),
    Byte,
    Integer,
    Double,
    Binary,
    List,
    Map,
    Struct,
}

pub(super) struct Thrift<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Thrift<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// How many bytes have been read.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Whether everything has been read: an error then means that more bytes are needed.
    pub(super) fn is_at_end(&self) -> bool {
        self.offset == self.bytes.len()
    }

    pub(super) fn malformed(&self, expected: &'static str, found: impl Into<String>) -> Malformed {
        Malformed { offset: self.offset, expected, found: found.into() }
    }

    /// Calls `field` with the number and the type of each field of a structure; it has to read the value or
    /// [`skip`](Self::skip) it.
    pub(super) fn structure(
        &mut self,
        mut field: impl FnMut(&mut Self, i64, Wire) -> Result<(), Malformed>,
    ) -> Result<(), Malformed> {
        let mut number = 0;
        while let Some(wire) = self.next_field(&mut number)? {
            field(self, number, wire)?;
        }
        Ok(())
    }

    fn next_field(&mut self, number: &mut i64) -> Result<Option<Wire>, Malformed> {
        let header = self.byte()?;
        if header == 0 {
            return Ok(None);
        }
        *number = match header >> 4 {
            0 => self.zigzag()?,
            // Saturating, since the number may come from a varint.
            delta => number.saturating_add(i64::from(delta)),
        };
        self.wire(header & 15).map(Some)
    }

    fn wire(&self, code: u8) -> Result<Wire, Malformed> {
        Ok(match code {
            1 => Wire::Bool(true),
            2 => Wire::Bool(false),
            3 => Wire::Byte,
            4..=6 => Wire::Integer,
            7 => Wire::Double,
            8 => Wire::Binary,
            9 | 10 => Wire::List,
            11 => Wire::Map,
            12 => Wire::Struct,
            _ => return Err(self.malformed("a Thrift type", format!("the code {code}"))),
        })
    }

    /// The integer value of a field of type `wire`.
    pub(super) fn integer(&mut self, wire: Wire) -> Result<i64, Malformed> {
        match wire {
            Wire::Integer => self.zigzag(),
            Wire::Byte => Ok(i64::from(self.byte()? as i8)),
            _ => Err(self.malformed("an integer", format!("a value of type {wire:?}"))),
        }
    }

    /// The type and the number of a list's elements; the elements follow.
    pub(super) fn list(&mut self, wire: Wire) -> Result<(Wire, usize), Malformed> {
        if wire != Wire::List {
            return Err(self.malformed("a list", format!("a value of type {wire:?}")));
        }
        let header = self.byte()?;
        let count = match header >> 4 {
            15 => self.varint()?,
            count => u64::from(count),
        };
        // Some writers omit the type of an empty list.
        let element = if count == 0 { Wire::Byte } else { self.wire(header & 15)? };
        let left = self.bytes.len() - self.offset;
        match usize::try_from(count) {
            // Every element takes at least one byte. Lists of bools are refused: readers disagree on their size.
            Ok(count) if count <= left && !matches!(element, Wire::Bool(_)) => Ok((element, count)),
            _ => Err(self.malformed("a list that fits into its structure", format!("{count} of {element:?}"))),
        }
    }

    /// Skips a value.
    pub(super) fn skip(&mut self, wire: Wire) -> Result<(), Malformed> {
        self.skip_nested(wire, 0)
    }

    fn skip_nested(&mut self, wire: Wire, depth: usize) -> Result<(), Malformed> {
        if depth == MAX_DEPTH {
            return Err(self.malformed("structures that nest less than 32 deep", "one more"));
        }
        match wire {
            Wire::Bool(_) => Ok(()),
            Wire::Byte => self.pass(1),
            Wire::Integer => self.varint().map(drop),
            Wire::Double => self.pass(8),
            Wire::Binary => {
                let length = self.varint()?;
                self.pass(length)
            }
            Wire::List => {
                let (element, count) = self.list(wire)?;
                (0..count).try_for_each(|_| self.skip_nested(element, depth + 1))
            }
            Wire::Struct => {
                let mut number = 0;
                while let Some(wire) = self.next_field(&mut number)? {
                    self.skip_nested(wire, depth + 1)?;
                }
                Ok(())
            }
            Wire::Map => Err(self.malformed("a Parquet structure, none of which has a map", "a map")),
        }
    }

    fn pass(&mut self, count: u64) -> Result<(), Malformed> {
        let left = self.bytes.len() - self.offset;
        match usize::try_from(count) {
            Ok(count) if count <= left => {
                self.offset += count;
                Ok(())
            }
            _ => {
                let found = format!("a length of {count} with {left} bytes left");
                self.offset = self.bytes.len();
                Err(self.malformed("a value that fits into its structure", found))
            }
        }
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        let &byte = self.bytes.get(self.offset).ok_or_else(|| self.malformed("a structure's next byte", "its end"))?;
        self.offset += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0;
        for position in 0..10 {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << (7 * position);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.malformed("a variable-length number", "more than ten bytes"))
    }

    fn zigzag(&mut self) -> Result<i64, Malformed> {
        self.varint().map(|value| (value >> 1) as i64 ^ -((value & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_visited_and_skipped() {
        // Fields 1: i32 -3, 2: true, 20 (number given in full): list of two binaries, 21: a structure.
        let bytes = [0x15, 5, 0x11, 0x09, 40, 0x28, 1, b'a', 0, 0x1c, 0x15, 2, 0, 0, 99];
        let mut seen = Vec::new();
        let mut thrift = Thrift::new(&bytes);
        thrift
            .structure(|thrift, number, wire| {
                seen.push((number, wire));
                if number == 1 { thrift.integer(wire).map(|value| assert_eq!(value, -3)) } else { thrift.skip(wire) }
            })
            .unwrap();
        assert_eq!(seen, [(1, Wire::Integer), (2, Wire::Bool(true)), (20, Wire::List), (21, Wire::Struct)]);
        assert_eq!((thrift.offset(), thrift.is_at_end()), (14, false));
        for cut in 0..14 {
            let mut thrift = Thrift::new(&bytes[..cut]);
            assert!(thrift.structure(|thrift, _, wire| thrift.skip(wire)).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn declared_lengths_are_checked() {
        let skip = |bytes: &[u8]| Thrift::new(bytes).structure(|thrift, _, wire| thrift.skip(wire)).unwrap_err();
        // A list of 2^31 bools, of 2^31 integers; a string of 2^60 bytes; a map; an unknown type.
        assert!(skip(&[0x19, 0xf1, 0x80, 0x80, 0x80, 0x80, 8, 0]).found.contains("2147483648"));
        assert!(skip(&[0x19, 0xf5, 0x80, 0x80, 0x80, 0x80, 8, 0]).found.contains("2147483648"));
        assert!(skip(&[0x18, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10, 0]).found.contains("a length of"));
        assert_eq!(skip(&[0x1b, 1, 0x55, 2, 2, 0]).found, "a map");
        assert_eq!(skip(&[0x1d, 0]).found, "the code 13");
        assert!(skip(&[0x16, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1]).found.contains("ten bytes"));
        assert_eq!(skip(&[0x1c; 1000]).found, "one more");
        assert_eq!(skip(&[0x19].iter().chain(&[0x19; 1000]).copied().collect::<Vec<_>>()).found, "one more");
    }
}
