//! The defaults of transforms with torchvision's names.

use std::fmt::Debug;

use anyhow::{Context, Result, bail};
use overdrive_dataload::{
    AugMix, ColorJitter, CutMix, ErasingValue, GaussianBlur, Interpolation, MixUp, PaddingMode, RandAugment,
    RandomAffine, RandomCrop, RandomErasing, RandomHorizontalFlip, RandomResizedCrop, RandomRotation,
    RandomVerticalFlip, Resize, SanitizeBoundingBoxes, TrivialAugmentWide,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::Tensor;

use crate::record::{Found, Given};

/// Sets each option of torchvision's to its default there, which must leave our transform as it is.
pub fn augment_defaults(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (transform, option, default) in given.value::<Vec<(String, String, Value)>>("defaults")? {
        let name = format!("{transform}.{option}");
        let [ours, torchvision] = with_default(&transform, &option, &Default(default)).context(name.clone())?;
        if ours != torchvision {
            println!("  {name}: {ours} by default, {torchvision} as in torchvision");
        }
        found.insert(name, &Tensor::from(ours == torchvision));
    }
    Ok(found)
}

/// An option's default in torchvision.
struct Default(Value);

impl Default {
    fn get<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.0).with_context(|| format!("the default {} has an unexpected type", self.0))
    }

    /// A range, or the one that stands for `None`.
    fn range(&self, none: f64) -> Result<std::ops::RangeInclusive<f64>> {
        let [start, end] = self.get::<Option<[f64; 2]>>()?.unwrap_or([none; 2]);
        Ok(start..=end)
    }

    /// The colour outside of an image: one level for all channels, or `None` for black.
    fn fill(&self) -> Result<[u8; 3]> {
        Ok([self.get::<Option<u8>>()?.unwrap_or(0); 3])
    }

    fn interpolation(&self) -> Result<Interpolation> {
        Ok(match self.get::<String>()?.as_str() {
            "nearest" => Interpolation::Nearest,
            "bilinear" => Interpolation::Bilinear,
            "bicubic" => Interpolation::Bicubic,
            other => bail!("no interpolation {other}"),
        })
    }

    fn padding_mode(&self) -> Result<PaddingMode> {
        Ok(match self.get::<String>()?.as_str() {
            "constant" => PaddingMode::Constant,
            "edge" => PaddingMode::Edge,
            "reflect" => PaddingMode::Reflect,
            "symmetric" => PaddingMode::Symmetric,
            other => bail!("no padding mode {other}"),
        })
    }
}

/// A transform as it is made, and with one option set, both with all their options.
fn with_default(transform: &str, option: &str, default: &Default) -> Result<[String; 2]> {
    fn both(new: impl Debug, set: impl Debug) -> Result<[String; 2]> {
        Ok([format!("{new:?}"), format!("{set:?}")])
    }
    macro_rules! compare {
        ($new:expr, $($name:literal => $set:expr),* $(,)?) => {
            match option {
                $($name => both($new, $set),)*
                _ => bail!("no option of this name here"),
            }
        };
    }
    match transform {
        "AugMix" => compare!(AugMix::new(),
            "severity" => AugMix::new().severity(default.get()?)?,
            "mixture_width" => AugMix::new().mixture_width(default.get()?),
            // Negative: a random number.
            "chain_depth" => match default.get::<i64>()? {
                depth if depth < 0 => AugMix::new(),
                depth => AugMix::new().chain_depth(depth as usize),
            },
            "alpha" => AugMix::new().alpha(default.get()?)?,
            "all_ops" => AugMix::new().all_ops(default.get()?),
            "interpolation" => AugMix::new().interpolation(default.interpolation()?)?,
            "fill" => AugMix::new().fill(default.fill()?),
        ),
        "ColorJitter" => compare!(ColorJitter::new(),
            "brightness" => ColorJitter::new().brightness(default.range(1.0)?)?,
            "contrast" => ColorJitter::new().contrast(default.range(1.0)?)?,
            "saturation" => ColorJitter::new().saturation(default.range(1.0)?)?,
            "hue" => ColorJitter::new().hue(default.range(0.0)?)?,
        ),
        "CutMix" => compare!(CutMix::new(2)?, "alpha" => CutMix::new(2)?.alpha(default.get()?)?),
        "MixUp" => compare!(MixUp::new(2)?, "alpha" => MixUp::new(2)?.alpha(default.get()?)?),
        "GaussianBlur" => {
            let new = GaussianBlur::new([3, 3])?;
            compare!(&new, "sigma" => new.clone().sigma(default.range(0.0)?)?)
        }
        "RandAugment" => compare!(RandAugment::new(),
            "num_ops" => RandAugment::new().num_ops(default.get()?),
            "magnitude" => RandAugment::new().magnitude(default.get()?)?,
            "num_magnitude_bins" => RandAugment::new().num_magnitude_bins(default.get()?)?,
            "interpolation" => RandAugment::new().interpolation(default.interpolation()?)?,
            "fill" => RandAugment::new().fill(default.fill()?),
        ),
        "RandomAffine" => {
            let new = RandomAffine::new(-1.0..=1.0)?;
            compare!(&new,
                "translate" => new.clone().translate(default.get::<Option<_>>()?.unwrap_or([0.0; 2]))?,
                "scale" => new.clone().scale(default.range(1.0)?)?,
                // One range is that of vertical lines.
                "shear" => new.clone().shear(default.range(0.0)?, 0.0..=0.0)?,
                "interpolation" => new.clone().interpolation(default.interpolation()?)?,
                "fill" => new.clone().fill(default.fill()?),
            )
        }
        "RandomCrop" => compare!(RandomCrop::new(8),
            "padding" => RandomCrop::new(8).padding(default.get::<Option<usize>>()?.unwrap_or(0)),
            "pad_if_needed" => RandomCrop::new(8).pad_if_needed(default.get()?),
            "fill" => RandomCrop::new(8).fill(default.fill()?),
            "padding_mode" => RandomCrop::new(8).padding_mode(default.padding_mode()?),
        ),
        "RandomErasing" => compare!(RandomErasing::new(),
            "p" => RandomErasing::new().p(default.get()?)?,
            "scale" => RandomErasing::new().scale(default.range(0.0)?)?,
            "ratio" => RandomErasing::new().ratio(default.range(0.0)?)?,
            "value" => RandomErasing::new().value(ErasingValue::Constant([default.get()?; 3])),
        ),
        "RandomHorizontalFlip" => compare!(RandomHorizontalFlip::default(),
            "p" => RandomHorizontalFlip::new(default.get()?)?,
        ),
        "RandomVerticalFlip" => compare!(RandomVerticalFlip::default(),
            "p" => RandomVerticalFlip::new(default.get()?)?,
        ),
        "RandomResizedCrop" => compare!(RandomResizedCrop::new(8),
            "scale" => RandomResizedCrop::new(8).scale(default.range(0.0)?)?,
            "ratio" => RandomResizedCrop::new(8).ratio(default.range(0.0)?)?,
            "interpolation" => RandomResizedCrop::new(8).interpolation(default.interpolation()?),
            "antialias" => RandomResizedCrop::new(8).antialias(default.get()?),
        ),
        "RandomRotation" => {
            let new = RandomRotation::new(-1.0..=1.0)?;
            compare!(&new,
                "interpolation" => new.clone().interpolation(default.interpolation()?)?,
                "fill" => new.clone().fill(default.fill()?),
            )
        }
        "Resize" => compare!(Resize::new(8),
            "interpolation" => Resize::new(8).interpolation(default.interpolation()?),
            "antialias" => Resize::new(8).antialias(default.get()?),
        ),
        "SanitizeBoundingBoxes" => compare!(SanitizeBoundingBoxes::new(),
            "min_size" => SanitizeBoundingBoxes::new().min_size(default.get()?)?,
            "min_area" => SanitizeBoundingBoxes::new().min_area(default.get()?)?,
        ),
        "TrivialAugmentWide" => compare!(TrivialAugmentWide::new(),
            "num_magnitude_bins" => TrivialAugmentWide::new().num_magnitude_bins(default.get()?)?,
            "interpolation" => TrivialAugmentWide::new().interpolation(default.interpolation()?)?,
            "fill" => TrivialAugmentWide::new().fill(default.fill()?),
        ),
        _ => bail!("no transform of this name here"),
    }
}
