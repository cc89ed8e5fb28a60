//! The stand-ins while a test uses them.

use std::ops::Deref;

use crate::Fake;

/// The stand-ins, whose settings are put back when this is dropped: see [`Fake::lend`].
#[derive(Debug)]
#[must_use = "what is set is put back when this is dropped"]
pub struct Lent(Fake);

impl Fake {
    /// Lends the stand-ins to a test, also to one that fails. When the result is dropped, the remaining work runs, work
    /// runs at once again, and all settings are as at the start: nothing is planted, limited, searched for, guarded,
    /// traced or kept, and NVML's figures are the usual ones. Counts and notes stay.
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
