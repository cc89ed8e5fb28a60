//! Images with boxes, masks, key points and captions: all of them follow the pixels.

use overdrive_dataload::{
    AugMix, BoundingBoxFormat, BoundingBoxes, Canvas, CenterCrop, ClampBoundingBoxes, ClampKeyPoints, Collate,
    ConvertBoundingBoxFormat, DataError, DataLoader, Draws, EncodedImage, FnDataset, Image, ImagePipeline,
    Interpolation, KeyPoints, Mask, OnError, Operation, PaddingMode, PerBox, RandAugment, RandomAffine, RandomCrop,
    RandomHorizontalFlip, RandomResizedCrop, RandomRotation, RandomVerticalFlip, Region, Resize, SanitizeBoundingBoxes,
    SanitizeKeyPoints, Target, TargetPart, ToFloat, Transform,
};
use tch::{Kind, Tensor};

use crate::{Anyhow, Crop, encoded, fixture};

const FORMATS: [BoundingBoxFormat; 3] = [BoundingBoxFormat::Xyxy, BoundingBoxFormat::Xywh, BoundingBoxFormat::Cxcywh];

/// One operation of a given magnitude.
struct Only(Operation, f64);

impl Transform for Only {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        self.0.apply(canvas, self.1, Interpolation::Nearest, [0; 3])
    }
}

type Label = (BoundingBoxes, Mask, KeyPoints);

/// A black image of 24 x 32 pixels with a white rectangle, and what belongs to it.
fn rectangle([left, top, right, bottom]: [usize; 4]) -> Result<(Image, Label), DataError> {
    let inside = |at: usize| (left..right).contains(&(at % 32)) && (top..bottom).contains(&(at / 32));
    let pixels: Vec<u8> = (0..24 * 32).flat_map(|at| [255 * u8::from(inside(at)); 3]).collect();
    let mask: Vec<u8> = (0..24 * 32).map(|at| u8::from(inside(at))).collect();
    let corners = [left, top, right, bottom].map(|side| side as f32);
    let boxes = BoundingBoxes::new([corners], BoundingBoxFormat::Xyxy);
    let points = KeyPoints::new([[corners[0], corners[1]], [corners[2] - 1.0, corners[3] - 1.0]]);
    Ok((Image::new(pixels, 24, 32, 3)?, (boxes, Mask::new(mask, 24, 32)?, points)))
}

/// The rectangle that is not 0.
fn extent(mask: &Mask) -> [f32; 4] {
    let width = mask.size().width;
    let covered = || mask.values().iter().enumerate().filter(|(_, value)| **value > 0).map(|(at, _)| at);
    let least = |of: &dyn Fn(usize) -> usize| covered().map(of).min().unwrap_or(0) as f32;
    let most = |of: &dyn Fn(usize) -> usize| covered().map(of).max().unwrap_or(0) as f32 + 1.0;
    let (x, y) = (|at| at % width, |at| at / width);
    [least(&x), least(&y), most(&x), most(&y)]
}

#[test]
fn boxes_masks_and_points_follow_their_pixels() -> Anyhow {
    let region = Region { top: 3, left: 6, height: 15, width: 20 };
    // A quarter of what it becomes: between whole multiples, images and masks round as Pillow and PyTorch do.
    let quarter = Region { height: 12, width: 16, ..region };
    let twice = || Resize::new([48, 64]).interpolation(Interpolation::Nearest);
    let pad = || RandomCrop::new([30, 44]).padding([5, 1, 7, 5]);
    let cases: [(&str, ImagePipeline); 13] = [
        ("flip", ImagePipeline::new(0).then(RandomHorizontalFlip::new(1.0)?)),
        ("upside down", ImagePipeline::new(0).then(RandomVerticalFlip::new(1.0)?)),
        ("crop", ImagePipeline::new(0).then(Crop(region))),
        ("flip, crop", ImagePipeline::new(0).then(RandomHorizontalFlip::new(1.0)?).then(Crop(region))),
        ("resize", ImagePipeline::new(0).then(twice())),
        ("pad", ImagePipeline::new(0).then(pad())),
        ("center", ImagePipeline::new(0).then(CenterCrop::new([31, 29]))),
        ("move", ImagePipeline::new(0).then(Only(Operation::TranslateX, 5.0)).then(Only(Operation::TranslateY, -3.0))),
        ("turn by 180", ImagePipeline::new(0).then(Only(Operation::Rotate, 180.0))),
        ("turn by 90", ImagePipeline::new(0).then(CenterCrop::new(24)).then(Only(Operation::Rotate, 90.0))),
        (
            "crop, resize, flip",
            ImagePipeline::new(0).then(Crop(quarter)).then(twice()).then(RandomVerticalFlip::new(1.0)?),
        ),
        ("affine", ImagePipeline::new(7).then(RandomAffine::new(0.0..=0.0)?.translate([0.2, 0.2])?)),
        ("nothing", ImagePipeline::new(0).then(RandomRotation::new(0.0..=0.0)?)),
    ];
    let (image, label) = rectangle([8, 6, 19, 12])?;
    for (name, pipeline) in cases {
        let mut target = label.clone();
        let changed = pipeline.image_with(&image, &mut target, 3, 0)?;
        let (boxes, mask, points) = target;
        assert_eq!([mask.size().height, mask.size().width], [changed.height(), changed.width()], "{name}");
        let seen: Vec<u8> = changed.data().chunks_exact(3).map(|pixel| u8::from(pixel[0] > 127)).collect();
        assert_eq!(mask.values(), seen, "{name}");
        let extent = extent(&mask);
        let near = |found: f32, expected: f32| (found - expected).abs() < 1e-4;
        assert!(boxes.boxes()[0].into_iter().zip(extent).all(|(found, expected)| near(found, expected)), "{name}");
        if ["flip", "upside down", "crop", "flip, crop", "pad", "center", "move"].contains(&name) {
            let xs = points.points().iter().map(|point| point[0]).fold(f32::INFINITY, f32::min);
            let ys = points.points().iter().map(|point| point[1]).fold(f32::NEG_INFINITY, f32::max);
            assert!(near(xs, extent[0]) && near(ys, extent[3] - 1.0), "{name}: {points:?}");
        }
    }
    Ok(())
}

#[test]
fn the_format_of_boxes_changes_nothing() -> Anyhow {
    let boxes = BoundingBoxes::new([[3.0, 4.0, 20.5, 11.0], [0.0, 0.0, 32.0, 24.0]], BoundingBoxFormat::Xyxy);
    let pipeline = ImagePipeline::new(5)
        .then(RandomHorizontalFlip::new(1.0)?)
        .then(RandomResizedCrop::new([40, 30]))
        .then(RandomCrop::new([40, 50]).padding([13, 4]))
        .then(RandomVerticalFlip::new(1.0)?)
        .then(RandomAffine::new(-20.0..=20.0)?.shear(-9.0..=9.0, -9.0..=9.0)?.scale(0.5..=1.5)?);
    let (image, _) = rectangle([0, 0, 1, 1])?;
    let run = |format, draw| -> Result<BoundingBoxes, DataError> {
        let mut target = boxes.to_format(format);
        pipeline.image_with(&image, &mut target, draw, 0)?;
        assert_eq!(target.format(), format);
        Ok(target.to_format(BoundingBoxFormat::Xyxy))
    };
    for draw in 0..20 {
        let expected = run(BoundingBoxFormat::Xyxy, draw)?;
        for format in FORMATS {
            for (found, expected) in run(format, draw)?.boxes().iter().flatten().zip(expected.boxes().iter().flatten())
            {
                assert!((found - expected).abs() < 1e-3, "{format:?}: {found} for {expected}");
            }
        }
    }
    let converted = ImagePipeline::new(0).then(ConvertBoundingBoxFormat::new(BoundingBoxFormat::Cxcywh));
    let mut target = boxes;
    converted.image_with(&image, &mut target, 0, 0)?;
    assert_eq!(target.boxes(), [[11.75, 7.5, 17.5, 7.0], [16.0, 12.0, 32.0, 24.0]]);
    Ok(())
}

#[test]
fn boxes_that_are_cut_off_go_with_what_belongs_to_them() -> Anyhow {
    let (image, (_, mask, _)) = rectangle([8, 6, 19, 12])?;
    let boxes = [[8.0, 6.0, 19.0, 12.0], [0.0, 0.0, 5.0, 5.0], [18.0, 11.0, 30.0, 20.0], [9.0, 7.0, 9.5, 12.0]];
    let boxes = BoundingBoxes::new(boxes, BoundingBoxFormat::Xyxy);
    let key_points = (0..4).map(|at| KeyPoints::new([[at as f32, 7.0], [40.0, 7.0]])).collect::<Vec<_>>();
    let label = || {
        let names = ["a", "b", "c", "d"].map(str::to_owned);
        let masks = PerBox(vec![mask.clone(); 4]);
        (boxes.clone(), PerBox(vec![1_i64, 2, 3, 4]), PerBox(names.into()), masks, PerBox(key_points.clone()))
    };
    let crop = || ImagePipeline::new(0).then(Crop(Region { top: 6, left: 8, height: 8, width: 12 }));
    let mut target = label();
    crop().then(SanitizeBoundingBoxes::new()).image_with(&image, &mut target, 0, 0)?;
    assert_eq!(target.0.boxes(), [[0.0, 0.0, 11.0, 6.0], [10.0, 5.0, 12.0, 8.0]]);
    assert_eq!((target.1.0, target.2.0), (vec![1, 3], vec!["a".to_owned(), "c".to_owned()]));
    assert_eq!((target.3.0.len(), target.3.0[0].size().width), (2, 12));
    assert_eq!(target.4.0[1].points(), [[-6.0, 1.0], [32.0, 1.0]]);
    let mut large = label();
    crop().then(SanitizeBoundingBoxes::new().min_area(7.0)?).image_with(&image, &mut large, 0, 0)?;
    assert_eq!(large.1.0, [1]);

    // Without clamping they stay whole, and are not within the image.
    let mut whole = boxes.clone().clamped(false);
    crop().image_with(&image, &mut whole, 0, 0)?;
    assert_eq!(whole.boxes()[2], [10.0, 5.0, 22.0, 14.0]);
    crop().then(ClampBoundingBoxes).image_with(&image, &mut whole, 0, 0)?;
    assert_eq!(whole.boxes()[2], [2.0, 0.0, 12.0, 8.0]);

    let points = || KeyPoints::new([[8.0, 6.0], [7.5, 6.0], [20.0, 13.9], [19.5, 13.5]]);
    let (mut some, mut all) = (points(), points());
    crop().then(SanitizeKeyPoints).image_with(&image, &mut some, 0, 0)?;
    assert_eq!(some.points(), [[0.0, 0.0], [11.5, 7.5]]);
    crop().then(ClampKeyPoints).image_with(&image, &mut all, 0, 0)?;
    assert_eq!(all.points(), [[0.0, 0.0], [0.0, 0.0], [11.0, 7.0], [11.0, 7.0]]);
    Ok(())
}

#[test]
fn boxes_at_an_edge_stay_although_a_resize_rounds_them_beyond_it() -> Anyhow {
    let sizes: Vec<usize> = (50..400).collect();
    for side in [224, 640] {
        let pipeline = ImagePipeline::new(0)
            .then(Resize::new([24, side]))
            .then(RandomHorizontalFlip::new(0.5)?)
            .then(SanitizeBoundingBoxes::new());
        for (draw, &width) in sizes.iter().enumerate().step_by(9) {
            let (image, [w, h]) = (Image::new(vec![0; width * 30 * 3], 30, width, 3)?, [width as f32, 30.0]);
            let boxes = BoundingBoxes::new([[10.0, 10.0, w, h], [0.0, 0.0, 7.3, 11.1]], BoundingBoxFormat::Xyxy);
            for format in FORMATS {
                let mut target = (boxes.to_format(format), PerBox(vec![3_i64, 4]));
                pipeline.image_with(&image, &mut target, draw as u64, 0)?;
                assert_eq!(target.1.0, [3, 4], "{width} to {side}, {format:?}");
                let corners = target.0.to_format(BoundingBoxFormat::Xyxy);
                let within = |&at: &f32| (-1e-4..=side as f32 + 1e-4).contains(&at);
                assert!(corners.boxes().iter().flatten().all(within), "{corners:?}");
                assert!(format != BoundingBoxFormat::Xyxy || corners.boxes()[0][2] <= side as f32);
            }
        }
    }
    // Beyond the image by more than rounding.
    let mut target = (BoundingBoxes::new([[1.0, 1.0, 32.01, 9.0]], BoundingBoxFormat::Xyxy), PerBox(vec![1_i64]));
    let (image, _) = rectangle([0, 0, 1, 1])?;
    ImagePipeline::new(0).then(SanitizeBoundingBoxes::new()).image_with(&image, &mut target, 0, 0)?;
    assert!(target.0.is_empty() && target.1.0.is_empty());
    Ok(())
}

#[test]
fn boxes_without_entries_of_their_own_are_said_to_be_alone() -> Anyhow {
    let (_, (boxes, ..)) = rectangle([8, 6, 19, 12])?;
    let classes = Tensor::from_slice(&[1_i64]);
    for target in [&mut boxes.clone() as &mut dyn Target, &mut (boxes.clone(), vec![1_i64]), &mut (boxes, classes)] {
        let error = refusal(SanitizeBoundingBoxes::new(), target)?;
        assert!(error.contains("a `PerBox`") && error.contains("boxes_alone"), "{error}");
        assert_eq!(refusal(SanitizeBoundingBoxes::new().boxes_alone(), target)?, "none");
    }
    Ok(())
}

#[test]
fn masks_whose_values_would_change_are_refused() -> Anyhow {
    let mut deep = Vec::new();
    let mut encoder = png::Encoder::new(&mut deep, 2, 1);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Sixteen);
    encoder.write_header()?.write_image_data(&[0, 1, 0, 255])?;
    let error = Mask::decode(&deep, "deep.png").expect_err("16 bits").to_string();
    assert!(error.contains("16 bits") && error.contains("deep.png"), "{error}");
    let error = Mask::decode(&fixture("grey.jpg"), "grey.jpg").expect_err("JPEG").to_string();
    assert!(error.contains("JPEG") && error.contains("grey.jpg"), "{error}");
    Ok(())
}

/// What the refusal of this target says.
fn refusal(transform: impl Transform + 'static, target: &mut dyn Target) -> Result<String, DataError> {
    let (image, _) = rectangle([8, 6, 19, 12])?;
    let done = ImagePipeline::new(0).then(transform).image_with(&image, target, 0, 0);
    Ok(done.map_or_else(|error| error.to_string(), |_| "none".to_owned()))
}

#[test]
fn targets_that_do_not_fit_are_refused_by_name() -> Anyhow {
    let (_, (boxes, mask, points)) = rectangle([8, 6, 19, 12])?;
    let mirrored = || RandomCrop::new(40).padding(20).padding_mode(PaddingMode::Reflect);
    assert!(refusal(mirrored(), &mut boxes.clone())?.contains("expected `Constant`"));
    assert!(refusal(mirrored(), &mut PerBox(vec![points.clone()]))?.contains("expected `Constant`"));
    assert_eq!(refusal(mirrored(), &mut mask.clone())?, "none");
    assert!(refusal(AugMix::new(), &mut (1_i64, mask.clone()))?.contains("AugMix"));
    assert_eq!(refusal(AugMix::new(), &mut (1_i64, "a caption".to_owned()))?, "none");
    assert_eq!(refusal(RandAugment::new(), &mut boxes.clone())?, "none");
    let sanitize = SanitizeBoundingBoxes::new;
    assert!(refusal(sanitize(), &mut 3_i64)?.contains("one `BoundingBoxes`"));
    assert!(refusal(sanitize(), &mut (boxes.clone(), boxes.clone()))?.contains("one `BoundingBoxes`"));
    let mut uneven = (boxes.clone(), PerBox(vec![1_i64, 2]));
    assert!(refusal(sanitize(), &mut uneven)?.contains("PerBox: expected 1 entries, one for each box, found 2"));
    assert_eq!(uneven, (boxes, PerBox(vec![1, 2])));
    let small = Mask::new([0; 6], 2, 3)?;
    assert!(
        refusal(sanitize(), &mut small.clone())?.contains("mask: expected the size of its image, 24 x 32, found 2 x 3")
    );
    assert!(refusal(sanitize(), &mut PerBox(vec![small]))?.contains("found 2 x 3"));
    assert!(Mask::new([0; 5], 2, 3).is_err() && Mask::decode(&fixture("h2v2.png"), "h2v2.png").is_err());
    let mut grey = Vec::new();
    let mut encoder = png::Encoder::new(&mut grey, 3, 2);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header()?.write_image_data(&[0, 1, 2, 3, 4, 255])?;
    assert_eq!(Mask::decode(&grey, "grey.png")?, Mask::new([0, 1, 2, 3, 4, 255], 2, 3)?);
    assert!(SanitizeBoundingBoxes::new().min_size(0.5).is_err() && RandomAffine::new(5.0..=4.0).is_err());
    assert!(RandomAffine::new(0.0..=1.0)?.shear(0.0..=90.0, 0.0..=0.0).is_err());
    Ok(())
}

#[test]
fn batches_have_labels_of_every_shape() -> Anyhow {
    let label = |count: usize| {
        let boxes = BoundingBoxes::new(vec![[1.0, 2.0, 30.0, 40.0]; count], BoundingBoxFormat::Xyxy);
        let masks =
            PerBox((0..count).map(|at| Mask::new(vec![at as u8; 43 * 61], 43, 61).unwrap()).collect::<Vec<_>>());
        let points = PerBox(vec![KeyPoints::new([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]); count]);
        ((boxes, PerBox(vec![7_i64; count])), (masks, points), (format!("{count} cats"), [0.5_f32, 1.5]))
    };
    // The fault of one image is its own: here, the second.
    let dataset = FnDataset::new(4, move |index| {
        let bytes = if index == 1 { fixture("h2v2.jpg")[..90].to_vec() } else { fixture("h2v2.jpg") };
        Ok((encoded(bytes), label(index)))
    });
    let pipeline = ImagePipeline::new(0).then(RandomHorizontalFlip::new(1.0)?).then(Resize::new([43, 122]));
    let loader = DataLoader::builder(dataset).batch_size(4).on_error(OnError::Skip).collate(pipeline).build()?;
    let (images, ((boxes, classes), (masks, points), (captions, pair))) = loader.iter().next().ok_or("no batch")??;
    assert_eq!(images.size(), [3, 3, 43, 122]);
    assert_eq!(captions, ["0 cats", "2 cats", "3 cats"]);
    assert_eq!((pair[0].size(), pair[1].double_value(&[2])), (vec![3], 1.5));
    let (boxes, counts) = boxes.to_padded(-1.0, None)?;
    assert_eq!((boxes.size(), Vec::<i64>::try_from(counts)?), (vec![3, 3, 4], vec![0, 2, 3]));
    assert_eq!(
        Vec::<f32>::try_from(boxes.get(1).view(-1))?,
        [62., 2., 120., 40., 62., 2., 120., 40., -1., -1., -1., -1.]
    );
    assert_eq!(classes.to_padded(0.0, Some(2))?.0.size(), [3, 2]);
    let (masks, offsets) = masks.into_tensors()?;
    assert_eq!((masks.size(), Vec::<i64>::try_from(&offsets[0])?), (vec![5, 43, 122], vec![0, 0, 2, 5]));
    assert_eq!(
        masks.to_kind(Kind::Int64).sum_dim_intlist([1, 2].as_slice(), false, Kind::Int64).int64_value(&[4]),
        2 * 43 * 122
    );
    assert_eq!(points.to_padded(0.0, None)?.0.size(), [3, 3, 3, 2]);
    Ok(())
}

#[test]
fn a_target_changes_no_pixel_and_own_types_have_own_batches() -> Anyhow {
    struct Annotation {
        boxes: BoundingBoxes,
        caption: &'static str,
    }
    impl Target for Annotation {
        fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
            self.boxes.visit(visit);
        }
    }
    let pipeline = || ImagePipeline::new(3).then(RandomResizedCrop::new(32)).then(RandomHorizontalFlip::default());
    let images = ["h2v2.jpg", "progressive.jpg", "grey.jpg"].map(|name| encoded(fixture(name)));
    let plain = images.iter().cloned().zip([4_i64, 5, 6]).collect();
    let annotated = || -> Vec<(EncodedImage, Annotation)> {
        let boxes = BoundingBoxes::new([[2.0, 2.0, 9.0, 9.0]], BoundingBoxFormat::Xyxy);
        images.iter().map(|image| (image.clone(), Annotation { boxes: boxes.clone(), caption: "cat" })).collect()
    };
    let collate = |labels: Vec<Annotation>| {
        let boxes: Vec<f32> = labels.iter().flat_map(|label| label.boxes.boxes()).flatten().copied().collect();
        Ok((Tensor::from_slice(&boxes), labels[2].caption))
    };
    let (expected, labels) = pipeline().collate(plain)?;
    let (found, (boxes, caption)) = pipeline().collate_targets(collate).collate(annotated())?;
    assert!(found.equal(&expected) && labels.int64_value(&[2]) == 6);
    assert_eq!((boxes.size(), caption), (vec![12], "cat"));
    let floats = pipeline().to_float(ToFloat::unit()).collate_targets(collate).collate(annotated())?;
    assert!(floats.0.equal(&ToFloat::unit().apply(&expected)?) && floats.1.0.equal(&boxes));
    Ok(())
}
