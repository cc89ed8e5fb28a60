//! A summary as text, as torchinfo prints it.

use std::collections::HashMap;
use std::fmt;

use super::{Summary, SummaryRow};

const COLUMN: usize = 25;

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = self.titles();
        let width = titles.iter().zip(&self.rows).map(|(title, row)| title.chars().count() + row.depth * 5 + 1).max();
        let width = width.unwrap_or(0).next_multiple_of(5).max(40);
        let line = "=".repeat(width + 3 * COLUMN);
        let write = |f: &mut fmt::Formatter<'_>, first: &str, cells: [&str; 3]| {
            let cells: String = cells.iter().map(|cell| format!("{cell:<COLUMN$} ")).collect();
            writeln!(f, "{}", format!("{first:<width$} {cells}").trim_end())
        };
        writeln!(f, "{line}")?;
        write(f, "Layer (type (var_name):depth-idx)", ["Output Shape", "Param #", "Mult-Adds"])?;
        writeln!(f, "{line}")?;
        for (place, row) in self.rows.iter().enumerate().filter(|(_, row)| row.depth <= self.depth) {
            let output = row.output.as_ref().map_or("--".to_owned(), |size| format!("{size:?}"));
            let first = indent(row.depth) + &titles[place];
            write(f, &first, [&output, &self.params(place), &self.mult_adds(place)])?;
        }
        let not_trainable = self.total_params - self.trainable_params;
        let memory = self.input_bytes + self.forward_backward_bytes + self.params_bytes;
        writeln!(f, "{line}\nTotal params: {}", grouped(self.total_params as u64))?;
        writeln!(f, "Trainable params: {}", grouped(self.trainable_params as u64))?;
        writeln!(f, "Non-trainable params: {}", grouped(not_trainable as u64))?;
        writeln!(f, "Total mult-adds{}\n{line}", readable(self.total_mult_adds, ""))?;
        writeln!(f, "Input size{}", readable(self.input_bytes as u64, "B"))?;
        writeln!(f, "Forward/backward pass size{}", readable(self.forward_backward_bytes as u64, "B"))?;
        writeln!(f, "Params size{}", readable(self.params_bytes as u64, "B"))?;
        write!(f, "Estimated Total Size{}\n{line}", readable(memory as u64, "B"))
    }
}

impl Summary {
    /// `Linear (fc1): 1-2`, the second module that is in one.
    fn titles(&self) -> Vec<String> {
        let mut counts: HashMap<usize, usize> = HashMap::new();
        let title = |row: &SummaryRow| {
            let count = counts.entry(row.depth).or_default();
            *count += 1;
            match row.name.rsplit('.').next() {
                Some(name) if row.depth > 0 => format!("{} ({name}): {}-{count}", row.class, row.depth),
                _ => format!("{0} ({0})", row.class),
            }
        };
        self.rows.iter().map(title).collect()
    }

    /// A row and those of the modules in it.
    fn with_parts(&self, place: usize) -> &[SummaryRow] {
        let depth = self.rows[place].depth;
        let parts = self.rows[place + 1..].iter().take_while(|row| row.depth > depth).count();
        &self.rows[place..=place + parts]
    }

    /// The rows that one row stands for: at the last depth that is shown, also those below.
    fn shown_by(&self, place: usize) -> &[SummaryRow] {
        let row = &self.rows[place];
        if row.depth == self.depth { self.with_parts(place) } else { std::slice::from_ref(row) }
    }

    fn params(&self, place: usize) -> String {
        let rows = self.shown_by(place);
        let params: usize = rows.iter().map(|row| row.params).sum();
        match params {
            0 if self.rows[place].is_repeated => "(recursive)".to_owned(),
            0 => "--".to_owned(),
            _ if rows.iter().any(|row| row.trainable_params > 0) => grouped(params as u64),
            _ => format!("({})", grouped(params as u64)),
        }
    }

    fn mult_adds(&self, place: usize) -> String {
        match self.shown_by(place).iter().map(|row| row.mult_adds).sum() {
            0 => "--".to_owned(),
            count => grouped(count),
        }
    }
}

fn indent(depth: usize) -> String {
    match depth {
        0 => String::new(),
        1 => "├─".to_owned(),
        _ => "│    ".repeat(depth - 1) + "└─",
    }
}

/// A number with its thousands separated.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// ` (MB): 1.25`
fn readable(number: u64, unit: &str) -> String {
    let scales = [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    match scales.into_iter().find(|(scale, _)| number >= *scale) {
        None => format!(": {number}"),
        Some((scale, prefix)) if number.is_multiple_of(scale) => {
            format!(" ({prefix}{unit}): {}", grouped(number / scale))
        }
        Some((scale, prefix)) => {
            let text = format!("{:.2}", number as f64 / scale as f64);
            let (whole, cents) = text.split_once('.').unwrap_or((&text, "00"));
            format!(" ({prefix}{unit}): {}.{cents}", grouped(whole.parse().unwrap_or_default()))
        }
    }
}
