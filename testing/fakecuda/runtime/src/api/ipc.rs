//! Sharing memory and events with other processes: not supported, which the real functions may say too.

use super::code;
use crate::error::CudaError;

macro_rules! not_supported {
    ($($name:ident),+ $(,)?) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> i32 {
            code(Err(CudaError::NOT_SUPPORTED))
        }
    )+};
}

not_supported! {
    cudaIpcCloseMemHandle, cudaIpcGetEventHandle, cudaIpcGetMemHandle, cudaIpcOpenEventHandle, cudaIpcOpenMemHandle,
}
