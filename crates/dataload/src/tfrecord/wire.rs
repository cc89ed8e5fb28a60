//! Reads protocol-buffer fields in order, borrowed from the message.

/// What is wrong with a message, and at which offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    pub(super) offset: usize,
    pub(super) expected: &'static str,
    pub(super) found: String,
}

/// A field's content.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    /// Bytes, a string, a message or packed numbers.
    Block(Message<'a>),
}

/// The bytes of a message, and their offset in the outermost message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) offset: usize,
}

impl<'a> Message<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn malformed(&self, expected: &'static str, found: impl Into<String>) -> Malformed {
        Malformed { offset: self.offset, expected, found: found.into() }
    }

    /// The next field and its number; call it only while the message is not empty.
    pub(super) fn field(&mut self) -> Result<(u64, Value<'a>), Malformed> {
        let start = *self;
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take::<8>().map(|_| Value::Fixed64)?,
            2 => {
                let length = self.varint()?;
                let block = usize::try_from(length).ok().and_then(|length| self.bytes.split_at_checked(length));
                let Some((block, rest)) = block else {
                    let found = format!("a length of {length} with {} bytes left", self.bytes.len());
                    return Err(self.malformed("a field that fits into its message", found));
                };
                let value = Value::Block(Message { bytes: block, offset: self.offset });
                self.offset += block.len();
                self.bytes = rest;
                value
            }
            5 => Value::Fixed32(self.take::<4>()?),
            kind => return Err(start.malformed("a protocol-buffer field", format!("the wire type {kind}"))),
        };
        match tag >> 3 {
            0 => Err(start.malformed("a protocol-buffer field", "the field number 0")),
            number => Ok((number, value)),
        }
    }

    /// The next varint: seven bits per byte, lowest first.
    pub(super) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for (position, &byte) in self.bytes.iter().take(10).enumerate() {
            // Only one bit of the tenth byte fits; like protobuf's own parsers, this drops the others.
            value |= u64::from(byte & 0x7f) << (7 * position);
            if byte < 0x80 {
                self.offset += position + 1;
                self.bytes = &self.bytes[position + 1..];
                return Ok(value);
            }
        }
        let found = if self.bytes.len() < 10 { "the end of the message" } else { "more than ten bytes" };
        Err(self.malformed("a variable-length number", found))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some((&head, rest)) = self.bytes.split_first_chunk::<N>() else {
            return Err(self.malformed("a number of fixed length", "the end of the message"));
        };
        self.offset += N;
        self.bytes = rest;
        Ok(head)
    }
}
