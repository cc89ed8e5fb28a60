//! Turns Parquet's levels into the offsets of lists.

use std::sync::Arc;

use crate::columns::OnNull;

/// Builds the offsets of a column's lists, and records which of their elements have a value.
///
/// A value's definition level says how many of the optional nodes around it are present, and its repetition level which
/// list it continues: 0 begins a row, 1 the next element of the row's list, and so on.
pub(super) struct Lists {
    /// For each list, outermost first, the definition level from which on it has an element.
    levels: Arc<[i16]>,
    max_def: i16,
    /// Whether nulls are allowed: a null list is then an empty one.
    fill: bool,
    /// Which rows are null, where that is asked for: nulls of rows are then allowed, and those within lists are not.
    mask: Option<Vec<bool>>,
    /// For each level, where each list begins among its elements.
    pub(super) offsets: Vec<Vec<i64>>,
    /// How many elements each level has so far.
    elements: Vec<i64>,
}

/// Why levels do not form lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadLevels {
    /// A list or a value is null, at this position among the levels.
    Null { at: usize },
    /// The levels contradict each other.
    Malformed,
}

impl Lists {
    pub(super) fn new(levels: Arc<[i16]>, max_def: i16, nulls: &OnNull) -> Self {
        let (lists, fill) = (levels.len(), matches!(nulls, OnNull::Fill(_)));
        let mask = matches!(nulls, OnNull::Mask).then(Vec::new);
        Self { levels, max_def, fill, mask, offsets: vec![Vec::new(); lists], elements: vec![0; lists] }
    }

    /// Adds the levels of some values; pushes onto `present` whether each element of the innermost list (each row,
    /// where there are no lists) has a value.
    pub(super) fn push(&mut self, reps: &[i16], defs: &[i16], present: &mut Vec<bool>) -> Result<(), BadLevels> {
        if self.levels.is_empty() {
            return defs.iter().enumerate().try_for_each(|(at, &def)| {
                let is_masked = self.masks(def < self.max_def);
                self.element(at, def, is_masked, present)
            });
        }
        if reps.len() != defs.len() {
            return Err(BadLevels::Malformed);
        }
        for (at, (&rep, &def)) in reps.iter().zip(defs).enumerate() {
            let lists = self.levels.len();
            let from = usize::try_from(rep).ok().filter(|&from| from <= lists).ok_or(BadLevels::Malformed)?;
            // Only a list that has begun, and has an element, can continue.
            if from > 0 && (def < self.levels[from - 1] || self.offsets[from - 1].is_empty()) {
                return Err(BadLevels::Malformed);
            }
            if from > 0 {
                self.elements[from - 1] += 1;
            }
            for list in from..lists {
                // A list begins in each element of the list around it.
                if list > 0 && def < self.levels[list - 1] {
                    break;
                }
                self.offsets[list].push(self.elements[list]);
                let is_null = def < self.levels[list] - 1;
                let is_masked = list == 0 && self.masks(is_null);
                if def >= self.levels[list] {
                    self.elements[list] += 1;
                } else if is_null && !is_masked && !self.fill {
                    return Err(BadLevels::Null { at });
                }
            }
            if def >= self.levels[lists - 1] {
                self.element(at, def, false, present)?;
            }
        }
        Ok(())
    }

    /// Adds a row to the mask; true where it is null, and the mask says so.
    fn masks(&mut self, is_null: bool) -> bool {
        self.mask.as_mut().is_some_and(|mask| {
            mask.push(is_null);
            is_null
        })
    }

    fn element(&self, at: usize, def: i16, is_masked: bool, present: &mut Vec<bool>) -> Result<(), BadLevels> {
        match def == self.max_def {
            true => present.push(true),
            false if def > self.max_def => return Err(BadLevels::Malformed),
            false if self.fill || is_masked => present.push(false),
            false => return Err(BadLevels::Null { at }),
        }
        Ok(())
    }

    /// The offsets, with the end of the last list, and the mask.
    pub(super) fn finish(mut self) -> (Vec<Vec<i64>>, Option<Vec<bool>>) {
        self.offsets.iter_mut().zip(&self.elements).for_each(|(offsets, &elements)| offsets.push(elements));
        (self.offsets, self.mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(levels: &[i16], max_def: i16, fill: bool, pairs: &[(i16, i16)]) -> Result<Vec<Vec<i64>>, BadLevels> {
        finished(levels, max_def, &if fill { OnNull::Fill([].into()) } else { OnNull::Error }, pairs).map(|it| it.0)
    }

    type Finished = (Vec<Vec<i64>>, Option<Vec<bool>>);

    fn finished(levels: &[i16], max_def: i16, nulls: &OnNull, pairs: &[(i16, i16)]) -> Result<Finished, BadLevels> {
        let mut lists = Lists::new(levels.into(), max_def, nulls);
        let (reps, defs): (Vec<i16>, Vec<i16>) = pairs.iter().copied().unzip();
        lists.push(&reps, &defs, &mut Vec::new())?;
        Ok(lists.finish())
    }

    #[test]
    fn lists_of_lists() {
        // Everything optional: [[1, 2], [], [3]], [], [[4]] with list levels 2 and 4, values at 5.
        let pairs = [(0, 5), (2, 5), (1, 3), (1, 5), (0, 1), (0, 5)];
        let offsets = lists(&[2, 4], 5, false, &pairs).unwrap();
        assert_eq!(offsets, [vec![0, 3, 3, 4], vec![0, 2, 2, 3, 4]]);
        // A missing outer list, inner list and value.
        for null in [(0, 0), (0, 2), (0, 4)] {
            assert_eq!(lists(&[2, 4], 5, false, &[(0, 5), null]), Err(BadLevels::Null { at: 1 }));
            lists(&[2, 4], 5, true, &[null]).unwrap();
        }
        assert_eq!(lists(&[2, 4], 5, true, &[(0, 0), (0, 2)]).unwrap(), [vec![0, 0, 1], vec![0, 0]]);
    }

    #[test]
    fn rows_are_masked_and_nulls_within_lists_are_not() {
        let masked = |levels: &[i16], max_def, pairs: &[(i16, i16)]| finished(levels, max_def, &OnNull::Mask, pairs);
        // As above: [[1]], a missing row, [], [[]].
        let (offsets, mask) = masked(&[2, 4], 5, &[(0, 5), (0, 0), (0, 1), (0, 3)]).unwrap();
        assert_eq!((offsets, mask), (vec![vec![0, 1, 1, 1, 2], vec![0, 1, 1]], Some(vec![false, true, false, false])));
        // A missing inner list and value.
        for null in [(0, 2), (0, 4)] {
            assert_eq!(masked(&[2, 4], 5, &[(0, 5), null]), Err(BadLevels::Null { at: 1 }));
        }
        assert_eq!(masked(&[], 2, &[(0, 2), (0, 1), (0, 0)]).unwrap().1, Some(vec![false, true, true]));
    }

    #[test]
    fn contradictions_are_errors() {
        for bad in [&[(1, 3)][..], &[(0, 1), (1, 0)], &[(0, 3), (2, 3)], &[(0, 4)], &[(-1, 3)]] {
            assert_eq!(lists(&[2], 3, false, bad), Err(BadLevels::Malformed), "{bad:?}");
        }
        let mut flat = Lists::new([].into(), 1, &OnNull::Fill([].into()));
        let mut present = Vec::new();
        assert_eq!(flat.push(&[], &[1, 0, 2], &mut present), Err(BadLevels::Malformed));
        assert_eq!(present, [true, false]);
    }
}
