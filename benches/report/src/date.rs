//! The date that a report carries.

/// Now, as `2026-01-31 09:05 UTC`.
pub fn utc_now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}
