//! Crops with borders, erasing, blurring and the operations of RandAugment, compared with torchvision's.

use anyhow::{Result, bail};
use overdrive_dataload::{
    AugMix, Canvas, DataError, Draws, GaussianBlur, ImagePipeline, Interpolation, Operation, PaddingMode, RandAugment,
    RandomCrop, RandomErasing, Transform, TrivialAugmentWide,
};
use tch::Tensor;

use super::dataload::{image, tensor};
use crate::record::{Found, Given};

fn operation(name: &str) -> Result<Operation> {
    Ok(match name {
        "Identity" => Operation::Identity,
        "ShearX" => Operation::ShearX,
        "ShearY" => Operation::ShearY,
        "TranslateX" => Operation::TranslateX,
        "TranslateY" => Operation::TranslateY,
        "Rotate" => Operation::Rotate,
        "Brightness" => Operation::Brightness,
        "Color" => Operation::Color,
        "Contrast" => Operation::Contrast,
        "Sharpness" => Operation::Sharpness,
        "Posterize" => Operation::Posterize,
        "Solarize" => Operation::Solarize,
        "AutoContrast" => Operation::AutoContrast,
        "Equalize" => Operation::Equalize,
        "Invert" => Operation::Invert,
        _ => bail!("no operation {name}"),
    })
}

pub fn augment_magnitudes(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let names = given.value::<Vec<String>>("names")?;
    let operations = names.iter().map(|name| operation(name)).collect::<Result<Vec<_>>>()?;
    let table = |bins: usize, magnitude: &dyn Fn(Operation, usize) -> Result<f64, DataError>| -> Result<Tensor> {
        let all = operations.iter().flat_map(|&operation| (0..bins).map(move |level| magnitude(operation, level)));
        let all = Tensor::from_slice(&all.collect::<Result<Vec<_>, _>>()?);
        Ok(all.view([operations.len() as i64, bins as i64]))
    };
    for bins in [31, 10, 2] {
        for (s, size) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
            let magnitude = |operation, level| {
                let augment = RandAugment::new().magnitude(0)?.num_magnitude_bins(bins)?.magnitude(level)?;
                Ok(augment.magnitude_of(operation, size))
            };
            found.insert(format!("rand.{s}.{bins}"), &table(bins, &magnitude)?);
        }
        let wide = TrivialAugmentWide::new().num_magnitude_bins(bins)?;
        found
            .insert(format!("wide.{bins}"), &table(bins, &|operation, level| Ok(wide.magnitude_of(operation, level)))?);
    }
    let names = given.value::<Vec<String>>("mix names")?;
    for (s, size) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
        let mut levels = Vec::new();
        for name in &names {
            let operation = operation(name)?;
            levels.extend((0..10).map(|level| AugMix::new().magnitude_of(operation, level, size)));
        }
        found.insert(format!("mix.{s}"), &Tensor::from_slice(&levels).view([names.len() as i64, 10]));
    }
    Ok(found)
}

/// One operation with a given magnitude.
struct Only(Operation, f64, Interpolation, [u8; 3]);

impl Transform for Only {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        self.0.apply(canvas, self.1, self.2, self.3)
    }
}

pub fn augment_operations(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (image, fill) = (image(given)?, given.value("fill")?);
    for (job, name, magnitude, mode) in given.value::<Vec<(String, String, f64, String)>>("jobs")? {
        let interpolation = if mode == "bilinear" { Interpolation::Bilinear } else { Interpolation::Nearest };
        let only = Only(operation(&name)?, magnitude, interpolation, fill);
        found.insert(job, &tensor(&ImagePipeline::new(0).then(only).image(&image, 0, 0)?));
    }
    Ok(found)
}

/// A mixture with given operations and shares.
struct Mixture(f64, Vec<(f64, Vec<(Operation, f64)>)>);

impl Transform for Mixture {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        AugMix::new().with_chains(canvas, self.0, &self.1)
    }
}

pub fn augment_mixture(given: &Given<'_>) -> Result<Found> {
    type Chains = Vec<(f64, Vec<(String, f64)>)>;
    let mut found = Found::default();
    let image = image(given)?;
    for (name, changed, chains) in given.value::<Vec<(String, f64, Chains)>>("mixtures")? {
        let operations = |chain: Vec<(String, f64)>| {
            chain.into_iter().map(|(name, magnitude)| Ok((operation(&name)?, magnitude))).collect::<Result<Vec<_>>>()
        };
        let chains = chains.into_iter().map(|(share, chain)| Ok((share, operations(chain)?))).collect::<Result<_>>()?;
        let mixture = Mixture(changed, chains);
        found.insert(name, &tensor(&ImagePipeline::new(0).then(mixture).image(&image, 0, 0)?));
    }
    Ok(found)
}

pub fn augment_padding(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (image, fill) = (image(given)?, given.value("fill")?);
    let modes = [
        ("constant", PaddingMode::Constant),
        ("edge", PaddingMode::Edge),
        ("reflect", PaddingMode::Reflect),
        ("symmetric", PaddingMode::Symmetric),
    ];
    for (p, padding) in given.value::<Vec<[usize; 4]>>("paddings")?.into_iter().enumerate() {
        let [left, top, right, bottom] = padding;
        // A crop of the whole image.
        let size = [image.height() + top + bottom, image.width() + left + right];
        for (name, mode) in modes {
            let crop = RandomCrop::new(size).padding(padding).padding_mode(mode).fill(fill);
            found.insert(format!("{name}.{p}"), &tensor(&ImagePipeline::new(0).then(crop).image(&image, 0, 0)?));
        }
    }
    Ok(found)
}

pub fn augment_blur(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let image = image(given)?;
    for (k, (kernel_size, sigma)) in given.value::<Vec<([usize; 2], f64)>>("kernels")?.into_iter().enumerate() {
        let blur = GaussianBlur::new(kernel_size)?.sigma(sigma..=sigma)?;
        found.insert(k.to_string(), &tensor(&ImagePipeline::new(0).then(blur).image(&image, 0, 0)?));
    }
    Ok(found)
}

pub fn augment_erasing(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let draws = given.value::<u64>("draws")?;
    for (s, [height, width]) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
        let region = |draw| RandomErasing::new().region(height, width, &mut Draws::new(s as u64, 0, draw, 0));
        let regions: Vec<[f64; 4]> = (0..draws)
            .filter_map(region)
            .map(|region| [region.top, region.left, region.height, region.width].map(|pixels| pixels as f64))
            .collect();
        for (column, name) in ["top", "left", "height", "width"].into_iter().enumerate() {
            let mean = regions.iter().map(|region| region[column]).sum::<f64>() / regions.len() as f64;
            found.insert(format!("{s}.{name}"), &Tensor::from(mean));
        }
    }
    Ok(found)
}
