//! Tests of modules.

mod bad_input;
mod files;
mod hostile;
mod hostile_pt;
mod loading;
mod summary;
