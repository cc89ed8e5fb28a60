//! Calls into the `parquet` crate, turning its panics into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ::parquet::errors::ParquetError;

use crate::DataError;

/// Runs `call`, which calls the `parquet` crate; `describe` makes an error of the crate's error or panic message.
///
/// After a panic, callers must not use the objects that `call` used.
pub(super) fn guarded<T>(
    describe: impl FnOnce(String) -> DataError,
    call: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        // An error of `Pages`, passed through by the `parquet` crate.
        Ok(Err(ParquetError::External(error))) => match error.downcast::<DataError>() {
            Ok(error) => Err(*error),
            Err(error) => Err(describe(error.to_string())),
        },
        Ok(Err(error)) => Err(describe(error.to_string())),
        Err(panic) => Err(describe(message_of(&*panic))),
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("content that the parquet crate panics at").into()
}
