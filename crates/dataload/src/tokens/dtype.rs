//! How tokens are stored.

/// The integers of a file of tokens, little-endian.
///
/// ```
/// use overdrive_dataload::{TokenDtype, TokenFile};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("tokens.bin");
/// # std::fs::write(&path, 128_000_u32.to_le_bytes())?;
///
/// // A vocabulary of more than 65,536 tokens.
/// let tokens = TokenFile::with_dtype(&path, TokenDtype::Uint32)?;
/// assert_eq!(tokens.tokens(0..1)?, [128_000]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenDtype {
    /// 8 bits, from 0 on.
    Uint8,
    /// 8 bits.
    Int8,
    /// 16 bits.
    Int16,
    /// 16 bits, from 0 on: enough for GPT-2's 50,257 tokens, and what nanoGPT writes.
    #[default]
    Uint16,
    /// 32 bits.
    Int32,
    /// 32 bits, from 0 on.
    Uint32,
    /// 64 bits.
    Int64,
}

impl TokenDtype {
    /// Bytes per token.
    pub fn size(self) -> usize {
        match self {
            Self::Uint8 | Self::Int8 => 1,
            Self::Int16 | Self::Uint16 => 2,
            Self::Int32 | Self::Uint32 => 4,
            Self::Int64 => 8,
        }
    }

    /// Whether it can hold a token.
    pub fn holds(self, token: i64) -> bool {
        self.encode(token, &mut Vec::new()).is_some()
    }

    /// Appends a token; `None`, and nothing, where this type cannot hold it.
    pub(super) fn encode(self, token: i64, bytes: &mut Vec<u8>) -> Option<()> {
        match self {
            Self::Uint8 => bytes.extend(u8::try_from(token).ok()?.to_le_bytes()),
            Self::Int8 => bytes.extend(i8::try_from(token).ok()?.to_le_bytes()),
            Self::Int16 => bytes.extend(i16::try_from(token).ok()?.to_le_bytes()),
            Self::Uint16 => bytes.extend(u16::try_from(token).ok()?.to_le_bytes()),
            Self::Int32 => bytes.extend(i32::try_from(token).ok()?.to_le_bytes()),
            Self::Uint32 => bytes.extend(u32::try_from(token).ok()?.to_le_bytes()),
            Self::Int64 => bytes.extend(token.to_le_bytes()),
        }
        Some(())
    }

    /// The tokens in `bytes`; what remains of an incomplete one is left out.
    pub(super) fn widen(self, bytes: &[u8]) -> Vec<i64> {
        fn each<const N: usize, T: Into<i64>>(bytes: &[u8], number: fn([u8; N]) -> T) -> Vec<i64> {
            bytes.as_chunks::<N>().0.iter().map(|&bytes| number(bytes).into()).collect()
        }
        match self {
            Self::Uint8 => each(bytes, u8::from_le_bytes),
            Self::Int8 => each(bytes, i8::from_le_bytes),
            Self::Int16 => each(bytes, i16::from_le_bytes),
            Self::Uint16 => each(bytes, u16::from_le_bytes),
            Self::Int32 => each(bytes, i32::from_le_bytes),
            Self::Uint32 => each(bytes, u32::from_le_bytes),
            Self::Int64 => each(bytes, i64::from_le_bytes),
        }
    }
}
