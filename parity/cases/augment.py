"""Crops with borders, erasing, blurring and the operations of RandAugment, against torchvision."""

import torch
from dataload import picture, pixels
from harness import case
from PIL import Image
from torchvision.transforms import RandAugment, RandomErasing, TrivialAugmentWide
from torchvision.transforms import functional as F
from torchvision.transforms.autoaugment import _apply_op

LEVELS = [0, 1, 5, 9, 15, 16, 22, 29, 30]
GEOMETRY = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
MODES = {"nearest": F.InterpolationMode.NEAREST, "bilinear": F.InterpolationMode.BILINEAR}
FILL = [3, 141, 59]


def given_picture(t, width, height):
    return Image.fromarray(t.give("image", pixels(picture(width, height))).numpy())


def magnitude(space, name, level):
    """An operation's magnitude as RandAugment takes it, without its sign."""
    magnitudes, _ = space[name]
    return float(magnitudes[level].item()) if magnitudes.ndim > 0 else 0.0


@case
def augment_magnitudes(t):
    """The magnitudes of all operations at all levels, bit for bit."""
    sizes = [(50, 61), (224, 224), (375, 500), (1, 1)]
    t.tell("sizes", sizes)
    names = list(RandAugment()._augmentation_space(31, (1, 1)))
    t.tell("names", names)

    def table(space, bins):
        values = [[magnitude(space, name, level) for level in range(bins)] for name in names]
        return torch.tensor(values, dtype=torch.float64)

    for s, size in enumerate(sizes):
        for bins in (31, 10, 2):
            t.expect(f"rand.{s}.{bins}", table(RandAugment()._augmentation_space(bins, size), bins))
    for bins in (31, 10, 2):
        t.expect(f"wide.{bins}", table(TrivialAugmentWide()._augmentation_space(bins), bins))


@case
def augment_operations(t):
    """Every operation of RandAugment and TrivialAugmentWide, of many magnitudes and both signs, bit for bit."""
    image = given_picture(t, 61, 50)
    jobs = []
    spaces = {
        "rand": RandAugment()._augmentation_space(31, (50, 61)),
        "wide": TrivialAugmentWide()._augmentation_space(31),
    }
    for of, space in spaces.items():
        for name, (magnitudes, signed) in space.items():
            for level in LEVELS if magnitudes.ndim > 0 else [0]:
                for sign in (1, -1) if signed else (1,):
                    for mode in MODES if name in GEOMETRY else ["nearest"]:
                        size = sign * magnitude(space, name, level)
                        jobs.append((f"{of}.{name}.{level}.{sign}.{mode}", name, size, mode))
    jobs.append(("invert", "Invert", 0.0, "nearest"))
    for angle in (90.0, 180.0, -90.0, 270.0, 45.0):
        jobs.append((f"rotate.{angle}", "Rotate", angle, "nearest"))
    t.tell("jobs", jobs)
    t.tell("fill", FILL)
    for job, name, size, mode in jobs:
        t.expect(job, pixels(_apply_op(image, name, size, MODES[mode], FILL)))


@case
def augment_padding(t):
    """Borders of every mode, also wider than the image."""
    image = given_picture(t, 9, 7)
    paddings = [[4, 4, 4, 4], [1, 2, 3, 0], [0, 0, 5, 0], [20, 31, 17, 9]]
    t.tell("paddings", paddings)
    t.tell("fill", FILL)
    for p, padding in enumerate(paddings):
        for mode in ("constant", "edge", "reflect", "symmetric"):
            t.expect(f"{mode}.{p}", pixels(F.pad(image, padding, tuple(FILL), mode)))


@case
def augment_blur(t):
    """Gaussian blur, within one level: torchvision sums over the plane at once, here over columns and then rows."""
    image = given_picture(t, 61, 50)
    kernels = [((3, 3), 0.1), ((5, 9), 0.7), ((23, 23), 2.0), ((1, 7), 1.3), ((49, 21), 11.0)]
    t.tell("kernels", kernels)
    for k, (kernel_size, sigma) in enumerate(kernels):
        t.expect(f"{k}", pixels(F.gaussian_blur(image, list(kernel_size), [sigma, sigma])), atol=1)


@case
def augment_erasing(t):
    """The mean place and size of erased rectangles, within five standard errors."""
    draws = 4000
    t.tell("draws", draws)
    sizes = [(50, 61), (224, 224), (20, 8)]
    t.tell("sizes", sizes)
    for s, (height, width) in enumerate(sizes):
        image = torch.zeros(3, height, width)
        regions = []
        for _ in range(draws):
            *region, _ = RandomErasing.get_params(image, (0.02, 0.33), (0.3, 3.3), [0.0])
            regions.append(region)
        regions = torch.tensor(regions, dtype=torch.float64)
        # Where no rectangle fits, torchvision returns the image itself: those are left out.
        regions = regions[regions[:, 2] < height]
        # Both sides draw about as many.
        error = 5 * regions.std(0) * (2 / len(regions)) ** 0.5
        for column, name in enumerate(("top", "left", "height", "width")):
            t.expect(f"{s}.{name}", regions[:, column].mean(), atol=error[column].item())
