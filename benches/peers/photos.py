"""Makes the photographs of `versus loader`. `photos.py OUT COUNT` crops large ones to JPEG files of ImageNet's usual
size.

The large photographs are in three Debian packages, which are downloaded and unpacked without installing anything. Each
is cropped to a random region, with a fixed seed, and scaled; quality 90 makes files of about 40 kB. The packages'
licences (CC BY, CC BY-SA and GPL 2 or later; see `NOTICE.txt` beside the files) allow this use. The files are for
measuring; do not distribute them with a program.
"""

import pathlib
import random
import subprocess
import sys
import tempfile

from PIL import Image

PACKAGES = ["mate-backgrounds", "lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04"]
WIDTH, HEIGHT = 500, 375
CLASSES = 8
LARGEST = 4
NOTICE = f"""Cropped from the photographs of the Debian packages {", ".join(PACKAGES)}, whose licences apply:
CC BY, CC BY-SA, GPL 2 or later. See /usr/share/doc/PACKAGE/copyright of each. For measuring only.
"""


def originals(folder):
    """The photographs of the packages that are large enough, in a fixed order."""
    subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True)
    files = {path.resolve() for path in folder.rglob("*.jpg") if path.is_file()}
    images = (Image.open(path).convert("RGB") for path in sorted(files))
    return [image for image in images if image.width >= WIDTH and image.height >= HEIGHT]


def crop(image, rng):
    """A random region of `image`, at most four times as wide as the result, scaled to its size."""
    times = rng.uniform(1, min(image.width / WIDTH, image.height / HEIGHT, LARGEST))
    width, height = int(WIDTH * times), int(HEIGHT * times)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS, (left, top, left + width, top + height))


def main():
    out, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        images = originals(pathlib.Path(folder))
        for number in range(count):
            path = out / f"{number % CLASSES:02}" / f"{number:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            crop(images[number % len(images)], rng).save(path, quality=90)
    (out / "NOTICE.txt").write_text(NOTICE)


if __name__ == "__main__":
    main()
