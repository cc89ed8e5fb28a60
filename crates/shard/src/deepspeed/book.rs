//! The book's table of keys is that of the code.

use std::fmt::Write;

use super::keys;
use super::optimizer::REFUSED;
use super::schema::{Plain, Row, Rule};

const BOOK: &str = include_str!("../../../../docs/sharding.md");
const START: &str = "<!-- keys -->\n";
const END: &str = "<!-- end of keys -->\n";

fn rule(rule: &Rule) -> String {
    match rule {
        Rule::Honoured => "honoured".to_owned(),
        Rule::NoEffect | Rule::Open => "no effect".to_owned(),
        Rule::Only([]) => "refused".to_owned(),
        Rule::Only(values) => {
            let shown = |plain: &Plain| match plain {
                Plain::Flag(flag) => format!("`{flag}`"),
                Plain::Number(number) => format!("`{number}`"),
                Plain::Text(text) => format!("`\"{text}\"`"),
            };
            format!("{} only", values.iter().map(shown).collect::<Vec<_>>().join(" or "))
        }
    }
}

fn add(table: &mut String, section: &str, rows: &[Row]) {
    for row in rows {
        let keys: Vec<_> = row.keys.iter().map(|key| format!("`{key}`")).collect();
        let section = if section.is_empty() && !row.section.is_empty() {
            format!("`{}`", row.section)
        } else {
            section.to_owned()
        };
        writeln!(table, "| {section} | {} | {} | {} |", keys.join(", "), rule(&row.rule), row.why).unwrap();
    }
}

fn table() -> String {
    let mut table = "| section | keys | | what it becomes, or why it does not |\n|---|---|---|---|\n".to_owned();
    keys::tables().into_iter().for_each(|rows| add(&mut table, "", rows));
    for (types, rows) in keys::by_type() {
        add(&mut table, &format!("`params` of {types}"), rows);
    }
    for (name, why) in REFUSED {
        writeln!(table, "| `optimizer` | `type`: `{name}`, and with it its `params` | refused | {why} |").unwrap();
    }
    table
}

#[test]
fn the_book_has_the_table_of_all_keys() {
    let (_, rest) = BOOK.split_once(START).expect("a start");
    let (found, _) = rest.split_once(END).expect("an end");
    let expected = table();
    assert!(found == expected, "docs/sharding.md should have this table:\n{START}{expected}{END}");
}
