//! Traits for tuples.

/// Calls a macro for the tuples of one to six parts, with the name of each part's type and its place.
macro_rules! for_tuples {
    ($implement:ident) => {
        $implement!(A 0);
        $implement!(A 0, B 1);
        $implement!(A 0, B 1, C 2);
        $implement!(A 0, B 1, C 2, D 3);
        $implement!(A 0, B 1, C 2, D 3, E 4);
        $implement!(A 0, B 1, C 2, D 3, E 4, F 5);
    };
}

pub(crate) use for_tuples;
