//! The stand-ins while a test has them.

use std::ops::Deref;

use crate::Fake;

/// What a test sets on it is put back when this is dropped: see [`Fake::lend`].
#[derive(Debug)]
#[must_use = "what is set is put back when this is dropped"]
pub struct Lent(Fake);

impl Fake {
    /// Lends the stand-ins to a test, which may fail in between. When the result is dropped, all work has run, and work
    /// runs at once again; nothing is planted, limited, searched for, guarded, traced or kept any more, and NVML's figures
    /// are the usual ones. Counts and notes stay.
    pub fn lend(self) -> Lent {
        Lent(self)
    }
}

impl Deref for Lent {
    type Target = Fake;

    fn deref(&self) -> &Fake {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        call!(c"fakecuda_restore"() -> ());
    }
}
