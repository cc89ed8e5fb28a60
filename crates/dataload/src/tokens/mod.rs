//! Files of tokens, memory-mapped.

mod dtype;
mod file;
mod indexed;
mod windows;
mod writer;

pub use dtype::TokenDtype;
pub use file::TokenFile;
pub use indexed::IndexedTokens;
pub use windows::TokenWindows;
pub use writer::{IndexedTokensWriter, TokenWriter};
