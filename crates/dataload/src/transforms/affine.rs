//! Affine maps, as Pillow draws them.

use crate::targets::{Geometry, Map};
use crate::{Canvas, DataError, Interpolation, Size};

/// The map from a pixel of the result to its place in the image: `[a, b, c, d, e, f]` maps `(x, y)` to `(a x + b y + c,
/// d x + e y + f)`.
pub(crate) type Inverse = [f64; 6];

/// Moves pixels to the right and down.
pub(super) fn translation(x: f64, y: f64) -> Inverse {
    [1.0, 0.0, -x, 0.0, 1.0, -y]
}

/// Moves each pixel by its distance from the top times `x` to the left, and by its distance from the left times `y` up.
pub(super) fn shear(x: f64, y: f64) -> Inverse {
    // The detour over the angles costs the last bits, as in torchvision.
    let [x, y] = [x, y].map(|slope| slope.atan().to_degrees().to_radians());
    [1.0, x.tan(), 0.0, y.sin() / y.cos(), 1.0, 0.0]
}

/// Turns counter-clockwise around the middle by an angle in degrees.
pub(super) fn rotation(degrees: f64, height: usize, width: usize) -> Inverse {
    let angle = -degrees.rem_euclid(360.0).to_radians();
    // So that right angles are exact.
    let [cos, sin] = [angle.cos(), angle.sin()].map(|number| (number * 1e15).round() / 1e15);
    let (x, y) = (width as f64 / 2.0, height as f64 / 2.0);
    [cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y]
}

/// Draws the image through the inverse of a map, within its size; `fill` is the colour where it has no pixel.
pub(super) fn transform(
    canvas: &mut Canvas<'_>,
    inverse: Inverse,
    interpolation: Interpolation,
    fill: [u8; 3],
) -> Result<(), DataError> {
    let (height, width) = (canvas.height(), canvas.width());
    let [red, green, blue] = fill;
    let (size, fill) = (Size { height, width }, [red, green, blue, 0]);
    if interpolation != Interpolation::Bicubic {
        canvas.change_target(&Geometry::Map { map: Map::new(inverse), size })?;
    }
    match interpolation {
        Interpolation::Nearest => canvas.redraw(size, |from, to| nearest(from, to, [height, width], inverse, fill)),
        Interpolation::Bilinear => canvas.redraw(size, |from, to| {
            let [a, b, c, d, e, f] = inverse;
            for (row, to) in to.chunks_exact_mut(width).enumerate() {
                for (column, pixel) in to.iter_mut().enumerate() {
                    let (x, y) = (column as f64 + 0.5, row as f64 + 0.5);
                    let (x, y) = (a * x + b * y + c, d * x + e * y + f);
                    let inside = (0.0..width as f64).contains(&x) && (0.0..height as f64).contains(&y);
                    *pixel = if inside { bilinear(from, [height, width], x - 0.5, y - 0.5) } else { fill };
                }
            }
        }),
        Interpolation::Bicubic => {
            Err(DataError::option("interpolation", "Nearest or Bilinear, for a map of the plane", "Bicubic"))
        }
    }
}

/// The nearest value at each place of the result; `fill` where there is none.
pub(crate) fn nearest<T: Copy>(from: &[T], to: &mut [T], [height, width]: [usize; 2], inverse: Inverse, fill: T) {
    // 16.16 fixed point; wider, and saturating, so that no size and no map overflows.
    let fixed = |number: f64| (number * 65536.0 + 0.5).floor() as i64;
    let [a, b, c, d, e, f] = inverse;
    let steps = [a, b, d, e].map(fixed);
    let mut start = [fixed(c + a * 0.5 + b * 0.5), fixed(f + d * 0.5 + e * 0.5)];
    for row in to.chunks_exact_mut(width.max(1)) {
        let [mut x, mut y] = start;
        for value in row {
            let (column, row) = (x >> 16, y >> 16);
            let inside = (0..width as i64).contains(&column) && (0..height as i64).contains(&row);
            *value = if inside { from[row as usize * width + column as usize] } else { fill };
            (x, y) = (x.saturating_add(steps[0]), y.saturating_add(steps[2]));
        }
        start = [start[0].saturating_add(steps[1]), start[1].saturating_add(steps[3])];
    }
}

/// The map of `torchvision.transforms.functional.affine`: `degrees` clockwise around `center`, in x and y, then
/// `translate` to the right and down. `shear` is in degrees.
pub(super) fn affine(center: [f64; 2], degrees: f64, translate: [f64; 2], scale: f64, shear: [f64; 2]) -> Inverse {
    let turn = degrees.to_radians();
    let [shear_x, shear_y] = shear.map(f64::to_radians);
    let [x, y] = center;
    let (to_x, to_y) = (x + translate[0], y + translate[1]);
    let a = (turn - shear_y).cos() / shear_y.cos();
    let b = -(a * shear_x.tan() + turn.sin());
    let c = (turn - shear_y).sin() / shear_y.cos();
    let d = turn.cos() - c * shear_x.tan();
    let [a, b, d, e] = [d / scale, -b / scale, -c / scale, a / scale];
    [a, b, x - a * to_x - b * to_y, d, e, y - d * to_x - e * to_y]
}

/// The value between four pixels, rounded down.
fn bilinear(from: &[[u8; 4]], [height, width]: [usize; 2], x: f64, y: f64) -> [u8; 4] {
    let (left, top) = (x.floor(), y.floor());
    let within = |place: f64, len: usize| (place.max(0.0) as usize).min(len - 1);
    let columns = [within(left, width), within(left + 1.0, width)];
    let rows = [within(top, height), within(top + 1.0, height)];
    let blend = |one: f64, other: f64, share: f64| one + (other - one) * share;
    std::array::from_fn(|channel| {
        let [upper, lower] = rows.map(|row| {
            let [one, other] = columns.map(|column| f64::from(from[row * width + column][channel]));
            blend(one, other, x - left)
        });
        blend(upper, lower, y - top) as u8
    })
}
