//! The keys by what they are about.

mod elsewhere;
mod models;
mod params;
mod training;
mod zero;

use super::schema::Row;

pub(super) use params::{of_optimizer, of_scheduler};

/// All keys, except those within `optimizer.params` and `scheduler.params`, which depend on the type.
pub(super) fn tables() -> [&'static [Row]; 4] {
    [training::KEYS, zero::KEYS, elsewhere::KEYS, models::KEYS]
}

/// Titles and keys of `optimizer.params` and `scheduler.params`, for the book.
#[cfg(test)]
pub(super) fn by_type() -> Vec<(&'static str, &'static [Row])> {
    params::BY_TYPE.to_vec()
}
