//! A line search for a step length that satisfies the strong Wolfe conditions.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use super::number::Number;

/// Sufficient decrease (Armijo): how far the loss has to fall, as a fraction of what the slope predicts.
const C1: f64 = 1e-4;
/// Curvature condition: the largest slope at the end, as a fraction of the slope at the start.
const C2: f64 = 0.9;

/// A point on the line.
#[derive(Debug)]
pub(super) struct Point {
    /// Its distance from the start, in multiples of the direction.
    pub t: Number,
    pub loss: Number,
    pub grad: Tensor,
    /// The gradient along the direction.
    pub slope: Number,
}

impl Point {
    fn share(&self) -> Self {
        Self { grad: self.grad.shallow_clone(), ..*self }
    }

    /// Whether the loss did not fall enough for this step length.
    fn is_high(&self, start: &Self) -> bool {
        self.loss > start.loss + C1 * self.t * start.slope
    }

    fn is_flat(&self, start: &Self) -> bool {
        self.slope.abs() <= -C2 * start.slope
    }
}

/// The largest absolute value.
pub(super) fn largest(tensor: &Tensor) -> Result<Number, TorchError> {
    Number::read(&tensor.f_abs()?.f_max()?)
}

/// Searches from `start` along `direction`, first at `t`. Returns the best point, and how often it has evaluated.
///
/// # Source
/// `_strong_wolfe` of torch/optim/lbfgs.py, in the same order of operations. A loss of NaN, from which it would go on
/// to a step of NaN, counts as infinite here.
pub(super) fn strong_wolfe<E: From<OptimizerError>>(
    start: Point,
    t: Number,
    direction: &Tensor,
    (tolerance_change, max_evaluations): (f64, i64),
    mut evaluate: impl FnMut(Number) -> Result<Point, E>,
) -> Result<(Point, i64), E> {
    let length = largest(direction).map_err(OptimizerError::from)?;
    let (mut before, mut now, mut searched) = (start.share(), evaluate(t)?, 0);
    // A point that satisfies the conditions, or two around one.
    let mut bracket = loop {
        if searched >= max_evaluations {
            break [start.share(), now];
        }
        if now.is_high(&start) || (searched > 1 && now.loss >= before.loss) {
            break [before, now];
        }
        if now.is_flat(&start) {
            return Ok((now, searched + 1));
        }
        if now.slope >= 0.0 {
            break [before, now];
        }
        let bounds = (now.t + 0.01 * (now.t - before.t), now.t * 10.0);
        let next = interpolated(&before, &now, Some(bounds))?;
        before = std::mem::replace(&mut now, evaluate(next)?);
        searched += 1;
    };

    let order = |bracket: &[Point; 2]| if bracket[0].loss <= bracket[1].loss { (0, 1) } else { (1, 0) };
    let (mut low, mut high) = order(&bracket);
    let mut was_near_an_end = false;
    while searched < max_evaluations {
        let (first, last) = (bracket[0].t, bracket[1].t);
        if (last - first).abs() * length < tolerance_change {
            break;
        }
        let mut t = interpolated(&bracket[0], &bracket[1], None)?;
        // A point next to an end of the bracket makes no progress: not twice in a row.
        let (top, bottom) = (first.max(last), first.min(last));
        let margin = 0.1 * (top - bottom);
        let is_near_an_end = (top - t).min(t - bottom) < margin;
        let is_moved = is_near_an_end && (was_near_an_end || t >= top || t <= bottom);
        if is_moved {
            t = if (t - top).abs() < (t - bottom).abs() { top - margin } else { bottom + margin };
        }
        was_near_an_end = is_near_an_end && !is_moved;

        let now = evaluate(t)?;
        searched += 1;
        if now.is_high(&start) || now.loss >= bracket[low].loss {
            bracket[high] = now;
            (low, high) = order(&bracket);
            continue;
        }
        let is_done = now.is_flat(&start);
        if !is_done && now.slope * (bracket[high].t - bracket[low].t) >= 0.0 {
            bracket[high] = bracket[low].share();
        }
        bracket[low] = now;
        if is_done {
            break;
        }
    }
    let [first, second] = bracket;
    Ok((if low == 0 { first } else { second }, searched + 1))
}

/// The minimum of the cubic through two points with their slopes, within bounds; by default the points themselves.
fn interpolated(one: &Point, other: &Point, bounds: Option<(Number, Number)>) -> Result<Number, OptimizerError> {
    let ((x1, f1, g1), (x2, f2, g2)) = ((one.t, one.loss, one.slope), (other.t, other.loss, other.slope));
    let (lowest, highest) = bounds.unwrap_or(if x1 <= x2 { (x1, x2) } else { (x2, x1) });
    let d1 = g1 + g2 - 3.0 * (f1 - f2) / (x1 - x2);
    let square = d1 * d1 - g1 * g2;
    let d2 = square.sqrt()?;
    let minimum = if x1 <= x2 {
        x2 - (x2 - x1) * ((g2 + d2 - d1) / (g2 - g1 + 2.0 * d2))
    } else {
        x1 - (x1 - x2) * ((g1 + d2 - d1) / (g1 - g2 + 2.0 * d2))
    };
    // NaN also after an infinite loss.
    Ok(match minimum.value.is_nan() {
        true => (lowest + highest) / 2.0,
        false => minimum.max(lowest).min(highest),
    })
}
