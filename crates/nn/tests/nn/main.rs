//! Modules and functions as a user calls them.

mod custom_fwd;
mod function;
mod grad;
mod gradcheck;
