"""Boxes, masks and key points that change with their image, against torchvision.transforms.v2."""

import math

import torch
from dataload import picture, pixels
from harness import case
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor

HEIGHT, WIDTH = 50, 61
FORMATS = ("XYXY", "XYWH", "CXCYWH")


def shear(target, magnitude, axis):
    """As RandAugment calls it."""
    degrees = math.degrees(math.atan(magnitude))
    return F.affine(
        target, angle=0.0, translate=[0, 0], scale=1.0, shear=[degrees, 0.0] if axis == 0 else [0.0, degrees],
        center=[0, 0],
    )


def move(target, x, y):
    return F.affine(target, angle=0.0, translate=[int(x), int(y)], scale=1.0, shear=[0.0, 0.0])


# Each with the numbers that the Rust side takes.
CHANGES = {
    "crop": ([7, 5, 30, 41], lambda t, a: F.crop(t, *map(int, a))),
    "resize": ([31, 47], lambda t, a: F.resize(t, [int(side) for side in a])),
    "enlarge": ([120, 97], lambda t, a: F.resize(t, [int(side) for side in a])),
    "hflip": ([], lambda t, a: F.horizontal_flip(t)),
    "vflip": ([], lambda t, a: F.vertical_flip(t)),
    "pad": ([3, 14, 9, 1], lambda t, a: F.pad(t, [int(side) for side in a])),
    "center": ([30, 41], lambda t, a: F.center_crop(t, [int(side) for side in a])),
    "rotate": ([17.3], lambda t, a: F.rotate(t, a[0])),
    "rotate back": ([-123.4], lambda t, a: F.rotate(t, a[0])),
    "shear x": ([0.213], lambda t, a: shear(t, a[0], 0)),
    "shear y": ([-0.291], lambda t, a: shear(t, a[0], 1)),
    "move x": ([-11.0], lambda t, a: move(t, a[0], 0)),
    "move y": ([9.0], lambda t, a: move(t, 0, a[0])),
}


def given_boxes(t):
    """Boxes inside, at the edges, across them and outside, some of them empty."""
    generator = torch.Generator().manual_seed(3)
    corners = torch.rand(40, 4, generator=generator) * torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
    corners = torch.cat([torch.minimum(corners[:, :2], corners[:, 2:]), torch.maximum(corners[:, :2], corners[:, 2:])], 1)
    odd = [[0, 0, WIDTH, HEIGHT], [-4, -6, 5, 7], [55, 44, 70, 90], [-9, -9, -2, -3], [8, 8, 8, 8], [20, 3, 20.4, 40]]
    return t.give("boxes", torch.cat([corners, torch.tensor(odd, dtype=torch.float32)]))


def of_format(boxes, format):
    boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(HEIGHT, WIDTH))
    return F.convert_bounding_box_format(boxes, new_format=format)


def plain(target):
    return target.as_subclass(torch.Tensor).clone()


@case
def targets_geometry(t):
    """Every change of boxes of each format, key points and masks: crops and flips of boxes bit for bit.

    Masks that are turned or sheared have Pillow's pixels, as the image has: those of torchvision's kernel for tensors
    differ where two are about equally near.
    """
    boxes = given_boxes(t)
    points = t.give("points", torch.rand(30, 2) * torch.tensor([WIDTH * 1.2, HEIGHT * 1.2]) - 5)
    mask = t.give("mask", torch.randint(0, 256, (HEIGHT, WIDTH), dtype=torch.uint8))
    t.tell("changes", [[name, numbers] for name, (numbers, _) in CHANGES.items()])
    for name, (numbers, change) in CHANGES.items():
        # Maps of the plane are multiplied out in another order.
        is_map = name.startswith(("rotate", "shear", "move"))
        # Where a border is added here, boxes are cut off twice.
        close = {"atol": 2e-4} if is_map else {"atol": 1e-5} if name == "pad" else {}
        for format in FORMATS:
            t.expect(f"{name}.{format}", plain(change(of_format(boxes, format), numbers)), **close)
        points_then = change(tv_tensors.KeyPoints(points, canvas_size=(HEIGHT, WIDTH)), numbers)
        t.expect(f"{name}.points", plain(points_then), **close)
        if is_map:
            t.expect(f"{name}.mask", pil_to_tensor(change(Image.fromarray(mask.numpy()), numbers))[0])
        else:
            t.expect(f"{name}.mask", plain(change(tv_tensors.Mask(mask), numbers)))


@case
def targets_mask_sizes(t):
    """Masks resized to many sizes, bit for bit."""
    mask = t.give("mask", torch.randint(0, 256, (HEIGHT, WIDTH), dtype=torch.uint8))
    sizes = [[1, 1], [25, 122], [49, 60], [51, 62], [100, 183], [7, 300], [333, 3], [150, 61]]
    t.tell("sizes", sizes)
    for s, size in enumerate(sizes):
        t.expect(f"{s}", plain(F.resize(tv_tensors.Mask(mask), size)))


@case
def targets_sanitized(t):
    """Which boxes and points stay, of each format and least size; and boxes and points clamped."""
    boxes = given_boxes(t)
    points = t.give("points", torch.rand(60, 2) * torch.tensor([WIDTH * 1.2, HEIGHT * 1.2]) - 5)
    least = [[1.0, 1.0], [5.0, 1.0], [1.0, 200.0]]
    t.tell("least", least)
    classes = torch.arange(len(boxes))
    for format in FORMATS:
        given = of_format(boxes, format)
        t.expect(f"{format}.clamped", plain(v2.ClampBoundingBoxes()(given)))
        for n, (min_size, min_area) in enumerate(least):
            sanitize = v2.SanitizeBoundingBoxes(min_size, min_area)
            out = sanitize({"boxes": given, "labels": classes})
            t.expect(f"{format}.{n}", plain(out["boxes"]))
            t.expect(f"{format}.{n}.labels", out["labels"])
    given = tv_tensors.KeyPoints(points, canvas_size=(HEIGHT, WIDTH))
    t.expect("points", plain(v2.SanitizeKeyPoints()(given)))
    t.expect("points.clamped", plain(v2.ClampKeyPoints()(given)))


@case
def targets_affine(t):
    """RandomAffine's map of the image, its boxes, key points and mask, and RandomRotation's, for fixed numbers.

    A move is what the pipeline draws for the sample of the job's number, of at most these parts of the sides.
    """
    image = Image.fromarray(t.give("image", pixels(picture(WIDTH, HEIGHT))).numpy())
    boxes = given_boxes(t)
    points = t.give("points", torch.rand(30, 2) * torch.tensor([WIDTH * 1.2, HEIGHT * 1.2]) - 5)
    mask = t.give("mask", torch.randint(0, 256, (HEIGHT, WIDTH), dtype=torch.uint8))
    jobs = [
        [23.1, 1.13, 11.7, 0.0, 0.0, 0.0],
        [-71.3, 0.61, -5.3, 8.9, 0.0, 0.0],
        [0.0, 1.0, 33.3, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0, 0.3, 0.2],
        [35.7, 1.31, 0.0, -7.1, 0.3, 0.2],
        [-14.9, 0.83, 9.3, 0.0, 0.3, 0.2],
    ]
    moves = [[0, 0], [0, 0], [0, 0], [16, 0], [-9, -5], [-10, 7]]
    t.tell("jobs", jobs)
    fill = [9, 200, 77]
    modes = {"nearest": F.InterpolationMode.NEAREST, "bilinear": F.InterpolationMode.BILINEAR}
    for j, ((angle, scale, *shears, _, _), move) in enumerate(zip(jobs, moves)):
        affine = dict(angle=angle, translate=move, scale=scale, shear=shears)
        for name, numbers, change in [("affine", affine, F.affine), ("rotation", dict(angle=angle), F.rotate)]:
            for mode, interpolation in modes.items():
                changed = change(image, interpolation=interpolation, fill=fill, **numbers)
                t.expect(f"{j}.{name}.{mode}", pixels(changed))
            t.expect(f"{j}.{name}.boxes", plain(change(of_format(boxes, "XYWH"), **numbers)), atol=5e-4)
            then = change(tv_tensors.KeyPoints(points, canvas_size=(HEIGHT, WIDTH)), **numbers)
            t.expect(f"{j}.{name}.points", plain(then), atol=5e-4)
            t.expect(f"{j}.{name}.mask", pil_to_tensor(change(Image.fromarray(mask.numpy()), **numbers))[0])
