//! Combinations of parts: each cell trains exactly like a plain loop without these parts, or is refused with a known
//! reason.
//!
//! CI runs a covering array of every three choices; `cargo xtask matrix` runs all cells.

mod choices;
mod covering;
mod data;
mod formulas;
mod optimizers;
mod places;
mod reference;
mod refusals;
mod runner;
mod subject;
mod totals;

use std::collections::HashSet;

use anyhow::{Result, ensure};
use tch::{Device, Kind};

use choices::{Cell, full_product};
use covering::Triples;

const CPU: Device = Device::Cpu;
const DOUBLE: (Kind, Device) = (Kind::Double, CPU);

fn check(cells: Vec<Cell>) -> Result<()> {
    // On a busy machine, small steps are slow with libtorch threads that wait for each other.
    tch::set_num_threads(1);
    let totals = runner::run(cells)?;
    println!("{totals}");
    ensure!(totals.wrong.is_empty(), "{} cells are wrong", totals.wrong.len());
    Ok(())
}

#[test]
fn any_three_choices_train_like_the_plain_loop_or_are_refused() -> Result<()> {
    check(covering::covering(&full_product()))
}

#[test]
fn the_covering_array_has_every_possible_combination_of_three_choices() {
    let product = full_product();
    let cells = covering::covering(&product);
    assert!(Triples::of(&cells) == Triples::of(&product));
    assert!(cells.iter().all(Cell::is_program));
    assert!(cells.len() * 100 < product.len(), "{} cells", cells.len());
    let distinct: HashSet<String> = cells.iter().map(Cell::name).collect();
    assert_eq!(distinct.len(), cells.len());
}

/// `OVERDRIVE_MATRIX` selects cells with all of these choices, as in "sam(sgd) + 2 ranks".
#[test]
#[ignore = "takes an hour or more: `cargo xtask matrix`"]
fn every_combination_trains_as_the_plain_loop_or_is_refused() -> Result<()> {
    let wanted = std::env::var("OVERDRIVE_MATRIX").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(" + ").filter(|it| !it.is_empty()).collect();
    let is_wanted = |cell: &Cell| {
        let name = cell.name();
        let choices: HashSet<&str> = name.split(" + ").collect();
        wanted.iter().all(|it| choices.contains(it))
    };
    let cells: Vec<Cell> = full_product().into_iter().filter(is_wanted).collect();
    ensure!(!cells.is_empty(), "no cell has {wanted:?}");
    check(cells)
}
