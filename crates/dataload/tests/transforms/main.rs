//! Decoding and transforms through the public interface: damaged files, Pillow's pixels, and results that depend only
//! on (seed, epoch, draw).

mod augment;
mod targets;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_dataload::{
    Canvas, CenterCrop, Collate, Color, ColorJitter, CutMix, DataError, DataLoader, Draws, EncodedImage, FnDataset,
    Image, ImageFolder, ImagePipeline, Interpolation, MixUp, RandomHorizontalFlip, RandomResizedCrop,
    RandomVerticalFlip, Region, Resize, Size, ToFloat, Transform, decode_image,
};
use tch::{Kind, Tensor};

type Anyhow = Result<(), Box<dyn std::error::Error>>;

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testing/images").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn decode(name: &str, color: Color) -> Image {
    decode_image(&fixture(name), color, Path::new(name)).unwrap()
}

fn encoded(bytes: impl Into<Arc<[u8]>>) -> EncodedImage {
    EncodedImage::new(bytes, "some.jpg")
}

/// The largest difference between the pixels of two images of one shape.
fn furthest(one: &Image, other: &Image) -> u8 {
    assert_eq!(one.chw(), other.chw());
    one.data().iter().zip(other.data()).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0)
}

/// Crops to a fixed region.
struct Crop(Region);

impl Transform for Crop {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        canvas.crop(self.0)
    }
}

#[test]
fn files_decode_to_pillows_pixels_and_lossy_webp_nearly() {
    for name in ["h2v2", "h2v1", "h1v1", "restarts", "grey", "progressive", "cmyk", "one", "wide", "lossless"] {
        let format = if name == "lossless" { "webp" } else { "jpg" };
        let (ours, pillows) =
            (decode(&format!("{name}.{format}"), Color::Rgb), decode(&format!("{name}.png"), Color::Rgb));
        assert_eq!(furthest(&ours, &pillows), 0, "{name}");
    }
    let furthest = furthest(&decode("lossy.webp", Color::Rgb), &decode("lossy.png", Color::Rgb));
    assert!(furthest <= 2, "{furthest}");
    assert_eq!(decode("grey.jpg", Color::AsStored).chw(), [1, 43, 61]);
    assert_eq!(decode("grey.jpg", Color::Grey).data(), decode("grey.png", Color::Grey).data());
    assert_eq!(decode("h2v2.jpg", Color::Grey).data(), decode("h2v2.png", Color::Grey).data());
}

#[test]
fn a_crop_has_the_pixels_of_the_whole() -> Anyhow {
    for name in ["h2v2.jpg", "h2v1.jpg", "h1v1.jpg", "restarts.jpg", "grey.jpg", "progressive.jpg", "lossy.webp"] {
        let whole = decode(name, Color::Rgb);
        let mut draws = Draws::new(0, 0, 0, 0);
        for _ in 0..200 {
            let (top, left) = (draws.below(43), draws.below(61));
            let (height, width) = (1 + draws.below(43 - top), 1 + draws.below(61 - left));
            let region = Region { top, left, height, width };
            let mut slot = vec![0; 3 * height * width];
            let pipeline = ImagePipeline::new(0).then(Crop(region)).channels_last(true);
            pipeline.decode_into(&encoded(fixture(name)), 0, 0, &mut slot)?;
            let rows = whole.data().chunks_exact(3 * 61).skip(top).take(height);
            let expected: Vec<u8> = rows.flat_map(|row| row[3 * left..3 * (left + width)].to_vec()).collect();
            assert!(slot == expected, "{name} {region:?}");
        }
    }
    Ok(())
}

#[test]
fn cuts_and_flipped_bytes_are_errors_or_images() {
    let pipeline = ImagePipeline::new(0).then(RandomResizedCrop::new(16));
    for name in ["h2v2.jpg", "restarts.jpg", "progressive.jpg", "cmyk.jpg", "lossy.webp", "lossless.webp"] {
        let whole = fixture(name);
        let path = Path::new("some.jpg");
        for cut in 0..whole.len() {
            let Err(error) = decode_image(&whole[..cut], Color::Rgb, path) else {
                panic!("{name} cut at {cut} decodes")
            };
            let error = error.to_string();
            assert!(error.starts_with("some.jpg: "), "{name} cut at {cut}: {error}");
            let sample = encoded(&whole[..cut]);
            assert!(pipeline.decode_into(&sample, 0, 0, &mut [0; 3 * 256]).is_err(), "{name} cut at {cut}");
        }
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= [0x01, 0x55, 0xff][position % 3];
            if let Ok(image) = decode_image(&flipped, Color::Rgb, path) {
                assert!(image.data().len() < 1 << 26, "{name} flipped at {position}");
            }
            _ = pipeline.decode_into(&encoded(flipped), 0, 0, &mut [0; 3 * 256]);
        }
    }
}

#[test]
fn files_that_are_not_images_are_named() {
    let pipeline = ImagePipeline::new(0);
    for (bytes, expected) in [
        (&b""[..], "some.jpg: at byte 0: expected an image, found an empty file"),
        (b"plain text", "some.jpg: unknown image format"),
        (b"\xff\xd8\xff", "some.jpg: "),
        (b"\xff\xd8\xff\xd9", "some.jpg: "),
        (b"RIFF\x04\0\0\0WEBP", "some.jpg: "),
    ] {
        let error = pipeline.decode_into(&encoded(bytes), 0, 0, &mut []).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = pipeline.collate(vec![(encoded(&b"plain text"[..]), 0)]).unwrap_err();
    assert_eq!(error.index(), Some(0));
    assert!(matches!(pipeline.collate(Vec::<(EncodedImage, i64)>::new()), Err(DataError::EmptyBatch)));
}

#[test]
fn absurd_sizes_are_refused_and_wide_images_are_not() -> Anyhow {
    let mut huge = fixture("h2v2.jpg");
    let frame = huge.windows(2).position(|pair| pair == b"\xff\xc0").ok_or("no frame")?;
    huge[frame + 5..frame + 9].fill(0xff);
    let error = decode_image(&huge, Color::Rgb, Path::new("huge.jpg")).unwrap_err().to_string();
    assert!(error.contains("65535 x 65535 pixels"), "{error}");
    let pipeline = ImagePipeline::new(0).then(RandomResizedCrop::new(32));
    let mut slot = [0; 3 * 32 * 32];
    pipeline.decode_into(&encoded(fixture("wide.jpg")), 0, 0, &mut slot)?;
    assert!(slot.chunks_exact(32 * 32).zip([9u8, 99, 199]).all(|(plane, v)| plane.iter().all(|p| p.abs_diff(v) < 3)));
    let too_large = ImagePipeline::new(0).then(Resize::shorter(1000));
    let error = too_large.decode_into(&encoded(fixture("wide.jpg")), 0, 0, &mut []).unwrap_err();
    assert!(matches!(error, DataError::TooLarge { .. }), "{error}");
    Ok(())
}

#[test]
fn exif_orientation_is_applied_only_when_asked() -> Anyhow {
    let sample = encoded(fixture("turned.jpg"));
    let stored = decode("turned.jpg", Color::Rgb);
    let (as_stored, _) = ImagePipeline::new(0).collate(vec![(sample.clone(), 0)])?;
    assert_eq!(as_stored.size(), [1, 3, 43, 61]);
    let (upright, _) = ImagePipeline::new(0).exif_orientation(true).collate(vec![(sample, 0)])?;
    assert_eq!(upright.size(), [1, 3, 61, 43]);
    // Orientation 6: the stored image has to be rotated 90 degrees clockwise.
    let expected = as_stored.transpose(2, 3).flip([3]);
    assert!(upright.equal(&expected));
    assert_eq!(stored.chw(), [3, 43, 61]);
    Ok(())
}

#[test]
fn layouts_hold_the_same_pixels() -> Anyhow {
    fn batch(
        pipeline: impl Collate<(EncodedImage, i64), Batch = (Tensor, Tensor)> + 'static,
        epoch: u64,
    ) -> (Tensor, Tensor) {
        let four = FnDataset::new(4, |index| Ok((encoded(fixture("h2v2.jpg")), index as i64)));
        let loader = DataLoader::builder(four).batch_size(4).collate(pipeline).build().unwrap();
        loader.epoch(epoch).next().unwrap().unwrap()
    }
    let pipeline = || {
        ImagePipeline::new(3)
            .then(RandomResizedCrop::new([24, 32]))
            .then(RandomHorizontalFlip::default())
            .then(RandomVerticalFlip::default())
    };
    let (planar, labels) = batch(pipeline(), 1);
    let (last, _) = batch(pipeline().channels_last(true), 1);
    assert_eq!((planar.size(), planar.kind()), (vec![4, 3, 24, 32], Kind::Uint8));
    assert_eq!(Vec::<i64>::try_from(&labels)?, [0, 1, 2, 3]);
    assert!(planar.equal(&last) && planar.is_contiguous() && !last.is_contiguous());
    assert!(last.permute([0, 2, 3, 1]).is_contiguous());
    let (float, _) = batch(pipeline().to_float(ToFloat::new(&[0.5], &[0.25])?), 1);
    assert!(float.equal(&((planar.to_kind(Kind::Float) / 255.0 - 0.5) / 0.25)));
    let ((again, _), (later, _)) = (batch(pipeline(), 1), batch(pipeline(), 2));
    assert!(planar.equal(&again) && !planar.equal(&later));
    assert!(!planar.get(0).equal(&planar.get(1)));
    Ok(())
}

#[test]
fn flips_commute_with_the_crops_and_sizes_after_them() -> Anyhow {
    let image = decode("h1v1.png", Color::Rgb);
    let region = Region { top: 5, left: 7, height: 21, width: 33 };
    let flip = || RandomHorizontalFlip::new(1.0);
    let turn = || RandomVerticalFlip::new(1.0);
    let flipped_first = ImagePipeline::new(0).then(flip()?).then(turn()?).then(Crop(region));
    let mirrored = Region { top: 43 - 5 - 21, left: 61 - 7 - 33, height: 21, width: 33 };
    let flipped_last = ImagePipeline::new(0).then(Crop(mirrored)).then(turn()?).then(flip()?);
    assert_eq!(flipped_first.image(&image, 0, 0)?.data(), flipped_last.image(&image, 0, 0)?.data());
    let twice = ImagePipeline::new(0).then(flip()?).then(flip()?).image(&image, 0, 0)?;
    assert_eq!(twice.data(), image.data());
    let padded = ImagePipeline::new(0).then(flip()?).then(CenterCrop::new([50, 20])).image(&image, 0, 0)?;
    assert_eq!(padded.chw(), [3, 50, 20]);
    assert!(padded.data()[..3 * 3 * 20].iter().all(|&value| value == 0));
    Ok(())
}

#[test]
fn sizes_follow_torchvision() -> Anyhow {
    let image = Image::new(vec![7; 3 * 40 * 61], 40, 61, 3)?;
    let size = |transform: Resize| Ok::<_, DataError>(ImagePipeline::new(0).then(transform).image(&image, 0, 0)?.chw());
    assert_eq!(size(Resize::shorter(32))?, [3, 32, 48]);
    assert_eq!(size(Resize::shorter(100))?, [3, 100, 152]);
    assert_eq!(size(Resize::new([5, 6]).interpolation(Interpolation::Nearest))?, [3, 5, 6]);
    assert_eq!(size(Resize::new(Size { height: 9, width: 2 }).interpolation(Interpolation::Bicubic))?, [3, 9, 2]);
    assert_eq!(size(Resize::new(8).antialias(false))?, [3, 8, 8]);
    assert!(size(Resize::new(0)).is_err());
    let outside = Region { top: 0, left: usize::MAX, height: 1, width: 2 };
    assert!(ImagePipeline::new(0).then(Crop(outside)).image(&image, 0, 0).is_err());
    assert!(ImagePipeline::new(0).then(CenterCrop::new(0)).image(&image, 0, 0).is_err());
    assert!(ImagePipeline::new(0).image(&Image::new([], 0, 5, 3)?, 0, 0).is_err());
    Ok(())
}

#[test]
fn jitter_changes_what_is_set() -> Anyhow {
    let image = decode("h1v1.png", Color::Rgb);
    let run = |jitter: ColorJitter| ImagePipeline::new(0).then(jitter).image(&image, 0, 0);
    assert_eq!(run(ColorJitter::new())?.data(), image.data());
    assert!(run(ColorJitter::new().brightness(0.0..=0.0)?)?.data().iter().all(|&value| value == 0));
    let grey = run(ColorJitter::new().saturation(0.0..=0.0)?)?;
    assert!(grey.data().chunks_exact(3).all(|pixel| pixel[0] == pixel[1] && pixel[1] == pixel[2]));
    let flat = run(ColorJitter::new().contrast(0.0..=0.0)?)?;
    assert!(flat.data().iter().all(|&value| value == flat.data()[0]));
    let refused = |jitter: Result<ColorJitter, DataError>| jitter.unwrap_err().to_string();
    let turns = "hue: expected a non-empty range within -0.5 to 0.5 of the colour circle, found";
    assert_eq!(refused(ColorJitter::new().hue(-0.6..=0.0)), format!("{turns} -0.6..=0.0"));
    assert_eq!(refused(ColorJitter::new().hue(0.4..=0.1)), format!("{turns} 0.4..=0.1"));
    let factors = "expected a non-empty range of finite factors from 0 on, found";
    let negative = refused(ColorJitter::new().brightness(-1.0..=1.0));
    assert_eq!(negative, format!("brightness: {factors} -1.0..=1.0"));
    for bad in [0.5..=f64::INFINITY, f64::NAN..=1.0, 0.0..=f64::NAN, 1.5..=0.5] {
        assert!(refused(ColorJitter::new().contrast(bad.clone())).contains(factors), "{bad:?}");
    }
    Ok(())
}

#[test]
fn mixes_are_weighted_by_share_and_area() -> Anyhow {
    let images = Tensor::arange(4, (Kind::Float, tch::Device::Cpu)).view([4, 1, 1, 1]).expand([4, 3, 8, 8], false);
    let labels = Tensor::from_slice(&[0i64, 1, 2, 1]);
    let (mixed, targets) = MixUp::new(3)?.with_share(&images, &labels, 0.25)?;
    assert_eq!(mixed.double_value(&[1, 0, 0, 0]), 0.25);
    assert_eq!(Vec::<f32>::try_from(targets.get(0))?, [0.25, 0.75, 0.0]);
    let region = Region { top: 2, left: 4, height: 4, width: 2 };
    let (cut, targets) = CutMix::new(3)?.with_region(&images, &labels, region)?;
    assert_eq!((cut.double_value(&[1, 2, 5, 5]), cut.double_value(&[1, 2, 5, 3])), (0.0, 1.0));
    assert_eq!(Vec::<f32>::try_from(targets.get(1))?, [0.125, 0.875, 0.0]);
    for sample in 0..50 {
        let mut draws = Draws::new(1, 2, sample, 0);
        let (_, targets) = CutMix::new(3)?.alpha(0.3)?.apply(&images, &labels, &mut draws)?;
        assert!((targets.sum(Kind::Float).double_value(&[]) - 4.0).abs() < 1e-5);
    }
    let whole_numbers = images.to_kind(Kind::Uint8);
    assert!(MixUp::new(3)?.apply(&whole_numbers, &labels, &mut Draws::new(0, 0, 0, 0)).is_err());
    assert!(CutMix::new(3)?.apply(&labels, &labels, &mut Draws::new(0, 0, 0, 0)).is_err());
    assert!(MixUp::new(0).is_err() && CutMix::new(3)?.alpha(0.0).is_err());
    Ok(())
}

#[test]
fn a_folder_gives_the_same_batches_with_any_number_of_workers() -> Anyhow {
    let dir = tempfile::tempdir()?;
    for (class, name) in [("cat", "h2v2.jpg"), ("cat", "progressive.jpg"), ("dog", "lossy.webp"), ("dog", "grey.png")] {
        std::fs::create_dir_all(dir.path().join(class))?;
        std::fs::write(dir.path().join(class).join(name), fixture(name))?;
    }
    let load = |workers| -> Result<Vec<(Tensor, Tensor)>, DataError> {
        let folder = ImageFolder::open(dir.path())?;
        assert_eq!(folder.classes(), ["cat", "dog"]);
        let pipeline = ImagePipeline::new(1).then(RandomResizedCrop::new(16)).then(RandomHorizontalFlip::default());
        let loader = DataLoader::builder(folder).batch_size(2).num_workers(workers).collate(pipeline).build()?;
        loader.epoch(4).collect()
    };
    let expected = load(0)?;
    for workers in [1, 2, 4] {
        for ((images, labels), (other_images, other_labels)) in expected.iter().zip(load(workers)?) {
            assert!(images.equal(&other_images) && labels.equal(&other_labels));
        }
    }
    std::fs::write(dir.path().join("cat/broken.jpg"), &fixture("h2v2.jpg")[..900])?;
    let error = load(2).unwrap_err();
    assert_eq!(error.index(), Some(0));
    assert!(error.to_string().contains("cat/broken.jpg"), "{error}");
    Ok(())
}
