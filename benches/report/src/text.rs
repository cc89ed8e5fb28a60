//! Formats numbers and paragraphs for people; the table, the page and the advice all use these functions.

/// Seconds: three decimals below 1, else three significant digits, or more if there are more before the point.
pub fn seconds(value: f64) -> String {
    match value.abs() {
        small if small < 0.995 => format!("{value:.3}"),
        small if small < 9.995 => format!("{value:.2}"),
        medium if medium < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A rate: two decimals below 10, else three significant digits, or more if there are more before the point.
pub fn rate(value: f64) -> String {
    match value.abs() {
        small if small < 9.995 => format!("{value:.2}"),
        medium if medium < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A ratio: `1.78x`.
pub fn times(value: f64) -> String {
    if value.abs() < 9.995 { format!("{value:.2}x") } else { format!("{value:.1}x") }
}

/// A share from 0 to 1, in percent.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// An accuracy in percent. It has two decimals, because good accuracies differ little.
pub fn accuracy(share: f64) -> String {
    format!("{:.2}%", share * 100.0)
}

/// Bytes in MiB, or in GiB from 1000 MiB on; a dash if they are not known.
pub fn bytes(value: Option<u64>) -> String {
    const MIB: f64 = (1 << 20) as f64;
    match value {
        None => "-".to_owned(),
        Some(bytes) if (bytes as f64) < 1000.0 * MIB => format!("{:.0} MiB", bytes as f64 / MIB),
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / MIB / 1024.0),
    }
}

/// Begins with a capital letter.
pub fn upper(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

/// `a, b and c`.
pub fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let mut items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    match items.pop() {
        Some(last) if !items.is_empty() => format!("{} and {last}", items.join(", ")),
        last => last.unwrap_or_default(),
    }
}

/// `text` in lines of at most `width` characters. A longer word gets a line of its own.
pub fn wrap(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_the_digits_that_matter() {
        assert_eq!([0.01234, 9.994, 9.996, 99.96, 1234.5].map(seconds), ["0.012", "9.99", "10.0", "100", "1234"]);
        assert_eq!([0.004, 0.0996, 0.5].map(percent), ["0.4%", "10%", "50%"]);
        assert_eq!([2.345, 23.45, 23456.7].map(rate), ["2.35", "23.4", "23457"]);
        assert_eq!([None, Some(300 << 20), Some(3 << 30)].map(bytes), ["-", "300 MiB", "3.0 GiB"]);
    }

    #[test]
    fn lists_and_lines() {
        assert_eq!([upper(""), upper("every time")], ["", "Every time"]);
        assert_eq!(list(["a"; 0]), "");
        assert_eq!(list(["a", "b", "c"]), "a, b and c");
        assert_eq!(wrap("one two three", 7), "one two\nthree");
        assert_eq!(wrap("unbreakable", 3), "unbreakable");
    }
}
