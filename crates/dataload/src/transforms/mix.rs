//! MixUp and CutMix, on a whole batch.

use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use crate::{DataError, Draws, Region};

static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// Mixes every image and label of a batch with those before it; the first with the last.
///
/// # Source
/// `torchvision.transforms.v2.MixUp`; Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018).
#[derive(Clone, Copy, Debug)]
#[doc(alias = "mixup")]
pub struct MixUp {
    mixing: Mixing,
}

/// Replaces a rectangle in every image of a batch by the same rectangle of the image before it (the last for the
/// first), and mixes the labels by area.
///
/// # Source
/// `torchvision.transforms.v2.CutMix`; Yun et al., "CutMix" (2019).
#[derive(Clone, Copy, Debug)]
pub struct CutMix {
    mixing: Mixing,
}

#[derive(Clone, Copy, Debug)]
struct Mixing {
    num_classes: i64,
    alpha: f64,
}

impl MixUp {
    /// Mixes images of this many classes.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for fewer than 1 class.
    pub fn new(num_classes: i64) -> Result<Self, DataError> {
        Ok(Self { mixing: Mixing::new(num_classes)? })
    }

    /// The share of the image itself is drawn from the beta distribution with parameters (`alpha`, `alpha`); 1 unless
    /// set, which makes every share as likely.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an `alpha` that is not above 0 and finite.
    pub fn alpha(self, alpha: f64) -> Result<Self, DataError> {
        Ok(Self { mixing: self.mixing.alpha(alpha)? })
    }

    /// Mixes a batch; `draws` are the batch's random numbers.
    ///
    /// # Shapes
    /// Images `[N, C, H, W]` of a floating-point kind and int64 labels `[N]` give images of the same shape and float32
    /// `[N, num_classes]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for images of integers; [`DataError::Tensor`].
    pub fn apply(&self, images: &Tensor, labels: &Tensor, draws: &mut Draws) -> Result<(Tensor, Tensor), DataError> {
        self.with_share(images, labels, draws.beta(self.mixing.alpha))
    }

    /// The same with a given share for the image itself; the image before it gets the rest.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn with_share(&self, images: &Tensor, labels: &Tensor, share: f64) -> Result<(Tensor, Tensor), DataError> {
        if !images.is_floating_point() {
            return Err(DataError::option("images", "a floating-point kind", format!("{:?}", images.kind())));
        }
        Ok((mix(images, share)?, self.mixing.labels(labels, share)?))
    }
}

impl CutMix {
    /// Mixes images of this many classes.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for fewer than 1 class.
    pub fn new(num_classes: i64) -> Result<Self, DataError> {
        Ok(Self { mixing: Mixing::new(num_classes)? })
    }

    /// The share of the area that an image keeps, before the rectangle is clipped at the edges, is drawn from the beta
    /// distribution with parameters (`alpha`, `alpha`); 1 unless set, which makes every share as likely.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an `alpha` that is not above 0 and finite.
    pub fn alpha(self, alpha: f64) -> Result<Self, DataError> {
        Ok(Self { mixing: self.mixing.alpha(alpha)? })
    }

    /// Mixes a batch; `draws` are the batch's random numbers.
    ///
    /// # Shapes
    /// Images `[N, C, H, W]` of any kind and int64 labels `[N]` give images of the same shape and kind and float32
    /// `[N, num_classes]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for images of another shape; [`DataError::Tensor`].
    pub fn apply(&self, images: &Tensor, labels: &Tensor, draws: &mut Draws) -> Result<(Tensor, Tensor), DataError> {
        let (height, width) = sides(images)?;
        let half = 0.5 * (1.0 - draws.beta(self.mixing.alpha)).sqrt();
        let (x, y) = (draws.below(width), draws.below(height));
        let around = |middle: usize, side: usize| {
            let reach = (half * side as f64) as usize;
            let start = middle.saturating_sub(reach);
            (start, (middle + reach).min(side) - start)
        };
        let ((left, width), (top, height)) = (around(x, width), around(y, height));
        self.with_region(images, labels, Region { top, left, height, width })
    }

    /// The same with a given rectangle.
    ///
    /// # Errors
    /// As [`apply`](Self::apply), and for a region that reaches beyond the images.
    pub fn with_region(&self, images: &Tensor, labels: &Tensor, region: Region) -> Result<(Tensor, Tensor), DataError> {
        let (height, width) = sides(images)?;
        let (area, whole) = ((region.height * region.width) as f64, (height * width) as f64);
        if area == 0.0 {
            return Ok((copy(images)?, self.mixing.labels(labels, 1.0)?));
        }
        if !region.fits(height, width) {
            let expected = format!("a region within {height} x {width} pixels");
            return Err(DataError::option("region", expected, format!("{region:?}")));
        }
        let mixed = copy(images)?;
        let part = |images: &Tensor| {
            let rows = images.f_narrow(-2, region.top as i64, region.height as i64)?;
            rows.f_narrow(-1, region.left as i64, region.width as i64)
        };
        part(&mixed)?.f_copy_(&part(&images.f_roll([1], [0])?)?)?;
        Ok((mixed, self.mixing.labels(labels, 1.0 - area / whole)?))
    }
}

impl Mixing {
    fn new(num_classes: i64) -> Result<Self, DataError> {
        if num_classes < 1 {
            return Err(DataError::option("num_classes", "at least 1", num_classes));
        }
        Ok(Self { num_classes, alpha: 1.0 })
    }

    fn alpha(self, alpha: f64) -> Result<Self, DataError> {
        if !(alpha > 0.0 && alpha.is_finite()) {
            return Err(DataError::option("alpha", "a finite number above 0", alpha));
        }
        Ok(Self { alpha, ..self })
    }

    fn labels(&self, labels: &Tensor, share: f64) -> Result<Tensor, DataError> {
        let classes = Tensor::f_arange(self.num_classes, (Kind::Int64, labels.device()))?;
        let one_hot = labels.f_unsqueeze(-1)?.f_eq_tensor(&classes)?.f_to_kind(Kind::Float)?;
        mix(&one_hot, share)
    }
}

/// Mixes `share` of each row with `1 - share` of the row before it; the first row is mixed with the last.
fn mix(rows: &Tensor, share: f64) -> Result<Tensor, DataError> {
    let times = |rows: &Tensor, share| MUL.tensor(&[Arg::Tensor(rows), Arg::Double(share)]).map_err(DataError::other);
    Ok(times(&rows.f_roll([1], [0])?, 1.0 - share)?.f_add_(&times(rows, share)?)?)
}

fn copy(images: &Tensor) -> Result<Tensor, DataError> {
    let mut copy = images.f_empty_like()?;
    copy.f_copy_(images)?;
    Ok(copy)
}

fn sides(images: &Tensor) -> Result<(usize, usize), DataError> {
    match images.size()[..] {
        [_, _, height, width] if height > 0 && width > 0 => Ok((height as usize, width as usize)),
        ref other => Err(DataError::option("images", "the shape [N, C, H, W]", format!("{other:?}"))),
    }
}
