//! Decoding and transforms, compared with Pillow's and torchvision's.

use std::path::Path;

use anyhow::{Context, Result};
use overdrive_dataload::{
    Canvas, CenterCrop, Collate, Color, ColorJitter, CutMix, DataError, Draws, EncodedImage, Image, ImagePipeline,
    Interpolation, MixUp, RandomHorizontalFlip, RandomVerticalFlip, Region, Resize, Transform, decode_image,
};
use tch::{Kind, Tensor};

use crate::record::{Found, Given};

/// A crop of a given region.
struct Crop(Region);

impl Transform for Crop {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        canvas.crop(self.0)
    }
}

fn bytes(given: &Given<'_>, name: &str) -> Result<Vec<u8>> {
    Ok(Vec::try_from(given.tensor(name)?.flatten(0, -1))?)
}

pub(super) fn tensor(image: &Image) -> Tensor {
    let [channels, height, width] = image.chw().map(|size| size as i64);
    Tensor::from_slice(image.data()).view([height, width, channels])
}

pub(super) fn image(given: &Given<'_>) -> Result<Image> {
    let size = given.tensor("image")?.size();
    Ok(Image::new(bytes(given, "image")?, size[0] as usize, size[1] as usize, 3)?)
}

pub fn dataload_jpeg(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for name in given.value::<Vec<String>>("names")? {
        found.insert(&name, &tensor(&decode_image(&bytes(given, &name)?, Color::Rgb, Path::new(&name))?));
    }
    Ok(found)
}

pub fn dataload_resized_crop(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let file: std::sync::Arc<[u8]> = bytes(given, "file")?.into();
    for (mode, interpolation) in [("bilinear", Interpolation::Bilinear), ("bicubic", Interpolation::Bicubic)] {
        for (r, [top, left, height, width]) in given.value::<Vec<[usize; 4]>>("regions")?.into_iter().enumerate() {
            for (s, size) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
                let resize = Resize::new(size).interpolation(interpolation);
                let pipeline = ImagePipeline::new(0).then(Crop(Region { top, left, height, width })).then(resize);
                let sample = EncodedImage::new(file.clone(), "file");
                let (batch, _) = pipeline.collate(vec![(sample, 0)])?;
                found.insert(format!("{mode}.{r}.{s}"), &batch.get(0).permute([1, 2, 0]));
            }
        }
    }
    Ok(found)
}

pub fn dataload_dct_scaling(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let file: std::sync::Arc<[u8]> = bytes(given, "file")?.into();
    for (r, [top, left, height, width]) in given.value::<Vec<[usize; 4]>>("regions")?.into_iter().enumerate() {
        for (s, size) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
            let region = Region { top, left, height, width };
            let pipeline = ImagePipeline::new(0).dct_scaling(true).then(Crop(region)).then(Resize::new(size));
            let sample = EncodedImage::new(file.clone(), "file");
            let (batch, _) = pipeline.collate(vec![(sample, 0)])?;
            found.insert(format!("{r}.{s}"), &batch.get(0).permute([1, 2, 0]));
        }
    }
    Ok(found)
}

pub fn dataload_exif(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for orientation in 1..=8 {
        let name = orientation.to_string();
        let pipeline = ImagePipeline::new(0).exif_orientation(true);
        let sample = EncodedImage::new(bytes(given, &name)?, &name);
        let (batch, _) = pipeline.collate(vec![(sample, 0)])?;
        found.insert(&name, &batch.get(0).permute([1, 2, 0]));
    }
    Ok(found)
}

pub fn dataload_evaluation(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let image = image(given)?;
    let run = |pipeline: ImagePipeline| Ok::<_, DataError>(tensor(&pipeline.image(&image, 0, 0)?));
    for side in given.value::<Vec<usize>>("sides")? {
        found.insert(format!("resize.{side}"), &run(ImagePipeline::new(0).then(Resize::shorter(side)))?);
        found.insert(format!("center.{side}"), &run(ImagePipeline::new(0).then(CenterCrop::new(side)))?);
        found.insert(format!("center.{side}.101"), &run(ImagePipeline::new(0).then(CenterCrop::new([side, 101])))?);
    }
    found.insert("hflip", &run(ImagePipeline::new(0).then(RandomHorizontalFlip::new(1.0)?))?);
    found.insert("vflip", &run(ImagePipeline::new(0).then(RandomVerticalFlip::new(1.0)?))?);
    Ok(found)
}

pub fn dataload_color_jitter(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let image = image(given)?;
    let mut run = |name: String, jitter: ColorJitter| -> Result<()> {
        found.insert(name, &tensor(&ImagePipeline::new(0).then(jitter).image(&image, 0, 0)?));
        Ok(())
    };
    for (i, factor) in given.value::<Vec<f64>>("factors")?.into_iter().enumerate() {
        run(format!("brightness.{i}"), ColorJitter::new().brightness(factor..=factor)?)?;
        run(format!("contrast.{i}"), ColorJitter::new().contrast(factor..=factor)?)?;
        run(format!("saturation.{i}"), ColorJitter::new().saturation(factor..=factor)?)?;
    }
    for (i, turn) in given.value::<Vec<f64>>("turns")?.into_iter().enumerate() {
        run(format!("hue.{i}"), ColorJitter::new().hue(turn..=turn)?)?;
    }
    Ok(found)
}

pub fn dataload_mix(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (images, labels) = (given.tensor("images")?, given.tensor("labels")?.to_kind(Kind::Int64));
    let mut put = |name: String, (images, labels): (Tensor, Tensor)| {
        found.insert(format!("{name}.labels"), &labels);
        found.insert(name, &images);
    };
    for (i, share) in given.value::<Vec<f64>>("shares")?.into_iter().enumerate() {
        put(format!("mixup.{i}"), MixUp::new(7)?.with_share(&images, &labels, share)?);
    }
    for (i, [left, top, right, bottom]) in given.value::<Vec<[usize; 4]>>("boxes")?.into_iter().enumerate() {
        let width = right.checked_sub(left).context("a box")?;
        let height = bottom.checked_sub(top).context("a box")?;
        let region = Region { top, left, height, width };
        put(format!("cutmix.{i}"), CutMix::new(7)?.with_region(&images, &labels, region)?);
    }
    Ok(found)
}
