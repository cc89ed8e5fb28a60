//! Compiled steps beside plain ones.

mod losses;
