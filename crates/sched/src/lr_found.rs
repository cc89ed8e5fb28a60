//! What a learning rate finder has found.

use crate::plot::plot_sweep;

/// The points that Lightning leaves out at the start and at the end of a sweep.
const SKIPPED: (usize, usize) = (10, 1);

/// Learning rates in rising order, and the smoothed loss at each.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSweep {
    lrs: Vec<f64>,
    losses: Vec<f64>,
    diverged: bool,
}

impl LrSweep {
    pub(crate) fn new(lrs: Vec<f64>, losses: Vec<f64>, diverged: bool) -> Self {
        Self { lrs, losses, diverged }
    }

    /// The learning rates that were tried.
    pub fn lrs(&self) -> &[f64] {
        &self.lrs
    }

    /// The smoothed loss at each rate.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Whether the sweep stopped early because the loss diverged.
    pub fn diverged(&self) -> bool {
        self.diverged
    }

    /// The rate at which the loss falls fastest from step to step, without the first 10 points and the last one; `None`
    /// if fewer than 2 points are left.
    ///
    /// # Source
    /// `suggestion` of Lightning's `lr_find` (up to 2.5; later versions divide by the rates' differences, which makes
    /// the noise at the smallest rates decide)
    pub fn suggestion(&self) -> Option<f64> {
        self.suggestion_within(SKIPPED.0, SKIPPED.1)
    }

    /// The same with other numbers of points left out at the start and at the end.
    pub fn suggestion_within(&self, skip_begin: usize, skip_end: usize) -> Option<f64> {
        self.steepest(skip_begin, skip_end).map(|index| self.lrs[index])
    }

    fn steepest(&self, skip_begin: usize, skip_end: usize) -> Option<usize> {
        let end = self.losses.len().saturating_sub(skip_end);
        let losses = self.losses.get(skip_begin..end).filter(|losses| losses.len() >= 2)?;
        let last = losses.len() - 1;
        let slope = |at: usize| match at {
            0 => losses[1] - losses[0],
            at if at == last => losses[last] - losses[last - 1],
            at => (losses[at + 1] - losses[at - 1]) / 2.0,
        };
        (0..=last).min_by(|&one, &other| slope(one).total_cmp(&slope(other))).map(|at| skip_begin + at)
    }

    /// The smoothed loss over the rates as SVG, with a mark at the suggestion.
    pub fn plot(&self, title: &str) -> String {
        let labels: Vec<_> = self.lrs.iter().map(|lr| format!("{lr:.1e}")).collect();
        let best = self.steepest(SKIPPED.0, SKIPPED.1);
        let what = match best {
            Some(best) => format!("smoothed loss by learning rate, falling fastest at {}", labels[best]),
            None => "smoothed loss by learning rate".to_owned(),
        };
        plot_sweep(title, &what, &labels, &self.losses, best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(losses: &[f64]) -> LrSweep {
        LrSweep::new((0..losses.len()).map(|at| 10f64.powi(at as i32 - 8)).collect(), losses.to_vec(), false)
    }

    #[test]
    fn the_suggestion_is_where_the_loss_falls_fastest() {
        let found = sweep(&[9.0, 5.0, 5.0, 4.9, 4.0, 3.5, 3.4, 9.0, 1.0]);
        assert_eq!(found.suggestion_within(1, 1), Some(1e-4));
        // Without leaving points out, the last one is the steepest.
        assert_eq!(found.suggestion_within(0, 0), Some(1.0));
        assert_eq!(found.suggestion(), None);
        assert_eq!((found.suggestion_within(7, 1), found.suggestion_within(20, 20)), (None, None));
    }

    #[test]
    fn the_picture_marks_the_suggestion() {
        let mut losses = vec![2.0; 30];
        losses[20..].fill(1.0);
        let svg = sweep(&losses).plot("Adam");
        assert_eq!(svg.matches("class=\"line").count(), 2);
        assert!(svg.contains("falling fastest at 1.0e11") && svg.contains(">1.0e-8<"), "{svg}");
        assert_eq!(sweep(&[1.0]).plot("Adam").matches("class=\"line").count(), 1);
        assert!(!sweep(&[]).plot("Adam").contains("NaN"));
    }
}
