"""DALI's side of `versus loader`. Answers each line `cpu EPOCHS` with the seconds that those epochs took.

Its CPU pipeline reads, decodes only the random region, scales (bilinear, with antialiasing) and flips on `workers`
threads, and reads two batches ahead. It needs no GPU.
"""

import json
import sys
import time

try:
    import nvidia.dali as dali
    from nvidia.dali import fn, pipeline_def, types
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))

SIDE = 224


@pipeline_def
def photographs(folder):
    files, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
    images = fn.decoders.image_random_crop(files, output_type=types.RGB)
    images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    return fn.transpose(images, perm=[2, 0, 1]), labels


def main():
    options = json.loads(sys.argv[1])
    size = options["batch_size"]
    pipeline = photographs(options["photos"], batch_size=size, num_threads=options["workers"], device_id=None)
    pipeline.build()
    images = pipeline.epoch_size("files")
    print(dali.__version__, flush=True)

    def epoch():
        seen = 0
        while seen < images:
            batch, _ = pipeline.run()
            assert batch.shape()[0] == (3, SIDE, SIDE) and batch.dtype == types.UINT8
            seen += len(batch)
        return seen / images

    for line in sys.stdin:
        _, count = line.split()
        started = time.perf_counter()
        epochs = sum(epoch() for _ in range(int(count)))
        # Its last batch runs on into the next epoch.
        print((time.perf_counter() - started) * int(count) / epochs, flush=True)


if __name__ == "__main__":
    main()
