//! Crops with borders, erasing, blurring, and the random operations of RandAugment and its kin. `parity/cases/augment.py`
//! has torchvision's pixels.

use std::collections::BTreeSet;

use overdrive_dataload::{
    AugMix, Canvas, DataError, Draws, ErasingValue, GaussianBlur, Image, ImagePipeline, Interpolation, Operation,
    Padding, PaddingMode, RandAugment, RandomCrop, RandomErasing, RandomVerticalFlip, Transform, TrivialAugmentWide,
};
use tch::{Device, Kind, Tensor};

use crate::Anyhow;

/// Grey levels as an image.
fn grey<const W: usize>(rows: &[[u8; W]]) -> Image {
    let pixels: Vec<u8> = rows.iter().flatten().flat_map(|&level| [level; 3]).collect();
    Image::new(pixels, rows.len(), W, 3).unwrap()
}

/// The red levels, row by row.
fn levels(image: &Image) -> Vec<Vec<u8>> {
    let rows = image.data().chunks_exact(3 * image.width());
    rows.map(|row| row.iter().step_by(3).copied().collect()).collect()
}

/// Every level once, in colours that differ.
fn picture() -> Image {
    let pixels: Vec<u8> = (0..16 * 16).flat_map(|i| [i as u8, (i * 7) as u8, 255 - (i / 2) as u8]).collect();
    Image::new(pixels, 16, 16, 3).unwrap()
}

fn run(transform: impl Transform + 'static, image: &Image, draw: u64) -> Result<Image, DataError> {
    ImagePipeline::new(3).then(transform).image(image, draw, 0)
}

/// One operation of a given magnitude.
struct Only(Operation, f64, Interpolation);

impl Transform for Only {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        self.0.apply(canvas, self.1, self.2, [9; 3])
    }
}

#[test]
fn borders_show_what_their_mode_says() -> Anyhow {
    let image = grey(&[[1, 2, 3, 4]]);
    let row = |mode, padding| {
        let crop = RandomCrop::new([1, 8]).padding(padding).padding_mode(mode).fill([9; 3]);
        Ok::<_, DataError>(levels(&run(crop, &image, 0)?).remove(0))
    };
    assert_eq!(row(PaddingMode::Constant, [2, 0])?, [9, 9, 1, 2, 3, 4, 9, 9]);
    assert_eq!(row(PaddingMode::Edge, [2, 0])?, [1, 1, 1, 2, 3, 4, 4, 4]);
    assert_eq!(row(PaddingMode::Reflect, [2, 0])?, [3, 2, 1, 2, 3, 4, 3, 2]);
    assert_eq!(row(PaddingMode::Symmetric, [2, 0])?, [2, 1, 1, 2, 3, 4, 4, 3]);
    let sides = Padding { left: 1, top: 2, right: 0, bottom: 1 };
    assert_eq!(Padding::from([1, 2, 0, 1]), sides);
    let all = run(RandomCrop::new([4, 5]).padding(sides).padding_mode(PaddingMode::Reflect), &image, 0)?;
    assert_eq!(levels(&all), vec![vec![2, 1, 2, 3, 4]; 4], "a single row is its own mirror image");
    // Borders wider than the image, as numpy.pad mirrors them again and again.
    let far = |mode| {
        Ok::<_, DataError>(
            levels(&run(RandomCrop::new([1, 10]).padding([4, 0]).padding_mode(mode), &grey(&[[1, 2]]), 0)?).remove(0),
        )
    };
    assert_eq!(far(PaddingMode::Reflect)?, [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]);
    assert_eq!(far(PaddingMode::Symmetric)?, [1, 2, 2, 1, 1, 2, 2, 1, 1, 2]);
    let flipped =
        ImagePipeline::new(0).then(RandomVerticalFlip::new(1.0)?).then(RandomCrop::new([4, 1]).padding([0, 1]));
    assert_eq!(levels(&flipped.image(&grey(&[[1], [2]]), 0, 0)?), [[0], [2], [1], [0]]);
    Ok(())
}

#[test]
fn crops_are_everywhere_and_fit_or_are_refused() -> Anyhow {
    let image = picture();
    let mut places = BTreeSet::new();
    for draw in 0..2000 {
        let region = RandomCrop::new([14, 12]).region(16, 16, &mut Draws::new(0, 0, draw, 0))?;
        assert!(region.fits(16, 16) && (region.height, region.width) == (14, 12));
        places.insert((region.top, region.left));
    }
    assert_eq!(places.len(), 3 * 5);
    let error = run(RandomCrop::new(17), &image, 0).unwrap_err().to_string();
    assert_eq!(error, "size: expected at most the image's 16 x 16 pixels, or `pad_if_needed`, found 17 x 17");
    // The border is as wide on both sides as the image lacks in all, so the image lies anywhere in the crop.
    let places: BTreeSet<usize> = (0..200)
        .map(|draw| {
            let crop = run(RandomCrop::new([1, 4]).pad_if_needed(true), &grey(&[[1, 2]]), draw)?;
            let row = levels(&crop).remove(0);
            assert_eq!(row.iter().filter(|&&level| level > 0).count(), 2, "{row:?}");
            Ok(row.iter().position(|&level| level == 1).unwrap())
        })
        .collect::<Result<_, DataError>>()?;
    assert_eq!(places, BTreeSet::from([0, 1, 2]));
    assert!(matches!(run(RandomCrop::new(4).padding(usize::MAX), &image, 0), Err(DataError::TooLarge { .. })));
    assert!(run(RandomCrop::new(0), &image, 0).is_err());
    Ok(())
}

#[test]
fn blurring_keeps_the_mean_and_flat_images() -> Anyhow {
    let flat = grey(&[[77; 5]; 4]);
    assert_eq!(run(GaussianBlur::new([3, 9])?.sigma(0.1..=5.0)?, &flat, 1)?, flat);
    let mut rows = [[0; 9]; 9];
    rows[4][4] = 255;
    let blurred = run(GaussianBlur::new([5, 3])?.sigma(1.0..=1.0)?, &grey(&rows), 0)?;
    let blurred = levels(&blurred);
    // exp(-x^2 / 2) over 5 columns and 3 rows, each normalized.
    let (across, down) = ([0.0545, 0.2442, 0.4026, 0.2442, 0.0545], [0.2741, 0.4519, 0.2741]);
    for (row, weight) in (3..6).zip(down) {
        for (column, other) in (2..7).zip(across) {
            let expected: f64 = 255.0 * weight * other;
            assert!((f64::from(blurred[row][column]) - expected).abs() < 0.6, "{row}, {column}: {expected}");
        }
    }
    assert!(blurred[2].iter().chain(&blurred[6]).all(|&level| level == 0));
    let odd = GaussianBlur::new([4, 3]).unwrap_err().to_string();
    assert_eq!(odd, "kernel_size: expected odd numbers up to 1023, found [4, 3]");
    assert!(GaussianBlur::new([3, 1025]).is_err() && GaussianBlur::new([0, 3]).is_err());
    for bad in [0.0..=1.0, 2.0..=1.0, 1.0..=f64::INFINITY, f64::NAN..=1.0] {
        assert!(GaussianBlur::new([3, 3])?.sigma(bad.clone()).is_err(), "{bad:?}");
    }
    // A kernel larger than the image.
    assert_eq!(run(GaussianBlur::new([23, 23])?.sigma(9.0..=9.0)?, &grey(&[[7]]), 0)?, grey(&[[7]]));
    Ok(())
}

#[test]
fn erased_rectangles_have_their_share_and_place() -> Anyhow {
    let erasing = RandomErasing::new();
    let draws = 100_000;
    let regions: Vec<_> = (0..draws).filter_map(|i| erasing.region(50, 40, &mut Draws::new(0, 0, i, 0))).collect();
    assert_eq!(regions.len(), draws as usize);
    assert!(regions.iter().all(|region| region.height < 50 && region.width < 40 && region.fits(50, 40)));
    let share = |region: &overdrive_dataload::Region| (region.height * region.width) as f64 / 2000.0;
    // Each side is rounded, by at most half a pixel.
    assert!(regions.iter().all(|region| (0.015..0.35).contains(&share(region))));
    let image = grey(&[[200; 40]; 50]);
    let mut erased = 0;
    for draw in 0..400 {
        let levels = levels(&run(RandomErasing::new().value(ErasingValue::Constant([5.0; 3])), &image, draw)?).concat();
        let count = levels.iter().filter(|&&level| level == 5).count();
        assert!(levels.iter().all(|&level| level == 5 || level == 200));
        assert!(count == 0 || (30..=700).contains(&count), "{count}");
        erased += usize::from(count > 0);
    }
    // Five standard deviations of a binomial count with p = 1/2.
    assert!(erased.abs_diff(200) < 50, "{erased}");
    let random = run(RandomErasing::new().p(1.0)?.value(ErasingValue::Random), &image, 0)?;
    let levels: BTreeSet<u8> = random.data().iter().copied().collect();
    assert!(levels.len() > 20, "{levels:?}");
    for (scale, ratio) in [(-0.1..=0.5, 1.0..=1.0), (0.6..=0.5, 1.0..=1.0), (0.1..=1.1, 1.0..=1.0)] {
        assert!(RandomErasing::new().scale(scale).is_err() && RandomErasing::new().ratio(ratio).is_ok());
    }
    assert!(RandomErasing::new().ratio(0.0..=1.0).is_err() && RandomErasing::new().p(1.5).is_err());
    Ok(())
}

#[test]
fn each_image_of_a_batch_is_erased_by_itself() -> Anyhow {
    let images = Tensor::ones([64, 3, 20, 20], (Kind::Float, Device::Cpu));
    let mut draws = Draws::new(1, 0, 0, 0);
    let erasing = RandomErasing::new().value(ErasingValue::Constant([0.0, -1.0, 2.5]));
    let erased = erasing.apply_batch(&images, &mut draws)?;
    assert!(images.equal(&images.ones_like()), "the images themselves stay");
    let mut rectangles = BTreeSet::new();
    for image in 0..64 {
        let image = erased.get(image);
        let values = |channel| Vec::<f32>::try_from(image.get(channel).reshape(-1)).unwrap();
        let hit: Vec<usize> =
            values(0).iter().enumerate().filter(|(_, value)| **value == 0.0).map(|(at, _)| at).collect();
        for (channel, value) in [(1, -1.0), (2, 2.5)] {
            let values = values(channel);
            assert!((0..400).all(|at| values[at] == if hit.contains(&at) { value } else { 1.0 }));
        }
        rectangles.insert(hit);
    }
    // Half have none, and count as one: five standard deviations of 64 / 2.
    assert!((13..54).contains(&rectangles.len()), "{}", rectangles.len());
    let random = RandomErasing::new().p(1.0)?.scale(0.3..=0.3)?.value(ErasingValue::Random);
    let noise = random.apply_batch(&Tensor::zeros([40, 1, 20, 20], (Kind::Double, Device::Cpu)), &mut draws)?;
    let noise: Vec<f64> = Vec::<f64>::try_from(noise.reshape(-1))?.into_iter().filter(|&value| value != 0.0).collect();
    let mean = noise.iter().sum::<f64>() / noise.len() as f64;
    let variance = noise.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / noise.len() as f64;
    // Five standard deviations for some 4800 values.
    assert!(noise.len() > 4000 && mean.abs() < 0.075 && (variance - 1.0).abs() < 0.11, "{mean}, {variance}");
    assert!(erasing.apply_batch(&images.narrow(1, 0, 1), &mut draws).is_err());
    assert!(erasing.apply_batch(&images.get(0), &mut draws).is_err());
    Ok(())
}

#[test]
fn operations_move_and_change_pixels() -> Anyhow {
    let image = grey(&[[10, 20, 30], [40, 50, 60], [70, 80, 90]]);
    let done = |operation, magnitude| {
        Ok::<_, DataError>(levels(&run(Only(operation, magnitude, Interpolation::Nearest), &image, 0)?))
    };
    assert_eq!(done(Operation::Identity, 0.7)?, levels(&image));
    assert_eq!(done(Operation::TranslateX, 1.9)?, [[9, 10, 20], [9, 40, 50], [9, 70, 80]]);
    assert_eq!(done(Operation::TranslateY, -1.0)?, [[40, 50, 60], [70, 80, 90], [9, 9, 9]]);
    assert_eq!(done(Operation::TranslateY, 1e9)?, [[9; 3]; 3]);
    assert_eq!(done(Operation::Rotate, 90.0)?, [[30, 60, 90], [20, 50, 80], [10, 40, 70]]);
    assert_eq!(done(Operation::Rotate, -180.0)?, [[90, 80, 70], [60, 50, 40], [30, 20, 10]]);
    assert_eq!(done(Operation::ShearX, 1.0)?, [[20, 30, 9], [60, 9, 9], [9, 9, 9]]);
    assert_eq!(done(Operation::ShearY, 0.0)?, levels(&image));
    assert_eq!(done(Operation::Posterize, 3.0)?, [[0, 0, 0], [32, 32, 32], [64, 64, 64]]);
    assert_eq!(done(Operation::Posterize, 0.0)?, [[0; 3]; 3]);
    assert_eq!(done(Operation::Posterize, 8.0)?, levels(&image));
    assert_eq!(done(Operation::Solarize, 60.0)?, [[10, 20, 30], [40, 50, 195], [185, 175, 165]]);
    assert_eq!(done(Operation::Invert, 0.0)?, [[245, 235, 225], [215, 205, 195], [185, 175, 165]]);
    assert_eq!(done(Operation::Brightness, -0.5)?, [[5, 10, 15], [20, 25, 30], [35, 40, 45]]);
    assert_eq!(done(Operation::AutoContrast, 0.0)?, [[0, 31, 63], [95, 127, 159], [191, 223, 255]]);
    assert_eq!(done(Operation::Equalize, 0.0)?, levels(&image), "too few pixels to be spread");
    assert_eq!(done(Operation::Sharpness, 1.0)?[1], [40, 50, 60], "the middle is the mean already");
    let flat = grey(&[[7; 2]; 2]);
    for operation in [Operation::AutoContrast, Operation::Equalize, Operation::Contrast, Operation::Sharpness] {
        assert_eq!(run(Only(operation, 0.4, Interpolation::Nearest), &flat, 0)?, flat, "{operation:?}");
    }
    let halfway = run(Only(Operation::ShearX, 0.5, Interpolation::Bilinear), &image, 0)?;
    assert_eq!(levels(&halfway)[0], [12, 22, 30]);
    let error = run(Only(Operation::Rotate, 5.0, Interpolation::Bicubic), &image, 0).unwrap_err().to_string();
    assert_eq!(error, "interpolation: expected Nearest or Bilinear, for a map of the plane, found Bicubic");
    Ok(())
}

#[test]
fn random_operations_are_functions_of_the_draw_and_all_occur() -> Anyhow {
    let image = picture();
    type Make = fn() -> Box<dyn Fn(u64) -> Result<Image, DataError>>;
    fn of(transform: impl Transform + Clone + 'static) -> Box<dyn Fn(u64) -> Result<Image, DataError>> {
        Box::new(move |draw| run(transform.clone(), &picture(), draw))
    }
    let makes: [(Make, usize); 4] = [
        (|| of(RandAugment::new()), 100),
        (|| of(RandAugment::new().num_ops(1)), 15),
        (|| of(TrivialAugmentWide::new()), 150),
        (|| of(AugMix::new()), 350),
    ];
    for (make, least) in makes {
        let images: Vec<Image> = (0..400).map(make()).collect::<Result<_, _>>()?;
        assert_eq!(images[17], make()(17)?);
        assert!(images.iter().all(|other| other.chw() == image.chw()));
        let distinct: BTreeSet<&[u8]> = images.iter().map(Image::data).collect();
        assert!(distinct.len() >= least, "{} of {least}", distinct.len());
    }
    assert_eq!(run(RandAugment::new().num_ops(0), &image, 0)?, image);
    Ok(())
}

#[test]
fn magnitudes_grow_with_their_number() -> Anyhow {
    let rand = RandAugment::new().magnitude(30)?;
    assert_eq!(rand.magnitude_of(Operation::Rotate, 331), 30.0);
    assert_eq!(rand.magnitude_of(Operation::TranslateX, [10, 331]), 150.0);
    assert_eq!(rand.magnitude_of(Operation::Posterize, 9), 4.0);
    assert_eq!(rand.magnitude_of(Operation::Solarize, 9), 0.0);
    let none = RandAugment::new().magnitude(0)?;
    assert_eq!((none.magnitude_of(Operation::ShearX, 9), none.magnitude_of(Operation::Posterize, 9)), (0.0, 8.0));
    let wide = TrivialAugmentWide::new();
    let expected = [(Operation::Rotate, 135.0), (Operation::TranslateY, 32.0), (Operation::Posterize, 2.0)];
    assert!(expected.iter().all(|&(operation, most)| wide.magnitude_of(operation, 30) == most));
    let refused = |result: Result<RandAugment, DataError>| result.unwrap_err().to_string();
    assert_eq!(refused(RandAugment::new().magnitude(31)), "magnitude: expected a number below 31, found 31");
    let bicubic = refused(RandAugment::new().interpolation(Interpolation::Bicubic));
    assert_eq!(bicubic, "interpolation: expected Nearest or Bilinear, found Bicubic");
    assert_eq!(refused(RandAugment::new().num_magnitude_bins(9)), "num_magnitude_bins: expected more than 9, found 9");
    assert_eq!(RandAugment::new().num_magnitude_bins(10)?.magnitude_of(Operation::Rotate, 9), 30.0);
    assert!(TrivialAugmentWide::new().num_magnitude_bins(1).is_err());
    Ok(())
}

#[test]
fn an_augmix_is_a_mixture_of_the_image_and_its_versions() -> Anyhow {
    let image = picture();
    // Without versions, and with versions in which nothing was changed, it is the image itself, rounded down.
    assert_eq!(run(AugMix::new().mixture_width(0), &image, 0)?, image);
    let unchanged = run(AugMix::new().chain_depth(0), &image, 5)?;
    assert!(unchanged.data().iter().zip(image.data()).all(|(mixed, level)| level - mixed <= 1));
    for operations in [false, true] {
        let mixed = run(AugMix::new().severity(10)?.alpha(0.5)?.all_ops(operations).chain_depth(1), &image, 2)?;
        assert_ne!(mixed, image);
    }
    let severity = AugMix::new().severity(11).unwrap_err().to_string();
    assert_eq!(severity, "severity: expected 1 to 10, found 11");
    assert!(AugMix::new().severity(0).is_err() && AugMix::new().alpha(0.0).is_err());
    Ok(())
}
