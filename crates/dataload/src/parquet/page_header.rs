//! The header before each page: how it is compressed, and how many values it has.

use ::parquet::basic::Encoding;

use super::thrift::{Malformed, Thrift, Wire};

/// A page's header, whose numbers are only checked for their sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageHeader {
    /// The header's own length in the file.
    pub(super) header_bytes: usize,
    pub(super) packed_bytes: usize,
    pub(super) bytes: usize,
    pub(super) crc: Option<u32>,
    pub(super) page: PageKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    Dictionary {
        values: u32,
        encoding: Encoding,
    },
    Data {
        values: u32,
        encoding: Encoding,
        def_encoding: Encoding,
        rep_encoding: Encoding,
    },
    DataV2 {
        values: u32,
        encoding: Encoding,
        nulls: u32,
        rows: u32,
        def_bytes: u32,
        rep_bytes: u32,
        packed: bool,
    },
    /// A page that is not needed to read values.
    Other,
}

/// The numbers in the header of one kind of page, by Thrift field.
type Fields = [Option<i64>; 8];

impl PageHeader {
    /// Parses a header at the start of `bytes`. With an error, true means that `bytes` may just be too short.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, (Malformed, bool)> {
        let mut thrift = Thrift::new(bytes);
        read(&mut thrift).map_err(|malformed| {
            let cut = thrift.is_at_end();
            (malformed, cut)
        })
    }

    /// The number of values of a data page, nulls included.
    pub(super) fn values(&self) -> Option<u32> {
        match self.page {
            PageKind::Data { values, .. } | PageKind::DataV2 { values, .. } => Some(values),
            PageKind::Dictionary { .. } | PageKind::Other => None,
        }
    }
}

fn read(thrift: &mut Thrift<'_>) -> Result<PageHeader, Malformed> {
    let mut own = Fields::default();
    let (mut data, mut dictionary, mut data_v2) = (None, None, None);
    thrift.structure(|thrift, field, wire| match (field, wire) {
        (1..=4, Wire::Integer) => {
            own[field as usize] = Some(thrift.integer(wire)?);
            Ok(())
        }
        (5, Wire::Struct) => numbers(thrift).map(|fields| data = Some(fields)),
        (7, Wire::Struct) => numbers(thrift).map(|fields| dictionary = Some(fields)),
        (8, Wire::Struct) => numbers(thrift).map(|fields| data_v2 = Some(fields)),
        (6, Wire::Struct) | (9.., _) => thrift.skip(wire),
        _ => Err(thrift.malformed("a page header's fields", format!("field {field} of type {wire:?}"))),
    })?;

    let count = |fields: &Fields, field: usize, what| count(thrift, fields, field, what);
    let encoding = |fields: &Fields, field: usize| {
        let found = fields[field].and_then(|code| Encoding::VARIANTS.iter().find(|known| **known as i64 == code));
        found.copied().ok_or_else(|| thrift.malformed("an encoding", said(fields[field])))
    };
    let missing = |what| thrift.malformed(what, "none");
    let page = match own[1] {
        Some(0) => {
            let fields = data.ok_or_else(|| missing("a header of a data page"))?;
            PageKind::Data {
                values: count(&fields, 1, "a number of values")?,
                encoding: encoding(&fields, 2)?,
                def_encoding: encoding(&fields, 3)?,
                rep_encoding: encoding(&fields, 4)?,
            }
        }
        Some(2) => {
            let fields = dictionary.ok_or_else(|| missing("a header of a dictionary page"))?;
            PageKind::Dictionary { values: count(&fields, 1, "a number of values")?, encoding: encoding(&fields, 2)? }
        }
        Some(3) => {
            let fields = data_v2.ok_or_else(|| missing("a header of a data page of version 2"))?;
            PageKind::DataV2 {
                values: count(&fields, 1, "a number of values")?,
                nulls: count(&fields, 2, "a number of nulls")?,
                rows: count(&fields, 3, "a number of rows")?,
                encoding: encoding(&fields, 4)?,
                def_bytes: count(&fields, 5, "a length of levels")?,
                rep_bytes: count(&fields, 6, "a length of levels")?,
                packed: fields[7] != Some(0),
            }
        }
        Some(_) => PageKind::Other,
        None => return Err(missing("a kind of page")),
    };
    let bytes = |field, what| count(&own, field, what).map(|bytes| bytes as usize);
    Ok(PageHeader {
        header_bytes: thrift.offset(),
        bytes: bytes(2, "a page's length")?,
        packed_bytes: bytes(3, "a page's compressed length")?,
        // The checksum is stored as a signed integer: take its 32 bits.
        crc: own[4].map(|crc| crc as u32),
        page,
    })
}

/// The integers and bools in the first seven fields of a structure.
fn numbers(thrift: &mut Thrift<'_>) -> Result<Fields, Malformed> {
    let mut fields = Fields::default();
    thrift.structure(|thrift, field, wire| match (field, wire) {
        (1..=7, Wire::Integer) => {
            fields[field as usize] = Some(thrift.integer(wire)?);
            Ok(())
        }
        (1..=7, Wire::Bool(value)) => {
            fields[field as usize] = Some(i64::from(value));
            Ok(())
        }
        _ => thrift.skip(wire),
    })?;
    Ok(fields)
}

/// A count, which Parquet stores as a signed 32-bit number.
fn count(thrift: &Thrift<'_>, fields: &Fields, field: usize, what: &'static str) -> Result<u32, Malformed> {
    let found = fields[field].filter(|&count| (0..=i64::from(i32::MAX)).contains(&count));
    found.map(|count| count as u32).ok_or_else(|| thrift.malformed(what, said(fields[field])))
}

/// A number, as an error shows what was found.
fn said(number: Option<i64>) -> String {
    number.map_or_else(|| "none".to_owned(), |number| number.to_string())
}
