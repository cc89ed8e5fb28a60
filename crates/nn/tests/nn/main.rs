//! Modules and functions as a user calls them.

mod function;
mod gradcheck;
