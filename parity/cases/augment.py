"""Crops with borders, erasing, blurring, RandAugment's operations, AugMix, and all defaults, against torchvision."""

import inspect
from unittest import mock

import torch
from dataload import picture, pixels
from harness import case
from PIL import Image
from torchvision.transforms import AugMix, RandAugment, RandomErasing, TrivialAugmentWide, autoaugment, v2
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
        mix = AugMix()._augmentation_space(10, size)
        levels = [[magnitude(mix, name, level) for level in range(10)] for name in mix]
        t.expect(f"mix.{s}", torch.tensor(levels, dtype=torch.float64))
    t.tell("mix names", list(mix))
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


class GivenShares(AugMix):
    """AugMix with given shares in the mixture: of the changed versions together, and of each."""

    def __init__(self, changed, shares, **options):
        super().__init__(mixture_width=len(shares), **options)
        self.given = [torch.tensor([[1 - changed, changed]]), torch.tensor([shares])]

    def _sample_dirichlet(self, params):
        return self.given.pop(0)


@case
def augment_mixture(t):
    """Torchvision's AugMix with given shares, and the operations that it has drawn, bit for bit.

    Torchvision makes a tensor of the image first. Its operations are called with Pillow images here, as in the other
    cases, because they round in another way on tensors: the mixture is what is compared. Pillow refuses to keep 0 bits.
    """
    image = given_picture(t, 61, 50)
    drawn = []

    def apply_to_pillow(tensor, name, magnitude, interpolation, fill):
        drawn.append((name, magnitude))
        if name == "Posterize":
            return _apply_op(tensor, name, magnitude, interpolation, fill)
        return F.pil_to_tensor(_apply_op(F.to_pil_image(tensor[0]), name, magnitude, interpolation, fill))[None]

    def mixture(name, changed, shares, depth, **options):
        drawn.clear()
        with mock.patch.object(autoaugment, "_apply_op", apply_to_pillow):
            mixed = GivenShares(changed, shares, chain_depth=depth, **options)(image)
        t.expect(name, pixels(mixed))
        # Chains of equally many operations.
        chains = [(share, drawn[at * depth:][:depth]) for at, share in enumerate(shares)]
        mixtures.append((name, changed, chains))
        return [name for name, _ in drawn]

    mixtures, names = [], set()
    given = [(0.5, [0.25, 0.5, 0.25]), (0.9, [0.1, 0.7, 0.2]), (0.0, [0.3, 0.3, 0.4]), (1.0, [0.6, 0.4]), (0.37, [1.0])]
    for s, (changed, shares) in enumerate(given):
        # In float32, as torchvision draws them.
        shares, changed = torch.tensor(shares).tolist(), torch.tensor(changed).item()
        for depth in (1, 2, 3):
            names.update(mixture(f"{s}.{depth}", changed, shares, depth))
            mixture(f"{s}.{depth}.severe", changed, shares, depth, severity=10)
            mixture(f"{s}.{depth}.partial", changed, shares, depth, severity=10, all_ops=False)
    # Until each of the 13 operations has been drawn.
    at = 0
    while names < set(AugMix()._augmentation_space(10, (50, 61))):
        names.update(mixture(f"more.{at}", 0.75, [0.5, 0.5], 3, severity=10))
        at += 1
    t.tell("mixtures", mixtures)


# Transforms that have torchvision's names; `Normalize` is a part of our `ToFloat`.
ALIKE = [
    "AugMix", "CenterCrop", "ClampBoundingBoxes", "ClampKeyPoints", "ColorJitter", "ConvertBoundingBoxFormat", "CutMix",
    "GaussianBlur", "MixUp", "Normalize", "RandAugment", "RandomAffine", "RandomCrop", "RandomErasing",
    "RandomHorizontalFlip", "RandomResizedCrop", "RandomRotation", "RandomVerticalFlip", "Resize",
    "SanitizeBoundingBoxes", "SanitizeKeyPoints", "TrivialAugmentWide",
]

# Options that are not there, with the default that is how ours always behave.
ABSENT = {
    "inplace": False,  # A batch is changed in a copy, an image always in place.
    "max_size": None,
    "expand": False,
    "center": None,
    "clamping_mode": "auto",
    # Labels are whole numbers of classes, whose number is therefore needed: torchvision needs it for such labels too.
    "num_classes": None,
}
# Which labels belong to a target's boxes: ours are given as labels, or in a `PerBox`.
GETTERS = {"CutMix": "default", "MixUp": "default", "SanitizeBoundingBoxes": "default", "SanitizeKeyPoints": None}


@case
def augment_defaults(t):
    """The default of every option of the transforms with torchvision's names."""
    defaults = []
    for name in ALIKE:
        for option, parameter in inspect.signature(getattr(v2, name)).parameters.items():
            default = parameter.default
            if option in ABSENT or option == "labels_getter":
                expected = GETTERS[name] if option == "labels_getter" else ABSENT[option]
                assert default == expected, f"{name}'s {option} is {default}, not {expected}"
            elif default is not parameter.empty:
                defaults.append((name, option, getattr(default, "value", default)))
                t.expect(f"{name}.{option}", True)
    t.tell("defaults", defaults)
