//! A covering array: few cells that contain every possible combination of three choices of different parts. A refused
//! cell tests only the refusal, so combinations that can run are covered by cells that run.

use crate::choices::{Cell, PARTS};
use crate::refusals;

/// A set of triples of choices, indexed by the numbers of the three choices, counted over all parts.
#[derive(Clone, PartialEq, Eq)]
pub struct Triples {
    has: Vec<bool>,
    /// The number of each part's first choice.
    first: Vec<usize>,
    choices: usize,
}

impl Triples {
    fn none() -> Self {
        let (mut first, mut choices) = (Vec::new(), 0);
        for (_, names) in PARTS {
            first.push(choices);
            choices += names.len();
        }
        Self { has: vec![false; choices.pow(3)], first, choices }
    }

    /// The indices of a cell's triples.
    fn places<'a>(&'a self, cell: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        let count = cell.len();
        let choice = move |part: usize| self.first[part] + cell[part];
        let pairs = (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)));
        pairs.flat_map(move |(a, b)| {
            let pair = (choice(a) * self.choices + choice(b)) * self.choices;
            (b + 1..count).map(move |c| pair + choice(c))
        })
    }

    /// The triples that some cell has.
    pub fn of<'a>(cells: impl IntoIterator<Item = &'a Cell>) -> Self {
        let mut all = Self::none();
        for cell in cells {
            let numbers = cell.numbers();
            let places: Vec<usize> = all.places(&numbers).collect();
            places.into_iter().for_each(|place| all.has[place] = true);
        }
        all
    }

    fn without(&self, others: &Self) -> Self {
        let has = self.has.iter().zip(&others.has).map(|(own, other)| *own && !other).collect();
        Self { has, ..self.clone() }
    }

    /// The three (part, choice) of the triple at an index.
    fn at(&self, place: usize) -> [(usize, usize); 3] {
        let choices = self.choices;
        [place / choices / choices, place / choices % choices, place % choices].map(|choice| {
            let part = self.first.partition_point(|first| *first <= choice) - 1;
            (part, choice - self.first[part])
        })
    }
}

/// Deterministic random numbers: splitmix64.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

/// Cells that cover every triple of `product`: with a cell that runs if one with this triple runs.
pub fn covering(product: &[Cell]) -> Vec<Cell> {
    let can_run = Triples::of(product.iter().filter(|cell| refusals::expected(cell).is_empty()));
    let only_refused = Triples::of(product).without(&can_run);
    let mut cells = cover(can_run, |cell| refusals::expected(cell).is_empty());
    cells.extend(cover(only_refused, |_| true));
    cells
}

/// For each missing triple, adds the random cell with it that covers most others.
fn cover(mut missing: Triples, is_wanted: impl Fn(&Cell) -> bool) -> Vec<Cell> {
    const TRIES: usize = 60;
    let mut draws = Draws(1);
    let mut cells = Vec::new();
    for place in 0..missing.has.len() {
        while missing.has[place] {
            let mut best: Option<(usize, Vec<usize>)> = None;
            for _ in 0..TRIES {
                let mut numbers: Vec<usize> = PARTS.iter().map(|(_, names)| draws.below(names.len())).collect();
                missing.at(place).iter().for_each(|&(part, choice)| numbers[part] = choice);
                let cell = Cell::of(&numbers);
                if !cell.is_program() || !is_wanted(&cell) {
                    continue;
                }
                let gain = missing.places(&numbers).filter(|&place| missing.has[place]).count();
                if best.as_ref().is_none_or(|(most, _)| gain > *most) {
                    best = Some((gain, numbers));
                }
            }
            if let Some((_, numbers)) = best {
                let covered: Vec<usize> = missing.places(&numbers).collect();
                covered.into_iter().for_each(|place| missing.has[place] = false);
                cells.push(Cell::of(&numbers));
            }
        }
    }
    cells
}
