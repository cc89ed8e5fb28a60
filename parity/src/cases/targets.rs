//! Boxes, masks and key points that change with their image, compared with torchvision's.

use anyhow::{Result, bail};
use overdrive_dataload::{
    BoundingBoxFormat, BoundingBoxes, Canvas, CenterCrop, ClampBoundingBoxes, ClampKeyPoints, DataError, Draws, Image,
    ImagePipeline, Interpolation, KeyPoints, Mask, Operation, PerBox, RandomAffine, RandomCrop, RandomHorizontalFlip,
    RandomRotation, RandomVerticalFlip, Region, Resize, SanitizeBoundingBoxes, SanitizeKeyPoints, Target, Transform,
};
use tch::{Kind, Tensor};

use super::dataload;
use crate::record::{Found, Given};

const HEIGHT: usize = 50;
const WIDTH: usize = 61;
const FORMATS: [(&str, BoundingBoxFormat); 3] =
    [("XYXY", BoundingBoxFormat::Xyxy), ("XYWH", BoundingBoxFormat::Xywh), ("CXCYWH", BoundingBoxFormat::Cxcywh)];

fn numbers<const N: usize>(given: &Given<'_>, name: &str) -> Result<Vec<[f32; N]>> {
    let all = Vec::<f32>::try_from(given.tensor(name)?.view(-1))?;
    Ok(all.as_chunks().0.to_vec())
}

fn boxes(given: &Given<'_>) -> Result<BoundingBoxes> {
    Ok(BoundingBoxes::new(numbers(given, "boxes")?, BoundingBoxFormat::Xyxy))
}

fn mask(given: &Given<'_>) -> Result<Mask> {
    let values = Vec::<u8>::try_from(given.tensor("mask")?.view(-1))?;
    Ok(Mask::new(values, HEIGHT, WIDTH)?)
}

fn rows<const N: usize>(rows: &[[f32; N]]) -> Tensor {
    Tensor::from_slice(rows.as_flattened()).view([rows.len() as i64, N as i64])
}

fn values(mask: &Mask) -> Tensor {
    Tensor::from_slice(mask.values()).view([mask.size().height, mask.size().width].map(|side| side as i64))
}

/// Changes a target as one of these transforms changes a black image.
fn change(pipeline: &ImagePipeline, target: &mut impl Target) -> Result<()> {
    let image = Image::new(vec![0; 3 * HEIGHT * WIDTH], HEIGHT, WIDTH, 3)?;
    pipeline.image_with(&image, target, 0, 0)?;
    Ok(())
}

struct Crop(Region);

impl Transform for Crop {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        canvas.crop(self.0)
    }
}

struct Only(Operation, f64);

impl Transform for Only {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        self.0.apply(canvas, self.1, Interpolation::Nearest, [0; 3])
    }
}

fn pipeline(name: &str, numbers: &[f64]) -> Result<ImagePipeline> {
    let sides: Vec<usize> = numbers.iter().map(|&number| number.max(0.0) as usize).collect();
    let to = ImagePipeline::new(0);
    Ok(match (name, sides.as_slice()) {
        ("crop", &[top, left, height, width]) => to.then(Crop(Region { top, left, height, width })),
        ("resize" | "enlarge", &[height, width]) => to.then(Resize::new([height, width])),
        ("hflip", []) => to.then(RandomHorizontalFlip::new(1.0)?),
        ("vflip", []) => to.then(RandomVerticalFlip::new(1.0)?),
        ("pad", &[left, top, right, bottom]) => {
            let size = [HEIGHT + top + bottom, WIDTH + left + right];
            to.then(RandomCrop::new(size).padding([left, top, right, bottom]))
        }
        ("center", &[height, width]) => to.then(CenterCrop::new([height, width])),
        ("rotate" | "rotate back", _) => to.then(Only(Operation::Rotate, numbers[0])),
        ("shear x", _) => to.then(Only(Operation::ShearX, numbers[0])),
        ("shear y", _) => to.then(Only(Operation::ShearY, numbers[0])),
        ("move x", _) => to.then(Only(Operation::TranslateX, numbers[0])),
        ("move y", _) => to.then(Only(Operation::TranslateY, numbers[0])),
        _ => bail!("no change {name} {numbers:?}"),
    })
}

pub fn targets_geometry(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (boxes, points, mask) = (boxes(given)?, KeyPoints::new(numbers(given, "points")?), mask(given)?);
    for (name, numbers) in given.value::<Vec<(String, Vec<f64>)>>("changes")? {
        let pipeline = pipeline(&name, &numbers)?;
        for (format, of) in FORMATS {
            let mut target = boxes.to_format(of);
            change(&pipeline, &mut target)?;
            found.insert(format!("{name}.{format}"), &rows(target.boxes()));
        }
        let mut target = (points.clone(), mask.clone());
        change(&pipeline, &mut target)?;
        found.insert(format!("{name}.points"), &rows(target.0.points()));
        found.insert(format!("{name}.mask"), &values(&target.1));
    }
    Ok(found)
}

pub fn targets_mask_sizes(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (s, size) in given.value::<Vec<[usize; 2]>>("sizes")?.into_iter().enumerate() {
        let mut target = mask(given)?;
        change(&ImagePipeline::new(0).then(Resize::new(size)), &mut target)?;
        found.insert(s.to_string(), &values(&target));
    }
    Ok(found)
}

pub fn targets_sanitized(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let boxes = boxes(given)?;
    for (format, of) in FORMATS {
        let mut target = boxes.to_format(of);
        change(&ImagePipeline::new(0).then(ClampBoundingBoxes), &mut target)?;
        found.insert(format!("{format}.clamped"), &rows(target.boxes()));
        for (n, [size, area]) in given.value::<Vec<[f32; 2]>>("least")?.into_iter().enumerate() {
            let sanitize = SanitizeBoundingBoxes::new().min_size(size)?.min_area(area)?;
            let mut target = (boxes.to_format(of), PerBox((0..boxes.len() as i64).collect::<Vec<_>>()));
            change(&ImagePipeline::new(0).then(sanitize), &mut target)?;
            found.insert(format!("{format}.{n}"), &rows(target.0.boxes()));
            found.insert(format!("{format}.{n}.labels"), &Tensor::from_slice(&target.1.0).to_kind(Kind::Int64));
        }
    }
    let points = || Ok::<_, anyhow::Error>(KeyPoints::new(numbers(given, "points")?));
    let (mut kept, mut clamped) = (points()?, points()?);
    change(&ImagePipeline::new(0).then(SanitizeKeyPoints), &mut kept)?;
    change(&ImagePipeline::new(0).then(ClampKeyPoints), &mut clamped)?;
    found.insert("points", &rows(kept.points()));
    found.insert("points.clamped", &rows(clamped.points()));
    Ok(found)
}

pub fn targets_affine(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (image, fill) = (dataload::image(given)?, [9, 200, 77]);
    for (j, [angle, scale, x, y, right, down]) in given.value::<Vec<[f64; 6]>>("jobs")?.into_iter().enumerate() {
        for (mode, interpolation) in [("nearest", Interpolation::Nearest), ("bilinear", Interpolation::Bilinear)] {
            let affine = RandomAffine::new(angle..=angle)?.scale(scale..=scale)?.shear(x..=x, y..=y)?;
            let affine = affine.translate([right, down])?.interpolation(interpolation)?.fill(fill);
            let rotation = RandomRotation::new(angle..=angle)?.interpolation(interpolation)?.fill(fill);
            let pipelines =
                [("affine", ImagePipeline::new(0).then(affine)), ("rotation", ImagePipeline::new(0).then(rotation))];
            for (name, pipeline) in pipelines {
                let boxes = boxes(given)?.to_format(BoundingBoxFormat::Xywh);
                let mut target = (boxes, KeyPoints::new(numbers(given, "points")?), mask(given)?);
                let changed = pipeline.image_with(&image, &mut target, j as u64, 0)?;
                found.insert(format!("{j}.{name}.{mode}"), &dataload::tensor(&changed));
                // The same for both: no interpolation is asked for where these change.
                found.insert(format!("{j}.{name}.boxes"), &rows(target.0.boxes()));
                found.insert(format!("{j}.{name}.points"), &rows(target.1.points()));
                found.insert(format!("{j}.{name}.mask"), &values(&target.2));
            }
        }
    }
    Ok(found)
}
