"""Prints a dataset that `convert` has written, as Hugging Face's datasets loads it, and saves it in three files.

    python load_from_disk.py FROM TO
"""

import sys

import datasets

loaded = datasets.load_from_disk(sys.argv[1])
loaded.save_to_disk(sys.argv[2], num_shards=3)
for name in loaded.column_names:
    print(f"{name}: {loaded.features[name]}")
print(len(loaded), "rows")
for name in ["jpg", "seg.png"]:
    loaded = loaded.cast_column(name, datasets.Image(decode=False))


def text(value):
    if isinstance(value, dict):
        value = value["bytes"]
    return value.hex() if isinstance(value, bytes) else str(value)


for row in loaded:
    print(*map(text, row.values()))
