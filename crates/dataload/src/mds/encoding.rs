//! How values are stored.

use serde_json::Value;
use tch::Tensor;

use crate::Image;
use crate::array::tensor_of;

/// A value of an [`MdsSample`](super::MdsSample).
#[derive(Debug)]
#[non_exhaustive]
pub enum MdsValue<'a> {
    /// `int`, `int8` to `int64`, `uint8` to `uint32`.
    Int(i64),
    /// `uint64`.
    UInt(u64),
    /// `float16`, `float32`, `float64`.
    Float(f64),
    /// `str`; and `str_int`, `str_float`, `str_decimal`, which are numbers of any size in digits.
    Str(&'a str),
    /// `bytes`; the files that `jpeg` and `png` hold.
    Bytes(&'a [u8]),
    /// `json`.
    Json(Value),
    /// `ndarray`, in its own shape; `uint16` becomes [`Kind::Int`](tch::Kind), `uint32` [`Kind::Int64`](tch::Kind).
    Tensor(Tensor),
    /// `pil`: pixels of the modes L, LA, RGB and RGBA.
    Image(Image),
}

/// The encoding of a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Bytes,
    Str(Text),
    Json,
    Pil,
    /// An integer of so many bytes, with a sign or without.
    Int(usize, bool),
    Float(usize),
    /// An array of a kind and shape that are fixed, or stored with each value.
    Array(Option<&'static str>, Option<Vec<usize>>),
    /// Not supported.
    Other(String),
}

/// What a text must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Text {
    Any,
    /// The digits of an integer of any size.
    Int,
    /// The digits of a number of any precision.
    Float,
}

impl Text {
    fn holds(self, text: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Int => {
                let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
                !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
            }
            Self::Float => text.parse::<f64>().is_ok(),
        }
    }
}

/// The numbers that stand for the kinds of arrays, their names, and numpy's.
const KINDS: [(u8, &str, &str); 11] = [
    (8, "uint8", "|u1"),
    (9, "int8", "|i1"),
    (16, "uint16", "<u2"),
    (17, "int16", "<i2"),
    (18, "float16", "<f2"),
    (32, "uint32", "<u4"),
    (33, "int32", "<i4"),
    (34, "float32", "<f4"),
    (64, "uint64", "<u8"),
    (65, "int64", "<i8"),
    (66, "float64", "<f8"),
];

impl Encoding {
    pub(super) fn parse(text: &str) -> Self {
        match text {
            "bytes" | "jpeg" | "png" => Self::Bytes,
            "str" => Self::Str(Text::Any),
            "str_int" => Self::Str(Text::Int),
            "str_float" | "str_decimal" => Self::Str(Text::Float),
            "json" => Self::Json,
            "pil" => Self::Pil,
            "int8" => Self::Int(1, true),
            "int16" => Self::Int(2, true),
            "int32" => Self::Int(4, true),
            "int" | "int64" => Self::Int(8, true),
            "uint8" => Self::Int(1, false),
            "uint16" => Self::Int(2, false),
            "uint32" => Self::Int(4, false),
            "uint64" => Self::Int(8, false),
            "float16" => Self::Float(2),
            "float32" => Self::Float(4),
            "float64" => Self::Float(8),
            other => Self::array(other).unwrap_or_else(|| Self::Other(other.to_owned())),
        }
    }

    /// Parses `ndarray`, `ndarray:KIND` and `ndarray:KIND:2,3`.
    fn array(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let name = parts.next()?;
        let kind = match parts.next() {
            Some(kind) => Some(KINDS.iter().find(|(_, name, _)| *name == kind)?.2),
            None => None,
        };
        let shape = parts.next().map(|shape| shape.split(',').map(|size| size.parse().ok()).collect::<Option<_>>());
        let is_array = name == "ndarray" && parts.next().is_none() && shape != Some(None);
        is_array.then_some(Self::Array(kind, shape.flatten()))
    }

    /// What a value should be, for errors.
    pub(super) fn wanted(&self) -> &'static str {
        match self {
            Self::Bytes | Self::Other(_) => "bytes",
            Self::Str(_) => "text in UTF-8",
            Self::Json => "JSON",
            Self::Pil => "the width, height and mode of an image, and its pixels",
            Self::Int(..) | Self::Float(_) => "a number",
            Self::Array(..) => "an array of numbers that have a Kind, with its shape",
        }
    }

    /// The bytes of a value, where they are always as many.
    pub(super) fn size(&self) -> Option<usize> {
        match self {
            Self::Int(size, _) | Self::Float(size) => Some(*size),
            _ => None,
        }
    }

    /// Appends a value; an error says what was found in its place.
    pub(super) fn encode(&self, value: &MdsValue<'_>, bytes: &mut Vec<u8>) -> Result<(), String> {
        match (self, value) {
            (Self::Bytes, MdsValue::Bytes(content)) => bytes.extend_from_slice(content),
            (Self::Str(kind), MdsValue::Str(text)) if kind.holds(text) => bytes.extend_from_slice(text.as_bytes()),
            (Self::Json, MdsValue::Json(value)) => bytes.extend_from_slice(value.to_string().as_bytes()),
            (Self::Json, MdsValue::Str(text)) => {
                serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| error.to_string())?;
                bytes.extend_from_slice(text.as_bytes());
            }
            (Self::Int(size, signed), MdsValue::Int(_) | MdsValue::UInt(_)) => {
                let number = match value {
                    MdsValue::Int(number) => i128::from(*number),
                    MdsValue::UInt(number) => i128::from(*number),
                    _ => 0,
                };
                let bits = 8 * *size as u32 - u32::from(*signed);
                let least = if *signed { -(1_i128 << bits) } else { 0 };
                if !(least..1 << bits).contains(&number) {
                    return Err(number.to_string());
                }
                bytes.extend_from_slice(&number.to_le_bytes()[..*size]);
            }
            (Self::Float(size), MdsValue::Float(number)) => {
                let (half, single) = (half::f16::from_f64(*number), *number as f32);
                let (stored, encoded) = match size {
                    2 => (half.to_f64(), &half.to_le_bytes()[..]),
                    4 => (f64::from(single), &single.to_le_bytes()[..]),
                    _ => (*number, &number.to_le_bytes()[..]),
                };
                if stored.is_infinite() && number.is_finite() {
                    return Err(number.to_string());
                }
                bytes.extend_from_slice(encoded);
            }
            (_, other) => return Err(format!("{other:?}").chars().take(60).collect()),
        }
        Ok(())
    }

    /// The value in these bytes; an error says what was found in its place.
    pub(super) fn decode<'a>(&self, bytes: &'a [u8]) -> Result<MdsValue<'a>, String> {
        match self {
            Self::Bytes | Self::Other(_) => Ok(MdsValue::Bytes(bytes)),
            Self::Str(_) => str::from_utf8(bytes).map(MdsValue::Str).map_err(|error| error.to_string()),
            Self::Json => serde_json::from_slice(bytes).map(MdsValue::Json).map_err(|error| error.to_string()),
            Self::Pil => image(bytes).map(MdsValue::Image),
            Self::Int(size, signed) => {
                let number = number(bytes, *size)?;
                let unused = 64 - 8 * *size as u32;
                Ok(match (signed, size) {
                    (false, 8) => MdsValue::UInt(number),
                    (false, _) => MdsValue::Int(number as i64),
                    // The sign is that of the highest byte.
                    (true, _) => MdsValue::Int((number << unused) as i64 >> unused),
                })
            }
            Self::Float(size) => {
                let number = number(bytes, *size)?;
                Ok(MdsValue::Float(match size {
                    2 => half::f16::from_bits(number as u16).to_f64(),
                    4 => f32::from_bits(number as u32).into(),
                    _ => f64::from_bits(number),
                }))
            }
            Self::Array(kind, shape) => array(*kind, shape.as_deref(), bytes).map(MdsValue::Tensor),
        }
    }
}

/// A number of `size` bytes, which are all bytes.
fn number(bytes: &[u8], size: usize) -> Result<u64, String> {
    match bytes.len() == size && size <= 8 {
        true => Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))),
        false => Err(format!("{} bytes for one of {size}", bytes.len())),
    }
}

/// Width, height and the length of the mode's name, the name, and the pixels.
fn image(bytes: &[u8]) -> Result<Image, String> {
    let cut = || format!("{} bytes", bytes.len());
    let (head, rest) = bytes.split_at_checked(12).ok_or_else(cut)?;
    let mut sizes = head.as_chunks::<4>().0.iter().map(|&size| u32::from_le_bytes(size) as usize);
    let mut size = || sizes.next().unwrap_or_default();
    let (width, height, name) = (size(), size(), size());
    let (mode, pixels) = rest.split_at_checked(name).ok_or_else(cut)?;
    let channels = match mode {
        b"L" => 1,
        b"LA" => 2,
        b"RGB" => 3,
        b"RGBA" => 4,
        other => return Err(format!("the mode \"{}\"", other[..other.len().min(20)].escape_ascii())),
    };
    Image::new(pixels, height, width, channels).map_err(|error| error.to_string())
}

fn array(kind: Option<&str>, shape: Option<&[usize]>, bytes: &[u8]) -> Result<Tensor, String> {
    let mut rest = bytes;
    let mut byte = || {
        let (&first, after) = rest.split_first().ok_or("nothing")?;
        rest = after;
        Ok::<u8, String>(first)
    };
    let kind = match kind {
        Some(kind) => kind,
        None => {
            let number = byte()?;
            let kind = KINDS.iter().find(|(kind, ..)| *kind == number);
            kind.ok_or_else(|| format!("the kind number {number}"))?.2
        }
    };
    let stored: Vec<usize>;
    let shape = match shape {
        Some(shape) => shape,
        None => {
            // The number of dimensions, and the logarithm of the bytes that each takes.
            let first = byte()?;
            let (dimensions, width) = (usize::from(first >> 2), 1 << (first & 3));
            let (sizes, after) = rest.split_at_checked(dimensions * width).ok_or("a shape that is cut")?;
            rest = after;
            let sizes = sizes.chunks_exact(width).map(|size| number(size, width));
            let size = |size: Result<u64, String>| usize::try_from(size?).map_err(|error| error.to_string());
            stored = sizes.map(size).collect::<Result<_, _>>()?;
            &stored
        }
    };
    let tensor = tensor_of(kind, rest, shape).map_err(|error| error.to_string())?;
    tensor.ok_or_else(|| format!("{} bytes for {kind} of shape {shape:?}", rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_those_of_mosaic() {
        let shape = || Some(vec![2, 3]);
        assert_eq!(Encoding::parse("ndarray:int16:2,3"), Encoding::Array(Some("<i2"), shape()));
        assert_eq!(Encoding::parse("ndarray"), Encoding::Array(None, None));
        for text in ["pkl", "list[pil]", "ndarray:bool", "ndarray:int8:", "ndarray:int8:2,x", "ndarray:int8:2:3", ""] {
            assert_eq!(Encoding::parse(text), Encoding::Other(text.to_owned()));
        }
    }
}
