//! How values are stored, and the kinds of tensors that they become.

use half::f16;
use tch::Kind;

/// How a value is stored, and thereby the kind that it is read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Bool,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    Half,
    Float,
    Double,
    Fixed(usize),
    Bytes,
}

impl Element {
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Bool => Kind::Bool,
            Self::Int8 => Kind::Int8,
            Self::Int16 => Kind::Int16,
            Self::Int32 | Self::Uint16 => Kind::Int,
            Self::Int64 | Self::Uint32 => Kind::Int64,
            Self::Half => Kind::Half,
            Self::Float => Kind::Float,
            Self::Double => Kind::Double,
            Self::Uint8 | Self::Fixed(_) | Self::Bytes => Kind::Uint8,
        }
    }

    /// Bytes of one value in memory; 1 for values without a fixed length, which are stored byte by byte.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Fixed(bytes) => bytes,
            other => other.kind().elt_size_in_bytes(),
        }
    }
}

/// The bytes of `number` as one value of `element`; `None` when the element type cannot hold it.
pub(crate) fn encode(element: Element, number: f64) -> Option<Vec<u8>> {
    let whole = number as i64;
    let integer = (whole as f64 == number).then_some(whole);
    macro_rules! integer {
        ($kind:ty) => {
            <$kind>::try_from(integer?).ok()?.to_ne_bytes().to_vec()
        };
    }
    Some(match element {
        Element::Bool => vec![u8::try_from(integer?).ok().filter(|&truth| truth < 2)?],
        Element::Int8 => integer!(i8),
        Element::Int16 => integer!(i16),
        Element::Int32 => integer!(i32),
        Element::Int64 => integer!(i64),
        Element::Uint8 => integer!(u8),
        Element::Uint16 => i32::from(u16::try_from(integer?).ok()?).to_ne_bytes().to_vec(),
        Element::Uint32 => i64::from(u32::try_from(integer?).ok()?).to_ne_bytes().to_vec(),
        Element::Half => f16::from_f64(number).to_ne_bytes().to_vec(),
        Element::Float => (number as f32).to_ne_bytes().to_vec(),
        Element::Double => number.to_ne_bytes().to_vec(),
        Element::Fixed(_) | Element::Bytes => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_values_of_their_type_or_none() {
        assert_eq!(encode(Element::Int8, -3.0), Some(vec![253]));
        assert_eq!(encode(Element::Uint16, 65535.0), Some(65535i32.to_ne_bytes().to_vec()));
        assert_eq!(encode(Element::Half, 1.5), Some(0x3e00u16.to_ne_bytes().to_vec()));
        assert_eq!(encode(Element::Float, f64::NAN).map(|bytes| bytes.len()), Some(4));
        for (element, number) in
            [(Element::Int8, 128.0), (Element::Int64, 0.5), (Element::Bool, 2.0), (Element::Int32, f64::NAN)]
        {
            assert_eq!(encode(element, number), None, "{element:?} {number}");
        }
        assert_eq!(encode(Element::Bytes, 0.0), None);
    }
}
