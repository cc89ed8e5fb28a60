"""Decoding and transforms against Pillow and torchvision."""

import io
import math

import numpy as np
import torch
from harness import case
from PIL import Image, ImageOps
from torchvision.transforms import ColorJitter, v2
from torchvision.transforms import functional as F

REGIONS = [(0, 0, 150, 200), (10, 20, 64, 96), (3, 5, 17, 11), (77, 101, 73, 99), (149, 199, 1, 1), (31, 0, 90, 200)]
SIZES = [(56, 56), (224, 224), (17, 90)]


def picture(width, height, seed=0):
    """Smooth shapes and noise, like a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    periods = ((7.0, 19.0, 0.0), (23.0, 5.0, 1.0), (11.0, 13.0, 2.0))
    waves = [128 + 90 * np.sin(x / a + y / b + c) for a, b, c in periods]
    noise = rng.normal(0, 9, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8))


def pixels(image):
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy())


def give_file(t, name, image, **options):
    """Gives the bytes of an encoded file to the Rust half, and returns the image that Pillow reads from them."""
    file = io.BytesIO()
    image.save(file, **options)
    t.give(name, torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    return Image.open(file)


@case
def dataload_jpeg(t):
    """Every kind of JPEG bit for bit; lossy WebP within two levels."""
    names = []
    for sampling in (0, 1, 2):
        for width, height in ((1, 1), (2, 3), (8, 8), (17, 33), (200, 150), (333, 250)):
            for restart in (0, 2):
                name = f"{sampling}.{width}x{height}.{restart}"
                options = {"quality": 90, "subsampling": sampling, "restart_marker_blocks": restart}
                t.expect(name, pixels(give_file(t, name, picture(width, height), format="JPEG", **options)))
                names.append(name)
    image = picture(200, 150)
    t.expect("grey", pixels(give_file(t, "grey", image.convert("L"), format="JPEG")))
    t.expect("low", pixels(give_file(t, "low", image, format="JPEG", quality=10)))
    t.expect("optimized", pixels(give_file(t, "optimized", image, format="JPEG", quality=97, optimize=True)))
    t.expect("progressive", pixels(give_file(t, "progressive", image, format="JPEG", progressive=True)))
    t.expect("cmyk", pixels(give_file(t, "cmyk", image.convert("CMYK"), format="JPEG")))
    t.expect("webp", pixels(give_file(t, "webp", image, format="WEBP", quality=90)), atol=2)
    t.expect("lossless", pixels(give_file(t, "lossless", image, format="WEBP", lossless=True)))
    t.tell("names", [*names, "grey", "low", "optimized", "progressive", "cmyk", "webp", "lossless"])


@case
def dataload_resized_crop(t):
    """Resized crops of an encoded file, antialiased as Pillow does it: within one level, two for bicubic.

    Pillow's weights have 22 bits, ours 14, so each of the two passes may round differently. A bilinear result lies
    between its neighbours; with bicubic, negative weights enlarge the first pass's error of one level to 1.25.
    """
    image = give_file(t, "file", picture(200, 150), format="JPEG", quality=90)
    t.tell("regions", REGIONS)
    t.tell("sizes", SIZES)
    for mode, filtering in (("bilinear", F.InterpolationMode.BILINEAR), ("bicubic", F.InterpolationMode.BICUBIC)):
        for r, region in enumerate(REGIONS):
            for s, size in enumerate(SIZES):
                cropped = F.resized_crop(image, *region, list(size), filtering)
                t.expect(f"{mode}.{r}.{s}", pixels(cropped), atol=1 if mode == "bilinear" else 2)


@case
def dataload_dct_scaling(t):
    """Crops of a file that Pillow decodes at a fraction of its size, by `draft`: within one level."""
    file = give_file(t, "file", picture(400, 304), format="JPEG", quality=90).fp.getvalue()
    regions = [(0, 0, 304, 400), (10, 20, 200, 300), (3, 5, 117, 111), (77, 101, 173, 199)]
    sizes = [(56, 56), (24, 30), (100, 97)]
    t.tell("regions", regions)
    t.tell("sizes", sizes)
    for r, (top, left, height, width) in enumerate(regions):
        for s, size in enumerate(sizes):
            eighths = next(e for e in (1, 2, 4, 8) if height * e >= 8 * size[0] and width * e >= 8 * size[1])
            draft = Image.open(io.BytesIO(file))
            draft.draft("RGB", (400 * eighths // 8, 304 * eighths // 8))
            exact = [side * eighths / 8 for side in (left, top, left + width, top + height)]
            whole = [math.floor(exact[0]), math.floor(exact[1]), math.ceil(exact[2]), math.ceil(exact[3])]
            box = [exact[0] - whole[0], exact[1] - whole[1], exact[2] - whole[0], exact[3] - whole[1]]
            scaled = draft.crop(whole).resize(size[::-1], Image.Resampling.BILINEAR, box=box)
            t.expect(f"{r}.{s}", pixels(scaled), atol=1)


@case
def dataload_exif(t):
    """The eight EXIF orientations."""
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = give_file(t, str(orientation), picture(61, 43), format="JPEG", quality=90, exif=exif)
        t.expect(str(orientation), pixels(ImageOps.exif_transpose(image)))


@case
def dataload_evaluation(t):
    """Resize, CenterCrop and flips."""
    image = t.give("image", pixels(picture(200, 150)))
    image = Image.fromarray(image.numpy())
    t.tell("sides", [32, 100, 150, 201])
    for side in (32, 100, 150, 201):
        t.expect(f"resize.{side}", pixels(F.resize(image, side)), atol=1)
        t.expect(f"center.{side}", pixels(F.center_crop(image, side)))
        t.expect(f"center.{side}.101", pixels(F.center_crop(image, [side, 101])))
    t.expect("hflip", pixels(F.hflip(image)))
    t.expect("vflip", pixels(F.vflip(image)))


@case
def dataload_color_jitter(t):
    """Each adjustment alone, bit for bit."""
    image = Image.fromarray(t.give("image", pixels(picture(200, 150))).numpy())
    factors = [0.0, 0.3, 0.77, 1.0, 1.4, 3.0]
    turns = [-0.5, -0.2, -0.01, 0.0, 0.1, 0.5]
    t.tell("factors", factors)
    t.tell("turns", turns)
    for i, factor in enumerate(factors):
        t.expect(f"brightness.{i}", pixels(ColorJitter(brightness=(factor, factor))(image)))
        t.expect(f"contrast.{i}", pixels(ColorJitter(contrast=(factor, factor))(image)))
        t.expect(f"saturation.{i}", pixels(ColorJitter(saturation=(factor, factor))(image)))
    for i, turn in enumerate(turns):
        t.expect(f"hue.{i}", pixels(ColorJitter(hue=(turn, turn))(image)))


@case
def dataload_mix(t):
    """MixUp and CutMix with given shares."""
    images = t.give("images", torch.rand(5, 3, 12, 10))
    labels = t.give("labels", torch.tensor([0, 3, 1, 1, 6]))
    shares = [0.0, 0.2, 0.5, 0.91, 1.0]
    boxes = [(0, 0, 10, 12), (2, 3, 7, 5), (9, 11, 10, 12), (4, 4, 4, 8)]
    t.tell("shares", shares)
    t.tell("boxes", boxes)
    mixup, cutmix = v2.MixUp(num_classes=7), v2.CutMix(num_classes=7)
    for i, lam in enumerate(shares):
        params = {"labels": labels, "batch_size": 5, "lam": lam}
        t.expect(f"mixup.{i}", mixup.transform(images, params))
        t.expect(f"mixup.{i}.labels", mixup.transform(labels, params))
    for i, (x1, y1, x2, y2) in enumerate(boxes):
        lam = float(1.0 - (x2 - x1) * (y2 - y1) / (10 * 12))
        params = {"labels": labels, "batch_size": 5, "box": (x1, y1, x2, y2), "lam_adjusted": lam}
        t.expect(f"cutmix.{i}", cutmix.transform(images, params))
        t.expect(f"cutmix.{i}.labels", cutmix.transform(labels, params))
