//! Formats figures and text for the page and for comparisons.

use jiff::Timestamp;

/// `template` with each `{{name}}` replaced; one pass, so that a value is never searched for further names.
pub(crate) fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, (name, after))) = rest.split_once("{{").and_then(|(b, r)| Some((b, r.split_once("}}")?))) {
        out.push_str(before);
        out.push_str(values.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value));
        rest = after;
    }
    out + rest
}

/// Text that is safe within an element and within a quoted attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

/// The same, with text between backquotes as code.
pub(crate) fn prose(text: &str) -> String {
    let mut parts = text.split('`').map(escape);
    let mut out = parts.next().unwrap_or_default();
    while let Some(code) = parts.next() {
        match parts.next() {
            Some(after) => out += &format!("<code>{code}</code>{after}"),
            // Never closed, so not code.
            None => out += &format!("`{code}"),
        }
    }
    out
}

/// Three significant digits: `1.23`, `12.3`, `123`; whole numbers above: `1234`.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size < 9.995 => format!("{value:.2}"),
        size if size < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// `1.23 s`, `12.3 ms`, `4.50 µs`.
pub(crate) fn time(seconds: f64) -> String {
    match seconds.abs() {
        0.0 => "0 ms".to_owned(),
        size if size >= 0.9995 => format!("{} s", digits(seconds)),
        size if size >= 0.999_5e-3 => format!("{} ms", digits(1e3 * seconds)),
        _ => format!("{} µs", digits(1e6 * seconds)),
    }
}

/// Milliseconds without the unit, for columns.
pub(crate) fn milliseconds(seconds: f64) -> String {
    format!("{:.3}", 1e3 * seconds)
}

/// `1.23 GB`.
pub(crate) fn bytes(bytes: f64) -> String {
    match bytes.abs() {
        size if size < 1e3 => format!("{bytes:.0} B"),
        _ => format!("{}B", large(bytes)),
    }
}

/// `1.23 G`, to be followed by a unit.
pub(crate) fn large(value: f64) -> String {
    let units = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.iter().find(|(size, _)| value.abs() >= 0.9995 * size) {
        Some((size, unit)) => format!("{} {unit}", digits(value / size)),
        None => format!("{} ", digits(value)),
    }
}

/// `12.3%`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A mean count: `12`, `0.25`.
pub(crate) fn count(value: f64) -> String {
    if (value - value.round()).abs() < 0.005 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// `1 step`, `2 steps`.
pub(crate) fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The multiples of 1, 2 or 5 times a power of ten from 0 to `high`, at most about `count` of them.
pub(crate) fn ticks(high: f64, count: f64) -> Vec<f64> {
    let rough = high / count;
    if !rough.is_normal() || rough < 0.0 {
        return vec![0.0];
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    (0..=(high / step + 1e-9).floor() as i64).map(|tick| tick as f64 * step).collect()
}

/// A label of a scale, without zeros after the point: `10 ms` for `10.0 ms`.
pub(crate) fn tick(label: &str) -> String {
    [".00", ".0"].iter().fold(label.to_owned(), |label, zeros| {
        let at =
            label.find(zeros).filter(|at| !label[at + zeros.len()..].starts_with(|next: char| next.is_ascii_digit()));
        at.map_or(label.clone(), |at| format!("{}{}", &label[..at], &label[at + zeros.len()..]))
    })
}

/// `seconds` since 1970 as `2026-01-31 09:05 UTC`; a time outside of years with four digits becomes the nearest in
/// them.
pub(crate) fn utc(seconds: f64) -> String {
    let nearest = Timestamp::from_second(seconds.max(0.0) as i64).unwrap_or(Timestamp::MAX);
    nearest.strftime("%Y-%m-%d %H:%M UTC").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_readable_units() {
        let times = [0.0, 2.5e-7, 3.21e-5, 9.996e-4, 0.01234, 0.9996, 75.0].map(time);
        assert_eq!(times, ["0 ms", "0.25 µs", "32.1 µs", "1.00 ms", "12.3 ms", "1.00 s", "75.0 s"]);
        assert_eq!([0.0, 999.0, 1e3, 1.5e9].map(bytes), ["0 B", "999 B", "1.00 kB", "1.50 GB"]);
        assert_eq!([12.0, 0.25, 3.0000001].map(count), ["12", "0.25", "3"]);
        assert_eq!((milliseconds(0.0123456), percent(0.1234)), ("12.346".to_owned(), "12.3%".to_owned()));
    }

    #[test]
    fn code_in_prose_is_marked() {
        assert_eq!(prose("use `a < b`, not `c`"), "use <code>a &lt; b</code>, not <code>c</code>");
        assert_eq!(["", "`", "a`b", "``"].map(prose), ["", "`", "a`b", "<code></code>"]);
    }

    #[test]
    fn ticks_are_round_and_never_endless() {
        assert_eq!(ticks(31.2, 5.0), [0.0, 10.0, 20.0, 30.0]);
        for high in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-320] {
            assert_eq!(ticks(high, 4.0), [0.0], "{high}");
        }
        assert!(ticks(f64::MAX, 4.0).len() < 10);
        let labels = ["10.0 ms", "2.00 GB", "2.50 GB", "100.0%", "1.05 s", "12"].map(tick);
        assert_eq!(labels, ["10 ms", "2 GB", "2.50 GB", "100%", "1.05 s", "12"]);
    }

    #[test]
    fn known_moments() {
        assert_eq!(utc(0.0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400.9), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_769_850_300.0), "2026-01-31 09:05 UTC");
        assert_eq!([utc(f64::NAN), utc(-5.0)], [utc(0.0), utc(0.0)]);
        assert_eq!(utc(f64::INFINITY), "9999-12-30 22:00 UTC");
    }
}
