//! Times, memory and shapes as PyTorch's table writes them.

use std::fmt::Write as _;

/// The unit of a table's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    /// `s`
    Seconds,
    /// `ms`
    Milliseconds,
    /// `us`
    Microseconds,
}

const MILLISECOND: f64 = 1e3;
const SECOND: f64 = 1e6;

/// A time in the unit, or in the largest unit in which it is at least 1.
pub(super) fn time(microseconds: f64, unit: Option<TimeUnit>) -> String {
    let unit = unit.unwrap_or(if microseconds >= SECOND {
        TimeUnit::Seconds
    } else if microseconds >= MILLISECOND {
        TimeUnit::Milliseconds
    } else {
        TimeUnit::Microseconds
    });
    match unit {
        TimeUnit::Seconds => format!("{:.3}s", microseconds / SECOND),
        TimeUnit::Milliseconds => format!("{:.3}ms", microseconds / MILLISECOND),
        TimeUnit::Microseconds => format!("{microseconds:.3}us"),
    }
}

pub(super) fn share(part: f64, whole: f64) -> String {
    if whole == 0.0 { "NaN".to_owned() } else { format!("{:.2}%", part * 100.0 / whole) }
}

pub(super) fn memory(bytes: i64) -> String {
    const UNITS: [(&str, u64); 3] = [("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| bytes.unsigned_abs() >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", bytes as f64 / *size as f64),
        None => format!("{bytes} B"),
    }
}

/// As Python writes a list of lists.
pub(super) fn shapes(shapes: &[Vec<i64>]) -> String {
    let mut text = String::from("[");
    for (place, shape) in shapes.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write!(text, "{}{shape:?}", if place == 0 { "" } else { ", " });
    }
    text.push(']');
    text
}

/// The first characters of a text.
pub(super) fn cut(text: &str, characters: usize) -> &str {
    text.char_indices().nth(characters).map_or(text, |(end, _)| &text[..end])
}

/// The scale of FLOPs and its name, such that the smallest value is at least 1.
pub(super) fn flops_scale(smallest: u64) -> (f64, &'static str) {
    const NAMES: [&str; 6] = ["FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"];
    let thousands = ((smallest as f64).log10() / 3.0).clamp(0.0, (NAMES.len() - 1) as f64).floor();
    (10f64.powf(-3.0 * thousands), NAMES[thousands as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_as_python_writes_them() {
        let times = [(0.0, "0.000us"), (999.9996, "1000.000us"), (1000.0, "1.000ms"), (1062.5, "1.062ms")];
        for (microseconds, text) in times {
            assert_eq!(time(microseconds, None), text);
        }
        assert_eq!(time(1_500_000.0, None), "1.500s");
        assert_eq!(time(1_500_000.0, Some(TimeUnit::Microseconds)), "1500000.000us");
        assert_eq!(share(1.0, 3.0), "33.33%");
        assert_eq!(share(0.0, 0.0), "NaN");
        assert_eq!(memory(-1024), "-1.00 KB");
        assert_eq!(memory(1023), "1023 B");
        assert_eq!(memory(3 << 29), "1.50 GB");
        assert_eq!(shapes(&[vec![32, 64], vec![]]), "[[32, 64], []]");
        assert_eq!(shapes(&[]), "[]");
        assert_eq!(cut("größe", 3), "grö");
        assert_eq!(cut("ab", 3), "ab");
    }

    #[test]
    fn flops_are_scaled_by_the_smallest() {
        for (smallest, name) in [(1, "FLOPs"), (999, "FLOPs"), (1001, "KFLOPs"), (u64::MAX, "PFLOPs")] {
            assert_eq!(flops_scale(smallest).1, name, "{smallest}");
        }
    }
}
