//! Sets of numbers as text.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Numbers as text, with consecutive ones as ranges: `5-90 92`.
pub(crate) struct Ranges(pub(crate) BTreeSet<usize>);

/// More numbers than any loader saves: a state with more is damaged, and would fill the memory.
const MOST: usize = 1 << 20;

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.0.iter().copied().peekable();
        let mut space = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if(|next| next - last == 1) {
                last = next;
            }
            match last == first {
                true => write!(f, "{space}{first}")?,
                false => write!(f, "{space}{first}-{last}")?,
            }
            space = " ";
        }
        Ok(())
    }
}

impl FromStr for Ranges {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut all = BTreeSet::new();
        for range in text.split_whitespace() {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |digits: &str| digits.parse::<usize>().map_err(|_| ());
            let (first, last) = (number(first)?, number(last)?);
            if last < first || last - first >= MOST - all.len() {
                return Err(());
            }
            all.extend(first..=last);
        }
        Ok(Self(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_round_trip_as_text() {
        for (numbers, text) in [(vec![], ""), (vec![5], "5"), (vec![5, 6, 7, 9, 11, 12], "5-7 9 11-12")] {
            let set: BTreeSet<usize> = numbers.into_iter().collect();
            assert_eq!(Ranges(set.clone()).to_string(), text);
            assert_eq!(text.parse::<Ranges>().map(|ranges| ranges.0), Ok(set));
        }
        let last = BTreeSet::from([usize::MAX - 1, usize::MAX]);
        assert_eq!(Ranges(last).to_string(), format!("{}-{}", usize::MAX - 1, usize::MAX));
        for bad in ["x", "3-", "-3", "9-5", "0-18446744073709551615", "0-99999999 5"] {
            assert!(bad.parse::<Ranges>().is_err(), "{bad}");
        }
    }
}
