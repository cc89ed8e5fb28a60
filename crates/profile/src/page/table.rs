//! Tables, which the page's script can sort.

use super::text::escape;

/// A column: its title, and whether it holds words rather than numbers.
pub(super) struct Column {
    title: String,
    is_text: bool,
}

/// A column of words.
pub(super) fn words(title: impl Into<String>) -> Column {
    Column { title: title.into(), is_text: true }
}

/// A column of numbers.
pub(super) fn numbers(title: impl Into<String>) -> Column {
    Column { title: title.into(), is_text: false }
}

/// A cell: what is shown, and what it is sorted by.
pub(super) struct Cell {
    html: String,
    key: Option<f64>,
    is_marked: bool,
}

impl Cell {
    pub fn text(text: &str) -> Self {
        Self { html: escape(text), key: None, is_marked: false }
    }

    /// Text that is HTML already.
    pub fn html(html: String) -> Self {
        Self { html, key: None, is_marked: false }
    }

    pub fn number(shown: String, key: f64) -> Self {
        Self { html: escape(&shown), key: Some(key), is_marked: false }
    }

    /// A number that may be missing.
    pub fn maybe(value: Option<f64>, shown: impl Fn(f64) -> String) -> Self {
        match value {
            Some(value) => Self::number(shown(value), value),
            None => Self { html: "\u{2013}".to_owned(), key: Some(-1.0), is_marked: false },
        }
    }

    /// Shows the cell in the warning colour.
    pub fn marked(mut self, is_marked: bool) -> Self {
        self.is_marked = is_marked;
        self
    }
}

/// The table, in a box that scrolls.
pub(super) fn table(name: &str, columns: &[Column], rows: Vec<Vec<Cell>>) -> String {
    let class = |column: &Column| if column.is_text { " class=\"words\"" } else { "" };
    let heads: String = columns
        .iter()
        .map(|column| format!("<th scope=\"col\"{}>{}</th>", class(column), escape(&column.title)))
        .collect();
    let cell = |(column, cell): (&Column, &Cell)| {
        let key = cell.key.map(|key| format!(" data-key=\"{key}\"")).unwrap_or_default();
        let class = match (column.is_text, cell.is_marked) {
            (_, true) => " class=\"marked\"",
            (true, false) => " class=\"words\"",
            (false, false) => "",
        };
        format!("<td{class}{key}>{}</td>", cell.html)
    };
    let body: String =
        rows.iter().map(|row| format!("<tr>{}</tr>", columns.iter().zip(row).map(cell).collect::<String>())).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\"><table><thead><tr>{heads}</tr></thead>\
         <tbody>{body}</tbody></table></div>",
        escape(name),
    )
}
