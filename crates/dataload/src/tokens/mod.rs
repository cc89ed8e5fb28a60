//! Files of tokens, memory-mapped.

mod dtype;
mod file;
mod indexed;
mod windows;

pub use dtype::TokenDtype;
pub use file::TokenFile;
pub use indexed::IndexedTokens;
pub use windows::TokenWindows;
